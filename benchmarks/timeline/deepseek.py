"""DeepSeek-V3 671B on 128 GB200: where the published 1.57x could come from, compiled only.

    .venv/bin/python benchmarks/timeline/deepseek.py [--cells stock:full,ours:recipe]

FSDP 16 x experts 8, sequences of 4096 tokens, two on each device (256 in all, the baseline's largest batch), everything
recomputed (`full`) against the experts' gate and up projections on the host and the rest of what spares the backward
pass on the device (`recipe`, as in `benchmarks/deepseek`). Each side is compiled in several ways:

- `off`: `jax.lax.scan` over `jax.checkpoint`, without the latency hiding scheduler;
- `stock`: the same under XLA's own flags of this build, which has that scheduler on;
- `maxtext`: the same with the flags that the published result names: latency hiding and pipelined host offloading;
- `ours`: `forebay.scan_layers` with forebay's options;
- `profiled`: that with `--profile timeline`.

A gain, time / time - 1, is divided among what the steps spend their time on: each part is the difference in seconds over
the faster step's time, so the parts add up to the gain. Results go to `deepseek.json` and `deepseek.md` beside this file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ways import compiled

HERE = Path(__file__).parent
DEVICES, MESH, SEQ, PER_DEVICE = 128, "fsdp=16,expert=8", 4096, 2
SAVED = ("mla_q", "kv_wa_proj", "mla_kv", "context", "out_proj", "mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1")
PLACEMENTS = {
    "full": "full",
    "recipe": ",".join(f"{n}={'host' if n.startswith('moe_mlpwi') else 'device'}" for n in SAVED),
}
CELLS = ("off:full", "stock:full", "stock:recipe", "maxtext:full", "maxtext:recipe", "ours:full", "ours:recipe",
         "profiled:full", "profiled:recipe")  # fmt: skip
PAIRS = (
    ("stock:full", "stock:recipe"),
    ("maxtext:full", "maxtext:recipe"),
    ("stock:full", "maxtext:recipe"),
    ("stock:full", "ours:recipe"),
    ("ours:full", "ours:recipe"),
    ("stock:full", "profiled:recipe"),
    ("profiled:full", "profiled:recipe"),
)
REPORTED = 908.2 / 578.3
PARTS = (
    "recomputed arithmetic", "recomputed collectives", "exposed transfers", "the compiler's rematerialisation",
    "other waits for collectives", "everything else",
)  # fmt: skip
GIB = 2**30


def one(way: str, policy: str) -> None:
    """Compiles and simulates one cell in this process and prints its row as JSON."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from forebay.hardware import get_hardware
    from forebay.train.config import ProgramConfig
    from forebay.train.program import make_program
    from forebay.xla.topology import compile_only_devices

    machine = get_hardware("gb200")
    config = ProgramConfig(
        model="deepseek-v3", mesh=MESH, batch=PER_DEVICE * DEVICES, seq=SEQ, placement=PLACEMENTS[policy],
        profile="timeline" if way == "profiled" else "copies",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        hlo = Path(folder) / "step.hlo"
        program, done, notes = compiled(
            way, lambda: make_program(config, compile_only_devices(machine, DEVICES)), machine, hlo
        )
        if folder := os.environ.get("KEEP_HLO"):
            Path(folder, f"deepseek-{way}-{policy}.hlo").write_text(hlo.read_text())
        row = simulated(hlo, program.flops_per_step / DEVICES)
    print(json.dumps({
        "cell": f"{way}:{policy}", **row, "device_bytes": done.device.total, "host_bytes": done.host.total,
        "fits": done.refused is None and done.device.total <= machine.usable_hbm_bytes(),
        "remat_clones": done.remat.count, "remat_collectives": done.remat.collectives,
        "windows": {
            d: min((t.window for t in done.transfers if t.where == "loop" and t.direction == d), default=None)
            for d in ("d2h", "h2d")
        },
        "violations": len(done.violations), "compile_time_s": done.compile_time_s, "notes": notes, "versions": dict(done.versions),
    }))  # fmt: skip


def simulated(hlo: Path, model_flops: float) -> dict[str, Any]:
    """What a row says of a step's timeline; waits by kind and part of the step."""
    from forebay.timeline import timeline

    made = timeline(hlo, "gb200", devices=DEVICES, model_flops=model_flops)
    waits: dict[str, float] = {}
    for e in made.exposed:
        waits[f"{e.kind} {e.phase}"] = waits.get(f"{e.kind} {e.phase}", 0.0) + e.exposed_s
    return {
        "model_flops": model_flops, "step_time_s": made.step_time_s, "tflops_per_device": made.tflops_per_device,
        "compute_s": dict(made.compute_s), "waits_s": waits, "collective_s": dict(made.collective_s),
        "kinds": dict(made.kinds), "hardware_flops": made.hardware_flops, "unknown_share": made.unknown_share,
    }  # fmt: skip


def parts(row: dict[str, Any]) -> dict[str, float]:
    """A step's seconds by `PARTS`."""
    waits, compute = row["waits_s"], row["compute_s"]
    made = {
        "recomputed arithmetic": compute["recompute"],
        "recomputed collectives": waits.get("collective recompute", 0.0),
        "exposed transfers": sum(s for name, s in waits.items() if name.split()[0] in ("d2h", "h2d", "host")),
        "the compiler's rematerialisation": compute["compiler_remat"] + waits.get("collective compiler_remat", 0.0),
        "other waits for collectives": sum(
            s for name, s in waits.items()
            if name.startswith("collective ") and name.split()[1] not in ("recompute", "compiler_remat")
        ),
    }  # fmt: skip
    return made | {"everything else": row["step_time_s"] - sum(made.values())}


def table(rows: list[dict[str, Any]]) -> str:
    found = {r["cell"]: r for r in rows}
    versions = ", ".join(f"{k} {v}" for k, v in rows[0]["versions"].items() if k != "forebay")
    lines = [
        "# DeepSeek-V3 671B on 128 GB200: what the published 1.57x could be made of", "",
        f"Compiled only, nothing was run on a device. Command: `.venv/bin/python benchmarks/timeline/deepseek.py`; {versions}.",
        "What the cells are is said there. Default efficiencies, none of them from this result. Both sides have the published",
        "baseline's batch, 256 sequences of 4096 tokens.", "",
        "## The steps", "",
        "Seconds.", "",
        "| compiled | activations | step | forward | backward | recompute | compiler's recompute | optimizer | waits for collectives | "
        "of these recomputed | waits for copies | TFLOP/s per device | least window out / back | clones | device GiB | host GiB | fits |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for cell in CELLS:
        if (r := found.get(cell)) is None:
            continue
        c, p = r["compute_s"], parts(r)
        collectives = sum(s for name, s in r["waits_s"].items() if name.startswith("collective "))
        seconds = [
            r["step_time_s"], c["forward"], c["backward"], c["recompute"], c["compiler_remat"], c["optimizer"], collectives,
            p["recomputed collectives"], p["exposed transfers"],
        ]  # fmt: skip
        windows = " / ".join("-" if w is None else f"{w:.2f}" for w in r["windows"].values())
        cells = [*cell.split(":"), *(f"{s:.3f}" for s in seconds), f"{r['tflops_per_device']:.0f}", windows]
        cells += [
            str(r["remat_clones"]),
            f"{r['device_bytes'] / GIB:.1f}",
            f"{r['host_bytes'] / GIB:.1f}",
            "yes" if r["fits"] else "no",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "", "## The gains", "",
        "Percent of the faster step; the parts add up to the gain. Unexplained is what the reported "
        f"{100 * (REPORTED - 1):.0f} % are more than that.", "",
        "| from | to | gain | " + " | ".join(PARTS) + " | unexplained |",
        "|---|---|---|" + "---|" * (len(PARTS) + 1),
    ]  # fmt: skip
    for before, after in PAIRS:
        if before not in found or after not in found:
            continue
        a, b = found[before], found[after]
        of = b["step_time_s"]
        gain = a["step_time_s"] / of - 1
        pa, pb = parts(a), parts(b)
        cells = [before, after, f"{100 * gain:+.1f}", *(f"{100 * (pa[n] - pb[n]) / of:+.1f}" for n in PARTS)]
        lines.append("| " + " | ".join(cells) + f" | {100 * (REPORTED - 1 - gain):+.1f} |")
    notes = HERE / "deepseek-notes.md"
    return "\n".join(lines) + "\n" + ("\n" + notes.read_text() if notes.is_file() else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(CELLS), help="which to compile; the other rows stay as they are")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--again", default=None, metavar="DIR", help="do not compile, simulate the HLO kept in DIR")
    arguments = parser.parse_args()
    if arguments.one:
        one(*arguments.one.split(":"))
        return
    stored = HERE / "deepseek.json"
    rows: list[dict[str, Any]] = json.loads(stored.read_text()) if stored.is_file() else []
    if arguments.again:
        for row in rows:
            row |= simulated(Path(arguments.again, f"deepseek-{row['cell'].replace(':', '-')}.hlo"), row["model_flops"])
    for cell in () if arguments.again else arguments.cells.split(","):
        done = subprocess.run([sys.executable, __file__, "--one", cell], capture_output=True, text=True)
        if done.returncode:
            print(f"{cell}: {done.stderr[-1500:]}", file=sys.stderr)
            continue
        rows = [r for r in rows if r["cell"] != cell] + [json.loads(done.stdout.splitlines()[-1])]
        stored.write_text(json.dumps(rows, indent=1) + "\n")
        print(cell, f"{rows[-1]['step_time_s']:.3f} s a step", flush=True)
    rows.sort(key=lambda r: CELLS.index(r["cell"]))
    stored.write_text(json.dumps(rows, indent=1) + "\n")
    (HERE / "deepseek.md").write_text(table(rows))


if __name__ == "__main__":
    main()
