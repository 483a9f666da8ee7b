"""Stock scan, presets and forebay's plan on the accelerator there is: numbers, step time, peak memory, as predicted.

    benchmarks/gpu/overlap.sh

Layers as in Llama 3.1 8B, as many as leave room for float32 state on one device, one after another in a process of its
own each (a process's peak memory never falls):

- stock: `jax.lax.scan` over `jax.checkpoint` with the same policy, compiled as any step is;
- forebay: the same placement through `forebay.scan_layers` and with the options that forebay chooses;
- plan: what `forebay.plan` decides for the device.

Each row says the losses of the first steps, the median, least and greatest time of the steps after them, the device's
peak, what the compiler said it would be, and the time that the timeline of the compiled step says. Results go to
`overlap.md` and `overlap.json` in the output folder after every row.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GIB = 2**30
STEPS, WARM = 12, 3
LAYER_INPUTS = "decoder_layer_input=host"
TYPICAL = f"minimal_offloaded,{LAYER_INPUTS}"
SIZES = {"layers": 12}
SMOKE_SIZES = {"layers": 3, "embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128, "vocab": 264}


@dataclasses.dataclass(frozen=True)
class Way:
    name: str
    program: str
    """stock, forebay or plan."""
    placement: str = ""
    state_on_host: bool = False


WAYS = (
    Way("full recompute", "stock", "full"),
    Way("full recompute", "forebay", "full"),
    Way("layer inputs on the host", "stock", LAYER_INPUTS),
    Way("layer inputs on the host", "forebay", LAYER_INPUTS),
    Way("query, key, value on the host", "stock", "qkv_proj_offloaded"),
    Way("query, key, value on the host", "forebay", "qkv_proj_offloaded"),
    Way("all projections and layer inputs on the host", "stock", TYPICAL),
    Way("all projections and layer inputs on the host", "forebay", TYPICAL),
    Way("full recompute, optimizer state on the host", "forebay", "full", state_on_host=True),
    Way("forebay's plan", "plan"),
)


def one(way: Way, smoke: bool) -> dict[str, Any]:
    """Compiles and runs one way in this process."""
    import jax
    import numpy as np

    from forebay.hardware.present import machine_of
    from forebay.offload.policy import apply
    from forebay.timeline.compare import of_compiled
    from forebay.train import program as programs
    from forebay.train.config import ProgramConfig
    from forebay.train.parity import check_numbers
    from forebay.train.planning import compile_program, planned_program, step_options

    def stock_scan(block: Any, plan: Any, x: Any, layers: Any, *constants: Any, stack: str) -> Any:
        checkpointed = apply(block, plan.for_stack(stack)[0])
        return jax.lax.scan(lambda x, layer: (checkpointed(layer, x, *constants), None), x, layers)[0]

    device = jax.devices()[0]
    machine = machine_of(device)
    common = {"sizes": SMOKE_SIZES if smoke else SIZES, "batch": 2, "seq": 32 if smoke else 8192}
    config = ProgramConfig(
        model="llama-tiny" if smoke else "llama3.1-8b", placement=way.placement,
        optimizer_host_fraction=1.0 if way.state_on_host else (None if way.program == "plan" else 0.0), **common,
    )  # fmt: skip
    if way.program == "stock":
        programs.scan_layers = stock_scan  # type: ignore[assignment]
    program = (
        planned_program(config, [device], machine) if way.program == "plan" else programs.make_program(config, [device])
    )
    row: dict[str, Any] = {"way": way.name, "program": way.program, "placements": program.plan.to_json()["placements"]}
    row["state_on_host"] = program.plan.optimizer_host_fraction
    if way.program != "stock" and program.offloads:
        worst = check_numbers(program).worst
        row |= {"compared_leaf": worst.leaf, "compared_relative": worst.relative}
    if way.program == "stock":
        options = step_options(dataclasses.replace(program, plan=_kept(program.plan)), machine, deviceless=False)[0]
    else:
        done = compile_program(program, machine, deviceless=False)
        options, compiled = done.options, done.compiled
        flops = program.flops_per_step
        timeline = None if machine is None else of_compiled(compiled, machine, 1, flops)
        row |= {
            "compiled_device_bytes": compiled.device.total, "compiled_host_bytes": compiled.host.total,
            "windows": [[t.name, t.direction, t.where, t.window] for t in compiled.transfers],
            "timeline_s": None if timeline is None else timeline["step_time_s"],
        }  # fmt: skip
    started = time.perf_counter()
    step, state = program.jit_step(options), program.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, program.model.vocab, (2, config.batch, config.seq), np.int32)
    batch = {"inputs": tokens[0], "targets": tokens[1]}
    losses, seconds = [], []
    for n in range(WARM + STEPS):
        before = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        if n < WARM:
            losses.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        else:
            seconds.append(time.perf_counter() - before)
    stats = device.memory_stats() or {}
    return row | {
        "losses_and_norms": losses, "step_s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds),
        "peak_bytes": stats.get("peak_bytes_in_use"), "tflops": program.flops_per_step / statistics.median(seconds) / 1e12,
        "compile_and_start_s": time.perf_counter() - started - sum(seconds),
        "device": device.device_kind, "jax": jax.__version__, "python": platform.python_version(),
        "runtime": device.client.platform_version, "attention": program.kernel.name,
    }  # fmt: skip


def _kept(plan: Any) -> Any:
    """The plan with nothing on the host: whose options a stock step is compiled with."""
    placements = [
        dataclasses.replace(p, tensors={n: "device" if w == "host" else w for n, w in p.tensors.items()})
        for p in plan.placements
    ]
    return dataclasses.replace(plan, placements=tuple(placements))


def table(rows: list[dict[str, Any]]) -> list[str]:
    def gib(value: int | None) -> str:
        return "" if value is None else f"{value / GIB:.2f}"

    base = next(
        (r["step_s"] for r in rows if r["way"] == "full recompute" and r["program"] == "forebay" and "step_s" in r),
        None,
    )
    lines = [
        "| | program | step, s (least to most) | against full recompute | TFLOP/s | timeline, s | peak GiB | compiler's GiB | "
        "loss, gradient norm of step 3 | worst leaf, offloaded against not |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['way']} | {r['program']} | {r['error']} | | | | | | | |")
            continue
        ratio = "" if base is None else f"{100 * (base / r['step_s'] - 1):+.1f} %"
        timeline = "" if r.get("timeline_s") is None else f"{r['timeline_s']:.3f}"
        worst = f"{r['compared_leaf']} {r['compared_relative']:.1e}" if "compared_leaf" in r else ""
        loss, norm = r["losses_and_norms"][-1]
        lines.append(
            f"| {r['way']} | {r['program']} | {r['step_s']:.3f} ({r['least_s']:.3f} to {r['most_s']:.3f}) | {ratio} | "
            f"{r['tflops']:.1f} | {timeline} | {gib(r['peak_bytes'])} | {gib(r.get('compiled_device_bytes'))} | "
            f"{loss:.5f}, {norm:.5f} | {worst} |"
        )
    return lines


def write(rows: list[dict[str, Any]], out: Path, smoke: bool) -> None:
    known = next((r for r in rows if "device" in r), {})
    text = [
        "# Measured on a device", "",
        f"Command: `benchmarks/gpu/overlap.sh`. {known.get('device', 'no row ran')}, jax {known.get('jax', '')}, "
        f"{known.get('runtime', '')}, attention {known.get('attention', '')}, Python {known.get('python', '')}, "
        f"{os.cpu_count()} CPU cores.",
        f"Llama 3.1 8B's layers, {SIZES['layers']} of them, 2 sequences of 8192 tokens, float32 state; median of {STEPS} steps."
        if not smoke else "A smoke run of small layers: its figures mean nothing.", "",
        *table(rows), "",
    ]  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "overlap.json").write_text(json.dumps(rows, indent=1) + "\n")
    (out / "overlap.md").write_text("\n".join(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="small layers, on a CPU")
    parser.add_argument("--way", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.smoke:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if arguments.way is not None:
        print(json.dumps(one(WAYS[arguments.way], arguments.smoke)))
        return
    rows: list[dict[str, Any]] = []
    for number, way in enumerate(WAYS):
        command = [sys.executable, __file__, "--out", str(arguments.out), "--way", str(number)]
        command += ["--smoke"] if arguments.smoke else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
            rows.append({"way": way.name, "program": way.program, "error": last.replace("|", "/")})
        else:
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(table(rows)[-1], flush=True)
        write(rows, arguments.out, arguments.smoke)
    if all("error" in row for row in rows):
        sys.exit("no row ran")


if __name__ == "__main__":
    main()
