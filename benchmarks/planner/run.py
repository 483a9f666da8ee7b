"""The planner against the compiler, against the presets, and against the clock.

    .venv/bin/python benchmarks/planner/run.py [--no-plan]

- Memory: the estimate made before any compile against the compiler's device bytes, for every case of
  `cases.json` (made by `cases.py`, which takes an hour or two).
- Seconds: the account's step time against that of the compiled step's timeline, for the GPU cases that fit.
- Quality: for the machine, model and batch of every case, the planned step time under the cost model
  against that of the fastest preset that fits.
- Ranges: what cutting the layers into one, two or three ranges gives.
- Speed: the solver's time for every such problem, and Llama 3.1 405B on 128 GB200 planned and verified,
  start to finish.

Results go to `results.md` and `results.json` beside this file.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent))

from cases import FILE, SEQ

from forebay.hardware import get_hardware
from forebay.pipeline import HOST_SHARE, preset_placements
from forebay.planner.placement import PRESETS, parse_placement
from forebay.planner.search import choose
from forebay.planner.solve import solve
from forebay.train.config import ProgramConfig
from forebay.train.planning import cost_program
from forebay.train.program import make_program
from forebay.xla.compile import versions
from forebay.xla.topology import compile_only_devices

HERE = Path(__file__).parent
GIB = 2**30
CLOSE = 0.02
"""Steps whose times differ by less are taken to be as fast."""
PLAN = ("--model", "llama3.1-405b", "--hardware", "gb200", "--devices", "128", "--mesh", "fsdp=128", "--batch", "128",
        "--seq", "8192", "--json")  # fmt: skip


def costed_of(case: dict, cache: dict):
    key = tuple(case[k] for k in ("machine", "model", "devices", "batch"))
    if key not in cache:
        machine = get_hardware(case["machine"])
        config = ProgramConfig(model=case["model"], batch=case["batch"], seq=SEQ, placement="full")
        program = make_program(config, compile_only_devices(machine, case["devices"]))
        host = int(HOST_SHARE * machine.host.memory_bytes_per_device)
        cache[key] = program, cost_program(program, machine, machine.usable_hbm_bytes(), host)
    return cache[key]


def memory(cases: list[dict], cache: dict) -> list[dict]:
    rows = []
    for case in cases:
        program, costed = costed_of(case, cache)
        carried = {s: n.carried for s, n in program.names.items()}
        predicted, _ = costed.predict(parse_placement(case["placement"], program.model.stacks, carried))
        rows.append(case | {
            "estimate": predicted.device_bytes, "error": predicted.device_bytes / case["device_bytes"] - 1,
            "host_error": predicted.host_bytes - case["host_bytes"], "usable": costed.problem.device_budget,
            "account_s": predicted.step_s,
        })  # fmt: skip
    return rows


def quality(cache: dict) -> list[dict]:
    rows = []
    for (machine, model, devices, batch), (_, costed) in cache.items():
        start = time.perf_counter()
        solution = solve(costed.problem)
        seconds = time.perf_counter() - start
        choice = choose(costed, costed.problem, variants=2, time_limit_s=20)
        presets = {}
        for name, preset in PRESETS.items():
            predicted, _ = costed.predict(preset_placements(costed, preset))
            if predicted.fits(costed.problem):
                presets[name] = predicted.step_s
        best = min(presets, key=presets.__getitem__, default=None)
        rows.append({
            "machine": machine, "model": model, "devices": devices, "batch": batch, "solve_s": seconds,
            "gap": None if solution is None else solution.gap, "plan_s": None if choice is None else choice[1].step_s,
            "preset": best, "preset_s": presets.get(best) if best else None,
        })  # fmt: skip
    return rows


def ranges(costed) -> list[dict]:
    """Llama 405B on 128 GB200: what more ranges of layers buy, to a gap of 1e-6 or for 60 s."""
    rows = []
    for variants in (1, 2, 3):
        start = time.perf_counter()
        found = solve(costed.problem, variants=variants, time_limit_s=60, relative_gap=1e-6)
        seconds = time.perf_counter() - start
        rows.append(
            {
                "ranges": variants,
                "step_s": found and found.predicted.step_s,
                "gap": found and found.gap,
                "solve_s": seconds,
            }
        )
    return rows


def end_to_end() -> dict:
    command = [str(Path(sys.executable).parent / "forebay"), "plan", *PLAN]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(done.stderr)
    plan = json.loads(done.stdout)
    return {"seconds": seconds, "verified": plan["verified"], "predicted": plan["predicted"]}


def memory_line(r: dict) -> str:
    return (
        f"| {r['machine']} | {r['model']} | {r['devices']} | {r['batch']} | `{r['placement']}` | {r['estimate'] / GIB:.2f} | "
        f"{r['device_bytes'] / GIB:.2f} | {100 * r['error']:+.1f} % |"
    )


def seconds(rows: list[dict]) -> list[str]:
    """The account's step times beside those of the compiled steps."""
    timed = [r for r in rows if r.get("step_s") is not None and r["fits"]]
    off = [r["account_s"] / r["step_s"] - 1 for r in timed]
    errors = sorted(map(abs, off))
    same = [
        (a, b) for a, b in itertools.combinations(timed, 2)
        if all(a[k] == b[k] for k in ("machine", "model", "batch")) and abs(a["step_s"] / b["step_s"] - 1) > CLOSE
    ]  # fmt: skip
    agreed = sum((a["step_s"] < b["step_s"]) == (a["account_s"] < b["account_s"]) for a, b in same)
    return [
        "", "## Seconds: the account, against the timeline of the compiled step", "",
        f"{len(timed)} GPU cases that fit. Error: median {100 * statistics.median(off):+.1f} %; without its sign "
        f"{100 * statistics.median(errors):.1f} %, 90th percentile {100 * errors[int(0.9 * len(errors))]:.1f} %, worst "
        f"{100 * errors[-1]:.1f} %. Of {len(same)} pairs of one machine, model and batch whose timelines differ by more than "
        f"{100 * CLOSE:.0f} %, the account orders {agreed} as the timelines do.", "",
        "| machine | model | devices | batch | placement | account s | timeline s | difference | clones |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {r['machine']} | {r['model']} | {r['devices']} | {r['batch']} | `{r['placement']}` | {r['account_s']:.3f} | "
            f"{r['step_s']:.3f} | {100 * (r['account_s'] / r['step_s'] - 1):+.1f} % | {r['remat_clones']} |"
            for r in timed
        ),
    ]  # fmt: skip


