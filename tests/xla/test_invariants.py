"""Structural checks of compiled loops: right programs pass, and each way to be wrong is seen.

Programs are compiled for a GPU that is not there and then broken in their text as released compilers broke them.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from forebay.hardware import get_hardware
from forebay.offload import scan_layers
from forebay.planner.placement import Placement
from forebay.sharding import make_mesh
from forebay.xla.compile import compile_step
from forebay.xla.follow import Follower
from forebay.xla.hlo import parse_module
from forebay.xla.invariants import computes_on_host_memory, wrong_places
from forebay.xla.options import compiler_options, variants
from forebay.xla.topology import compile_only_devices

WIDTH, ROWS = 256, 512
SLICE = ROWS * WIDTH * 2  # bytes of "h" of one layer, bfloat16


@functools.cache
def compiled(layers: int, *, double_buffered: bool = True, pipelines_too: bool = False, microbatches: int = 1) -> str:
    """The scheduled HLO of a step whose layers keep "h" on the host."""
    plan = (Placement("layers", (0, layers), {"h": "host"}),)

    def block(w, x):
        return x + jnp.sin(checkpoint_name(x @ w, "h")) @ w.T

    def loss(weights, x):
        return scan_layers(block, plan, x, weights).astype(jnp.float32).sum()

    def accumulated(weights, xs):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

        return jax.lax.scan(add, jnp.zeros_like(weights), xs)[0]

    step = accumulated if microbatches > 1 else lambda weights, xs: jax.grad(loss)(weights, xs[0])
    whole = NamedSharding(make_mesh({}, compile_only_devices(get_hardware("gb200"), 1)), PartitionSpec())
    first, pipelined, second = variants(compiler_options("cuda", deviceless=True, offloads=True))
    weights = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.bfloat16)
    xs = jax.ShapeDtypeStruct((microbatches, ROWS, WIDTH), jnp.bfloat16)
    lowered = jax.jit(step, in_shardings=whole, out_shardings=whole).lower(weights, xs)
    chosen = pipelined if pipelines_too else first if double_buffered else second
    text = lowered.compile(compiler_options=chosen).as_text()
    assert text is not None
    return text


def problems(text: str) -> list[str]:
    module = parse_module(text)
    return wrong_places(module) + computes_on_host_memory(module)


def replaced(text: str, old: str, new: str) -> str:
    """The text with the first match of a pattern replaced."""
    changed, count = re.subn(old, new, text, count=1)
    assert count == 1, f"{old} is not in the program: this build of XLA writes it otherwise"
    return changed


# 15 to 17 layers: loops of odd and even lengths, of which up to three iterations are peeled off and the rest paired
@pytest.mark.parametrize("layers", [1, 2, 3, 15, 16, 17])
def test_a_right_program_passes(layers):
    assert problems(compiled(layers)) == []


def test_a_right_program_without_double_buffering_passes():
    assert problems(compiled(16, double_buffered=False)) == []


@pytest.mark.parametrize("layers", [3, 16, 17])
def test_a_right_program_that_xla_pipelines_as_well_passes(layers):
    assert problems(compiled(layers, pipelines_too=True)) == []


def test_a_right_program_in_a_loop_over_microbatches_passes():
    assert problems(compiled(5, microbatches=3)) == []


@pytest.mark.parametrize(("hardware", "platform"), [("gb200", "cuda"), ("v5p", "tpu")])
@pytest.mark.parametrize("written_first", [False, True])
def test_sums_in_host_memory_do_not_start_from_what_their_buffer_is_filled_with(hardware, platform, written_first):
    """Two passes over a buffer of zeros in host memory, slice by slice: XLA allocates it and writes no zeros."""
    slices = 4
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def update(sums, work):
        def body(k, sums):
            part = jax.device_put(jax.lax.dynamic_index_in_dim(sums, k, keepdims=False), device)
            return jax.lax.dynamic_update_index_in_dim(sums, jax.device_put(work(part, k), host), k, 0)

        return jax.lax.fori_loop(0, slices, body, sums)

    def step(xs):
        sums = jax.device_put(jnp.zeros((slices, ROWS, WIDTH), jnp.bfloat16), host)
        if written_first:

            def write(k, sums):
                return jax.lax.dynamic_update_index_in_dim(sums, jax.device_put(jnp.cos(xs[0, k]), host), k, 0)

            sums = jax.lax.fori_loop(0, slices, write, sums)
        return jax.lax.fori_loop(0, 2, lambda n, s: update(s, lambda part, k: part + jnp.sin(xs[n, k])), sums)

    def on_device(xs):
        return jax.device_put(step(xs), device)

    whole = NamedSharding(make_mesh({}, compile_only_devices(get_hardware(hardware), 1)), PartitionSpec())
    xs = jax.ShapeDtypeStruct((2, slices, ROWS, WIDTH), jnp.bfloat16)
    lowered = jax.jit(on_device, in_shardings=whole, out_shardings=whole).lower(xs)
    text = lowered.compile(compiler_options=compiler_options(platform, deviceless=True, offloads=True)).as_text()
    assert text is not None
    assert any("before anything is written" in p for p in problems(text)) != written_first


@pytest.mark.parametrize("stacks", [("first", "second"), ("layers", "layers")])
def test_two_loops_that_are_alike_share_neither_buffers_nor_a_body(stacks):
    """Buffers made one would be copied apart, host memory to host memory, or written twice. Of loops with one body the
    compiler aborts."""
    layers = 4

    def block(w, x):
        return x + jnp.sin(checkpoint_name(x @ w, "h")) @ w.T

    def loss(weights, x):
        for stack, w in zip(stacks, weights, strict=True):
            x = scan_layers(block, (Placement(stack, (0, layers), {"h": "host"}),), x, w, stack=stack)
        return x.astype(jnp.float32).sum()

    whole = NamedSharding(make_mesh({}, compile_only_devices(get_hardware("gb200"), 1)), PartitionSpec())
    weights = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.bfloat16)
    step = jax.jit(jax.grad(loss), in_shardings=whole, out_shardings=whole)
    args = ((weights, weights), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16))
    done = compile_step(step, args, options=compiler_options("cuda", deviceless=True, offloads=True))
    assert done.violations == () and done.host_copy_bytes == 0
    assert done.host.total == 2 * layers * ROWS * WIDTH * 2


def places_of(text: str) -> dict[str, list[int]]:
    """Where the copies to and from the host go by the program's own indices, in order, by direction."""
    module = parse_module(text)
    found: dict[str, list[int]] = {"update": [], "slice": []}
    wanted = lambda i: i.opcode == "fusion-start" and ":S(5)" in i.shape  # noqa: E731
    for step in Follower(module, wanted).steps():
        update = "update" in step.instruction.name
        place = step.value(module.operands(step.instruction)[2 if update else 1])
        assert isinstance(place, int)
        found["update" if update else "slice"].append(place)
    return found


