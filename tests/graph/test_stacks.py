"""Finding the layers of anyone's loss, naming them, and running them under a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import forebay
from forebay.errors import UserError
from forebay.graph.loss import trace_loss
from forebay.graph.stacks import find_stacks, unrolled_layers
from forebay.planner import Placement, Plan

L, D, F, N = 5, 8, 16, 4


def weights(key=0):
    a, b = jax.random.split(jax.random.key(key))
    return {"wi": 0.3 * jax.random.normal(a, (L, D, F)), "wo": 0.3 * jax.random.normal(b, (L, F, D))}


X = jax.random.normal(jax.random.key(7), (N, D))


def layer(x, w):
    return x + jnp.tanh(x @ w["wi"]) @ w["wo"]


def scanned(w, x):
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2).sum()


def checkpointed(w, x):
    return (jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, w)[0] ** 2).sum()


def with_auxiliary(w, x):
    def body(x, w):
        y = layer(x, w)
        return y, {"mean": (y**2).mean(), "row": y[0]}

    x, aux = jax.lax.scan(jax.checkpoint(body), x, w)
    return (x**2).sum() + aux["mean"].sum() + (aux["row"] ** 3).sum(), aux["mean"]


def looped(w, x):
    block = jax.checkpoint(layer)
    for i in range(L):
        x = block(x, jax.tree.map(lambda a: a[i], w))  # noqa: B023
    return (x**2).sum()


def reversed_scan(w, x):
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, w, reverse=True)[0] ** 2).sum()


def library(w, x):
    def block(w, x):
        return layer(x, w)

    return (forebay.scan_layers(block, None, x, w, stack="decoder") ** 2).sum()


def shared(w, x):
    """A weight that all layers use besides their own, and that is differentiated too."""

    def body(x, own):
        return layer(x, {"wi": own, "wo": w["wo"][0]}), None

    return (jax.lax.scan(body, x, w["wi"])[0] ** 2).sum()


def looped_and_jitted(w, x):
    """The cached jaxpr of the block is one object, called five times."""
    block = jax.jit(jax.checkpoint(layer))
    for i in range(L):
        x = block(x, jax.tree.map(lambda a: a[i], w))  # noqa: B023
    return (x**2).sum()


def with_numbers_in_the_carry(w, x):
    """A step counter and an accumulator that start as Python numbers."""

    def body(carry, w):
        x, count, total = carry
        y = layer(x, w)
        return (y, count + 1, total + (y**2).mean()), None

    (x, count, total), _ = jax.lax.scan(body, (x, 0, 0.0), w)
    return (x**2).sum() + total * count


LOSSES = [
    scanned, checkpointed, with_auxiliary, looped, looped_and_jitted, reversed_scan, library, shared,
    with_numbers_in_the_carry,
]  # fmt: skip


def stacks(loss):
    return find_stacks(jax.make_jaxpr(loss)(weights(), X))


@pytest.mark.parametrize("loss", LOSSES)
def test_each_is_one_stack_of_five_layers(loss):
    (stack,) = stacks(loss)
    assert stack.layers == L
    assert stack.name == ("decoder" if loss is library else "layers")
    assert not any("remat" in str(e.primitive) for e in stack.body.jaxpr.eqns)


def value_and_gradients(loss):
    def scalar(w, x):
        result = loss(w, x)
        return result[0] if isinstance(result, tuple) else result

    # as a user's is compiled: numbers are compared to the last bits, which unoptimized code rounds otherwise
    optimized = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1)), compiler_options=optimized)(weights(), X)


def assert_same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "tensors", [{}, {"dot_0": "host"}, {"dot_0": "device", "dot_1": "host"}, {"*": "device"}], ids=str
)
def test_a_plan_changes_neither_value_nor_gradients(loss, tensors):
    name = "decoder" if loss is library else "layers"
    cut = L if loss is reversed_scan else 2
    ranges = [Placement(name, (0, cut), tensors)]
    ranges += [Placement(name, (cut, L), {"dot_1": "device"})] if cut < L else []
    planned = forebay.apply(loss, Plan(tuple(ranges)))
    assert_same(value_and_gradients(planned), value_and_gradients(loss))


def test_what_a_loss_returns_beside_its_value_is_kept():
    planned = forebay.apply(with_auxiliary, Plan((Placement("layers", (0, L), {}),)))
    np.testing.assert_allclose(planned(weights(), X)[1], with_auxiliary(weights(), X)[1], rtol=1e-6)


def test_a_plan_is_really_applied():
    """Under a plan that keeps the product on the host, the backward pass reads it from there."""
    planned = forebay.apply(scanned, Plan((Placement("layers", (0, L), {"dot_0": "host"}),)))
    text = str(jax.make_jaxpr(jax.grad(planned))(weights(), X))
    assert "<host>" in text
    assert "<host>" not in str(jax.make_jaxpr(jax.grad(scanned))(weights(), X))


def test_a_plan_of_other_names_is_refused():
    planned = forebay.apply(scanned, Plan((Placement("layers", (0, L), {"dott_0": "host"}),)))
    with pytest.raises(UserError, match="'dot_0'"):
        planned(weights(), X)
    with pytest.raises(UserError, match="layer stack 'blocks'"):
        forebay.apply(scanned, Plan((Placement("blocks", (0, L), {}),)))(weights(), X)


def test_a_scan_inside_a_custom_derivative_is_not_a_stack():
    @jax.custom_vjp
    def head(x, w):
        return jax.lax.scan(lambda t, w: (t + (x @ w).sum(), None), 0.0, w)[0]

    head.defvjp(lambda x, w: (head(x, w), (x, w)), lambda r, d: (d * r[0], d * r[1]))
    jaxpr = jax.make_jaxpr(lambda w, x: head(x, w["wi"]) + scanned(w, x))(weights(), X)
    assert len(find_stacks(jaxpr)) == 1


def test_two_stacks_have_two_names_and_one_name_twice_is_an_error():
    both = jax.make_jaxpr(lambda w, x: scanned(w, x) + scanned(w, 2 * x))(weights(), X)
    assert [s.name for s in find_stacks(both)] == ["layers_0", "layers_1"]
    with pytest.raises(UserError, match="two stacks of layers are called 'decoder'"):
        find_stacks(jax.make_jaxpr(lambda w, x: library(w, x) + library(w, 2 * x))(weights(), X))


def test_layers_in_a_python_loop_without_checkpoints_are_pointed_at():
    def unrolled(w, x):
        for i in range(L):
            x = layer(x, jax.tree.map(lambda a: a[i], w))  # noqa: B023
        return (x**2).sum()

    assert unrolled_layers(jax.make_jaxpr(unrolled)(weights(), X)) == L
    with pytest.raises(UserError, match=f"{L} like layers in a Python loop: stack their weights"):
        trace_loss(unrolled, weights(), X, axis_sizes={})


def test_checkpointed_blocks_that_differ_are_named_as_the_reason():
    def differing(w, x):
        for i in range(L):
            block = jax.checkpoint(lambda x, w: layer(x, w) * (1 + 0.3 * i))  # noqa: B023
            x = block(x, jax.tree.map(lambda a: a[i], w))  # noqa: B023
        return (x**2).sum()

    with pytest.raises(UserError, match=f"{L} jax.checkpoint blocks and no two are alike"):
        trace_loss(differing, weights(), X, axis_sizes={})


def test_blocks_called_in_a_loop_know_what_they_hand_on():
    for loss in (looped, looped_and_jitted):
        (stack,) = stacks(loss)
        assert [stack.roles.count(r) for r in ("carry", "layer", "constant")] == [1, 2, 0]


def test_what_is_changed_between_two_blocks_is_still_handed_on():
    """As a weight of each layer it would count as there anyway, and its storage as free."""
    block = jax.checkpoint(layer)

    def changing(w, x):
        for i in range(L):
            x = jnp.sin(block(x, jax.tree.map(lambda a: a[i], w)))  # noqa: B023
        return (x**2).sum()

    (stack,) = stacks(changing)
    assert [stack.roles.count(r) for r in ("carry", "layer", "constant")] == [1, 2, 0]
    graph = trace_loss(changing, weights(), X, axis_sizes={})
    assert graph.layer_bytes["layers"] == 4 * L * 2 * D * F


def test_a_block_may_return_what_it_hands_on_second():
    def swapped(x, w):
        y = layer(x, w)
        return (y**2).mean(), y

    def loss(w, x):
        total, block = 0.0, jax.checkpoint(swapped)
        for i in range(L):
            mean, x = block(x, jax.tree.map(lambda a: a[i], w))  # noqa: B023
            total += mean
        return (x**2).sum() + total

    graph = trace_loss(loss, weights(), X, axis_sizes={})
    assert graph.stacks == {"layers": L}
    planned = forebay.apply(loss, Plan((Placement("layers", (0, L), {"dot_0": "device"}),)))
    assert_same(value_and_gradients(planned), value_and_gradients(loss))


def test_nothing_to_decide_and_no_scalar():
    with pytest.raises(UserError, match="nothing to decide"):
        trace_loss(lambda w, x: (x @ w["wi"][0]).sum(), weights(), X, axis_sizes={})
    with pytest.raises(UserError, match="must return a scalar"):
        trace_loss(lambda w, x: x @ w["wi"][0], weights(), X, axis_sizes={})


def test_auto_name_names_products_and_large_operands_in_order():
    named = forebay.auto_name(lambda x, w: layer(x, w))
    w = jax.tree.map(lambda a: a[0], weights())
    jaxpr = jax.make_jaxpr(named)(X, w)
    assert [e.params["name"] for e in jaxpr.jaxpr.eqns if e.primitive.name == "name"] == ["dot_0", "dot_1"]
    np.testing.assert_array_equal(named(X, w), layer(X, w))

    def gated(x, w):
        return (jnp.sin(x @ w["wi"]) * (x @ w["wi"])) @ w["wo"]

    text = jax.make_jaxpr(forebay.auto_name(gated))(X, w)
    names = [e.params["name"] for e in text.jaxpr.eqns if e.primitive.name == "name"]
    assert names == ["dot_0", "dot_1", "operand_0", "dot_2"]


def test_auto_name_leaves_code_with_names_alone():
    def mine(x, w):
        return checkpoint_name(x @ w["wi"], "mine") @ w["wo"]

    jaxpr = jax.make_jaxpr(forebay.auto_name(mine))(X, jax.tree.map(lambda a: a[0], weights()))
    assert [e.params["name"] for e in jaxpr.jaxpr.eqns if e.primitive.name == "name"] == ["mine"]


def test_a_policy_and_a_block_from_a_plan():
    plan = Plan((Placement("layers", (0, L), {"dot_0": "device"}),))

    def by_hand(w, x):
        return (jax.lax.scan(lambda x, w: (plan.apply(layer)(x, w), None), x, w)[0] ** 2).sum()

    a, b = value_and_gradients(by_hand), value_and_gradients(scanned)
    assert_same(a, b)
    assert callable(plan.policy("layers"))
    two = Plan((Placement("layers", (0, 2), {}), Placement("layers", (2, L), {"dot_0": "device"})))
    with pytest.raises(UserError, match="2 placements, and a checkpoint policy is one"):
        two.policy()
    with pytest.raises(UserError, match="unknown layer stack 'blocks'"):
        plan.policy("blocks")
