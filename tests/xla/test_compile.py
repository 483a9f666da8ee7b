"""Steps compiled by the real XLA compilers for machines that are not there.

Expected sizes are worked out from the model's shapes, not read off a compile.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from forebay.hardware import get_hardware
from forebay.sharding import make_mesh
from forebay.train.config import OptimizerConfig, ProgramConfig
from forebay.train.planning import compile_program
from forebay.train.program import Program, make_program
from forebay.xla.compile import CompiledStep, compile_step
from forebay.xla.options import compiler_options
from forebay.xla.topology import compile_only_devices

LAYERS, EMBED, HEADS, KV_HEADS, HEAD, MLP, VOCAB = 6, 1024, 8, 8, 128, 2048, 4096  # whole tiles on a TPU: no padding
SIZES = {
    "layers": LAYERS, "embed": EMBED, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD, "mlp": MLP,
    "vocab": VOCAB, "tied_embeddings": False,
}  # fmt: skip
DEVICES, BATCH, SEQ = 8, 8, 1024
LAYER_WEIGHTS = EMBED * HEAD * 2 * (HEADS + KV_HEADS) + 3 * EMBED * MLP
# norms are replicated, everything else is split over the devices; float32
WEIGHT_BYTES = 4 * ((LAYERS * LAYER_WEIGHTS + 2 * VOCAB * EMBED) // DEVICES + LAYERS * 2 * EMBED + EMBED)
TOKENS = BATCH * SEQ // DEVICES  # per device
BYTES = {  # of one layer on one device, bfloat16; the context's softmax statistics are float32
    "decoder_layer_input": 2 * TOKENS * EMBED,
    "query_proj": 2 * TOKENS * HEADS * HEAD,
    "key_proj": 2 * TOKENS * KV_HEADS * HEAD,
    "value_proj": 2 * TOKENS * KV_HEADS * HEAD,
    "context": 2 * TOKENS * HEADS * HEAD + 4 * TOKENS * HEADS,
    "out_proj": 2 * TOKENS * EMBED,
    "mlpwi_0": 2 * TOKENS * MLP,
    "mlpwi_1": 2 * TOKENS * MLP,
}


@functools.cache
def compiled(hardware: str, placement: str, accumulate: int = 1, mesh: str = "") -> tuple[Program, CompiledStep]:
    machine = get_hardware(hardware)
    config = ProgramConfig(
        model="llama-tiny", sizes=SIZES, batch=BATCH * accumulate, seq=SEQ, placement=placement, mesh=mesh,
        accumulate=accumulate, steps=10, optimizer=OptimizerConfig(warmup_steps=1),
    )  # fmt: skip
    program = make_program(config, compile_only_devices(machine, DEVICES))
    options = compiler_options(machine.platform, deviceless=True, offloads=program.plan.offloads)
    step = compile_step(
        program.jit_step(), (program.abstract_state, program.abstract_batch),
        weight_shapes=program.local_weight_shapes(), options=options,
    )  # fmt: skip
    return program, step


def bytes_of(step: CompiledStep, memory: str, name: str) -> int:
    return sum(r.num_bytes for r in step.peak_rows(memory) if r.name == name)


@pytest.mark.parametrize("hardware", ["gb200", "v5p"])
@pytest.mark.parametrize("placement", ["full", "minimal_offloaded,context=device"])
def test_named_parts_add_up_to_the_compilers_total(hardware, placement):
    _, step = compiled(hardware, placement)
    assert sum(r.num_bytes for r in step.peak_rows("device")) == step.device.total
    assert sum(r.num_bytes for r in step.peak_rows("host")) == step.host.total


@pytest.mark.parametrize("hardware", ["gb200", "v5p"])
def test_weights_and_moments_have_their_worked_out_sizes(hardware):
    _, step = compiled(hardware, "full")
    # TPU pads the norms' small arrays; the matrices dominate
    assert bytes_of(step, "device", "weights") == pytest.approx(WEIGHT_BYTES, rel=0.002)
    assert bytes_of(step, "device", "optimizer state (mu)") == pytest.approx(WEIGHT_BYTES, rel=0.002)
    assert bytes_of(step, "device", "optimizer state (nu)") == pytest.approx(WEIGHT_BYTES, rel=0.002)
    assert step.device.aliased == pytest.approx(3 * WEIGHT_BYTES, rel=0.002)  # the state is donated


@pytest.mark.parametrize("hardware", ["gb200", "v5p"])
def test_offloaded_tensors_are_on_the_host_and_nowhere_else(hardware):
    _, step = compiled(hardware, "minimal_offloaded,context=device")
    for name in ("query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1"):
        assert bytes_of(step, "host", f"{name} (layers, offloaded)") == LAYERS * BYTES[name], name
        assert bytes_of(step, "device", f"{name} (layers, saved)") == 0
    assert step.host.total == pytest.approx(
        sum(LAYERS * BYTES[n] for n in BYTES if n not in ("context", "decoder_layer_input")), rel=1e-6
    )


def test_saved_tensors_are_on_the_device_with_their_worked_out_sizes():
    _, step = compiled("gb200", "minimal_offloaded,context=device")
    assert bytes_of(step, "device", "context (layers, saved)") == LAYERS * BYTES["context"]
    assert bytes_of(step, "device", "decoder_layer_input (layers, saved)") == LAYERS * BYTES["decoder_layer_input"]


@pytest.mark.parametrize("hardware", ["gb200", "v5p"])
def test_every_offloaded_tensor_goes_out_and_comes_back_once_a_layer(hardware):
    _, step = compiled(hardware, "minimal_offloaded,context=device")
    moved = Counter()
    for t in step.transfers:
        moved[t.name, t.direction, t.num_bytes] += t.count
    names = ("query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1")
    assert moved == {(name, direction, BYTES[name]): LAYERS for name in names for direction in ("d2h", "h2d")}
    assert step.violations == ()


@pytest.mark.slow
def test_a_tpu_fetches_and_stores_behind_more_work_with_its_options_than_without():
    def mean_window(step: CompiledStep, direction: str) -> float:
        copies = [t for t in step.transfers if (t.direction, t.where) == (direction, "loop")]
        return 1 - sum(t.exposed_bytes for t in copies) / sum(t.num_bytes * t.count for t in copies)

    program, step = compiled("v5p", "minimal_offloaded,context=device")
    plain = compile_step(program.jit_step(), (program.abstract_state, program.abstract_batch), options={})
    assert mean_window(step, "h2d") > mean_window(plain, "h2d") + 0.1
    # a layer's projections need not leave before the next layer makes its own
    assert min(t.window for t in step.transfers if (t.direction, t.where) == ("d2h", "loop")) > 0.9


@pytest.mark.slow
def test_a_tpu_compiles_two_layers_whose_projections_go_to_the_host():
    """In row-major order this libtpu's compiler would abort, and the process with it."""
    machine = get_hardware("v5p")
    config = ProgramConfig(
        model="llama-tiny", sizes=SIZES | {"layers": 2, "kv_heads": 8, "mlp": 1024}, batch=2, seq=1024,
        placement="qkv_proj_offloaded", steps=10, optimizer=OptimizerConfig(warmup_steps=1),
    )  # fmt: skip
    program = make_program(config, compile_only_devices(machine, 2))
    done = compile_program(program, machine, deviceless=True)
    assert done.compiled.refused is None and done.compiled.violations == ()