@pytest.mark.parametrize("layers", [15, 16, 17])
def test_indices_are_followed_through_peeled_and_double_buffered_loops(layers):
    found = places_of(compiled(layers))
    assert found["update"] == list(range(layers))
    assert found["slice"] == list(reversed(range(layers)))


def test_indices_are_followed_through_microbatches():
    # of odd numbers the first write, of nothing, is before the loop, and two microbatches' may come first of all
    assert places_of(compiled(4, microbatches=3))["update"] == 3 * list(range(4))


# Broken are programs of 16 layers: loops of 8 iterations of two, of which the first reads the places 15 and 14.


# ------------------------------------------------------------------ how released compilers went wrong

WALK = r'"linear":\{"byte_offset":"(\d+)","byte_stride":"-(\d+)"\}'


def host_slice(text: str, clone: bool) -> str:
    """The computation of the backward loop's copy from the host, of the iteration's first or second layer."""
    name = r"%dynamic-slice-start[\w.]*" + (
        r"\.double_buffer_clone" if clone else r"(?<!clone)(?<!peeled_double_buffer)"
    )
    starts = re.findall(rf"{name} = .*calls=%([\w.\-]+)", text)
    walks = [s for s in starts if re.search(rf"(?m)^%{re.escape(s)} (?:.*\n)*?.*{WALK}", text)]
    assert walks
    return walks[0]


