"""What each part of the recipe for hidden copies is worth: one thing taken away or changed at a time.

    .venv/bin/python benchmarks/overlap/parts.py

Llama 3.1 8B on 8 GB200 with seven tensors offloaded (and, for the memory limit, 405B on 128 with everything
offloaded), compiled without devices, each case in a process of its own. Results go to `parts.md` beside
this file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TYPICAL = "minimal_offloaded,decoder_layer_input=host"
SMALL = ("llama3.1-8b", 8, TYPICAL)
LARGE = ("llama3.1-405b", 128, f"{TYPICAL},context=host")
LATENCY = "xla_gpu_enable_latency_hiding_scheduler"
UNROLL, LIMIT = "xla_gpu_enable_while_loop_unrolling", "xla_gpu_memory_limit_slop_factor"
PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
# name: model, options taken away, cost of a copy in the profile (us), loop by lax.scan, host buffers alike
CASES: dict[str, tuple[tuple[str, int, str], tuple[str, ...], float | None, bool, bool]] = {
    "everything that forebay does": (SMALL, (), None, False, False),
    "without the latency hiding scheduler": (SMALL, (LATENCY,), None, False, False),
    "copies pipelined by XLA too": (SMALL, (), None, False, False),
    "without double buffering": (SMALL, (UNROLL,), None, False, False),
    "without the profile": (SMALL, (PROFILE,), None, False, False),
    "loops by lax.scan, layers indexed from an array": (SMALL, (), None, True, False),
    "copies cost 2,000 us": (SMALL, (), 2e3, False, False),
    "copies cost 10,000 us": (SMALL, (), 1e4, False, False),
    "copies cost 1,000,000 us": (SMALL, (), 1e6, False, False),
    "host buffers all made alike": (SMALL, (), None, False, True),
    "405B, everything that forebay does": (LARGE, (), None, False, False),
    "405B, XLA's own memory limit": (LARGE, (LIMIT,), None, False, False),
}


def one(name: str) -> None:
    """Compiles one case in this process and prints its row as JSON."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    from forebay.hardware import get_hardware
    from forebay.offload import host_buffers, scan
    from forebay.train.config import ProgramConfig
    from forebay.train.planning import step_options
    from forebay.train.program import make_program
    from forebay.xla import options as recipe
    from forebay.xla.compile import compile_step
    from forebay.xla.topology import compile_only_devices

    (model, devices, placement), without, cost_us, by_scan, alike = CASES[name]
    if cost_us is not None:
        recipe._LONG_COPY_US = cost_us
    if by_scan:

        def loop(self: Any, body: Any, carry: Any, layers: Any, index: Any) -> Any:
            counter = jnp.arange(self.count, dtype=jnp.int32)
            return jax.lax.scan(lambda c, k: (body(k, c, scan._take(layers, index(k))), None), carry, counter)[0]

        scan._Range._loop = loop  # type: ignore[method-assign]
    if alike:
        host_buffers.filling = lambda dtype, owner, number: 0
    machine = get_hardware("gb200")
    config = ProgramConfig(model=model, batch=devices, seq=8192, placement=placement)
    program = make_program(config, compile_only_devices(machine, devices))
    options, _ = step_options(program, machine, deviceless=True)
    options = {k: v for k, v in options.items() if k not in without}
    if name == "copies pipelined by XLA too":
        options[recipe.PIPELINING] = True
    compiled = compile_step(
        program.jit_step(), (program.abstract_state, program.abstract_batch),
        weight_shapes=program.local_weight_shapes(), options=options,
    )  # fmt: skip
    row: dict[str, Any] = {"name": name, "versions": dict(compiled.versions)}
    for direction in ("d2h", "h2d"):
        copies = [t for t in compiled.transfers if (t.direction, t.where) == (direction, "loop")]
        moved = sum(t.num_bytes * t.count for t in copies)
        row[direction] = sum(t.num_bytes * t.count * t.window for t in copies) / moved if moved else None
    row |= {
        "temporaries": compiled.device.temporaries, "host_to_host": compiled.host_copy_bytes,
        "clones": compiled.remat.count, "seconds": compiled.compile_time_s,
    }  # fmt: skip
    print(json.dumps(row))


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--case":
        one(sys.argv[2])
        return
    rows = []
    for name in CASES:
        done = subprocess.run([sys.executable, __file__, "--case", name], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr[-2000:]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print({k: v for k, v in rows[-1].items() if k != "versions"}, flush=True)

    def window(value: float | None) -> str:
        return "no copies" if value is None else f"{value:.2f}"

    gib = 2**30
    versions = ", ".join(f"{k} {v}" for k, v in rows[0]["versions"].items() if k != "forebay")
    lines = [
        "# What each part is worth", "",
        f"Compiled only. {os.cpu_count()} CPU cores, no accelerator; {versions}. Llama 3.1 8B on 8 GB200, one sequence of 8192",
        f"tokens per device, `{TYPICAL}`; 405B on 128, also `context=host`.",
        "Command: `.venv/bin/python benchmarks/overlap/parts.py`. D2H and H2D: windows of the copies in loops, the mean by",
        "bytes. Sizes in GiB per device.", "",
        "| | D2H | H2D | temporaries | host to host | clones | compile, s |", "|---|---|---|---|---|---|---|",
        *(
            f"| {r['name']} | {window(r['d2h'])} | {window(r['h2d'])} | {r['temporaries'] / gib:.2f} | "
            f"{r['host_to_host'] / gib:.1f} | {r['clones']} | {r['seconds']:.1f} |"
            for r in rows
        ), "",
    ]  # fmt: skip
    (HERE / "parts.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