def test_ranges_of_layers_place_their_own_layers_only():
    _, step = compiled("gb200", "decoder_layer_input=host,mlpwi_0=host@0:4;mlpwi_0=device@4:6")
    assert bytes_of(step, "host", "mlpwi_0 (layers, offloaded)") == 4 * BYTES["mlpwi_0"]
    assert bytes_of(step, "host", "decoder_layer_input (layers, offloaded)") == 4 * BYTES["decoder_layer_input"]
    assert bytes_of(step, "device", "decoder_layer_input (layers, saved)") == 2 * BYTES["decoder_layer_input"]


def test_splitting_a_stack_into_ranges_copies_neither_weights_nor_gradients():
    _, whole = compiled("gb200", "full")
    _, split = compiled("gb200", "full@0:2;full@2:5;full@5:6")
    # a slice of the largest stacked matrix alone would be much more than this
    assert split.device.temporaries < whole.device.temporaries + 4 * LAYERS * EMBED * MLP // DEVICES // 2


def test_the_float32_gradients_of_accumulation_have_a_row_of_their_own():
    _, step = compiled("gb200", "full", accumulate=4)
    assert bytes_of(step, "device", "gradient accumulator") == pytest.approx(WEIGHT_BYTES, rel=0.01)


def test_gpu_sizes_equal_the_compilers_memory_analysis():
    program, step = compiled("gb200", "minimal_offloaded,context=device")
    options = compiler_options("cuda", deviceless=True, offloads=True)
    lowered = program.jit_step().lower(program.abstract_state, program.abstract_batch)
    stats = lowered.compile(compiler_options=options).memory_analysis()
    assert step.device.arguments == stats.argument_size_in_bytes
    assert step.added_bytes > 0  # the scratch memory of attention's gradient, which a compile without a device has not
    assert step.device.temporaries - step.added_bytes == stats.temp_size_in_bytes
    assert step.device.total == pytest.approx(
        stats.argument_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + step.added_bytes,
        rel=1e-5,
    )
    assert step.host.temporaries == stats.host_temp_size_in_bytes


