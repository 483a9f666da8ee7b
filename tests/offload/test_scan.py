"""`scan_layers` against the plain `lax.scan` without checkpointing: a plan never changes a number."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from parity import assert_same, normal, place, placements, plain, quick_jit, summed

from forebay.errors import UserError
from forebay.graph.residuals import residuals
from forebay.offload import scan_layers
from forebay.offload.apply import apply as forebay_apply
from forebay.offload.host_buffers import filling
from forebay.offload.policy import apply
from forebay.planner.placement import Placement
from forebay.planner.plan import Plan

D = 4


def check(block, plan, *args):
    """Value and gradients by every floating-point leaf of `args` = x, layers, *constants."""
    leaves, tree = jax.tree.flatten(args)
    inexact = [i for i, v in enumerate(leaves) if jnp.issubdtype(v.dtype, jnp.inexact)]

    def run(scan):
        def loss(values):
            everything = list(leaves)
            for i, v in zip(inexact, values, strict=True):
                everything[i] = v
            return summed(scan(*jax.tree.unflatten(tree, everything)))

        return quick_jit(jax.value_and_grad(loss))([leaves[i] for i in inexact])

    ours = run(lambda x, layers, *c: scan_layers(block, plan, x, layers, *c))
    assert_same(ours, run(functools.partial(plain, block)))
    assert all(np.asarray(g, np.float32).any() for g in ours[1]), "a gradient of zero proves nothing"


# ------------------------------------------------------------------ a small block with every kind of name


def block(layer, x, constant):
    """`u` is needed by the backward pass, `v` made of it, `last` is not a residual."""
    u = checkpoint_name(x @ layer["w"], "u")
    v = checkpoint_name(jnp.sin(u) * constant, "v")
    return x + checkpoint_name(0.5 * v + layer["b"], "last")


def example(layers):
    return normal(1, 2, D), {"w": 0.3 * normal(2, layers, D, D), "b": 0.1 * normal(3, layers, D)}, normal(4, D)


@functools.cache
def _reference(layers):
    x, weights, constant = example(layers)

    def loss(x, weights, constant):
        return summed(plain(block, x, weights, constant))

    return quick_jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, weights, constant)


def run_small(plan, layers):
    def loss(x, weights, constant):
        return summed(scan_layers(block, plan, x, weights, constant))

    return quick_jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*example(layers))


@hypothesis.given(data=st.data(), layers=st.integers(1, 5))
def test_random_plans_change_nothing(data, layers):
    plan = data.draw(placements(layers, ["u", "v", "last"]))
    assert_same(run_small(plan, layers), _reference(layers))


@pytest.mark.parametrize("layers", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("cut", [False, True], ids=["one range", "two ranges"])
def test_trip_counts_around_those_that_pipelining_got_wrong(layers, cut):
    middle = layers // 2 if cut else 0
    ranges = [(0, middle, {"u": "host"})] * (middle > 0) + [(middle, layers, {"u": "device", "v": "host"})]
    assert_same(run_small(place(*ranges), layers), _reference(layers))


def test_a_plan_gives_the_ranges_of_its_stack_in_order():
    plan = Plan((*place((2, 3, {}), (0, 2, {"u": "host"})), Placement("others", (0, 9), {})))
    x, weights, constant = example(3)
    value = summed(scan_layers(block, plan, x, weights, constant, stack="layers"))
    assert_same(value, _reference(3)[0])


def test_the_value_without_gradients():
    assert_same(summed(scan_layers(block, place((0, 3, {"u": "host"})), *example(3))), _reference(3)[0])


# ------------------------------------------------------------------ the order in which a TPU stores


def rows_of_eight(layers):
    """Arguments whose last but one dimension fills a TPU's tiles."""
    return normal(5, 8, D), *example(layers)[1:]


def constrained(scan, plan) -> int:
    """How many layout constraints a TPU's compiler gets with value and gradients."""
    loss = jax.jit(jax.grad(lambda w: summed(scan(plan, w))))
    lowered = loss.trace(rows_of_eight(3)[1]).lower(lowering_platforms=("tpu",))
    return lowered.as_text().count("@LayoutConstraint")


