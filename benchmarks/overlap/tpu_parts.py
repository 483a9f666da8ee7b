"""What was tried for the copies of a TPU step, one thing at a time: compiler options and the shape of the program.

    .venv/bin/python benchmarks/overlap/tpu_parts.py

Six layers on TPU v5p with a vocabulary of 1024 words, compiled up to the schedule without devices: of Llama 2 13B with
query, key and value offloaded, which the link could just hide, and of Llama 3.1 8B with seven tensors, which it cannot, on
8 chips; some of it of Llama 2 70B on 64, whose copies need a third of a layer, of Llama 3.1 405B on 128,
and on one chip; of two also all layers.
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
    "405B, seven tensors": {
        "devices": 128, "batch": 128, "seq": 8192, "placement": "minimal_offloaded,decoder_layer_input=host",
        "sizes": SMALL | {"embed": 16384, "heads": 128, "kv_heads": 8, "mlp": 53248},
    },
    "8B, all layers, seven tensors": {
        "devices": 8, "batch": 8, "seq": 8192, "placement": "minimal_offloaded,decoder_layer_input=host",
    },
    "70B, all layers, eight tensors": {
        "sizes": {"layers": 80, "embed": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672},
        "devices": 32, "batch": 32, "seq": 8192, "placement": "minimal_offloaded,decoder_layer_input=host,context=host",
    },
    "8B, seven tensors, one chip": {
        "devices": 1, "sizes": SMALL, "batch": 1, "seq": 8192, "placement": "minimal_offloaded,decoder_layer_input=host",
    },
}  # fmt: skip
WHOLE = (
    "everything that forebay does",
    "gathers as libtpu makes them",
    "the same, stores in any order",
    "gathers in pieces",
)
SOME = {
    "70B, query, key and value": (
        "everything that forebay does", "without early starts", "without row-major stores", "gathers as libtpu makes them",
        "gathers in pieces", "aggressive scheduling alone",
    ),
    "405B, seven tensors": (
        "everything that forebay does", "gathers in pieces", "gathers as libtpu makes them", "without row-major stores",
        "gathers in pieces, stores in any order", "no options, stock scan",
    ),
    "8B, all layers, seven tensors": WHOLE, "70B, all layers, eight tensors": WHOLE,
    "8B, seven tensors, one chip": (
        "aggressive scheduling alone", "aggressive, stores carried to the next layer by hand",
    ),
}  # fmt: skip
"""What is tried of a program where not all is."""
AGGRESSIVE = {"xla_tpu_use_aggressive_scheduling": "ENABLED"}
EXPERIMENTAL = {"xla_tpu_enable_all_experimental_scheduler_features": True}
MAXTEXT = EXPERIMENTAL | {  # HOST_OFFLOAD_FLAGS of AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py
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
SURE, PIECES = ({GATHERS: mode, SCATTERS: mode} for mode in ("post_spmd_conservative", "post_spmd"))
# what the row is called: shape of the program ("" is forebay's own), compiler options
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "everything that forebay does": ("", AGGRESSIVE | EARLY | SURE),
    "without early starts": ("", AGGRESSIVE | SURE),
    "without row-major stores": ("any order", AGGRESSIVE | EARLY | SURE),
    "gathers as libtpu makes them": ("", AGGRESSIVE | EARLY),
    "the same, stores in any order": ("any order", AGGRESSIVE | EARLY),
    "gathers in pieces": ("", AGGRESSIVE | EARLY | PIECES),
    "gathers in pieces, stores in any order": ("any order", AGGRESSIVE | EARLY | PIECES),
    "aggressive scheduling alone": ("any order", AGGRESSIVE),
    "no options, stores in any order": ("any order", {}),
    "no options, stock scan": ("stock", {}),
    "aggressive, stock scan": ("stock", AGGRESSIVE),
    "aggressive, layers indexed from an array": ("lax.scan", AGGRESSIVE),
    "aggressive, stores carried to the next layer by hand": ("late", AGGRESSIVE),
    "MaxText's flags for offloading": ("any order", MAXTEXT),
    "all experimental scheduler features": ("any order", EXPERIMENTAL),
    "async depth over stalls": ("any order", {"xla_lhs_prioritize_async_depth_over_stall": "ENABLED"}),
    "100 concurrent host copies (5)": ("any order", {"xla_max_concurrent_host_copy": 100}),
    "aggressive, PCIe bandwidth x 0.1": ("any order", AGGRESSIVE | {"xla_tpu_pcie_bandwidth_multiplier": 0.1}),
    "aggressive, pipelined loops unrolled": (
        "any order", AGGRESSIVE | {"xla_tpu_enable_pipelined_loop_unrolling": True},
    ),
    "aggressive, host copies not pipelined": (
        "any order", AGGRESSIVE | {"xla_tpu_pipeline_memory_host_transfers": False},
    ),
}  # fmt: skip


def one(program_name: str, name: str) -> None:
    """Compiles one case in this process, with the dump that is asked for."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from forebay.hardware import get_hardware
    from forebay.train import program as programs
    from forebay.train.config import ProgramConfig
    from forebay.xla.topology import compile_only_devices

    shape, options = CASES[name]
    if shape:
        {"stock": stock, "lax.scan": by_scan, "late": late, "any order": any_order}[shape]()
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


