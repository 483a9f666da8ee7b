"""Windows of the copies between device and host: forebay's layer scan against the stock scan, compiled only.

    .venv/bin/python benchmarks/overlap/run.py [--platform cuda|tpu] [--hardware gb200] [--model llama3.1-8b] [--again]

Nothing runs on a device. Each case is a whole training step of Llama 3.1 (8192 tokens and one sequence per
device, FSDP) compiled for machines that are not there, in a process of its own, in three ways:

- stock: `jax.lax.scan` over `jax.checkpoint` with the same offload policy, and the options that any
  step gets (latency hiding scheduler), as a user without forebay would write it;
- stock + options (TPUs; for GPUs see `parts.py`): the same program with the options that forebay chooses;
- forebay: `forebay.scan_layers`, with these options.

A window is the share of one layer's matrix and attention FLOPs between a copy's start and its done; the
figures are means over the copies in loops, weighted by bytes, and the smallest. TPU steps are compiled up to the
schedule, see `benchmarks/scheduled.py`; their schedules are also run by `forebay.timeline`, for what of the step
waits for copies and what the link alone would make it wait.

Results go to `results.md` and `results.json` beside this file as they come, each program of a case at once: a run
that was stopped goes on where it was, and runs for different machines may go on at the same time. Rows that are
there are left as they are, unless `--again`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from scheduled import DUMP, scheduled  # noqa: E402

CASES = (
    ("llama3.1-8b", "gb200", 1),
    ("llama3.1-8b", "gb200", 8),
    ("llama3.1-8b", "h200", 8),
    ("llama3.1-70b", "h200", 32),
    ("llama3.1-405b", "gb200", 128),
    # the state of 8B alone, 90 GiB, leaves no room on one chip
    ("llama3.1-8b", "v5p", 8),
    ("llama3.1-8b", "v6e", 8),
    ("llama3.1-70b", "v5p", 32),
    ("llama3.1-405b", "v5p", 128),
)
PLACEMENTS = {
    "layer inputs": "decoder_layer_input=host",
    "typical": "minimal_offloaded,decoder_layer_input=host",
    "everything": "minimal_offloaded,decoder_layer_input=host,context=host",
}
WAYS = ("stock", "stock + options", "forebay")
TPUS = ("v5e", "v5p", "v6e", "tpu7x")
STORED = HERE / "results.json"
GIB = 2**30


def build(model: str, hardware: str, devices: int, placement: str, way: str) -> tuple[Any, Any, dict[str, Any]]:
    """The machine, the program and the compiler options of one way of a case."""
    import jax

    from forebay.hardware import get_hardware
    from forebay.offload.policy import apply
    from forebay.train import program as programs
    from forebay.train.config import ProgramConfig
    from forebay.xla.estimate import argument_bytes, offloaded_bytes
    from forebay.xla.options import TPU_PIPELINING, compiler_options, memory_limit_percent
    from forebay.xla.topology import compile_only_devices

    def stock_scan(block: Any, plan: Any, x: Any, layers: Any, *constants: Any, stack: str) -> Any:
        checkpointed = apply(block, plan.for_stack(stack)[0])
        return jax.lax.scan(lambda x, layer: (checkpointed(layer, x, *constants), None), x, layers)[0]

    if way in ("stock", "stock + options"):
        programs.scan_layers = stock_scan  # type: ignore[assignment]
    machine = get_hardware(hardware)
    config = ProgramConfig(model=model, batch=devices, seq=8192, placement=placement)
    program = programs.make_program(config, compile_only_devices(machine, devices))
    limit = None
    if machine.platform == "cuda" and way != "stock":
        step, args = program.jit_step(), (program.abstract_state, program.abstract_batch)
        arguments = argument_bytes(args, (program.state_shardings, program.batch_shardings))
        host = offloaded_bytes(step.trace(*args).jaxpr, devices)
        limit = memory_limit_percent(machine.hbm_bytes, machine.usable_hbm_bytes(), arguments, host)
    if machine.platform == "tpu" and way == "stock":
        return machine, program, {}
    options = compiler_options(machine.platform, deviceless=True, offloads=way != "stock", memory_limit_percent=limit)
    if way == "stock + options":  # the stock scan has the compiler to move its copies a layer ahead
        options.pop(TPU_PIPELINING, None)
    return machine, program, options


def one(*case: Any) -> None:
    """Compiles one case in this process and prints its row as JSON; where a dump is asked for, does only that."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from forebay.xla.compile import compile_hidden

    machine, program, options = build(*case)
    step, args = program.jit_step(), (program.abstract_state, program.abstract_batch)
    if dump := os.environ.get(DUMP):
        step.lower(*args).compile(compiler_options=options | {"xla_dump_to": dump, "xla_dump_hlo_as_text": True})
        return
    # the first compile of a process also loads the compiler
    jax.jit(lambda x: x + 1, in_shardings=program.sharding.named(()), out_shardings=program.sharding.named(())).lower(
        jax.ShapeDtypeStruct((8,), "float32")
    ).compile()
    before = cpu_s()
    ours = machine.platform == "cuda" and case[-1] == "forebay"
    compiled, chosen = compile_hidden(step, args, options, judged=ours)
    print(json.dumps(_named(case) | _windows(compiled.transfers) | {
        "temporaries": compiled.device.temporaries, "arguments": compiled.device.arguments,
        "host": compiled.host.temporaries, "host_to_host": compiled.host_copy_bytes,
        "violations": list(compiled.violations), "refused": compiled.refused,
        "remat_clones": compiled.remat.count, "remat_flops": compiled.remat.flops,
        "double_buffered": "xla_gpu_enable_while_loop_unrolling" in chosen,
        "memory_limit_percent": chosen.get("xla_gpu_memory_limit_slop_factor"),
        "cpu_s": cpu_s() - before, "compile_time_s": compiled.compile_time_s, "versions": dict(compiled.versions),
    }))  # fmt: skip


