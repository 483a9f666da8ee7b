"""The timeline against published results: the same step with activations recomputed and offloaded, compiled only.

    .venv/bin/python benchmarks/timeline/run.py [--only NAME]
    KEEP_HLO=DIR .venv/bin/python benchmarks/timeline/run.py ... --again DIR     # after a change of the model

Nothing runs on a device. Each side of a case is a whole training step, compiled for machines that are not
there in a process of its own, and its timeline is simulated with the default efficiencies of
`forebay.timeline.Efficiency`: from datasheets and kernel benchmarks, none of them from these results. What a
published result leaves open is assumed, and said. Both sides get the same compiler options (those with
which forebay compiles a step that offloads, without XLA's memory limit, so that neither side is
rematerialised by the compiler); `as forebay compiles` is the other comparison, each side with its own, the timeline's times
included. TPU steps are compiled up to the schedule (`benchmarks/scheduled.py`).

GPU attention is cuDNN's, as on the device.
Results go to `results.md` and `results.json` beside this file.
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

from table import table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from scheduled import DUMP, scheduled  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Case:
    """A published comparison. `before` and `after` are placements; `reported` is the ratio of step times."""

    name: str
    title: str
    reported: float
    model: str
    hardware: str
    devices: int
    batch: int
    seq: int
    before: str
    after: str
    known: str
    assumed: str
    sizes: tuple[str, ...] = ()
    state: str = "float32"
    """The dtype of weights, gradients and optimizer state."""
    remark: str = ""
    """What is to be said of a prediction that does not come out, or only just."""


CASES = (
    Case(
        "405b-gb200", "Llama 3.1 405B, GB200: offload against recompute, fixed configuration", 1.029, "llama3.1-405b",
        "gb200", 128, 128, 8192, "full", "qkv_proj_offloaded", "model, machine, that only the placement differs",
        "128 GPUs, FSDP over all, one sequence of 8192 tokens each, bfloat16; query, key and value offloaded (as in the "
        "other Llama results; what was offloaded is not public)",
        remark="Not recomputing query, key and value takes 0.36 s of arithmetic away, 2.3 % of the step. Half of that is lost "
        "again: in the offloading step's schedule more all-gathers of weights end right after they start, and 0.18 s more is "
        "spent waiting for them. The scheduler treats all kernels as equally short, so what it hides is partly chance "
        "([profile.md](profile.md)). With the timeline's times, as forebay compiles, the two sides wait 0.96 and 0.68 s",
    ),
    Case(
        "70b-h200", "Llama 3.3 70B, 8 H200: query, key and value offloaded against full recompute", 1.069,
        "llama3.1-70b", "h200", 8, 8, 8192, "full", "qkv_proj_offloaded",
        "model, machines, what is offloaded (Intel, Activation Offloading on Heterogeneous Systems; a summary of it was read)",
        "FSDP over 8, one sequence of 8192 tokens each; Llama 3.1 70B, the same architecture; weights, gradients and "
        "moments in bfloat16, because in float32 they alone are 131 of the 127 GiB that XLA may use",
        state="bfloat16",
        remark="What is not computed again is 2.4 % of the arithmetic, and in this configuration the baseline has only 0.15 s of "
        "waits that could go as well, so no cost model that knows the FLOPs predicts 6.9 %. What is not public cannot close "
        "the gap either, as far as it was tried ([unknown.md](unknown.md)): of 18 configurations (dtypes of the state, 2048 to 8192 "
        "tokens, one to four sequences on a device), 12 fit the H200, and gain -11.0 to +2.1 % with MaxText's flags and "
        "-6.0 to +4.2 % as forebay compiles, the median +2.7 %. With float32 state, which does not fit an H200, a baseline that ran "
        "into XLA's memory limit lost its overlap, was rematerialised, and made the gain 18.6 %: something like it would "
        "explain the published figure, and was not found among what fits. The same work reports 11.6 % for PaliGemma2 28B on 8 H200 "
        "and 15.5 % for Gemma 4 31B on 8 B300",
    ),
    Case(
        "70b-b300", "Llama 3.3 70B, 8 B300: the same", 1.03, "llama3.1-70b", "b300", 8, 8, 8192, "full",
        "qkv_proj_offloaded", "model, machines, what is offloaded",
        "as above; a B300 is a GB300's GPU behind PCIe 5, 8 of them on NVLink",
        state="bfloat16",
    ),
    Case(
        "13b-v5p", "Llama 2 13B, TPU v5p: offload against full recompute", 1.05, "llama3.1-8b", "v5p", 8, 32, 4096,
        "full", "qkv_proj_offloaded", "model, machine (Google Open Source Blog, 10 April 2026: MaxText, about 5 %)",
        "8 chips, FSDP, four sequences of 4096 tokens each; query, key and value offloaded. The post gives neither chips, batch "
        "and sequence nor the tensors, as far as its text could be found",
        ("vocab=32000", "embed=5120", "layers=40", "heads=40", "kv_heads=40", "mlp=13824"),
        remark="This row is bound by the link: 480 MiB a layer and direction take 36.6 ms at the 13.8 GB/s that it is taken to reach "
        "(16 nominal, 86 %), a layer's forward pass 32 ms, so that most of the 6.5 % of arithmetic that is saved is waited for again. "
        "With a link of 15, 15.5, 18, 20, 25 and 32 GB/s in place of 16, and everything else the same, it is +0.1, +1.2, +5.7, +6.1, +6.1 "
        "and +6.1 %. That is both steps again, by `forebay timeline --hlo` on a machine of that link; 15 is what an older text of the "
        "link's source has. One nominal figure decides this row, and was not chosen by it. libtpu's own scheduler takes a v5p's link to "
        "be far faster: 41 bytes a cycle, which is 72 GB/s at 1.75 GHz (`benchmarks/timeline/host_link.py`; of a v6e it has 18 bytes, "
        "which agrees with the 32 GB/s of the same source). The lower figure is kept, since a plan that trusts the higher one "
        "and is wrong waits for its copies. No measured rate of a v5p's link was found in public; which tensors were "
        "offloaded, and chips, batch and sequence, are not public either",
    ),
    Case(
        "70b-v5p", "Llama 2 70B, 64 TPU v5p, FSDP: query, key and value offloaded, MFU 65 against 63 %", 65 / 63,
        "llama3.1-70b", "v5p", 64, 256, 4096, "full", "qkv_proj_offloaded",
        "model, machine (v5p-128 is 64 chips), FSDP, what is offloaded, both MFU (MaxText pull request 546, March 2024)",
        "four sequences of 4096 tokens on each chip, as in MaxText's own later script for this model on v5p (4 Mi tokens on "
        "256 chips); full recompute on the side without offload, of which only the MFU is public",
        ("vocab=32000", "embed=8192", "layers=80", "heads=64", "kv_heads=8", "mlp=28672"),
        remark="No copy is waited for: a layer's forward pass is three times as long as its copies. Predicted MFU is 61 and 60 % "
        "where 65 and 63 were reported",
    ),
)  # fmt: skip

B300 = """
[b300]
base = "b200"
title = "NVIDIA B300 SXM, 8 to a host"
hbm_bytes = 297_021_079_552
hbm_bytes_per_s = 7.928064e12
flops_per_s = { bf16 = 2.5e15, fp8 = 5.0e15, tf32 = 1.25e15 }

