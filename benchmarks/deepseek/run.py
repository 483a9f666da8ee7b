"""DeepSeek-V3 671B on 128 GB200 that are not there: memory, arithmetic and predicted speed by batch and policy.

    .venv/bin/python benchmarks/deepseek/run.py [--cells 8:full,8:plan]

FSDP 16 x experts 8, sequence 4096. Every cell is compiled; results go to `results.json` and `results.md` beside this
file, `--cells` replaces the rows it names. Policies:

- `full`: everything recomputed;
- `saved`: on the device what spares the backward pass all but small products (queries, keys and values are made
  again from their latents); the exchange of tokens is repeated;
- `keep`: the fastest plan that keeps nothing on the host;
- `recipe`, a published one: the experts' gate and up projections on the host, everything else as `saved`;
- `plan`: ours.

Expert arithmetic is counted in the compiled HLO, as if every row of the buffers were of some expert, and compared with
8 experts for each token: three products forward, six backward, and those that the policy repeats.
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
DEVICES, MESH, SEQ = 128, "fsdp=16,expert=8", 4096
BATCHES = (1, 2, 4, 6, 8)
POLICIES = ("full", "saved", "keep", "recipe", "plan")
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
    from forebay.pipeline import device_budget, host_budget
    from forebay.train.config import ProgramConfig
    from forebay.train.planning import compile_program, cost_program, planned_program
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
        host = "0GiB" if policy == "keep" else None
        program = planned_program(
            config, devices, machine, host=host, progress=lambda text: print(text, file=sys.stderr)
        )
    planning_s = time.perf_counter() - start
    costed = cost_program(program, machine, device_budget(machine, None), host_budget(machine, None))
    predicted, _ = costed.predict(program.plan.placements)
    with tempfile.TemporaryDirectory() as folder:
        hlo = Path(folder) / "step.hlo"
        done = compile_program(program, machine, deviceless=True, save_hlo=hlo).compiled
        module = parse_module(hlo.read_text())
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
        "predicted_step_s": predicted.step_s,
        "predicted_exposed_s": predicted.exposed_d2h_s + predicted.exposed_h2d_s,
        "tflops_per_device": program.flops_per_step / predicted.step_s / DEVICES / 1e12,
        "expert_flops": expert_flops(module), "ideal_expert_flops": ideal,
        "loop_windows": {
            d: min((t.window for t in done.transfers if t.where == "loop" and t.direction == d), default=None)
            for d in ("d2h", "h2d")
        },
        "remat_clones": done.remat.count, "compile_time_s": done.compile_time_s, "planning_s": planning_s,
        "placements": [dataclasses.asdict(p) for p in program.plan.placements], "versions": dict(done.versions),
    }  # fmt: skip


def expert_flops(module: Any) -> float:
    """FLOPs of a step in the experts' kernels."""
    from forebay.xla.flops import FlopCounter

    class Experts(FlopCounter):
        def instruction(self, instruction: Any) -> float:
            if instruction.opcode in ("dot", "convolution") or instruction.opcode.startswith("custom-call"):
                return super().instruction(instruction) if "/grouped_" in instruction.rest else 0.0
            return super().instruction(instruction)

    return Experts(module).computation(module.entry)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# DeepSeek-V3 671B on 128 GB200 (FSDP 16 x experts 8, sequence 4096)", "",
        "`benchmarks/deepseek/run.py`. Memory, windows and expert arithmetic are the compiler's; step time and TFLOP/s are the "
        "planner's model of the machine, not measurements. TFLOP/s count the model's FLOPs (forward and backward, "
        "causal attention, nothing recomputed, the multi-token-prediction layer included).", "",
        "| sequences per device | policy | device GiB | host GiB | fits | expert FLOPs over ideal | least window d2h / h2d | "
        "predicted s | exposed s | predicted TFLOP/s | clones | compile s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in sorted(rows, key=lambda r: (r["batch_per_device"], POLICIES.index(r["policy"]))):
        windows = " / ".join("" if w is None else f"{w:.2f}" for w in r["loop_windows"].values())
        lines.append(
            f"| {r['batch_per_device']} | {r['policy']} | {r['device_bytes'] / GiB:.1f} | {r['host_bytes'] / GiB:.1f} | "
            f"{'yes' if r['fits'] else 'no'} | {r['expert_flops'] / r['ideal_expert_flops']:.3f} | {windows} | "
            f"{r['predicted_step_s']:.2f} | {r['predicted_exposed_s']:.3f} | {r['tflops_per_device']:.0f} | {r['remat_clones']} | "
            f"{r['compile_time_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", default=",".join(f"{b}:{p}" for b in BATCHES for p in POLICIES))
    parser.add_argument("--one")
    arguments = parser.parse_args()
    if arguments.one:
        batch, policy = arguments.one.split(":")
        print(json.dumps(one(int(batch), policy, {})))
        return
    file = HERE / "results.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    for cell in arguments.cells.split(","):
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
        file.write_text(json.dumps(rows, indent=1) + "\n")
        (HERE / "results.md").write_text(table(rows))
        print(cell, f"{row['device_bytes'] / GiB:.1f} GiB device, {row['host_bytes'] / GiB:.1f} GiB host")


if __name__ == "__main__":
    main()