def cpu_s() -> float:
    """Seconds of CPU of this process and of those that it ran: XLA for GPUs runs an assembler for each kernel."""
    return sum(
        r.ru_utime + r.ru_stime for r in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _named(case: Any) -> dict[str, Any]:
    return dict(zip(("model", "hardware", "devices", "placement", "way"), case, strict=True))


def _windows(transfers: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for direction in ("d2h", "h2d"):
        for where in ("loop", "boundary"):
            copies = [t for t in transfers if (t.direction, t.where) == (direction, where)]
            moved = sum(t.num_bytes * t.count for t in copies)
            row[f"{direction}_{where}_bytes"] = moved
            if moved:
                exposed = sum(t.exposed_bytes for t in copies)
                row[f"{direction}_{where}_window"] = 1 - exposed / moved
                row[f"{direction}_{where}_smallest"] = min(t.window for t in copies)
    return row


def on_tpu(*case: Any) -> dict[str, Any]:
    """The row of a case on TPU, from the schedule that another process wrote; the reason where there is none."""
    from forebay.hardware import get_hardware
    from forebay.timeline import timeline
    from forebay.timeline.costs import Efficiency
    from forebay.xla.buffers import read_assignment
    from forebay.xla.copies import buffer_scopes, host_copy_bytes
    from forebay.xla.exposure import exposed_bytes
    from forebay.xla.hlo import HOST_MEMORY_SPACE, parse_module
    from forebay.xla.invariants import all_violations, host_buffers
    from forebay.xla.remat import remat_clones
    from forebay.xla.versions import versions
    from forebay.xla.windows import transfers

    machine = get_hardware(case[1])
    try:
        with scheduled([sys.executable, __file__, "--case", *map(str, case)]) as made:
            module = parse_module(made.hlo)
            assignment = read_assignment(made.dump, module)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = next((line for line in lines if "RESOURCE_EXHAUSTED" in line), lines[-1])
        return _named(case) | {"refused": said[:200], "versions": versions()}
    allocations, copies = assignment.allocations, transfers(module)
    moved = _windows(copies)
    with tempfile.NamedTemporaryFile("w", suffix=".hlo") as file:
        file.write(made.hlo)
        file.flush()
        simulated = timeline(file.name, machine)

    def size(kind: str, space: int = 0) -> int:
        return sum(a.num_bytes for a in allocations if (a.kind, a.memory_space) == (kind, space))

    def link_s(direction: str) -> float:
        link = machine.host_link
        measured = [getattr(link, f"{direction}_{w}_bytes_per_s") for w in ("all_active", "measured")]
        rate = next((m for m in measured if m), None) or (
            getattr(link, f"{direction}_nominal_bytes_per_s") * Efficiency().host_link
        )
        return sum(moved[f"{direction}_{where}_bytes"] for where in ("loop", "boundary")) / rate

    work = simulated.compute_s
    back = work["backward"] + work["recompute"]
    return _named(case) | moved | {
        "temporaries": size("temporary"), "arguments": size("parameter"), "host": size("temporary", HOST_MEMORY_SPACE),
        "host_to_host": host_copy_bytes(module), "refused": None, "exposed_bytes": exposed_bytes(copies),
        "violations": list(all_violations(module, copies, host_buffers(assignment, buffer_scopes(module)))),
        "remat_clones": remat_clones(module).count, "step_time_s": simulated.step_time_s,
        "waits_for_copies_s": sum(simulated.waiting_s.get(d, 0.0) for d in ("d2h", "h2d")),
        "link_bound_s": max(0.0, link_s("d2h") - work["forward"]) + max(0.0, link_s("h2d") - back),
        "cpu_s": made.cpu_s, "versions": versions(),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    from forebay.hardware import get_hardware

    def window(row: dict[str, Any], direction: str) -> str:
        key = f"{direction}_loop_window"
        return f"{row[key]:.2f} ({row[f'{direction}_loop_smallest']:.2f})" if key in row else ""

    def of_stock(row: dict[str, Any]) -> str:
        stock = next((r for r in rows if _group(r) == _group(row) and r["way"] == "stock"), None)
        key = "cpu_s" if "cpu_s" in row else "compile_time_s"
        if stock is None or key not in stock or row.get("run") != stock.get("run"):
            return ""
        return f"{row[key] / stock[key]:.2f}"

    def host(row: dict[str, Any]) -> str:
        there = get_hardware(row["hardware"]).host.memory_bytes_per_device
        return f"{row['host'] / GIB:.1f}" + (f", of {there / GIB:.0f}" if row["host"] > there else "")

    lines = [
        "| model | machine | offloaded | program | D2H | H2D | exposed at the boundary, GiB | temporaries | host | "
        "host to host | clones | step, s | waits for copies, s | of these the link's, s | compile time, of stock's |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    names = {text: name for name, text in PLACEMENTS.items()}
    for r in rows:
        unrolled = r.get("double_buffered", True) or r["way"] != "forebay"
        start = (
            f"| {r['model']} | {r['devices']} x {r['hardware']} | {names[r['placement']]} | "
            f"{r['way']}{'' if unrolled else ' (not unrolled)'} | "
        )
        if "temporaries" not in r:
            lines.append(f"{start}not compiled: {r['refused']} |{' |' * 10}")
            continue
        boundary = sum(r[f"{d}_boundary_bytes"] * (1 - r.get(f"{d}_boundary_window", 0)) for d in ("d2h", "h2d"))
        seconds = [f"{r[k]:.2f}" if k in r else "" for k in ("step_time_s", "waits_for_copies_s", "link_bound_s")]
        lines.append(
            f"{start}{window(r, 'd2h')} | "
            f"{window(r, 'h2d')} | {boundary / GIB:.2f} | {r['temporaries'] / GIB:.2f} | {host(r)} | "
            f"{r['host_to_host'] / GIB:.1f} | {r['remat_clones']} | {' | '.join(seconds)} | {of_stock(r)} |"
        )
    return lines


def _group(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["hardware"], row["devices"], row["placement"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("cuda", "tpu"), help="only machines of one platform")
    parser.add_argument("--hardware", help="only one machine")
    parser.add_argument("--model", help="only one model")
    parser.add_argument("--again", action="store_true", help="compile what there are rows of already, too")
    parser.add_argument("--case", nargs=5, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        model, hardware, devices, placement, way = arguments.case
        one(model, hardware, int(devices), placement, way)
        return
    for placement in PLACEMENTS.values():
        for model, hardware, devices in CASES:
            platform = "tpu" if hardware in TPUS else "cuda"
            wanted = (arguments.platform, platform), (arguments.hardware, hardware), (arguments.model, model)
            ways = ["stock", "stock + options", "forebay"] if platform == "tpu" else ["stock", "forebay"]
            group = model, hardware, devices, placement
            there = {r["way"] for r in stored() if _group(r) == group and not arguments.again}
            if any(w not in (None, has) for w, has in wanted):
                continue
            # one after another, so that their compile times can be compared
            run, rows = round(time.time()), []
            for way in ways:
                if way not in there:
                    rows.append(row(*group, way) | {"run": run})
            if rows:
                merge(rows)
                print("\n".join(table([r for r in stored() if _group(r) == group])[2:]), flush=True)
    if stored():
        merge([])


def row(*case: Any) -> dict[str, Any]:
    if case[1] in TPUS:
        return on_tpu(*case)
    command = [sys.executable, __file__, "--case", *map(str, case)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def stored() -> list[dict[str, Any]]:
    return json.loads(STORED.read_text()) if STORED.is_file() else []


def merge(new: list[dict[str, Any]]) -> None:
    """Writes the rows that are stored by now, with `new` in place of those of the same programs."""
    replaced = {(*_group(r), r["way"]) for r in new}
    rows = [r for r in stored() if (*_group(r), r["way"]) not in replaced and r["way"] in WAYS] + new
    cases, placements = [c[:3] for c in CASES], list(PLACEMENTS.values())
    rows.sort(key=lambda r: (cases.index(_group(r)[:3]), placements.index(r["placement"]), WAYS.index(r["way"])))
    versions = sorted({f"{k} {v}" for r in rows for k, v in r["versions"].items() if k != "forebay"})
    text = [
        "# Windows of the copies between device and host", "",
        f"Compiled only. {os.cpu_count()} CPU cores shared with other work, no accelerator; {', '.join(versions)}.",
        "Sequences of 8192 tokens, one per device, FSDP over all devices, cuDNN's attention on GPU and splash attention on",
        "TPU. Command: `.venv/bin/python benchmarks/overlap/run.py`. D2H and H2D are the windows of the copies in loops, the",
        "mean by bytes and in brackets the smallest; sizes are GiB per device. Compile time is in seconds of CPU, as a ratio",
        "to the stock program's in the same run; of GPU rows that lack these it is by the clock, on a machine whose load",
        "varied. A TPU's is up to the schedule: what follows, the code's generation, takes most of a compile there. Step and",
        "waits are `forebay timeline`'s, of TPU rows only, which were simulated with 0.85 of the HBM's bandwidth where the default is",
        "0.77 by now. The link's part of the waits is what it needs to move a step's bytes",
        "beyond the work of the forward pass, one way, and of the backward pass, the other; a schedule does with less only where",
        "copies run while the step waits for something else, collectives for one.",
        "Where a host has less memory for each device than a step takes, the table says what it has: these do not fit. What",
        "the columns mean and why the figures are what they are: [docs/overlap.md](../../docs/overlap.md).", "",
        *table(rows), "",
    ]  # fmt: skip
    STORED.write_text(json.dumps(rows, indent=1) + "\n")
    (HERE / "results.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
