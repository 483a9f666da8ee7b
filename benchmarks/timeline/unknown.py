"""What the unpublished part of a published result can do to it: Llama 3.3 70B on 8 H200 and 8 B300, compiled only.

    .venv/bin/python benchmarks/timeline/unknown.py [--only h200] [--state moments]

Of these results the model, the machines and what is offloaded (query, key and value) are public; sequences, their
length, the dtypes of the state and the compiler's flags are not. Every combination of those that a trainer would
choose is compiled for both placements, and its gain simulated with the default efficiencies. The grid was set before
the first of its cells was compiled. No cell is the published one, and none is chosen by its result.

Ways of compiling: `maxtext`, `jax.lax.scan` with the flags that MaxText's results name; `ours`, as forebay compiles.
Results go to `unknown.json` and `unknown.md` beside this file.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from run import CASES, machine_of, simulated
from ways import compiled

HERE = Path(__file__).parent
MACHINES = {"h200": 1.069, "b300": 1.03}
"""Machines, and the reported ratio of step times on each."""
STATES = {
    "float32": "all float32",
    "moments": "weights and gradients float32, moments bfloat16",
    "bfloat16": "all bfloat16",
}
SHAPES = ((2048, 1), (4096, 1), (8192, 1), (2048, 4), (4096, 4), (8192, 2))
"""Tokens of a sequence, and sequences on each device."""
WAYS = ("maxtext", "ours")
PLACEMENTS = ("full", "qkv_proj_offloaded")
KEYS = ("machine", "state", "seq", "per_device", "way", "placement")
GIB = 2**30


def one(name: str, state: str, seq: int, per_device: int, way: str, placement: str) -> None:
    """Compiles and simulates one cell in this process and prints its row as JSON."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    from forebay.train.config import ProgramConfig
    from forebay.train.program import make_program
    from forebay.xla.topology import compile_only_devices

    machine = machine_of(next(c for c in CASES if c.name == f"70b-{name}"))
    config = ProgramConfig(
        model="llama3.1-70b", batch=8 * per_device, seq=seq, placement=placement, attention="cudnn"
    )  # fmt: skip

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16" if x.ndim else x.dtype), tree)

    def make() -> Any:
        program = make_program(config, compile_only_devices(machine, 8))
        program = dataclasses.replace(program, optimizer=_of_its_dtypes(program.optimizer))
        shapes = program.abstract_state
        if state == "moments":
            shapes = dataclasses.replace(shapes, optimizer=cast(shapes.optimizer))
        vars(program)["abstract_state"] = cast(shapes) if state == "bfloat16" else shapes
        return program

    with tempfile.TemporaryDirectory() as folder:
        hlo = Path(folder) / "step.hlo"
        program, done, notes = compiled(way, make, machine, hlo)
        row = simulated(hlo, machine, program.flops_per_step / 8)
    print(json.dumps({
        **dict(zip(KEYS, (name, state, seq, per_device, way, placement), strict=True)), **row,
        "device_bytes": done.device.total, "host_bytes": done.host.total, "usable_bytes": machine.usable_hbm_bytes(),
        "remat_clones": done.remat.count, "refused": done.refused, "notes": notes, "versions": dict(done.versions),
    }))  # fmt: skip


def _of_its_dtypes(optimizer: Any) -> Any:
    """The optimizer with a state that stays of the dtypes that it is given."""
    import jax
    import optax

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, new = optimizer.update(updates, state, params)
        return updates, jax.tree.map(lambda after, before: after.astype(before.dtype), new, state)

    return optax.GradientTransformation(optimizer.init, update)


def pairs(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]]:
    """Both placements of each configuration of which both were compiled and fit."""
    found = {tuple(r[k] for k in KEYS): r for r in rows}
    made = {}
    for key in itertools.product(MACHINES, STATES, (s for s, _ in SHAPES), (p for _, p in SHAPES), WAYS):
        sides = [found.get((*key, placement)) for placement in PLACEMENTS]
        if all(r is not None and r["refused"] is None and r["device_bytes"] <= r["usable_bytes"] for r in sides):
            made[key] = tuple(sides)
    return made