def test_a_tpu_is_asked_for_row_major_order():
    x, _, constant = rows_of_eight(3)
    stored = place((0, 3, {"u": "host"}))
    assert constrained(lambda plan, w: scan_layers(block, plan, x, w, constant), stored) == 1


@pytest.mark.parametrize(("cut", "asked"), [(0, 1), (2, 0), (3, 1)])
def test_up_to_two_layers_have_no_order(cut, asked):
    """Of two the TPU's compiler would abort (libtpu 0.0.50.1)."""
    x, weights, constant = rows_of_eight(4)
    ranges = [(0, cut, {"u": "host"})] * (cut > 0) + [(cut, 4, {"u": "host"})]

    def loss(weights):
        return summed(scan_layers(block, place(*ranges), x, weights, constant))

    lowered = jax.jit(jax.grad(loss)).trace(weights).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("@LayoutConstraint") == asked


def test_only_what_goes_to_the_host_has_an_order():
    x, _, constant = rows_of_eight(3)
    stored = place((0, 3, {"u": "device"}))
    assert constrained(lambda plan, w: scan_layers(block, plan, x, w, constant), stored) == 0


def test_a_functions_layers_are_stored_in_row_major_order():
    x, weights, constant = rows_of_eight(3)

    def loss(weights):
        return summed(plain(block, x, weights, constant))

    planned = forebay_apply(loss, Plan(place((0, 3, {"u": "host"}))))
    lowered = jax.jit(jax.grad(planned)).trace(weights).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("@LayoutConstraint") == 1


@pytest.mark.parametrize("batched", [False, True], ids=["", "vmap"])
def test_the_order_changes_no_number(batched):
    x, weights, constant = rows_of_eight(6)
    stored = place((0, 3, {"u": "host"}), (3, 6, {"v": "host"}))

    def run(scan):
        def loss(x, weights, constant):
            return summed(scan(x, weights, constant))

        gradient = jax.value_and_grad(loss, argnums=(0, 1, 2))
        if batched:
            return quick_jit(jax.vmap(gradient, in_axes=(0, None, None)))(jnp.stack([x, 2 * x]), weights, constant)
        return quick_jit(gradient)(x, weights, constant)

    assert_same(run(lambda *a: scan_layers(block, stored, *a)), run(functools.partial(plain, block)))


# ------------------------------------------------------------------ what a placement keeps

WIDE = 2 * D * 4  # bytes of x, u and everything else of its shape


@pytest.mark.parametrize(
    ("tensors", "kept"),
    [
        ({}, []),
        ({"u": "recompute"}, []),
        ({"u": "device"}, [("u", WIDE)]),
        ({"u": "host"}, [("u", WIDE)]),
        ({"u": "host", "last": "host"}, [("u", WIDE)]),
        # d sin(u) * constant: by u the cosine and the constant, by the constant the sine
        ({"*": "device"}, [(None, WIDE), (None, WIDE)]),
    ],
    ids=str,
)
def test_what_is_kept_beside_the_arguments(tensors, kept):
    x, weights, constant = example(1)
    layer = jax.tree.map(lambda w: w[0], weights)
    found = residuals(apply(block, Placement("layers", (0, 1), tensors)), layer, x, constant)
    assert [(r.name, r.num_bytes) for r in found if r.argument is None and r.num_bytes == WIDE] == kept


@pytest.mark.parametrize(("where", "space"), [("host", jax.memory.Space.Host), ("device", jax.memory.Space.Device)])
def test_where_it_is_kept(equations, where, space):
    def loss(weights):
        x, _, constant = example(3)
        return summed(scan_layers(block, place((0, 3, {"u": where})), x, weights, constant))

    loops = [e for e in equations(jax.grad(loss), example(3)[1]) if e.primitive.name in ("scan", "while")]
    stacks = {v.aval.memory_space for e in loops for v in e.outvars if v.aval.shape == (3, 2, D)}
    assert space in stacks


