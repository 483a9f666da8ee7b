"""What a scan under a plan stores depends on what it is differentiated by, and on nothing else."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from parity import assert_same, normal, place, plain, quick_jit, summed

from forebay.offload import scan_layers

LAYERS, ROWS, D = 3, 2, 4
X, WEIGHTS, CONSTANT = normal(1, ROWS, D), 0.3 * normal(2, LAYERS, D, D), normal(3, D)


def block(w, x, constant):
    return x + checkpoint_name(jnp.sin(x @ w) * constant, "v")


def stored(equations, gradient, *args):
    """How many arrays of the carry's shape the loops of a program hand on for every layer."""
    loops = [e for e in equations(gradient, *args) if e.primitive.name in ("scan", "while")]
    return sum(v.aval.shape == (LAYERS, ROWS, D) for e in loops for v in e.outvars)


# By x a layer's backward pass needs the cosine, by its weights its input too, by the constant the sine too.
# x is differentiated through every layer whoever asks.
@pytest.mark.parametrize(
    ("argnums", "count"),
    [((0,), 1), ((1,), 2), ((2,), 2), ((0, 1), 2), ((0, 2), 2), ((1, 2), 3), ((0, 1, 2), 3)],
    ids=str,
)
def test_a_layer_stores_what_the_wanted_gradients_need(equations, argnums, count):
    def gradient(scan):
        return jax.grad(lambda *a: summed(scan(*a)), argnums)

    ours = gradient(lambda *a: scan_layers(block, place((0, LAYERS, {"*": "device"})), *a))
    assert stored(equations, ours, X, WEIGHTS, CONSTANT) == count
    expected = gradient(lambda *a: plain(block, *a))
    assert_same(quick_jit(ours)(X, WEIGHTS, CONSTANT), quick_jit(expected)(X, WEIGHTS, CONSTANT))


def test_weights_that_are_frozen_cost_no_residual_and_get_no_gradient(equations):
    """A low-rank adapter: the frozen matrix's gradient would need the layer's input, of another width than the rank."""
    rank = 1
    frozen, down, up = WEIGHTS, normal(4, LAYERS, D, rank), normal(5, LAYERS, rank, D)

    def adapted(layer, x):
        w, down, up = layer
        return jnp.sin(x @ w + (x @ down) @ up)

    def gradient(scan):
        return jax.grad(lambda up: summed(scan(adapted, X, (frozen, down, up))))

    ours = gradient(lambda b, *a: scan_layers(b, place((0, LAYERS, {"*": "device"})), *a))
    assert stored(equations, ours, up) == 1  # the cosine; `up` needs x @ down, which is of the rank
    expected = gradient(plain)
    assert_same(quick_jit(ours)(up), quick_jit(expected)(up))
    loops = [e for e in equations(ours, up) if e.primitive.name == "scan"]
    assert not any(v.aval.shape == frozen.shape for e in loops for v in e.outvars), "a gradient of frozen weights"


def test_integers_in_the_carry_store_nothing_that_floats_do_not(equations):
    def counting(w, carry):
        x, ids, n = carry
        return jnp.sin(x @ w), ids + 1, n * 2

    def gradient(w):
        x, *_ = scan_layers(
            counting, place((0, LAYERS, {"*": "device"})), (X, jnp.ones((ROWS, D), jnp.int32), jnp.int32(1)), w
        )
        return summed(x)

    assert stored(equations, jax.grad(gradient), WEIGHTS) == 2  # the input and the cosine


def test_a_jitted_function_stores_for_each_caller_what_that_caller_needs(equations):
    """It is traced once; residuals of both callers come out of the same traced function."""
    loss = jax.jit(lambda *a: summed(scan_layers(block, place((0, LAYERS, {"*": "device"})), *a)))

    def by(*argnums):
        return jax.grad(loss, argnums)

    args = (X, WEIGHTS, CONSTANT)
    assert [stored(equations, by(*n), *args) for n in ((0,), (1, 2), (0,), (2,))] == [1, 3, 1, 2]


@pytest.mark.parametrize("first", [(0,), (1,), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("second", [(0,), (1,), (2,), (1, 2)], ids=str)
def test_both_forward_passes_of_a_jitted_function_before_both_backward_passes(first, second):
    args = (X, WEIGHTS, CONSTANT)
    loss = jax.jit(
        lambda *a: summed(scan_layers(block, place((0, 2, {"v": "host"}), (2, LAYERS, {"*": "device"})), *a))
    )
    expected = jax.grad(lambda *a: summed(plain(block, *a)), (0, 1, 2))(*args)

    def by(argnums):
        def chosen(*values):
            full = list(args)
            for n, v in zip(argnums, values, strict=True):
                full[n] = v
            return loss(*full)

        return jax.vjp(chosen, *(args[n] for n in argnums))[1]

    pulls = [by(first), by(second)]
    for argnums, pull in zip((first, second), pulls, strict=True):
        assert_same(pull(jnp.float32(1)), tuple(expected[n] for n in argnums))