def test_weights_are_gathered_and_gradients_scattered_never_reduced_whole():
    # of a step under fsdp, only what every device holds whole (norms) and scalars may be all-reduced
    from forebay.xla.hlo import arrays_of, parse_module

    program, _ = compiled("gb200", "full")
    lowered = program.jit_step().lower(program.abstract_state, program.abstract_batch)
    module = parse_module(
        lowered.compile(compiler_options=compiler_options("cuda", deviceless=True, offloads=False)).as_text()
    )
    reduced = [a for i in module.instructions() if i.opcode.startswith("all-reduce") for a in arrays_of(i.shape)]
    assert reduced
    assert max(a.num_bytes for a in reduced) <= 4 * (LAYERS * 2 + 1) * EMBED + 64
    assert any(i.opcode.startswith("reduce-scatter") for i in module.instructions())


@pytest.mark.parametrize("hardware", ["h200", "v5e"])
def test_arguments_in_host_memory_are_counted_as_host_bytes(hardware):
    # an optimizer moment that lives on the host is an argument, not a temporary
    device = compile_only_devices(get_hardware(hardware), 1)
    mesh = make_mesh({}, device)
    on_device = NamedSharding(mesh, PartitionSpec())
    on_host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")

    def update(moment, gradient):
        # a NamedSharding with a memory kind does nothing here: compile-only GPUs list no memories
        moment = jax.device_put(moment, jax.memory.Space.Device)
        return jax.device_put(0.9 * moment + 0.1 * gradient, jax.memory.Space.Host)

    step = jax.jit(update, in_shardings=(on_host, on_device), out_shardings=on_host, donate_argnums=0)
    array = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    result = compile_step(step, (array, array))
    assert result.host.arguments == 1024 * 1024 * 4
    assert result.device.arguments == 1024 * 1024 * 4


def test_a_step_that_the_compiler_refuses_is_reported_with_the_size_it_found():
    # v5e has 16 GiB; a loop that keeps 8192 x 8192 floats a hundred times over needs more
    mesh = make_mesh({}, compile_only_devices(get_hardware("v5e"), 1))
    whole = NamedSharding(mesh, PartitionSpec())

    def keep(x):
        y, kept = jax.lax.scan(lambda c, _: (jnp.sin(c), jnp.cos(c)), x, length=100)
        return jax.lax.scan(lambda c, k: (c * k, None), y, kept, reverse=True)[0]

    step = jax.jit(keep, in_shardings=whole, out_shardings=whole)
    result = compile_step(step, (jax.ShapeDtypeStruct((8192, 8192), jnp.float32),))
    assert result.refused is not None and "RESOURCE_EXHAUSTED" in result.refused
    assert result.device.total > get_hardware("v5e").usable_hbm_bytes()


def test_activations_and_weights_in_host_memory_together():
    """Every layer's weights come in for each pass, and its activations go out and come back, all a layer ahead."""
    machine = get_hardware("gb200")
    config = ProgramConfig(
        model="llama-tiny", sizes=SIZES, batch=BATCH, seq=SEQ, placement="minimal_offloaded", steps=10,
        parameters_host_fraction=1.0, optimizer=OptimizerConfig(warmup_steps=1),
    )  # fmt: skip
    program = make_program(config, compile_only_devices(machine, DEVICES))
    step = compile_program(program, machine, deviceless=True).compiled
    assert step.violations == ()
    moved = Counter[tuple[str, str]]()
    for t in step.transfers:
        if t.where != "update":
            moved[t.name, t.direction] += t.num_bytes * t.count
    assert moved["mlpwi_0", "d2h"] == LAYERS * BYTES["mlpwi_0"]
    assert moved["mlpwi_0", "h2d"] in (LAYERS * BYTES["mlpwi_0"], (LAYERS - 1) * BYTES["mlpwi_0"])
    assert moved["weight.gate_DF", "h2d"] >= 2 * LAYERS * 4 * EMBED * MLP // DEVICES
    loops = [t for t in step.transfers if t.where == "loop" and t.stack == "layers"]
    assert {t.direction for t in loops} == {"d2h", "h2d"}
    assert min(t.window for t in loops) >= 0.9


def test_sums_of_microbatches_in_host_memory_have_a_buffer_each():
    """What these start from is dropped by the compiler, which would make buffers of one filling one and copy it apart."""
    machine = get_hardware("gb200")
    config = ProgramConfig(
        model="llama-tiny", sizes=SIZES, batch=2 * BATCH, seq=SEQ, placement="full", accumulate=2, steps=10,
        parameters_host_fraction=1.0, optimizer=OptimizerConfig(warmup_steps=1),
    )  # fmt: skip
    program = make_program(config, compile_only_devices(machine, DEVICES))
    step = compile_program(program, machine, deviceless=True).compiled
    assert step.violations == () and step.host_copy_bytes == 0