def test_a_range_of_one_layer_moves_nothing(equations):
    """Of a loop of one layer XLA makes none, and moves nothing, or fails."""

    def loss(weights, cut):
        x, _, constant = example(3)
        plan = place((0, cut, {"u": "host"}), (cut, 3, {"u": "host"}))
        return summed(scan_layers(block, plan, x, weights, constant))

    def on_host(cut):
        found = equations(jax.grad(functools.partial(loss, cut=cut)), example(3)[1])
        loops = [e for e in found if e.primitive.name in ("scan", "while")]
        avals = [v.aval for e in loops for v in e.outvars]
        return {a.shape for a in avals if getattr(a, "memory_space", None) == jax.memory.Space.Host}

    assert on_host(1) == {(2, 2, D)}  # the two layers after it
    assert on_host(2) == {(2, 2, D)}  # the two layers before it


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int32, jnp.int8])
def test_host_buffers_of_all_stacks_are_filled_differently(dtype):
    owners = ["layers 0", "layers 1", "dense_layers 0", "moe_layers 0", "mtp 0", "gradient:moe_layers 0"]
    if jnp.dtype(dtype).itemsize == 1:  # of a byte there are few values: within one stack
        owners = owners[:1]
    values = [np.asarray(filling(dtype, owner, n)).astype(dtype) for owner in owners for n in range(60)]
    assert len({v.tobytes() for v in values}) == len(values)
    assert all(np.isfinite(np.float64(v)) for v in values)


# ------------------------------------------------------------------ what a carry, a layer, a constant may be

EVERYWHERE = [{}, {"h": "device"}, {"h": "host"}, {"*": "device"}]


@pytest.mark.parametrize("tensors", EVERYWHERE, ids=str)
def test_a_carry_of_several_arrays_of_which_one_counts(tensors):
    def count_and_mix(w, carry):
        h = checkpoint_name(jnp.tanh(carry["x"] @ w), "h")
        return {"x": h * carry["n"] + carry["y"], "y": carry["y"] * 0.5 + h, "n": carry["n"] + 1}

    carry = {"x": normal(1, 2, D), "y": normal(2, 2, D), "n": jnp.int32(1)}
    check(count_and_mix, place((0, 2, tensors), (2, 3, {})), carry, 0.5 * normal(3, 3, D, D))


@pytest.mark.parametrize("typed", [True, False], ids=["key array", "uint32 key data"])
@pytest.mark.parametrize("tensors", EVERYWHERE, ids=str)
def test_dropout_with_a_key_for_each_layer(typed, tensors):
    def dropout(layer, x):
        w, key = layer
        key = key if typed else jax.random.wrap_key_data(key)
        h = checkpoint_name(x @ w, "h")
        return x + jnp.sin(h) * jax.random.bernoulli(key, 0.5, h.shape)

    keys = jax.random.split(jax.random.key(0), 3)
    layers = (normal(1, 3, D, D), keys if typed else jax.random.key_data(keys))
    check(dropout, place((0, 3, tensors)), normal(2, 2, D), layers)


@pytest.mark.parametrize("tensors", [{}, {"h": "host"}], ids=str)
def test_a_key_in_the_carry(tensors):
    def dropout(w, carry):
        x, key = carry
        key, now = jax.random.split(key)
        h = checkpoint_name(x @ w, "h")
        return x + jnp.sin(h) * jax.random.bernoulli(now, 0.5, h.shape), key

    check(dropout, place((0, 3, tensors)), (normal(2, 2, D), jax.random.key(1)), normal(1, 3, D, D))


@pytest.mark.parametrize("tensors", EVERYWHERE, ids=str)
def test_integers_among_the_weights_and_the_constants(tensors):
    def scaled(layer, x, table):
        h = checkpoint_name(jnp.sin(x @ layer["w"]), "h")
        return x + h * table["scale"][layer["row"]] + table["shift"]

    layers = {"w": normal(1, 3, D, D), "row": jnp.asarray([2, 0, 1])}
    table = {"scale": normal(3, 3, D), "shift": jnp.asarray([1, 0, 2, 0])}
    check(scaled, place((0, 3, tensors)), normal(2, 2, D), layers, table)


