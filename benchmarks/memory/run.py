"""The memory table against the compiler's own totals, for Llama at full size on GPUs and TPUs that are not there.

    .venv/bin/python benchmarks/memory/run.py [--only gb200]

For each case the named parts are added up and compared with the total that XLA reports itself: on GPU
`memory_analysis()` (arguments + temporaries + outputs - aliased); on TPU the sizes of the allocations
in the buffer assignment's text, added up here without forebay's reader (`memory_analysis()` counts
temporaries of loops wrongly there, see `docs/xla.md`). Results go to `results.json` and `results.md`
beside this file; `--only` replaces the rows of one machine.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
MODELS = {"llama3.1-8b": (8, 8, 8192), "llama3.1-70b": (64, 64, 8192), "llama3.1-405b": (128, 128, 8192)}
MACHINES = ("gb200", "h200", "v5p")
PLACEMENTS = ("full", "decoder_layer_input=host")


def independent_total(dump: Path, memory_analysis: dict[str, int], platform: str) -> int:
    """The device bytes of a step from the compiler's side."""
    if platform == "cuda":
        return sum(memory_analysis[k] for k in ("argument", "temp", "output")) - memory_analysis["alias"]
    text = max(dump.glob("*buffer-assignment.txt"), key=lambda p: p.stat().st_size).read_text()
    total = 0
    for line in text.splitlines():
        match = re.match(r"allocation \d+: size (\d+), (.*)", line)
        if match and "color" not in line and "thread-local" not in line and "constant" not in line:
            total += int(match[1])
    return total


def one(model: str, hardware: str, placement: str) -> None:
    """Compiles one case in this process and prints its row as JSON."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from forebay.hardware import get_hardware
    from forebay.train.config import ProgramConfig
    from forebay.train.program import make_program
    from forebay.xla.compile import compile_step
    from forebay.xla.options import compiler_options
    from forebay.xla.topology import compile_only_devices

    devices, batch, seq = MODELS[model]
    machine = get_hardware(hardware)
    config = ProgramConfig(model=model, batch=batch, seq=seq, placement=placement)
    program = make_program(config, compile_only_devices(machine, devices))
    options = compiler_options(machine.platform, deviceless=True, offloads=program.plan.offloads)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        step = compile_step(
            program.jit_step(), (program.abstract_state, program.abstract_batch),
            weight_shapes=program.local_weight_shapes(), options=options, dump=Path(folder),
        )  # fmt: skip
        seconds = time.perf_counter() - start
        stats = {}
        if machine.platform == "cuda":
            lowered = program.jit_step().lower(program.abstract_state, program.abstract_batch)
            analysis = lowered.compile(compiler_options=options).memory_analysis()
            stats = {k: getattr(analysis, f"{k}_size_in_bytes") for k in ("argument", "temp", "output", "alias")}
        total = independent_total(Path(folder), stats, machine.platform)
    parts = sum(r.num_bytes for r in step.peak_rows("device"))
    other = sum(r.num_bytes for r in step.peak_rows("device") if r.kind == "other")
    print(json.dumps({
        "model": model, "hardware": hardware, "devices": devices, "placement": placement, "parts": parts,
        "compiler": total, "difference": parts / total - 1, "other": other / total, "host": step.host.total,
        "seconds": seconds, "fits": step.refused is None and step.device.total <= machine.usable_hbm_bytes(),
        "usable": machine.usable_hbm_bytes(), "versions": dict(step.versions),
    }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, help="one machine")
    parser.add_argument("--case", nargs=3, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        one(*arguments.case)
        return
    saved = HERE / "results.json"
    before = json.loads(saved.read_text()) if arguments.only and saved.exists() else []
    rows = []
    for hardware in MACHINES:
        if arguments.only in (None, hardware):
            for model in MODELS:
                for placement in PLACEMENTS:
                    command = [sys.executable, __file__, "--case", model, hardware, placement]
                    done = subprocess.run(command, capture_output=True, text=True)
                    if done.returncode:
                        sys.exit(done.stderr[-2000:])
                    rows.append(json.loads(done.stdout.splitlines()[-1]))
                    print({k: v for k, v in rows[-1].items() if k != "versions"}, flush=True)
    rows += [r for r in before if r["hardware"] != arguments.only]
    rows.sort(key=lambda r: MACHINES.index(r["hardware"]))
    saved.write_text(json.dumps(rows, indent=1) + "\n")
    gib = 2**30
    versions = ", ".join(f"{k} {v}" for k, v in rows[0]["versions"].items() if k != "forebay")
    table = [
        "# The memory table against the compiler", "",
        f"Per device, GiB. {os.cpu_count()} CPU cores, no accelerator; {versions}. Sequences of 8192 tokens, one per device,",
        "FSDP over all devices. Command: `.venv/bin/python benchmarks/memory/run.py`. `unnamed` is the share of the rows of",
        "kind `other`; compile time is lowering and compiling together.", "",
        "| model | machine | placement | named parts | compiler | difference | unnamed | host | usable HBM | fits | s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {r['model']} | {r['devices']} x {r['hardware']} | `{r['placement']}` | {r['parts'] / gib:.2f} | "
            f"{r['compiler'] / gib:.2f} | {100 * r['difference']:+.3f} % | {100 * r['other']:.1f} % | {r['host'] / gib:.1f} | "
            f"{r['usable'] / gib:.1f} | {'yes' if r['fits'] else 'no'} | {r['seconds']:.0f} |"
            for r in rows
        ), "",
    ]  # fmt: skip
    (HERE / "results.md").write_text("\n".join(table))
    print("\n".join(table))


if __name__ == "__main__":
    main()
