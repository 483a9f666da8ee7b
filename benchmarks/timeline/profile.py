"""What a profile of a step's own times does to its schedule: steps compiled without and with it.

    .venv/bin/python benchmarks/timeline/profile.py [--only 405b-gb200:qkv_proj_offloaded]

Compiled only, for machines that are not there, with cuDNN's attention. Each row is one program:
compiled as forebay compiles it, simulated, compiled again with `profile=timeline`, simulated again. Results go to
`profile.json` and `profile.md` beside this file.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# name, model, hardware, devices, dtype of the state; 8192 tokens and one sequence per device, FSDP
CASES = (
    ("8b-h200", "llama3.1-8b", "h200", 8, "float32"),
    ("70b-h200", "llama3.1-70b", "h200", 8, "bfloat16"),
    ("70b-32-h200", "llama3.1-70b", "h200", 32, "float32"),
    ("405b-gb200", "llama3.1-405b", "gb200", 128, "float32"),
)
PLACEMENTS = ("full", "qkv_proj_offloaded", "minimal_offloaded")
CELLS = tuple(f"{c[0]}:{p}" for c in CASES for p in PLACEMENTS[: 3 if c[0] == "405b-gb200" else 2])
GIB = 2**30


def one(cell: str) -> None:
    """Compiles and simulates one program twice in this process and prints its row as JSON."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    from forebay.hardware import get_hardware
    from forebay.timeline import profile, timeline
    from forebay.train import planning
    from forebay.train.config import ProgramConfig
    from forebay.train.program import make_program
    from forebay.xla.topology import compile_only_devices

    name, placement = cell.split(":")
    _, model, hardware, devices, state = next(c for c in CASES if c[0] == name)
    machine = get_hardware(hardware)
    config = ProgramConfig(
        model=model, batch=devices, seq=8192, placement=placement, attention="cudnn", profile="timeline"
    )
    program = make_program(config, compile_only_devices(machine, devices))
    if state != "float32":
        shapes = program.abstract_state
        vars(program)["abstract_state"] = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, state if x.ndim else x.dtype), shapes
        )
    sides: list[dict[str, Any]] = []

    def side(compiled: Any) -> dict[str, Any]:
        made = timeline(compiled.module, machine, devices=devices)
        windows = [t.window for t in compiled.transfers if t.where == "loop"]
        return {
            "step_time_s": made.step_time_s, "waiting_s": dict(made.waiting_s), "device_bytes": compiled.device.total,
            "window": min(windows, default=None), "remat_clones": compiled.remat.count,
            "violations": len(compiled.violations), "compile_time_s": compiled.compile_time_s,
        }  # fmt: skip

    def watched(compiled: Any, options: Any, hardware: Any, devices: int, usable: int, again: Any, *rest: Any) -> Any:
        sides.append(side(compiled))

        def compile_again(options: Any) -> Any:
            second = again(options)
            sides.append(side(second))
            return second

        return profile.profiled(compiled, options, hardware, devices, usable, compile_again, *rest)

    planning.profiled = watched  # type: ignore[assignment]
    done = planning.compile_program(program, machine, deviceless=True)
    row = {"cell": cell, "state": state, "devices": devices, "note": done.notes[-1], "sides": sides}
    print(json.dumps(row | {"versions": dict(done.compiled.versions)}))


def table(rows: list[dict[str, Any]]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in rows[0]["versions"].items() if k != "forebay")
    lines = [
        "# The scheduler told of times", "",
        f"Compiled only, nothing was run on a device. Command: `.venv/bin/python benchmarks/timeline/profile.py`; {versions}.",
        "Step times are the timeline's, which is also what the profile is made from: these figures say what XLA's scheduler makes",
        "of better times if these times are right. Sequences of 8192 tokens, one per device, FSDP, cuDNN's attention. `without`",
        "and `with`: the profile of kernels' and collectives' times; copies have their long cost in both.", "",
        "| step | activations | state | step without | with | change | waits for collectives without | with | least window without | with "
        "| device GiB without | with | clones | kept | compile s without | with |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        if len(r["sides"]) < 2:
            lines.append(f"| {r['cell'].replace(':', ' | ')} | {r['state']} | {r['note']} |")
            continue
        a, b = r["sides"]
        window = ["-" if s["window"] is None else f"{s['window']:.2f}" for s in (a, b)]
        cells = [
            *r["cell"].split(":"), r["state"], f"{a['step_time_s']:.3f}", f"{b['step_time_s']:.3f}",
            f"{100 * (b['step_time_s'] / a['step_time_s'] - 1):+.1f} %",
            *(f"{s['waiting_s'].get('collective', 0):.3f}" for s in (a, b)), *window,
            *(f"{s['device_bytes'] / GIB:.1f}" for s in (a, b)), f"{a['remat_clones']} / {b['remat_clones']}",
            "yes" if r["note"].startswith("scheduled") else "no", *(f"{s['compile_time_s']:.0f}" for s in (a, b)),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return (
        "\n".join(lines)
        + "\n\nThe machine that compiled was shared: compile times of different rows cannot be compared.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CELLS), help="which to compile; the other rows stay as they are")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one)
        return
    stored = HERE / "profile.json"
    rows: list[dict[str, Any]] = json.loads(stored.read_text()) if stored.is_file() else []
    for cell in arguments.only.split(","):
        done = subprocess.run([sys.executable, __file__, "--one", cell], capture_output=True, text=True)
        if done.returncode:
            print(f"{cell}: {done.stderr[-1500:]}", file=sys.stderr)
            continue
        rows = [r for r in rows if r["cell"] != cell] + [json.loads(done.stdout.splitlines()[-1])]
        rows.sort(key=lambda r: CELLS.index(r["cell"]))
        stored.write_text(json.dumps(rows, indent=1) + "\n")
        (HERE / "profile.md").write_text(table(rows))
        print(cell, rows and next(r["note"] for r in rows if r["cell"] == cell), flush=True)


if __name__ == "__main__":
    main()