@pytest.mark.parametrize("tensors", EVERYWHERE, ids=str)
def test_float32_weights_of_a_bfloat16_block(tensors):
    def mixed(layer, x, constant):
        h = checkpoint_name(x @ layer["w"].astype(x.dtype), "h")
        return x + jnp.sin(h) * constant.astype(x.dtype)

    args = (normal(1, 2, D).astype(jnp.bfloat16), {"w": normal(2, 3, D, D)}, normal(3, D))

    def run(scan):
        return quick_jit(jax.grad(lambda *a: summed(scan(mixed, *a)), argnums=(0, 1, 2)))(*args)

    ours = run(lambda b, x, *rest: scan_layers(b, place((0, 3, tensors)), x, *rest))
    assert [g.dtype for g in jax.tree.leaves(ours)] == [jnp.bfloat16, jnp.float32, jnp.float32]
    for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(run(plain)), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.abs(a - e).max() <= 2e-2 * np.abs(e).max()


@pytest.mark.parametrize("argnums", [0, 1, 2, (0, 1), (1, 2)])
def test_differentiation_by_some_of_the_arguments(argnums):
    def run(scan):
        return quick_jit(jax.grad(lambda *a: summed(scan(*a)), argnums))(*example(3))

    ours = run(lambda *a: scan_layers(block, place((0, 3, {"u": "host"})), *a))
    assert_same(ours, run(lambda *a: plain(block, *a)))


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("second", [0, 1, 2])
def test_a_jitted_function_differentiated_twice_by_different_arguments(first, second):
    args = example(3)
    loss = jax.jit(lambda *a: summed(scan_layers(block, place((0, 3, {"u": "host"})), *a)))

    def by(argnum):
        return jax.vjp(lambda v: loss(*args[:argnum], v, *args[argnum + 1 :]), args[argnum])[1]

    pullbacks = [by(first), by(second)]  # both forward passes before either backward pass
    for argnum, pull in zip((first, second), pullbacks, strict=True):
        assert_same(pull(jnp.float32(1))[0], _reference(3)[1][argnum])


def test_a_scan_inside_a_scan():
    inner_plan = place((0, 2, {"u": "host"}), (2, 3, {"v": "device"}))
    x, weights, constant = example(3)
    outer = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), weights)

    def stage(scan):
        return lambda layers, x, constant: scan(x, layers, constant)

    def gradient(scan, block):
        return quick_jit(jax.grad(lambda w: summed(scan(block, x, w, constant))))(outer)

    ours = stage(lambda *a: scan_layers(block, inner_plan, *a))
    outer_plan = place((0, 1, {}), (1, 2, {"*": "device"}))
    expected = gradient(plain, stage(functools.partial(plain, block)))
    assert_same(gradient(lambda b, *a: scan_layers(b, outer_plan, *a), ours), expected)
    assert_same(gradient(plain, ours), expected)


def test_inside_a_checkpoint_and_a_vmap():
    x, weights, constant = example(3)
    batch = jnp.stack([x, -2 * x])

    def run(scan):
        per_example = jax.checkpoint(lambda x: summed(scan(x, weights, constant)))
        return quick_jit(jax.vmap(jax.grad(per_example)))(batch)

    ours = run(lambda *a: scan_layers(block, place((0, 3, {"u": "device"})), *a))
    assert_same(ours, run(lambda *a: plain(block, *a)))


def test_an_array_closed_over_that_is_not_differentiated():
    @jax.jit
    def ours(weights, mask):
        def masked(layer, x, constant):
            return block(layer, x * mask, constant)

        x, _, constant = example(3)
        return jax.grad(lambda w: summed(scan_layers(masked, place((0, 3, {"u": "host"})), x, w, constant)))(weights)

    x, weights, constant = example(3)
    mask = jnp.asarray([1.0, 0.0, 1.0, 2.0])
    expected = jax.grad(lambda w: summed(plain(lambda lay, x, c: block(lay, x * mask, c), x, w, constant)))(weights)
    assert_same(ours(weights, mask), expected)