[b300.interconnect]
network_bytes_per_s = 100e9
"""
"""The GPU as in `forebay hardware gb300`, the host as in b200; the compiler's target is b200's."""


def one(case: Case, placement: str, same: str) -> None:
    """Compiles and simulates one side of a case in this process and prints its row as JSON."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    from forebay.train.config import ProgramConfig
    from forebay.train.planning import compile_program, step_options
    from forebay.train.program import make_program
    from forebay.xla.compile import compile_hidden
    from forebay.xla.options import compiler_options
    from forebay.xla.topology import compile_only_devices

    with tempfile.TemporaryDirectory() as folder:
        machine = machine_of(case)
        sizes = {k: int(v) for k, _, v in (s.partition("=") for s in case.sizes)}
        config = ProgramConfig(
            model=case.model, sizes=sizes, batch=case.batch, seq=case.seq, placement=placement,
            attention="cudnn" if machine.platform == "cuda" else "auto",
        )  # fmt: skip
        program = make_program(config, compile_only_devices(machine, case.devices))
        if case.state != "float32":
            shapes = program.abstract_state  # what `Program` makes of float32 shapes, cast
            vars(program)["abstract_state"] = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, case.state if x.ndim else x.dtype), shapes
            )
        options, _ = step_options(program, machine, deviceless=True)
        if same == "same":
            options = compiler_options(machine.platform, deviceless=True, offloads=True)
        if dump := os.environ.get(DUMP):  # the rest is done from the schedule, by `on_tpu`
            program.jit_step().lower(program.abstract_state, program.abstract_batch).compile(
                compiler_options=options | {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
            )
            return
        hlo = Path(folder) / "step.hlo"
        if same == "same":
            step, args = program.jit_step(), (program.abstract_state, program.abstract_batch)
            compiled, _ = compile_hidden(step, args, options, judged=machine.platform == "cuda", save_hlo=hlo)
        else:
            compiled = compile_program(program, machine, deviceless=True, save_hlo=hlo).compiled
        if folder := os.environ.get("KEEP_HLO"):
            Path(folder, f"{case.name}-{placement}-{same}.hlo").write_text(hlo.read_text())
        row = simulated(hlo, machine, program.flops_per_step / case.devices)
    print(json.dumps({
        "case": case.name, "placement": placement, "same_options": same, **row,
        "device_bytes": compiled.device.total, "host_bytes": compiled.host.total, "remat_clones": compiled.remat.count,
        "versions": dict(compiled.versions),
    }))  # fmt: skip


def on_tpu(case: Case, placement: str, same: str) -> dict[str, Any]:
    """The row of one side on a TPU, from the schedule that another process wrote."""
    from forebay.models.registry import get_model
    from forebay.xla.buffers import read_assignment
    from forebay.xla.compile import _bytes
    from forebay.xla.hlo import HOST_MEMORY_SPACE, parse_module
    from forebay.xla.remat import remat_clones
    from forebay.xla.versions import versions

    machine = machine_of(case)
    model = get_model(case.model, {k: int(v) for k, _, v in (s.partition("=") for s in case.sizes)})
    model_flops = model.flops_per_token(case.seq) * case.batch * case.seq / case.devices
    with scheduled([sys.executable, __file__, "--side", case.name, placement, same]) as made:
        hlo = made.dump / "scheduled.hlo"
        hlo.write_text(made.hlo)
        if folder := os.environ.get("KEEP_HLO"):
            Path(folder, f"{case.name}-{placement}-{same}.hlo").write_text(made.hlo)
        module = parse_module(made.hlo)
        assignment = read_assignment(made.dump, module)
        row = simulated(hlo, machine, model_flops)
    return {
        "case": case.name, "placement": placement, "same_options": same, **row,
        "device_bytes": _bytes(assignment, module, 0).total,
        "host_bytes": _bytes(assignment, module, HOST_MEMORY_SPACE).total,
        "remat_clones": remat_clones(module).count, "versions": versions(),
    }  # fmt: skip


def machine_of(case: Case) -> Any:
    """The case's machine, B300 included."""
    from forebay.hardware import get_hardware

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(B300)
        file.flush()
        os.environ["FOREBAY_HARDWARE"] = file.name
        return get_hardware(case.hardware)


def simulated(hlo: Path, machine: Any, model_flops: float) -> dict[str, Any]:
    """What a row says of a step's timeline."""
    from forebay.timeline import timeline

    start = time.process_time()
    made = timeline(hlo, machine, model_flops=model_flops)
    return {
        "model_flops": model_flops, "timeline_cpu_s": time.process_time() - start, "step_time_s": made.step_time_s,
        "tflops_per_device": made.tflops_per_device, "mfu": made.mfu, "compute_s": dict(made.compute_s),
        "waiting_s": dict(made.waiting_s), "collective_s": dict(made.collective_s), "kinds": dict(made.kinds),
        "hardware_flops": made.hardware_flops, "unknown_share": made.unknown_share,
        "assumptions": list(made.assumptions),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, help="one case; the other rows stay as they are")
    parser.add_argument("--side", nargs=3, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--again", default=None, metavar="DIR", help="do not compile, simulate the HLO kept in DIR")
    arguments = parser.parse_args()
    cases = {c.name: c for c in CASES}
    if arguments.side:
        name, placement, same = arguments.side
        one(cases[name], placement, same)
        return
    stored = HERE / "results.json"
    rows: list[dict[str, Any]] = json.loads(stored.read_text()) if stored.is_file() else []
    if arguments.again:
        for row in rows:
            hlo = Path(arguments.again, f"{row['case']}-{row['placement']}-{row['same_options']}.hlo")
            row |= simulated(hlo, machine_of(cases[row["case"]]), row["model_flops"])
        stored.write_text(json.dumps(rows, indent=1) + "\n")
    for case in () if arguments.again else CASES:
        if arguments.only not in (None, case.name):
            continue
        rows = [r for r in rows if r["case"] != case.name]
        for same in ("same", "own"):
            for placement in (case.before, case.after):
                if case.hardware[0] == "v":
                    rows.append(on_tpu(case, placement, same))
                    print(case.name, placement, same, f"{rows[-1]['step_time_s']:.3f} s", flush=True)
                    stored.write_text(json.dumps(rows, indent=1) + "\n")
                    continue
                command = [sys.executable, __file__, "--side", case.name, placement, same]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr[-3000:])
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(case.name, placement, same, f"{rows[-1]['step_time_s']:.3f} s", flush=True)
                stored.write_text(json.dumps(rows, indent=1) + "\n")
    write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    speed, deepseek = (
        json.loads(f.read_text()) if f.is_file() else [] for f in (HERE / "speed.json", HERE / "deepseek.json")
    )
    (HERE / "results.md").write_text(table(CASES, rows, speed, deepseek))


if __name__ == "__main__":
    main()
