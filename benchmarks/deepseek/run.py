"""DeepSeek-V3 671B on 128 GB200 that are not there: memory, arithmetic and predicted speed by batch and policy.

    .venv/bin/python benchmarks/deepseek/run.py [--cells 8:full,8:plan]
    KEEP_HLO=DIR .venv/bin/python benchmarks/deepseek/run.py ... --again DIR     # after a change of the timeline
    .venv/bin/python benchmarks/deepseek/run.py --replan                         # after one of the planner's seconds

FSDP 16 x experts 8, sequence 4096. Every cell is compiled, and its timeline simulated; results go to `results.json` and
`results.md` beside this file. Cells that are there are left as they are, those that `--cells` names are made again.
Policies:

- `full`: everything recomputed;
- `saved`: on the device what spares the backward pass all but small products (queries, keys and values are made
  again from their latents); the exchange of tokens is repeated;
- `recipe`, a published one: the experts' gate and up projections on the host, everything else as `saved`;
- `plan`: ours.

Expert arithmetic is counted in the compiled HLO, as if every row of the buffers were of some expert, and compared with
8 experts for each token: three products forward, six backward, and those that the policy repeats.
"""

import argparse
import dataclasses
import gzip
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

DEVICES, MESH, SEQ = 128, "fsdp=16,expert=8", 4096
BATCHES = (1, 2, 4, 6, 8)
POLICIES = ("full", "saved", "recipe", "plan")
SAVED = ("mla_q", "kv_wa_proj", "mla_kv", "context", "out_proj", "mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1")
PLACEMENTS = {
    "full": "full",
    "saved": ",".join(f"{n}=device" for n in SAVED),
    "recipe": ",".join(f"{n}={'host' if n.startswith('moe_mlpwi') else 'device'}" for n in SAVED),
}
GiB = 2**30


