"""Windows of the copies between device and host: forebay's layer scan against the stock scan, compiled only.

    .venv/bin/python benchmarks/overlap/run.py [--only gb200]

Nothing runs on a device. Each case is a whole training step of Llama 3.1 (8192 tokens and one sequence per
device, FSDP) compiled for machines that are not there, in a process of its own, in three ways:

- stock: `jax.lax.scan` over `jax.checkpoint` with the same offload policy, and the options that any
  step gets (latency hiding scheduler), as a user without forebay would write it;
- stock + options: the same program with the options that forebay chooses;
- forebay: `forebay.scan_layers`, with these options.

A window is the share of one layer's matrix and attention FLOPs between a copy's start and its done; the
figures are means over the copies in loops, weighted by bytes, and the smallest. Results go to
`results.md` and `results.json` beside this file.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CASES = (
    ("llama3.1-8b", "gb200", 1),
    ("llama3.1-8b", "gb200", 8),
    ("llama3.1-8b", "h200", 8),
    ("llama3.1-70b", "h200", 32),
    ("llama3.1-405b", "gb200", 128),
    ("llama3.1-8b", "v5p", 8),
    ("llama3.1-8b", "v6e", 8),
)
PLACEMENTS = {
    "layer inputs": "decoder_layer_input=host",
    "typical": "minimal_offloaded,decoder_layer_input=host",
    "everything": "minimal_offloaded,decoder_layer_input=host,context=host",
}
WAYS = ("stock", "stock + options", "forebay")
GIB = 2**30


def one(model: str, hardware: str, devices: int, placement: str, way: str) -> None:
    """Compiles one case in this process and prints its row as JSON."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from forebay.hardware import get_hardware
    from forebay.offload.policy import apply
    from forebay.train import program as programs
    from forebay.train.config import ProgramConfig
    from forebay.xla.compile import compile_hidden
    from forebay.xla.estimate import argument_bytes, offloaded_bytes
    from forebay.xla.options import compiler_options, memory_limit_percent
    from forebay.xla.topology import compile_only_devices

    def stock_scan(block: Any, plan: Any, x: Any, layers: Any, *constants: Any, stack: str) -> Any:
        checkpointed = apply(block, plan.for_stack(stack)[0])
        return jax.lax.scan(lambda x, layer: (checkpointed(layer, x, *constants), None), x, layers)[0]

    if way != "forebay":
        programs.scan_layers = stock_scan  # type: ignore[assignment]
    machine = get_hardware(hardware)
    config = ProgramConfig(model=model, batch=devices, seq=8192, placement=placement)
    program = programs.make_program(config, compile_only_devices(machine, devices))
    step, args = program.jit_step(), (program.abstract_state, program.abstract_batch)
    arguments = argument_bytes(args, (program.state_shardings, program.batch_shardings))
    host = offloaded_bytes(step.trace(*args).jaxpr, devices)
    limit = memory_limit_percent(machine.hbm_bytes, machine.usable_hbm_bytes(), arguments, host)
    options = compiler_options(machine.platform, deviceless=True, offloads=way != "stock", memory_limit_percent=limit)
    # the first compile of a process also loads the compiler
    jax.jit(lambda x: x + 1, in_shardings=program.sharding.named(()), out_shardings=program.sharding.named(())).lower(
        jax.ShapeDtypeStruct((8,), "float32")
    ).compile()
    before = time.process_time()
    compiled, chosen = compile_hidden(step, args, options, judged=machine.platform == "cuda" and way == "forebay")
    row: dict[str, Any] = {"model": model, "hardware": hardware, "devices": devices, "placement": placement, "way": way}
    for direction in ("d2h", "h2d"):
        for where in ("loop", "boundary"):
            copies = [t for t in compiled.transfers if (t.direction, t.where) == (direction, where)]
            moved = sum(t.num_bytes * t.count for t in copies)
            row[f"{direction}_{where}_bytes"] = moved
            if moved:
                row[f"{direction}_{where}_window"] = sum(t.num_bytes * t.count * t.window for t in copies) / moved
                row[f"{direction}_{where}_smallest"] = min(t.window for t in copies)
    print(json.dumps(row | {
        "temporaries": compiled.device.temporaries, "arguments": compiled.device.arguments,
        "host": compiled.host.temporaries, "host_to_host": compiled.host_copy_bytes,
        "violations": list(compiled.violations), "refused": compiled.refused,
        "remat_clones": compiled.remat.count, "remat_flops": compiled.remat.flops,
        "double_buffered": "xla_gpu_enable_while_loop_unrolling" in chosen,
        "memory_limit_percent": chosen.get("xla_gpu_memory_limit_slop_factor"),
        "cpu_s": time.process_time() - before, "compile_time_s": compiled.compile_time_s, "versions": dict(compiled.versions),
    }))  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    def window(row: dict[str, Any], direction: str) -> str:
        key = f"{direction}_loop_window"
        return f"{row[key]:.2f} ({row[f'{direction}_loop_smallest']:.2f})" if key in row else ""

    lines = [
        "| model | machine | offloaded | program | D2H | H2D | exposed at the boundary, GiB | temporaries | host | "
        "host to host | clones | compile, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    names = {text: name for name, text in PLACEMENTS.items()}
    for r in rows:
        boundary = sum(r[f"{d}_boundary_bytes"] * (1 - r.get(f"{d}_boundary_window", 0)) for d in ("d2h", "h2d"))
        way = (
            r["way"]
            if r["way"] != "forebay" or r["double_buffered"] or r["hardware"][0] == "v"
            else "forebay (not unrolled)"
        )
        lines.append(
            f"| {r['model']} | {r['devices']} x {r['hardware']} | {names[r['placement']]} | {way} | {window(r, 'd2h')} | "
            f"{window(r, 'h2d')} | {boundary / GIB:.2f} | {r['temporaries'] / GIB:.2f} | {r['host'] / GIB:.1f} | "
            f"{r['host_to_host'] / GIB:.1f} | {r['remat_clones']} | {r['compile_time_s']:.1f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, help="one machine; the other rows stay as they are")
    parser.add_argument("--case", nargs=5, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        model, hardware, devices, placement, way = arguments.case
        one(model, hardware, int(devices), placement, way)
        return
    stored = HERE / "results.json"
    rows = json.loads(stored.read_text()) if arguments.only and stored.is_file() else []
    rows = [r for r in rows if r["hardware"] != arguments.only]
    for model, hardware, devices in CASES:
        if arguments.only not in (None, hardware):
            continue
        for placement in PLACEMENTS.values():
            # on TPU there are no options to add
            for way in WAYS if hardware[0] != "v" else ("stock", "forebay"):
                command = [sys.executable, __file__, "--case", model, hardware, str(devices), placement, way]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr[-2000:])
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print("\n".join(table(rows[-1:])[2:]), flush=True)
                write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    order = [f"{m} {h} {d}" for m, h, d in CASES]
    rows = sorted(rows, key=lambda r: order.index(f"{r['model']} {r['hardware']} {r['devices']}"))
    versions = ", ".join(f"{k} {v}" for k, v in rows[0]["versions"].items() if k != "forebay")
    text = [
        "# Windows of the copies between device and host", "",
        f"Compiled only. {os.cpu_count()} CPU cores shared with other work, no accelerator; {versions}. Sequences of 8192",
        "tokens, one per device, FSDP over all devices, blockwise attention on GPU and splash attention on TPU. Command:",
        "`.venv/bin/python benchmarks/overlap/run.py`. D2H and H2D are the windows of the copies in loops, the mean by bytes",
        "and in brackets the smallest; sizes are GiB per device. Where the load of the machine varied, compile times of",
        "different rows cannot be compared. What the columns mean and why the figures are what they are:",
        "[docs/overlap.md](../../docs/overlap.md).", "",
        *table(rows), "",
    ]  # fmt: skip
    (HERE / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    (HERE / "results.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