@pytest.mark.parametrize("jit", [False, True])
def test_an_array_closed_over_that_is_differentiated_is_never_silently_wrong(jit):
    x, weights, constant = example(3)

    def loss(constant):
        return summed(scan_layers(lambda layer, x: block(layer, x, constant), place((0, 3, {})), x, weights))

    gradient = jax.grad(loss)
    try:
        found = (jax.jit(gradient) if jit else gradient)(constant)
    except (jax.errors.UnexpectedTracerError, UserError):
        return  # jax's own refusal
    assert_same(found, _reference(3)[1][2])


# ------------------------------------------------------------------ other derivatives


def test_second_derivatives_of_a_plan_that_moves_nothing():
    x, weights, constant = example(2)

    def run(scan):
        def inner(x):
            return (jax.grad(lambda x: summed(scan(x, weights, constant)))(x) ** 2).sum()

        return quick_jit(jax.grad(inner))(x)

    ours = run(lambda *a: scan_layers(block, place((0, 2, {"u": "device"})), *a))
    expected = run(lambda *a: plain(block, *a))
    assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()


def test_forward_mode_is_refused():
    x, weights, constant = example(2)

    def run(x):
        return scan_layers(block, place((0, 2, {})), x, weights, constant)

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(run, (x,), (x,))


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "ranges",
    [(), ((0, 2),), ((1, 3),), ((0, 4),), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((2, 3), (0, 2))],
    ids=["nothing", "end lacks", "start lacks", "too many", "gap", "overlap", "order"],
)
def test_placements_that_do_not_cover_the_layers_once_and_in_order(ranges):
    with pytest.raises(UserError, match="cover 0:3") as error:
        scan_layers(block, place(*((a, b, {}) for a, b in ranges)), *example(3))
    assert "\n" not in str(error.value)


def test_a_plan_without_the_stack():
    with pytest.raises(UserError, match=r"unknown layer stack 'decoder'.*layers"):
        scan_layers(block, Plan(place((0, 3, {}))), *example(3), stack="decoder")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda w, x: x[:, :2], r"float32\[2, 4\] into float32\[2, 2\]"),
        (lambda w, x: x.astype(jnp.bfloat16), r"float32\[2, 4\] into bfloat16\[2, 4\]"),
        (lambda w, x: (x,), "same structure"),
        (lambda w, x: {"x": x}, "same structure"),
    ],
    ids=["shape", "dtype", "tuple", "dict"],
)
def test_a_block_that_changes_its_carry(bad, says):
    x, weights, _ = example(3)
    with pytest.raises(UserError, match=says) as error:
        scan_layers(bad, place((0, 3, {})), x, weights)
    assert "\n" not in str(error.value)


def test_a_plan_for_another_block_names_what_this_one_has():
    with pytest.raises(UserError, match="the block of 'layers' names none so") as error:
        scan_layers(block, place((0, 3, {"query_proj": "host"})), *example(3))
    assert "'query_proj'" in str(error.value) and all(n in str(error.value) for n in ("u", "v", "last"))
    assert "\n" not in str(error.value)


def test_the_leaf_that_changes_is_named():
    x, weights, _ = example(3)
    carry = {"x": x, "count": jnp.int32(0)}
    with pytest.raises(UserError, match=r"\['count'\] from int32\[\] into float32\[\]"):
        scan_layers(lambda w, c: c | {"count": c["count"] + 0.5}, place((0, 3, {})), carry, weights)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ((normal(1, 3, D), normal(2, 2, D)), r"\b2\b.*\b3\b"),
        ((normal(1, 3, D), jnp.float32(1)), "leading dimensions"),
        ((), "leading dimensions"),
        (normal(1, 0, D), r"\b0\b"),
    ],
    ids=["differ", "scalar", "no arrays", "no layers"],
)
def test_layers_that_are_not_stacked(layers, says):
    with pytest.raises(UserError, match=says) as error:
        scan_layers(lambda w, x: x, place((0, 3, {})), normal(3, 2, D), layers)
    assert "\n" not in str(error.value)