def with_config(text: str, computation: str, offset: int, stride: int) -> str:
    before, header, after = text.partition(f"\n%{computation} (")
    assert header
    return before + header + replaced(after, WALK, f'"linear":{{"byte_offset":"{offset}","byte_stride":"{stride}"}}')


FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize(
    ("file", "says"),
    [
        # reads from byte 1 x stride on, as the forward pass would, where it should begin with layer 14
        ("jax-0.11.0-pipelined.hlo", r"dynamic-slice-start\S* goes to byte 1048576 .* the program says 14680064"),
        # layer 0 is peeled off, so the loop begins with layer 1
        ("jax-0.11.0-double-buffered.hlo", r"dynamic-update-slice-start\S* goes to byte 0 .* the program says 1048576"),
    ],
)
def test_programs_of_a_released_compiler_with_wrong_gradients(file, says):
    (found,) = problems((FIXTURES / file).read_text())
    assert re.match(rf"h \(layers\): the copy {says} \(iteration 0\)$", found), found


def test_a_backward_pass_that_reads_in_the_order_of_the_forward_pass():
    """openxla/xla#46231"""
    text = compiled(16)
    broken = with_config(text, host_slice(text, clone=False), 0, 2 * SLICE)
    (found,) = problems(broken)
    assert f"goes to byte 0 of its buffer where the program says {15 * SLICE} (iteration 0)" in found
    assert found.startswith("h (layers): ")


def test_a_second_half_of_a_double_buffered_loop_that_goes_where_the_first_goes():
    """openxla/xla#47218"""
    text = compiled(16)
    (found,) = problems(with_config(text, host_slice(text, clone=True), 15 * SLICE, -2 * SLICE))
    assert f"goes to byte {15 * SLICE} of its buffer where the program says {14 * SLICE} (iteration 0)" in found


def test_a_stride_that_was_not_doubled():
    """openxla/xla#39302"""
    text = compiled(16)
    (found,) = problems(with_config(text, host_slice(text, clone=False), 15 * SLICE, -SLICE))
    assert f"goes to byte {14 * SLICE} of its buffer where the program says {13 * SLICE} (iteration 1)" in found


def test_a_place_outside_of_the_buffer():
    text = compiled(16)
    (found,) = problems(with_config(text, host_slice(text, clone=False), 16 * SLICE, -2 * SLICE))
    assert f"goes to byte {16 * SLICE} of its buffer where the program says {15 * SLICE} (iteration 0)" in found


@pytest.mark.parametrize("noted", [7, 9])
def test_a_loop_that_runs_another_number_of_times_than_noted(noted):
    """openxla/xla#41348"""
    found = problems(replaced(compiled(16), r'"known_trip_count":\{"n":"8"\}', f'"known_trip_count":{{"n":"{noted}"}}'))
    assert f"runs 8 times and is noted to run {noted} times" in found[0]


# ------------------------------------------------------------------ other ways to be wrong


def moved_index(text: str, start: str, by: int) -> str:
    """The text with the index of the copies whose name begins with `start` in loops moved by some layers."""
    line = next(
        m for m in re.finditer(rf"(?m)^  %{start}[\w.]* = .*fusion-start\((.*?)\),.*$", text)
        if "peeled" not in m[0].split(" = ")[0] and "constant" not in m[1].split(", ")[2 if "update" in start else 1]
    )  # fmt: skip
    operands = line[1].split(", ")
    place = 2 if "update" in start else 1
    index = operands[place]
    more = f"  %more = s32[] constant({by})\n  %moved = s32[] add({index}, %more)\n"
    new = line[0].replace(", ".join(operands), ", ".join([*operands[:place], "%moved", *operands[place + 1 :]]), 1)
    return text[: line.start()] + more + new + text[line.end() :]