def table(rows: list[dict[str, Any]]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in rows[0]["versions"].items() if k != "forebay")
    found = pairs(rows)
    gains = {k: 100 * (a["step_time_s"] / b["step_time_s"] - 1) for k, (a, b) in found.items()}
    lines = [
        "# Llama 3.3 70B on 8 H200 and 8 B300: what the unpublished configuration can do", "",
        f"Compiled only, nothing was run on a device. Command: `.venv/bin/python benchmarks/timeline/unknown.py`; {versions}.",
        "What the cells are is said there. A gain is (time with full recompute) / (time with query, key and value offloaded) - 1,",
        "of the same configuration compiled the same way. Configurations that do not fit are left out "
        f"({len(rows) // 2 - len(found)} of {len(rows) // 2}).", "",
        "| machine | reported | compiled as | configurations | least | median | greatest | greatest without clones |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for machine, way in itertools.product(MACHINES, WAYS):
        of = {k: g for k, g in gains.items() if k[0] == machine and k[4] == way}
        if of:
            clean = [g for k, g in of.items() if not any(r["remat_clones"] for r in found[k])]
            cells = [machine, f"{100 * (MACHINES[machine] - 1):+.1f} %", way, str(len(of))]
            cells += [f"{x:+.1f} %" for x in (min(of.values()), statistics.median(of.values()), max(of.values()))]
            lines.append("| " + " | ".join([*cells, f"{max(clean):+.1f} %" if clean else "-"]) + " |")
    lines += [
        "", "## Every configuration", "",
        "Waits are for collectives and copies; clones are what the compiler recomputes on its own. Both as `full / offloaded`.", "",
        "| machine | state | tokens | sequences per device | compiled as | step s | waits s | clones | device GiB | host GiB | gain |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for key, sides in found.items():
        machine, state, seq, per_device, way = key
        both = lambda of: " / ".join(of(r) for r in sides)  # noqa: E731, B023
        cells = [
            machine, STATES[state], str(seq), str(per_device), way, both(lambda r: f"{r['step_time_s']:.3f}"),
            both(lambda r: f"{sum(r['waiting_s'].values()):.3f}"), both(lambda r: str(r["remat_clones"])),
            both(lambda r: f"{r['device_bytes'] / GIB:.0f}"), f"{sides[1]['host_bytes'] / GIB:.0f}", f"{gains[key]:+.1f} %",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    notes = HERE / "unknown-notes.md"
    return "\n".join(lines) + "\n" + ("\n" + notes.read_text() if notes.is_file() else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, help="one machine (or none, which only writes the table again)")
    parser.add_argument(
        "--state", default=None, choices=tuple(STATES), help="one state; the other rows stay as they are"
    )
    parser.add_argument("--one", nargs=6, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, state, seq, per_device, way, placement = arguments.one
        one(name, state, int(seq), int(per_device), way, placement)
        return
    stored = HERE / "unknown.json"
    rows: list[dict[str, Any]] = json.loads(stored.read_text()) if stored.is_file() else []
    for cell in itertools.product(MACHINES, STATES, SHAPES, WAYS, PLACEMENTS):
        name, state, (seq, per_device), way, placement = cell
        if arguments.only not in (None, name) or arguments.state not in (None, state):
            continue
        key = (name, state, seq, per_device, way, placement)
        done = subprocess.run(
            [sys.executable, __file__, "--one", *map(str, key)], capture_output=True, text=True
        )  # fmt: skip
        rows = [r for r in rows if tuple(r[k] for k in KEYS) != key]
        if done.returncode:
            print(*key, done.stderr[-1500:], file=sys.stderr)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        stored.write_text(json.dumps(rows, indent=1) + "\n")
        print(*key, f"{rows[-1]['step_time_s']:.3f} s", flush=True)
    (HERE / "unknown.md").write_text(table(rows))


if __name__ == "__main__":
    main()