def by_scan() -> None:
    """The loops of forebay's scan by `jax.lax.scan` over indices."""
    import jax
    import jax.numpy as jnp

    from forebay.offload import scan

    any_order()

    def loop(self: Any, body: Any, carry: Any, layers: Any) -> Any:
        counter = jnp.arange(self.count, dtype=jnp.int32)
        return jax.lax.scan(lambda carry, k: (body(k, carry), None), carry, counter)[0]

    scan._Range._loop = loop  # type: ignore[method-assign]


def late() -> None:
    """The forward loop stores what the layer before it made, which it carries on the device; one range of layers."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from forebay.offload import scan
    from forebay.offload.stream import on_host

    any_order()
    Range = scan._Range
    init, avals, read, host = Range.__init__, Range.stored_avals, scan._read, jax.memory.Space.Host

    def kept_on_device(self: Any, block: Any, placement: Any, owner: str) -> None:
        init(self, block, placement, owner)
        self.to_host = set(placement.names("host"))
        tensors = {n: "device" if w == "host" else w for n, w in placement.tensors.items()}
        self.checkpointed = scan.apply(block, dataclasses.replace(placement, tensors=tensors))

    def names(self: Any, layers: Any, x: Any, constants: Any, wanted: Any) -> list[str]:
        layer, found = scan._one_layer_of(layers), []
        origins = scan.residuals(self.checkpointed, layer, x, *constants, wanted=wanted.flat)
        inputs = scan.input_names(self.block, layer, x, *constants)

        def trace(*args: Any) -> Any:
            _, stored, _, sources = self._one_layer(*args, wanted)
            pairs = zip(origins, sources, strict=True)
            found.append([scan._name(o, inputs) for o, s in pairs if s.kind == "stored"])
            return stored

        jax.make_jaxpr(trace)(layer, x, constants)
        return found[-1]

    def stored_avals(self: Any, layers: Any, x: Any, constants: Any, wanted: Any) -> Any:
        pairs = zip(avals(self, layers, x, constants, wanted), names(self, layers, x, constants, wanted), strict=True)
        return [a.update(memory_space=host) if n in self.to_host else a for a, n in pairs]

    def forward(self: Any, layers: Any, x: Any, constants: Any, wanted: Any, buffers: Any) -> Any:
        called, carry, vjps = names(self, layers, x, constants, wanted), jax.tree.map(scan._Aval.of, x), []

        def write(buffers: Any, values: Any, k: Any, hosted: bool) -> Any:
            written = []
            for buffer, value, name in zip(buffers, values, called, strict=True):
                with jax.named_scope(f"save:{self.stack}:{name}"):
                    written.append(scan._write(buffer, value, k) if on_host(buffer) == hosted else buffer)
            return written

        def body(k: Any, state: Any) -> Any:
            x, buffers, before = state
            layer = scan._take(layers, self.first + k, self.stack)
            y, stored, tree, sources = self._one_layer(layer, x, constants, wanted)
            vjps.append(scan._LayerVjp(tree, sources, tuple(called), wanted, carry))
            buffers = write(buffers, before, jnp.maximum(k - 1, 0), hosted=True)
            buffers = write(buffers, stored, k, hosted=False)
            return y, buffers, [s if on_host(b) else o for s, b, o in zip(stored, buffers, before, strict=True)]

        nothing = [jnp.zeros(b.shape[1:] if on_host(b) else (), b.dtype) for b in buffers]
        x, buffers, last = self._loop(body, (x, buffers, nothing), layers)
        return x, write(buffers, last, jnp.int32(self.count - 1), hosted=True), vjps[-1]

    def fetched(stack: Any, i: Any) -> Any:
        value = read(stack, i)
        return jax.device_put(value, jax.memory.Space.Device) if on_host(stack) else value

    Range.__init__, Range.stored_avals, Range.forward = kept_on_device, stored_avals, forward
    scan._read = fetched


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
        f"Compiled only, up to the schedule; {named}. Six layers (or all) on {MACHINE}, FSDP, 16384 tokens on each chip (Llama 3.1: 8192),",
        "of six the vocabulary is cut to 1024. Command: `.venv/bin/python benchmarks/overlap/tpu_parts.py`. D2H and H2D: windows of the",
        "copies in loops, the mean by bytes and in brackets the smallest. Step and waits are those of `forebay timeline`.", "",
    ]  # fmt: skip
    (HERE / "tpu_parts.md").write_text("\n".join(head + lines))


if __name__ == "__main__":
    main()
