"""Mixtral and Qwen3-MoE at full size on machines that are not there: memory and experts' arithmetic, compiled only.

    .venv/bin/python benchmarks/moe/run.py [--only qwen3-30b-a3b]

Sequence 4096, float32 weights and moments. Each case is compiled in a process of its own, the plan's after planning. Expert
FLOPs are counted in the compiled HLO as in benchmarks/deepseek, beside those of a perfectly balanced router: three
products forward, six backward, and those that the placement repeats. Results go to `results.json` and `results.md`.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from experts import expert_flops  # noqa: E402

SEQ, GiB = 4096, 2**30
# model, hardware, devices, mesh, batch, placement; an empty one is planned
CASES = (
    ("qwen3-30b-a3b", "h200", 8, "expert=8", 8, "full"),
    ("qwen3-30b-a3b", "h200", 8, "expert=8", 8, ""),
    ("qwen3-30b-a3b", "h200", 8, "expert=8", 32, ""),
    ("qwen3-235b-a22b", "h200", 64, "fsdp=8,expert=8", 64, "full"),
    ("mixtral-8x22b", "gb200", 32, "fsdp=4,expert=8", 64, "full"),
    ("mixtral-8x7b", "gb200", 8, "fsdp=8", 16, "full"),
    ("mixtral-8x7b", "gb200", 8, "fsdp=8", 16, "minimal_offloaded"),
)


def one(number: int) -> dict[str, Any]:
    """One case, compiled in this process."""
    from forebay.hardware import get_hardware
    from forebay.timeline.compare import of_compiled
    from forebay.train.config import ProgramConfig
    from forebay.train.planning import compile_program, cost_program, planned_program
    from forebay.xla.hlo import parse_module
    from forebay.xla.topology import compile_only_devices

    name, hardware, count, mesh, batch, placement = CASES[number]
    machine = get_hardware(hardware)
    config = ProgramConfig(model=name, mesh=mesh, batch=batch, seq=SEQ, placement=placement)
    start = time.perf_counter()
    program = planned_program(config, compile_only_devices(machine, count), machine)
    planning_s = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        hlo = Path(folder) / "step.hlo"
        done = compile_program(program, machine, deviceless=True, save_hlo=hlo).compiled
        flops = expert_flops(parse_module(hlo.read_text()))
    costed = cost_program(program, machine, machine.usable_hbm_bytes(None), machine.host.memory_bytes_per_device)
    made = of_compiled(done, machine, count)
    c = program.model.config
    repeated = sum(
        (p.layers[1] - p.layers[0])
        * sum(p.tensors.get(n, "recompute") == "recompute" for n in ("moe_mlpwi_0", "moe_mlpwi_1"))
        for p in program.plan.placements
        if "*" not in p.tensors
    )
    product = 2 * batch * SEQ * c.experts_per_token * c.embed * c.moe_mlp / count
    return {
        "case": CASES[number], "device_bytes": done.device.total, "host_bytes": done.host.total,
        "usable_bytes": machine.usable_hbm_bytes(None), "refused": done.refused, "remat_clones": done.remat.count,
        "expert_flops_over_ideal": flops / (product * (9 * c.layers + repeated)),
        "planner_step_s": costed.predict(program.plan.placements)[0].step_s,
        "timeline_step_s": None if made is None else made["step_time_s"], "compile_time_s": done.compile_time_s,
        "planning_s": None if placement else planning_s,
        "placements": [dataclasses.asdict(p) for p in program.plan.placements], "versions": dict(done.versions),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    versions = sorted({f"{k} {v}" for r in rows for k, v in r["versions"].items() if k != "forebay"})
    lines = [
        "# Mixtral and Qwen3-MoE at full size", "",
        f"Compiled only, {os.cpu_count()} CPU cores, no accelerator; {', '.join(versions)}. Command: "
        "`.venv/bin/python benchmarks/moe/run.py`.", "Sequence 4096, cuDNN's attention. Step "
        "times are the planner's and the timeline's, not measured;", "seconds of compiling and planning are of a machine with "
        "other work.", "",
        "| model | machine | mesh | batch | placement | device GiB | host GiB | fits | expert FLOPs over ideal | clones | planner's "
        "step s | timeline's | compile s | planning s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        name, hardware, count, mesh, batch, placement = r["case"]
        fits = r["refused"] is None and r["device_bytes"] <= r["usable_bytes"]
        timeline, planning = (
            "" if r[k] is None else f"{r[k]:.{d}f}" for k, d in (("timeline_step_s", 3), ("planning_s", 0))
        )
        lines.append(
            f"| {name} | {count} x {hardware} | {mesh} | {batch} | {placement or 'plan'} | {r['device_bytes'] / GiB:.1f} of "
            f"{r['usable_bytes'] / GiB:.1f} | {r['host_bytes'] / GiB:.1f} | {'yes' if fits else 'no'} | "
            f"{r['expert_flops_over_ideal']:.3f} | {r['remat_clones']} | {r['planner_step_s']:.3f} | {timeline} | "
            f"{r['compile_time_s']:.0f} | {planning} |"
        )
    lines += ["", "The plans; what is not named is recomputed.", ""]
    for r in rows:
        if r["case"][-1]:
            continue
        said = "; ".join(
            f"{p['layers'][0]}:{p['layers'][1]} " + ", ".join(f"{n} {w}" for n, w in p["tensors"].items())
            for p in r["placements"]
        )
        lines.append(f"- {r['case'][0]}, batch {r['case'][4]}: {said}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one model")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(one(arguments.one)))
        return
    file = HERE / "results.json"
    rows = {tuple(r["case"]): r for r in (json.loads(file.read_text()) if file.exists() else [])}
    for number, case in enumerate(CASES):
        if arguments.only not in (None, case[0]):
            continue
        command = [sys.executable, __file__, "--one", str(number)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        if done.returncode:
            sys.exit(f"{case}: failed")
        rows[case] = json.loads(done.stdout.splitlines()[-1])
        ordered = [rows[c] for c in CASES if c in rows]
        file.write_text(json.dumps(ordered, indent=1) + "\n")
        (HERE / "results.md").write_text(table(ordered))
        print(case, f"{rows[case]['device_bytes'] / GiB:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
