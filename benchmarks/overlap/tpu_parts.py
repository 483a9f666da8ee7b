"""What was tried for the copies of a TPU step, one thing at a time: compiler options and the shape of the program.

    .venv/bin/python benchmarks/overlap/tpu_parts.py

Six layers on TPU v5p with a vocabulary of 1024 words, compiled up to the schedule without devices: of Llama 2 13B with
query, key and value offloaded, which the link could just hide, and of Llama 3.1 8B with seven tensors, which it cannot, on
8 chips; some of it of Llama 2 70B on 64, whose copies need a third of a layer, of Llama 3.1 70B on 32 and 405B on 128,
and on one chip.
The step and its waits are `forebay timeline`'s. Results go to `tpu_parts.md` beside this file.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from scheduled import DUMP, scheduled  # noqa: E402

MACHINE = "v5p"
SMALL = {"layers": 6, "vocab": 1024}
PROGRAMS: dict[str, dict[str, Any]] = {
    "13B, query, key and value": {
        "sizes": SMALL | {"embed": 5120, "heads": 40, "kv_heads": 40, "mlp": 13824},
        "devices": 8, "batch": 32, "seq": 4096, "placement": "qkv_proj_offloaded",
    },
    "8B, seven tensors": {
        "devices": 8, "sizes": SMALL, "batch": 8, "seq": 8192,
        "placement": "minimal_offloaded,decoder_layer_input=host",
    },
    "70B, query, key and value": {
        "sizes": SMALL | {"embed": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672},
        "devices": 64, "batch": 256, "seq": 4096, "placement": "qkv_proj_offloaded",
    },
    "70B, seven tensors": {
        "sizes": SMALL | {"embed": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672},
        "devices": 32, "batch": 32, "seq": 8192, "placement": "minimal_offloaded,decoder_layer_input=host",
    },
    "405B, seven tensors": {
        "devices": 128, "batch": 128, "seq": 8192, "placement": "minimal_offloaded,decoder_layer_input=host",
        "sizes": SMALL | {"embed": 16384, "heads": 128, "kv_heads": 8, "mlp": 53248},
    },
    "8B, seven tensors, one chip": {
        "devices": 1, "sizes": SMALL, "batch": 1, "seq": 8192, "placement": "minimal_offloaded,decoder_layer_input=host",
    },
}  # fmt: skip
SOME = {
    "70B, query, key and value": (
        "everything that forebay does", "copies pipelined by libtpu too", "gathers in pieces", "stock scan, no options",
    ),
    "70B, seven tensors": (
        "everything that forebay does", "without row-major stores", "gathers in pieces", "stock scan, no options",
    ),
    "405B, seven tensors": (
        "everything that forebay does", "without row-major stores", "gathers in pieces", "stock scan, no options",
    ),
    "8B, seven tensors, one chip": (
        "everything that forebay does", "copies pipelined by libtpu too", "stock scan, aggressive scheduling",
    ),
}  # fmt: skip
"""What is tried of a program where not all is."""
AGGRESSIVE = {"xla_tpu_use_aggressive_scheduling": "ENABLED"}
MAXTEXT = {  # HOST_OFFLOAD_FLAGS of AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py
    "xla_tpu_enable_all_experimental_scheduler_features": True,
    "xla_tpu_enable_scheduler_memory_pressure_tracking": True,
    "xla_tpu_host_transfer_overlap_limit": 24,
    "xla_tpu_aggressive_opt_barrier_removal": "ENABLED",
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_enable_ag_backward_pipelining": True,
    "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
    "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    "xla_max_concurrent_host_send_recv": 100,
    "xla_tpu_scheduler_percent_shared_memory_limit": 100,
    "xla_latency_hiding_scheduler_rerun": 2,
}
EARLY = {"xla_lhs_enable_release_start_policy": True}
GATHERS, SCATTERS = "xla_tpu_all_gather_collective_matmul_mode", "xla_tpu_reduce_scatter_collective_matmul_mode"
ONCE = {"xla_tpu_pipeline_memory_host_transfers": False}
SURE, PIECES = ({GATHERS: mode, SCATTERS: mode} for mode in ("post_spmd_conservative", "post_spmd"))
# what the row is called: shape of the program ("" is forebay's own), compiler options
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "everything that forebay does": ("", AGGRESSIVE | EARLY | SURE | ONCE),
    "without early starts": ("", AGGRESSIVE | SURE | ONCE),
    "without row-major stores": ("any order", AGGRESSIVE | EARLY | SURE | ONCE),
    "copies pipelined by libtpu too": ("", AGGRESSIVE | EARLY | SURE),
    "gathers as libtpu makes them": ("", AGGRESSIVE | EARLY | ONCE),
    "gathers in pieces": ("", AGGRESSIVE | EARLY | PIECES | ONCE),
    "stock scan, no options": ("stock", {}),
    "stock scan, aggressive scheduling": ("stock", AGGRESSIVE),
    "stock scan, forebay's options, copies pipelined by libtpu": ("stock", AGGRESSIVE | EARLY | SURE),
    "stock scan, MaxText's flags for offloading": ("stock", MAXTEXT),
}


def one(program_name: str, name: str) -> None:
    """Compiles one case in this process, with the dump that is asked for."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from forebay.hardware import get_hardware
    from forebay.train import program as programs
    from forebay.train.config import ProgramConfig
    from forebay.xla.topology import compile_only_devices

    shape, options = CASES[name]
    if shape:
        {"stock": stock, "any order": any_order}[shape]()
    machine = get_hardware(MACHINE)
    wanted = dict(PROGRAMS[program_name])
    devices = compile_only_devices(machine, wanted.pop("devices"))
    program = programs.make_program(ProgramConfig(model="llama3.1-8b", **wanted), devices)
    dump = {"xla_dump_to": os.environ[DUMP], "xla_dump_hlo_as_text": True}
    lowered = program.jit_step().lower(program.abstract_state, program.abstract_batch)
    lowered.compile(compiler_options=options | dump)