def without_places(text: str) -> str:
    """What the compiler worked out is left away, so that only the program's own indices are left to check."""
    return text.replace('"dynamic_slice_config"', '"nothing"')


def test_the_text_without_places_is_still_right():
    assert problems(without_places(compiled(16))) == []


def test_a_write_that_is_off_by_one():
    found = problems(moved_index(without_places(compiled(16)), "dynamic-update-slice-start", 1))
    assert any(re.search(r"h \(layers\): layer \d+ is written again before it is read", f) for f in found), found


def test_a_read_that_is_off_by_one():
    found = problems(moved_index(without_places(compiled(16)), "dynamic-slice-start", -1))
    assert any(re.search(r"h \(layers\): layer \d+ is read", f) for f in found), found


def test_a_missing_write():
    text = without_places(compiled(17))  # whose first layer is before the loop, where place 0 is written
    peeled = re.search(
        r"(?m)^  (%dynamic-update-slice-start[\w.]*peeled[\w.]*) = .*fusion-start\((%[\w.\-]+),.*$", text
    )
    assert peeled
    text = text[: peeled.start()] + text[peeled.end() :]
    text = replaced(text, rf"fusion-done\({re.escape(peeled[1])}\)", f"bitcast({peeled[2]})")
    assert problems(text) == ["h (layers): layer 0 is read and not written"]


def test_an_operation_of_the_device_on_host_memory():
    text = compiled(16)
    root = re.search(r"(?m)^ENTRY .*\n(?:.*\n)*?(  %[\w.\-]+ = )(\S*S\(5\)\}) custom-call\(\).*$", text)
    assert root
    name = root[1].strip().removesuffix(" =")
    shape = root[2].replace(":S(5)", "")
    broken = text[: root.end()] + f"\n  %wrong = {shape} negate({name})" + text[root.end() :]
    assert problems(broken) == [f"wrong computes on {name[1:]}, which is in host memory"]


def test_a_fusion_that_does_more_than_move_host_memory():
    text = compiled(16)
    body = host_slice(text, clone=False)
    before, header, after = text.partition(f"\n%{body} (")
    after = replaced(after, r"ROOT (%[\w.\-]+) = (\S+) dynamic-slice\(", r"\1 = \2 dynamic-slice(")
    sliced = re.search(r"(?m)^  (%[\w.\-]+) = (\S+) dynamic-slice\(.*$", after)
    assert sliced
    after = after[: sliced.end()] + f"\n  ROOT %cosine = {sliced[2]} cosine({sliced[1]})" + after[sliced.end() :]
    assert any("computes on" in f and "in host memory" in f for f in problems(before + header + after))


# ------------------------------------------------------------------ it is part of every compile


def test_a_compile_reports_what_is_wrong(monkeypatch):
    monkeypatch.setattr("forebay.xla.invariants.wrong_places", lambda module: ["a loop is wrong"])
    whole = NamedSharding(make_mesh({}, compile_only_devices(get_hardware("gb200"), 1)), PartitionSpec())
    step = jax.jit(lambda x: x + 1, in_shardings=whole, out_shardings=whole)
    assert compile_step(step, (jax.ShapeDtypeStruct((8,), jnp.float32),)).violations == ("a loop is wrong",)


def test_forebay_compile_ends_with_3_and_one_line(monkeypatch, capsys):
    from forebay.cli.main import main
    from forebay.errors import EXIT_WRONG_NUMBERS

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("forebay.xla.invariants.wrong_places", lambda module: ["a loop is wrong", "another"])
    argv = ["compile", "--hardware", "gb200", "--devices", "1", "--placement", "full", "--sizes.layers", "2"]
    assert main([*argv, "--batch", "1", "--seq", "64", "--json"]) == EXIT_WRONG_NUMBERS
    out, err = capsys.readouterr()
    assert err.startswith("forebay: this build of XLA has compiled a step that computes wrong numbers: a loop is wrong")
    assert "(and 1 more)" in err and err.count("\n") == 1
    assert '"violations": [\n    "a loop is wrong"' in out
