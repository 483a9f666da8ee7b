"""The optimizer's update with its state in host memory, compiled alone: memory at its peak, and which copies run at once.

Bound: weights + gradients + three slices of both moments. Beside it the update that brings the whole state to
the device first, as `optimizer_memory_host_offload` does in MaxText 0.2.5.

    .venv/bin/python benchmarks/update/run.py
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

from forebay.hardware import get_hardware
from forebay.offload.memories import settle
from forebay.offload.optimizer import streamed_update
from forebay.offload.stream import cut
from forebay.train.config import OptimizerConfig, ProgramConfig
from forebay.train.program import Program, make_program
from forebay.units import GiB
from forebay.xla.compile import CompiledStep, compile_step, versions
from forebay.xla.estimate import local_bytes
from forebay.xla.options import compiler_options
from forebay.xla.topology import compile_only_devices

CASES = (
    ("llama3.1-8b", "gb200", 1),
    ("llama3.1-8b", "gb200", 8),
    ("llama3.1-8b", "h200", 8),
    ("llama3.1-405b", "gb200", 128),
)
HERE = Path(__file__).parent


def compile_update(program: Program, hardware: Any, *, whole: bool) -> CompiledStep:
    """The update alone; `whole` brings the state to the device at once."""
    state, split = program.abstract_state, program.state_shardings
    hosted = program.hosted

    def update(weights: Any, moments: Any, gradients: Any) -> Any:
        moments = settle(moments, hosted.optimizer)
        if whole:
            on_device = jax.device_put(moments, jax.memory.Space.Device)
            norm = optax.tree.norm(gradients)
            gradients = jax.tree.map(lambda g: jnp.where(norm < 1.0, g, g / norm), gradients)
            updates, new = program.optimizer.update(gradients, on_device, weights)
            return optax.apply_updates(weights, updates), settle(new, hosted.optimizer), norm
        with jax.named_scope("optimizer"):
            weights, moments, _, norm = streamed_update(
                program.optimizer, gradients, moments, weights, clip_norm=1.0, shardings=split.weights, checked=True
            )
        return weights, moments, norm

    step = jax.jit(
        update,
        in_shardings=(split.weights, split.optimizer, split.weights),
        out_shardings=(split.weights, split.optimizer, program.sharding.named(())),
        donate_argnums=(0, 1),
    )
    in_host = jax.tree.leaves(hosted.optimizer)
    weights = [False] * len(jax.tree.leaves(state.weights))
    return compile_step(
        step, (state.weights, state.optimizer, state.weights),
        hosted=([*weights, *in_host, *weights], [*weights, *in_host, False]),
        options=compiler_options(hardware.platform, deviceless=True, offloads=True),
    )  # fmt: skip


def slice_bytes(program: Program) -> int:
    """The largest slice of both moments of one weight, on one device."""
    shapes = jax.tree.leaves(program.abstract_state.weights)
    shardings = jax.tree.leaves(program.state_shardings.weights)
    sizes = local_bytes(program.abstract_state.weights, program.state_shardings.weights)
    return max(2 * b // cut(x.shape, 4, s).count for x, s, b in zip(shapes, shardings, sizes, strict=True))


def main() -> None:
    rows = []
    for model, machine, devices in CASES:
        hardware = get_hardware(machine)
        config = ProgramConfig(
            model=model, batch=devices, seq=4096, placement="full", optimizer_host_fraction=1.0, steps=10,
            optimizer=OptimizerConfig(warmup_steps=1),
        )  # fmt: skip
        program = make_program(config, compile_only_devices(hardware, devices))
        ours, whole = (compile_update(program, hardware, whole=w) for w in (False, True))
        weights = sum(local_bytes(program.abstract_state.weights, program.state_shardings.weights))
        moved = {d: [t for t in ours.transfers if t.direction == d] for d in ("d2h", "h2d")}
        total = {d: sum(t.num_bytes * t.count for t in ts) for d, ts in moved.items()}
        both = {d: sum(t.num_bytes * t.count * t.window for t in ts if t.where == "update") for d, ts in moved.items()}
        slices = 3 * slice_bytes(program)
        rows.append(
            {
                "model": model, "hardware": machine, "devices": devices, "weights": weights, "gradients": weights,
                "slices": slices, "peak": ours.device.total, "whole_peak": whole.device.total,
                "host": ours.host.total, "copied": total, "both_ways": {d: both[d] / total[d] for d in total},
                "host_copies": ours.host_copy_bytes, "compile_s": ours.compile_time_s,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    (HERE / "results.json").write_text(json.dumps({"rows": rows, "versions": versions()}, indent=2) + "\n")
    (HERE / "results.md").write_text(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# The update with the optimizer's state in host memory",
        "",
        f"Compiled only, the update alone (AdamW, clipping, float32, state donated). {os.cpu_count()} CPU cores, no accelerator; "
        + ", ".join(f"{k} {v}" for k, v in versions().items() if k != "forebay") + ".",
        "Command: `.venv/bin/python benchmarks/update/run.py`. GiB per device. Bound: weights + gradients + three slices of both",
        "moments. Both ways: the share of the bytes in each direction that move while others move in the other.",
        "",
        "| model | machine | devices | weights | gradients | 3 slices | bound | peak | peak, whole state at once "
        "| host | D2H both ways | H2D both ways |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        bound = r["weights"] + r["gradients"] + r["slices"]
        numbers = (r["weights"], r["gradients"], r["slices"], bound, r["peak"], r["whole_peak"], r["host"])
        lines.append(
            f"| {r['model']} | {r['hardware']} | {r['devices']} | " + " | ".join(f"{n / GiB:.2f}" for n in numbers)
            + f" | {r['both_ways']['d2h']:.2f} | {r['both_ways']['h2d']:.2f} |"
        )  # fmt: skip
    worst = max(r["peak"] / (r["weights"] + r["gradients"] + r["slices"]) for r in rows)
    lines += ["", f"Peak against the bound, at most: {worst:.3f}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