def any_order() -> None:
    """What is stored has the order of dimensions that the compiler chooses."""
    from forebay.offload import scan

    scan._in_row_major = lambda value: value


def stock() -> None:
    """`jax.lax.scan` over `jax.checkpoint` in place of forebay's scan."""
    import jax

    from forebay.offload.policy import apply
    from forebay.train import program as programs

    def scan(block: Any, plan: Any, x: Any, layers: Any, *constants: Any, stack: str) -> Any:
        checkpointed = apply(block, plan.for_stack(stack)[0])
        return jax.lax.scan(lambda x, layer: (checkpointed(layer, x, *constants), None), x, layers)[0]

    programs.scan_layers = scan  # type: ignore[assignment]


def row(program_name: str, name: str) -> dict[str, Any]:
    from forebay.hardware import get_hardware
    from forebay.timeline import timeline
    from forebay.xla.buffers import read_assignment
    from forebay.xla.hlo import parse_module
    from forebay.xla.versions import versions
    from forebay.xla.windows import transfers

    with scheduled([sys.executable, __file__, "--case", program_name, name]) as made:
        module = parse_module(made.hlo)
        allocations = read_assignment(made.dump, module).allocations
        with tempfile.NamedTemporaryFile("w", suffix=".hlo") as file:
            file.write(made.hlo)
            file.flush()
            simulated = timeline(file.name, get_hardware(MACHINE))
    found: dict[str, Any] = {"versions": versions()}
    for direction in ("d2h", "h2d"):
        copies = [t for t in transfers(module) if (t.direction, t.where) == (direction, "loop")]
        moved = sum(t.num_bytes * t.count for t in copies)
        found[direction] = 1 - sum(t.exposed_bytes for t in copies) / moved
        found[f"{direction}_smallest"] = min(t.window for t in copies)
        found[f"{direction}_wait_s"] = simulated.waiting_s.get(direction, 0.0)
    temporaries = sum(a.num_bytes for a in allocations if (a.kind, a.memory_space) == ("temporary", 0))
    return found | {"step_s": simulated.step_time_s, "temporaries": temporaries}


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "--case":
        one(*sys.argv[2:])
        return
    lines, installed = [], {}
    for program_name, program in PROGRAMS.items():
        lines += [
            f"## {program_name} (`{program['placement']}`, on {program['devices']})", "",
            "| | D2H | H2D | temporaries, GiB | step, ms | waits D2H, ms | waits H2D, ms |", "|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for name in SOME.get(program_name, CASES):
            r = row(program_name, name)
            installed = r["versions"]
            windows = [f"{r[d]:.2f} ({r[f'{d}_smallest']:.2f})" for d in ("d2h", "h2d")]
            times = [f"{1e3 * r[k]:.0f}" for k in ("step_s", "d2h_wait_s", "h2d_wait_s")]
            lines.append(f"| {name} | {' | '.join(windows)} | {r['temporaries'] / 2**30:.2f} | {' | '.join(times)} |")
            print(lines[-1], flush=True)
        lines.append("")
        write(lines, installed)


def write(lines: list[str], installed: dict[str, str]) -> None:
    named = ", ".join(f"{k} {v}" for k, v in installed.items() if k in ("jax", "jaxlib", "libtpu"))
    head = [
        "# What was tried for the copies of a TPU step", "",
        f"Compiled only, up to the schedule; {named}. Six layers on {MACHINE}, FSDP, 16384 tokens on each chip (Llama 3.1: 8192),",
        "the vocabulary is cut to 1024. Command: `.venv/bin/python benchmarks/overlap/tpu_parts.py`. D2H and H2D: windows of the",
        "copies in loops, the mean by bytes and in brackets the smallest. Step and waits are those of `forebay timeline`.", "",
    ]  # fmt: skip
    (HERE / "tpu_parts.md").write_text("\n".join(head + lines))


if __name__ == "__main__":
    main()
