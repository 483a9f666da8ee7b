"""Windows of copies, in schedules written by hand whose FLOPs are round numbers, and in one real compile."""

import dataclasses
from collections import Counter

import pytest

from forebay.hardware import get_hardware
from forebay.train.config import OptimizerConfig, ProgramConfig
from forebay.train.program import make_program
from forebay.xla.compile import compile_hidden
from forebay.xla.copies import host_copy_bytes
from forebay.xla.exposure import MemoryLimit, explain, exposed
from forebay.xla.hlo import parse_module
from forebay.xla.invariants import violations
from forebay.xla.options import compiler_options
from forebay.xla.remat import remat_clones
from forebay.xla.topology import compile_only_devices
from forebay.xla.windows import Transfer, transfers

HOST = "f32[10,64]{1,0:S(5)}"
SLICE = "f32[1,64]{1,0}"
SLICE_BYTES = 64 * 4
SAVE = 'metadata={op_name="jit(step)/while/body/save:layers:mlpwi/dynamic_update_slice"}'
LOAD = 'metadata={op_name="jit(step)/transpose/while/body/load:layers:mlpwi/dynamic_slice"}'


def work(name: str, share: int) -> str:
    """A product of `share` x 2 x 4 x 4 FLOPs."""
    return (
        f"%{name}.l = f32[4,{share}]{{1,0}} broadcast(%i), dimensions={{}}\n  "
        f"%{name}.r = f32[{share},4]{{1,0}} broadcast(%i), dimensions={{}}\n  "
        f"%{name} = f32[4,4]{{1,0}} dot(%{name}.l, %{name}.r), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    )


def store(name: str, buffer: str = "%host", scope: str = SAVE) -> str:
    return (
        f"%{name} = (({HOST}, {SLICE}, s32[], s32[]), {HOST}, u32[]) fusion-start({buffer}, %value, %i, %i), kind=kLoop, "
        f"calls=%wrapped_store, {scope}"
    )


def fetch(name: str, buffer: str = "%host", scope: str = LOAD) -> str:
    return (
        f"%{name} = (({HOST}, s32[], s32[]), {SLICE}, u32[]) fusion-start({buffer}, %i, %i), kind=kLoop, "
        f"calls=%wrapped_fetch, {scope}"
    )


def stored(name: str, start: str) -> str:
    return f"%{name} = {HOST} fusion-done(%{start})"


def fetched(name: str, start: str) -> str:
    return f"%{name} = {SLICE} fusion-done(%{start})"


def loop(*body: str, result: str = "%host", trips: int = 10, state: str = SLICE, carried: str = "%value", outside=()):
    """A program with one loop over a host buffer; the state is a counter, the buffer and what is `carried`."""
    whole = f"(s32[], {HOST}, {state})"
    lines = "\n  ".join(body)
    around = "\n  ".join(outside)
    return parse_module(f"""\
HloModule m, is_scheduled=true

%wrapped_store (h: f32[10,64], v: f32[1,64], a: s32[], b: s32[]) -> f32[10,64] {{
  %h = {HOST} parameter(0)
  %v = {SLICE} parameter(1)
  %a = s32[] parameter(2)
  %b = s32[] parameter(3)
  ROOT %dus = {HOST} dynamic-update-slice(%h, %v, %a, %b)
}}

%wrapped_fetch (h: f32[10,64], a: s32[], b: s32[]) -> f32[1,64] {{
  %h = {HOST} parameter(0)
  %a = s32[] parameter(1)
  %b = s32[] parameter(2)
  ROOT %ds = {SLICE} dynamic-slice(%h, %a, %b), dynamic_slice_sizes={{1,64}}
}}

%condition (c: {whole}) -> pred[] {{
  %c = {whole} parameter(0)
  ROOT %less = pred[] custom-call(%c), custom_call_target="less"
}}

%body (s: {whole}) -> {whole} {{
  %s = {whole} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %host = {HOST} get-tuple-element(%s), index=1
  %value = {state} get-tuple-element(%s), index=2
  {lines}
  ROOT %out = {whole} tuple(%i, {result}, {carried})
}}

ENTRY %main (x: f32[1,64]) -> f32[10,64] {{
  %value = {SLICE} parameter(0)
  %i = s32[] constant(0)
  %host = {HOST} custom-call(), custom_call_target="AllocateBuffer"
  {around}
  %init = {whole} tuple(%i, %host, %value)
  %loop = {whole} while(%init), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}
  ROOT %result = {HOST} get-tuple-element(%loop), index=1
}}
""")


def only(module) -> Transfer:
    (found,) = transfers(module)
    return found


def test_a_copy_to_the_host_behind_part_of_a_layer():
    found = only(loop(work("a", 1), store("start"), work("b", 6), stored("end", "start"), work("c", 3), result="%end"))
    assert dataclasses.replace(found, window=0) == Transfer("mlpwi", "layers", "d2h", "loop", SLICE_BYTES, 10, 0)
    assert found.window == pytest.approx(0.6)


def test_a_copy_from_the_host_behind_part_of_a_layer():
    found = only(loop(fetch("start"), work("a", 2), fetched("end", "start"), work("b", 6)))
    assert dataclasses.replace(found, window=0) == Transfer("mlpwi", "layers", "h2d", "loop", SLICE_BYTES, 10, 0)
    assert found.window == pytest.approx(0.25)


def test_start_and_end_at_the_top_of_the_loop_hide_nothing():
    assert only(loop(fetch("start"), fetched("end", "start"), work("a", 5))).window == 0


def test_a_window_that_goes_round_the_end_of_the_loop():
    # starts after 7 of 10 and ends after the first 2 of the next iteration: 3 + 2
    state = f"(({HOST}, s32[], s32[]), {SLICE}, u32[])"
    body = (work("a", 2), fetched("end", "value"), work("b", 5), fetch("start"), work("c", 3))
    assert only(loop(*body, state=state, carried="%start")).window == pytest.approx(0.5)


def test_an_iteration_of_two_layers_is_unrolled():
    # each copy of the same buffer: 4 of a layer's 5; the iteration has 10
    body = (
        store("start"), work("a", 4), stored("end", "start"), work("b", 1),
        store("start2", "%end"), work("c", 4), stored("end2", "start2"), work("d", 1),
    )  # fmt: skip
    found = only(loop(*body, result="%end2", trips=5))
    assert (found.count, found.window) == (10, pytest.approx(0.8))


def test_more_than_a_layer_is_a_whole_one():
    body = (fetch("one"), work("a", 5), fetch("two"), fetched("e1", "one"), work("b", 5), fetched("e2", "two"))
    # the first has its layer of 5; the second too
    assert only(loop(*body, trips=5)).window == 1
    body = (fetch("one"), fetch("two"), work("a", 10), fetched("e1", "one"), fetched("e2", "two"))
    assert only(loop(*body, trips=5)).window == 1


def test_the_worst_of_several_copies_is_told():
    body = (fetch("one"), work("a", 6), fetched("e1", "one"), fetch("two"), work("b", 4), fetched("e2", "two"))
    assert only(loop(*body, trips=5)).window == pytest.approx(0.8)  # 4 of 5


def test_a_copy_without_start_and_done_waits():
    synchronous = f"%read = {SLICE} dynamic-slice(%host, %i, %i), dynamic_slice_sizes={{1,64}}, {LOAD}"
    assert only(loop(work("a", 1), synchronous, work("b", 1))).window == 0


def test_what_is_peeled_off_is_the_boundary_and_compared_with_a_layer_of_the_loop():
    body = (store("start"), work("a", 10), stored("end", "start"))
    peeled = (store("p.start"), work("p.a", 3), stored("p.end", "p.start"))
    found = {t.where: t for t in transfers(loop(*body, result="%end", trips=9, outside=peeled))}
    assert (found["loop"].count, found["loop"].window) == (9, 1)
    assert (found["boundary"].count, found["boundary"].window) == (1, pytest.approx(0.3))


def test_a_copy_that_lost_its_name_has_that_of_its_buffer():
    body = (store("start", scope="metadata={}"), work("a", 1), stored("end", "start"), fetch("back", "%end"),
            fetched("got", "back"))  # fmt: skip
    assert {(t.direction, t.name) for t in transfers(loop(*body, result="%end"))} == {
        ("d2h", "mlpwi"),
        ("h2d", "mlpwi"),
    }


def test_a_copy_in_the_optimizer():
    update = 'metadata={op_name="jit(step)/optimizer/mul"}'
    start = f"%start = ({HOST.replace(':S(5)', '')}, {HOST}, u32[]) copy-start(%host), {update}"
    end = f"%end = {HOST.replace(':S(5)', '')} copy-done(%start), {update}"
    found = [t for t in transfers(loop(work("a", 1), outside=(start, work("u", 1), end))) if t.where == "update"]
    assert [(t.direction, t.num_bytes) for t in found] == [("h2d", 10 * SLICE_BYTES)]


def test_work_on_the_device_and_copies_within_the_host_are_no_transfers():
    on_device = f"%moved = {SLICE} copy(%value)"
    on_host = f"%again = {HOST} copy(%host)"
    module = loop(work("a", 1), on_device, on_host, result="%again")
    assert transfers(module) == []
    assert host_copy_bytes(module) == 10 * 10 * SLICE_BYTES


# ------------------------------------------------------------------ clones


def test_clones_and_what_they_cost():
    gather = "%all-gather.3.remat = f32[64]{0} all-gather(%value), dimensions={0}"
    again = work("dot.7.remat2", 3).replace("dot.7.remat2.", "operand.")
    other = "%fusion.rematerialized = f32[4]{0} copy(%value)"
    clones = remat_clones(loop(work("a", 3), again, gather, other))
    assert (clones.count, clones.flops, clones.collectives) == (2, 10 * 3 * 2 * 4 * 4, 10)


# ------------------------------------------------------------------ what must hold


def transfer(direction: str, count: int, *, name: str = "mlpwi", where: str = "loop", window: float = 1.0):
    return Transfer(name, "layers", direction, where, SLICE_BYTES, count, window)


BUFFERS = {("layers", "mlpwi"): Counter({10 * SLICE_BYTES: 1})}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_buffer_written_and_read_once_a_layer(microbatches):
    moved = [transfer("d2h", 10 * microbatches), transfer("h2d", 9 * microbatches)]
    moved.append(transfer("h2d", microbatches, where="boundary"))
    assert violations(moved, BUFFERS) == []


@pytest.mark.parametrize("microbatches", [1, 4])
def test_of_layers_whose_weights_come_from_the_host_the_place_that_is_written_first_may_be_left_unread(microbatches):
    weight = transfer("h2d", 20, name="weight.up")
    assert violations([transfer("d2h", 10 * microbatches), transfer("h2d", 9 * microbatches), weight], BUFFERS) == []
    for out, back in [(10, 8), (9, 10), (9, 8), (11, 10)]:
        found = violations([transfer("d2h", out * microbatches), transfer("h2d", back * microbatches), weight], BUFFERS)
        assert ["mlpwi (layers)" in f for f in found] == [True], (out, back)


@pytest.mark.parametrize(("out", "back"), [(10, 8), (10, 9), (9, 10), (9, 9), (0, 0), (11, 11)])
def test_a_layer_too_few_or_too_many(out, back):
    (found,) = violations([transfer("d2h", out), transfer("h2d", back)], BUFFERS)
    assert "mlpwi (layers)" in found


def test_nothing_is_exposed_when_all_windows_are_wide():
    moved = [
        transfer("d2h", 10, window=0.9),
        transfer("h2d", 9, window=1.0),
        transfer("h2d", 1, where="boundary", window=0),
    ]
    assert exposed(moved) == [] and explain(moved, None, 0) is None


def test_the_rule_that_broke_is_told():
    bad = transfer("h2d", 9, window=0.1)
    peeled = transfer("h2d", 1, where="boundary")
    assert "'mlpwi' (layers) from the host has 10 %" in (explain([bad], None, 0) or "")
    assert "starts it late or ends it early" in (explain([bad], None, 0) or "")
    assert "memory limit" in (explain([bad, peeled], None, 3) or "")
    assert "memory limit" in (explain([bad, peeled], MemoryLimit(100, 97), 0) or "")
    assert "memory limit" not in (explain([bad, peeled], MemoryLimit(100, 90), 0) or "")


# ------------------------------------------------------------------ a real compile


def test_a_small_llama_on_a_gpu_that_is_not_there_hides_all_its_copies():
    layers = 6
    sizes = {"layers": layers, "embed": 512, "heads": 4, "kv_heads": 4, "head_dim": 128, "mlp": 1024, "vocab": 1024}
    placement = "minimal_offloaded,decoder_layer_input=host,context=host"
    config = ProgramConfig(
        model="llama-tiny", sizes=sizes, batch=2, seq=1024, placement=placement, steps=10,
        optimizer=OptimizerConfig(warmup_steps=1),
    )  # fmt: skip
    program = make_program(config, compile_only_devices(get_hardware("gb200"), 2))
    compiled, _ = compile_hidden(
        program.jit_step(), (program.abstract_state, program.abstract_batch),
        compiler_options("cuda", deviceless=True, offloads=True),
    )  # fmt: skip
    in_loops = [t for t in compiled.transfers if t.where == "loop"]
    assert {t.direction for t in in_loops} == {"d2h", "h2d"}
    assert all(t.window >= 0.99 for t in in_loops), in_loops
    assert compiled.violations == ()
    assert compiled.remat.count == 0 and compiled.host_copy_bytes == 0
    # tokens x features in bfloat16, the softmax statistics in float32, once a layer each way
    a_layer = 1024 * (2 * (6 * 512 + 2 * 1024) + 4 * 4)
    for direction in ("d2h", "h2d"):
        assert sum(t.num_bytes * t.count for t in compiled.transfers if t.direction == direction) == layers * a_layer
