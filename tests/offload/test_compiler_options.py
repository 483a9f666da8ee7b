"""`forebay.compiler_options`: what code that is not ours needs to be compiled with."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import forebay
from forebay.planner.placement import Placement
from forebay.xla.options import PIPELINING, PROFILE_OPTION, TPU_PIPELINING, variants
from forebay.xla.versions import DOUBLE_BUFFERING

L, D, N = 6, 512, 1024


def loss(weights, x):
    def layer(x, w):
        u = forebay.name(x @ w["in"], "u")
        return x + forebay.name(jax.nn.gelu(u), "v") @ w["out"], None

    return (jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).mean()


def placed(**tensors):
    return forebay.Plan((Placement("layers", (0, L), tensors),))


@functools.cache
def there(hardware, count):
    return tuple(forebay.compile_only_devices(forebay.get_hardware(hardware), count))


def windows(plan, devices, options, weights_split=(None, None, "fsdp")):
    """The least window of the copies in loops, in each direction."""
    mesh = Mesh(devices, "fsdp")
    split = NamedSharding(mesh, PartitionSpec(*weights_split)), NamedSharding(mesh, PartitionSpec("fsdp"))
    step = jax.jit(
        jax.value_and_grad(forebay.apply(loss, plan)), in_shardings=split, compiler_options=options,
        out_shardings=(NamedSharding(mesh, PartitionSpec()), split[0]),
    )  # fmt: skip
    weights = {name: jax.ShapeDtypeStruct((L, D, D), jnp.bfloat16) for name in ("in", "out")}
    made = forebay.compile_step(step, (weights, jax.ShapeDtypeStruct((N * len(devices), D), jnp.bfloat16)))
    assert not made.violations
    copies = [t for t in made.transfers if t.where == "loop"]
    return {d: min(t.window for t in copies if t.direction == d) for d in ("d2h", "h2d")}


@pytest.mark.parametrize("count", [1, 4])
def test_they_hide_the_copies_of_a_plan_that_is_applied_to_any_code(count):
    plan, devices = placed(u="host", v="host"), there("gb200", count)
    assert min(windows(plan, devices, forebay.compiler_options(plan, devices)).values()) >= 0.9
    assert min(windows(plan, devices, None).values()) < 0.9, "or nothing is needed"


def test_where_what_is_fetched_is_exchanged_between_devices_the_second_choice_hides_it():
    """Of weights split by rows XLA multiplies "v" split by columns, where it was stored split by rows."""
    plan, devices = placed(v="host"), there("gb200", 4)
    first, second, _ = variants(forebay.compiler_options(plan, devices))
    found = [min(windows(plan, devices, o, (None, "fsdp")).values()) for o in (first, second)]
    assert found[0] < 0.9 <= found[1]


def test_a_scan_of_ones_own_is_left_to_the_compiler_to_pipeline():
    plan, devices = placed(u="host", v="host"), there("gb200", 1)

    def own(weights, x):
        block = plan.apply(lambda x, w: x + forebay.name(jax.nn.gelu(forebay.name(x @ w["in"], "u")), "v") @ w["out"])
        return (jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)[0].astype(jnp.float32) ** 2).mean()

    whole = NamedSharding(Mesh(devices, "fsdp"), PartitionSpec())
    weights = {name: jax.ShapeDtypeStruct((L, D, D), jnp.bfloat16) for name in ("in", "out")}
    least = []
    for own_scan in (True, False):
        options = forebay.compiler_options(plan, devices, own_scan=own_scan)
        step = jax.jit(jax.grad(own), in_shardings=whole, out_shardings=whole, compiler_options=options)
        made = forebay.compile_step(step, (weights, jax.ShapeDtypeStruct((N, D), jnp.bfloat16)))
        least.append(min(t.window for t in made.transfers if (t.where, t.direction) == ("loop", "d2h")))
    assert least[1] < 0.9 <= least[0]
    on_tpu = [forebay.compiler_options(plan, there("v5p", 8), own_scan=own) for own in (True, False)]
    assert [TPU_PIPELINING in found for found in on_tpu] == [False, True]


def test_there_are_none_on_a_cpu():
    assert forebay.compiler_options(placed(u="host")) == {}


def test_a_plan_that_moves_nothing_gets_no_more_than_any_step():
    devices = there("gb200", 4)
    assert DOUBLE_BUFFERING in forebay.compiler_options(placed(u="host"), devices)
    assert DOUBLE_BUFFERING not in forebay.compiler_options(placed(u="device"), devices)


def test_they_are_those_that_the_plan_was_compiled_with():
    plan, devices = placed(u="host"), there("gb200", 1)
    first, pipelined, third = variants(forebay.compiler_options(plan, devices))
    for tried in (first, pipelined, third):
        made = forebay.Plan(plan.placements, compiled={"compiler_options": tried})
        assert forebay.compiler_options(made, devices) == tried
    assert DOUBLE_BUFFERING in first and DOUBLE_BUFFERING not in third and pipelined == first | {PIPELINING: True}


def test_for_a_step_of_ones_own_they_have_its_timelines_times_where_that_is_faster():
    """Weights that are gathered for each layer, which the scheduler without times does not start early enough."""
    plan, devices = placed(u="host", v="device"), there("gb200", 32)
    mesh = Mesh(devices, "fsdp")
    split = NamedSharding(mesh, PartitionSpec(None, None, "fsdp")), NamedSharding(mesh, PartitionSpec("fsdp"))
    jitted = jax.jit(
        jax.value_and_grad(forebay.apply(loss, plan)), in_shardings=split,
        out_shardings=(NamedSharding(mesh, PartitionSpec()), split[0]),
    )  # fmt: skip
    shape = {"in": (L, 8 * D, 16 * D), "out": (L, 16 * D, 8 * D)}
    weights = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in shape.items()}
    args = weights, jax.ShapeDtypeStruct((4096 * len(devices), 8 * D), jnp.bfloat16)

    def seconds(options) -> float:
        return forebay.timeline(jitted.lower(*args).compile(compiler_options=options), "gb200").step_time_s

    plain = forebay.compiler_options(plan, devices)
    timed = forebay.compiler_options(plan, devices, step=jitted, args=args, hardware="gb200")
    assert {k: v for k, v in timed.items() if k != PROFILE_OPTION} == {
        k: v for k, v in plain.items() if k != PROFILE_OPTION
    }
    assert "all-gather" in Path(timed[PROFILE_OPTION]).read_text(), "or it was not faster"
    assert seconds(timed) < seconds(plain)


def test_options_for_a_step_need_a_machine_and_on_a_cpu_there_are_none():
    with pytest.raises(forebay.UserError, match="which machine it is for"):
        forebay.compiler_options(placed(u="host"), there("h200", 1), step=jax.jit(loss))
    assert forebay.compiler_options(placed(u="host"), step=jax.jit(loss)) == {}