def one(per_device: int, policy: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """One cell, compiled in this process."""
    from forebay.hardware import get_hardware
    from forebay.train.config import ProgramConfig
    from forebay.train.planning import compile_program, planned_program
    from forebay.train.program import make_program
    from forebay.xla.hlo import parse_module
    from forebay.xla.topology import compile_only_devices

    machine = get_hardware("gb200")
    devices = compile_only_devices(machine, DEVICES)
    placement = PLACEMENTS.get(policy, "")
    config = ProgramConfig(
        model="deepseek-v3", sizes=sizes, mesh=MESH, batch=per_device * DEVICES, seq=SEQ, placement=placement
    )
    start = time.perf_counter()
    if placement:
        program = make_program(config, devices)
    else:
        program = planned_program(config, devices, machine, progress=lambda text: print(text, file=sys.stderr))
    planning_s = time.perf_counter() - start
    predicted_s = planner_s(program)
    with tempfile.TemporaryDirectory() as folder:
        hlo = Path(folder) / "step.hlo"
        done = compile_program(program, machine, deviceless=True, save_hlo=hlo).compiled
        text = hlo.read_text()
    if kept := os.environ.get("KEEP_HLO"):
        with gzip.open(Path(kept) / f"{per_device}-{policy}.hlo.gz", "wt") as file:
            file.write(text)
    module = parse_module(text)
    repeated = sum(
        (p.layers[1] - p.layers[0])
        * sum(
            p.tensors.get(n, "recompute") == "recompute" and "*" not in p.tensors
            for n in ("moe_mlpwi_0", "moe_mlpwi_1")
        )
        for p in program.plan.placements
        if p.stack != "dense_layers"
    )
    c = program.model.config
    product = 2 * per_device * SEQ * c.experts_per_token * c.embed * c.moe_mlp
    ideal = product * (9 * (c.moe_layers + c.mtp) + repeated)
    return {
        "batch_per_device": per_device, "policy": policy, "device_bytes": done.device.total, "host_bytes": done.host.total,
        "fits": done.refused is None and done.device.total <= machine.usable_hbm_bytes(None)
        and done.host.total <= machine.host.memory_bytes_per_device,
        "planner_step_s": predicted_s, "model_flops": program.flops_per_step / DEVICES,
        "timeline": simulated(module, program.flops_per_step / DEVICES),
        "expert_flops": expert_flops(module), "ideal_expert_flops": ideal,
        "loop_windows": {
            d: min((t.window for t in done.transfers if t.where == "loop" and t.direction == d), default=None)
            for d in ("d2h", "h2d")
        },
        "remat_clones": done.remat.count, "compile_time_s": done.compile_time_s, "planning_s": planning_s,
        "placements": [dataclasses.asdict(p) for p in program.plan.placements], "versions": dict(done.versions),
    }  # fmt: skip


def planner_s(program: Any) -> float:
    """The step time of a program's placements by the planner's account, in seconds."""
    from forebay.hardware import get_hardware
    from forebay.pipeline import device_budget, host_budget
    from forebay.train.planning import cost_program

    machine = get_hardware("gb200")
    costed = cost_program(program, machine, device_budget(machine, None), host_budget(machine, None))
    return costed.predict(program.plan.placements)[0].step_s


def replan(rows: list[dict[str, Any]]) -> None:
    """The planner's seconds of all rows again; nothing is compiled."""
    from forebay.hardware import get_hardware
    from forebay.planner.placement import Placement
    from forebay.train.config import ProgramConfig
    from forebay.train.program import make_program
    from forebay.xla.topology import compile_only_devices

    devices = compile_only_devices(get_hardware("gb200"), DEVICES)
    for row in rows:
        config = ProgramConfig(
            model="deepseek-v3", mesh=MESH, batch=row["batch_per_device"] * DEVICES, seq=SEQ, placement="full"
        )
        program = make_program(config, devices)
        placements = tuple(Placement(p["stack"], tuple(p["layers"]), p["tensors"]) for p in row["placements"])
        plan = dataclasses.replace(program.plan, placements=placements)
        row["planner_step_s"] = planner_s(dataclasses.replace(program, plan=plan))


def simulated(module: Any, model_flops: float) -> dict[str, Any]:
    """What the timeline says of a compiled step."""
    from forebay.timeline import timeline

    made = timeline(module, "gb200", devices=DEVICES, model_flops=model_flops)
    return {
        "attention_s": attention_s(module), "step_s": made.step_time_s, "tflops_per_device": made.tflops_per_device,
        "hardware_flops": made.hardware_flops,
        "compute_s": made.compute_s, "collective_s": made.collective_s, "waiting_s": made.waiting_s,
        "kinds": made.kinds, "lanes": made.lanes, "unknown_share": made.unknown_share, "unknown": made.unknown,
    }  # fmt: skip


def attention_s(module: Any) -> dict[str, float]:
    """Seconds in kernels of attention, by part of the step."""
    from forebay.hardware import get_hardware
    from forebay.timeline.costs import CostModel
    from forebay.timeline.simulate import simulate
    from forebay.xla.schedule import read_schedule

    run = simulate(read_schedule(module, "cuda", DEVICES), CostModel(get_hardware("gb200"), DEVICES))
    spent: dict[str, float] = {}
    for e in run.events:
        if e.kind == "work" and e.op.work is not None and e.op.work.kind == "attention":
            spent[e.op.phase] = spent.get(e.op.phase, 0.0) + e.count * e.seconds
    return spent


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# DeepSeek-V3 671B on 128 GB200 (FSDP 16 x experts 8, sequence 4096)", "",
        "`benchmarks/deepseek/run.py`. Compiled only, nothing was run. Memory, windows, clones and expert arithmetic are the "
        "compiler's. Seconds and TFLOP/s are the timeline's, a simulation of the compiled step under the default efficiencies "
        "([docs/timeline.md](../../docs/timeline.md)), and not measurements; the planner's own estimate, made before compiling, "
        "is beside them. TFLOP/s count the model's FLOPs (forward and backward, causal attention, nothing recomputed, the "
        "multi-token-prediction layer included). Where a cell does not fit, its speed is that of a machine with more memory.", "",
        "| sequences per device | policy | device GiB | host GiB | fits | step s | of it in attention s | "
        "TFLOP/s per device | waits for host copies s | waits for collectives s | recomputed s | planner's step s | "
        "expert FLOPs over ideal | least window in loops d2h / h2d | clones | compile s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in sorted(rows, key=lambda r: (r["batch_per_device"], POLICIES.index(r["policy"]))):
        windows = " / ".join("" if w is None else f"{w:.2f}" for w in r["loop_windows"].values())
        t = r["timeline"]
        waits, compute = t["waiting_s"], t["compute_s"]
        lines.append(
            f"| {r['batch_per_device']} | {r['policy']} | {r['device_bytes'] / GiB:.1f} | {r['host_bytes'] / GiB:.1f} | "
            f"{'yes' if r['fits'] else 'no'} | {t['step_s']:.2f} | {sum(t['attention_s'].values()):.2f} | {t['tflops_per_device']:.0f} | "
            f"{waits.get('d2h', 0) + waits.get('h2d', 0):.3f} | {waits.get('collective', 0):.2f} | "
            f"{compute['recompute'] + compute['compiler_remat']:.2f} | {r['planner_step_s']:.2f} | "
            f"{r['expert_flops'] / r['ideal_expert_flops']:.3f} | {windows} | {r['remat_clones']} | {r['compile_time_s']:.0f} |"
        )
    planned = [r for r in rows if r["policy"] == "plan"]
    lines += ["", "The plans: share of the layers in which each tensor is placed so; all others are recomputed.", ""]
    for r in sorted(planned, key=lambda r: (r["batch_per_device"], r["policy"])):
        lines.append(f"- {r['batch_per_device']}, {r['policy']}, found in {r['planning_s']:.0f} s: {_plan_text(r)}")
    return "\n".join(lines) + "\n"


def _plan_text(row: dict[str, Any]) -> str:
    said = []
    for p in row["placements"]:
        first, past = p["layers"]
        by_place = {place: [n for n, w in p["tensors"].items() if w == place] for place in ("host", "device")}
        places = "; ".join(f"{', '.join(names)} {place}" for place, names in by_place.items() if names)
        said.append(f"`{p['stack']}` {first}:{past} {places or 'recomputed'}")
    return "; ".join(said)


def write(rows: list[dict[str, Any]]) -> None:
    (HERE / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    (HERE / "results.md").write_text(table(rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", help="of these; by default all that are not there yet")
    parser.add_argument("--one")
    parser.add_argument("--again", metavar="DIR", help="simulate the HLO kept in this folder again, compile nothing")
    parser.add_argument("--replan", action="store_true", help="the planner's seconds again, compile nothing")
    arguments = parser.parse_args()
    if arguments.one:
        batch, policy = arguments.one.split(":")
        print(json.dumps(one(int(batch), policy, {})))
        return
    file = HERE / "results.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    if arguments.replan:
        os.environ["JAX_PLATFORMS"] = "cpu"
        replan(rows)
        write(rows)
        return
    if arguments.again:
        from forebay.xla.hlo import parse_module

        for row in rows:
            file_of = Path(arguments.again) / f"{row['batch_per_device']}-{row['policy']}.hlo.gz"
            if file_of.exists():
                with gzip.open(file_of, "rt") as text:
                    row["timeline"] = simulated(parse_module(text.read()), row["model_flops"])
        write(rows)
        return
    there = {f"{r['batch_per_device']}:{r['policy']}" for r in rows}
    missing = [cell for b in BATCHES for p in POLICIES if (cell := f"{b}:{p}") not in there]
    for cell in arguments.cells.split(",") if arguments.cells else missing:
        command = [sys.executable, __file__, "--one", cell]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False
        )
        if done.returncode:
            print(f"{cell}: nothing fits, or it could not be compiled", file=sys.stderr)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        rows = [r for r in rows if (r["batch_per_device"], r["policy"]) != (row["batch_per_device"], row["policy"])]
        rows.append(row)
        write(rows)
        print(cell, f"{row['device_bytes'] / GiB:.1f} GiB device, {row['host_bytes'] / GiB:.1f} GiB host")


if __name__ == "__main__":
    main()