def report(rows: list[dict], compared: list[dict], by_ranges: list[dict], whole: dict | None) -> list[str]:
    # a TPU compiler refuses what does not fit; what it then says of sizes is not of a program
    refused = [r for r in rows if r["machine"] in ("v5p", "v6e") and not r["fits"]]
    rows = [r for r in rows if r not in refused]
    errors = sorted(abs(r["error"]) for r in rows)
    used = ", ".join(f"{k} {v}" for k, v in versions().items() if k != "forebay")
    lines = [
        "# The planner", "",
        f"{os.cpu_count()} CPU cores, {platform.machine()}, no accelerator, Python {platform.python_version()}; {used}.",
        "Commands: `.venv/bin/python benchmarks/planner/cases.py`, then `.venv/bin/python benchmarks/planner/run.py`.", "",
        "## Memory: the estimate before any compile, against the compiler", "",
        f"{len(rows)} cases that the compiler accepts, sequences of {SEQ}, FSDP over all devices. Absolute error: median "
        f"**{100 * statistics.median(errors):.1f} %**, 90th percentile {100 * errors[int(0.9 * len(errors))]:.1f} %, worst "
        f"**{100 * errors[-1]:.1f} %**. Host bytes differ by at most {max(abs(r['host_error']) for r in rows) / 2**20:.1f} MiB.", "",
        "| machine | model | devices | batch | placement | estimate GiB | compiler GiB | error |", "|---|---|---|---|---|---|---|---|",
        *map(memory_line, rows), "",
        f"{len(refused)} more that TPU compilers refuse because they do not fit (v5p has 95.7 GiB, v6e 31.2). The sizes of a failed "
        f"compile are not those of a program, so they are not counted above; the planner too says that none of them fits: "
        f"{all(r['estimate'] > r['usable'] for r in refused)}.", "",
        "| machine | model | devices | batch | placement | estimate GiB | compiler GiB | error |", "|---|---|---|---|---|---|---|---|",
        *map(memory_line, refused), *seconds(rows), "",
        "## Quality: step time under the cost model, against the fastest preset that fits", "",
        "| machine | model | devices | batch | plan s | best preset | preset s | plan / preset | solver s | gap |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in compared:
        plan = "nothing fits" if r["plan_s"] is None else f"{r['plan_s']:.3f}"
        preset = "none fits" if r["preset_s"] is None else f"{r['preset_s']:.3f}"
        ratio = f"{r['plan_s'] / r['preset_s']:.3f}" if r["plan_s"] and r["preset_s"] else ""
        gap = "" if r["gap"] is None else f"{r['gap']:.0e}"
        lines.append(
            f"| {r['machine']} | {r['model']} | {r['devices']} | {r['batch']} | {plan} | {r['preset'] or ''} | {preset} | {ratio} | "
            f"{r['solve_s']:.2f} | {gap} |"
        )
    lines += [
        "", "## Ranges of layers: Llama 3.1 405B on 128 GB200, batch 128", "",
        "Solved to a gap of 1e-6, or for 60 s.", "", "| ranges | step s | solver s | gap |", "|---|---|---|---|",
        *(f"| {r['ranges']} | {r['step_s']:.4f} | {r['solve_s']:.1f} | {r['gap']:.0e} |" for r in by_ranges),
    ]  # fmt: skip
    if whole is not None:
        p = whole["predicted"]
        lines += [
            "", "## Speed", "",
            f"`forebay plan {' '.join(PLAN[:-1])}`: **{whole['seconds']:.0f} s** start to finish with {p['compiles']} verifying "
            f"compiles; {p['device_bytes'] / GIB:.2f} GiB of {p['device_budget_bytes'] / GIB:.2f} GiB, verified: {whole['verified']}.",
        ]  # fmt: skip
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-plan", action="store_true", help="leave out the full plan of 405B")
    arguments = parser.parse_args()
    cache: dict = {}
    rows = memory(json.loads(FILE.read_text()), cache)
    compared = quality(cache)
    by_ranges = ranges(cache["gb200", "llama3.1-405b", 128, 128][1])
    whole = None if arguments.no_plan else end_to_end()
    lines = report(rows, compared, by_ranges, whole)
    (HERE / "results.md").write_text("\n".join(lines))
    keep = (
        "machine", "model", "devices", "batch", "placement", "device_bytes", "estimate", "error", "fits", "account_s", "step_s",
    )  # fmt: skip
    kept = [{k: r.get(k) for k in keep} for r in rows]
    data = {"memory": kept, "quality": compared, "ranges": by_ranges, "plan": whole}
    (HERE / "results.json").write_text(json.dumps(data, indent=1) + "\n")
    print("\n".join(lines))
    worse = [r for r in compared if r["preset_s"] and (r["plan_s"] is None or r["plan_s"] > r["preset_s"] * (1 + 1e-6))]
    for r in worse:
        print("worse than a preset:", r)


if __name__ == "__main__":
    main()
