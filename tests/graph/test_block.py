"""What a recompute repeats and what a layer stores, against jax's own backward pass, for all sets of names."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from forebay.errors import UserError
from forebay.graph.block import block_graph, forward_costs
from forebay.graph.costs import sum_costs
from forebay.graph.loss import trace_loss
from forebay.graph.partition import whole
from forebay.graph.residuals import residuals
from forebay.graph.rewrite import as_function
from forebay.graph.stacks import find_stacks
from forebay.models.registry import get_model
from forebay.offload import scan_layers
from forebay.sharding import single_device

B, S = 2, 64


def llama():
    model = get_model("llama-tiny")
    weights = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), model.shapes(), is_leaf=lambda x: isinstance(x, tuple)
    )
    tokens = jax.ShapeDtypeStruct((B, S), jnp.int32)

    def loss(weights, batch):
        def scan(block, x, layers, *constants, stack):
            return scan_layers(block, None, x, layers, *constants, stack=stack)

        return model.loss(
            weights, batch, sharding=single_device(), kernel="blockwise", chunking="tokens", scan_layers=scan,
            dtype=jnp.float32,
        )  # fmt: skip

    return model, trace_loss(loss, weights, {"inputs": tokens, "targets": tokens}, axis_sizes={})


@pytest.fixture(scope="module")
def graph():
    return llama()[1].blocks[0]


def product_flops(jaxpr) -> float:
    """Two per multiply-add of every matrix product, loops as often as they run; written without forebay's counter."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            ((contract, _), _) = eqn.params["dimension_numbers"]
            inner = np.prod([eqn.invars[0].aval.shape[d] for d in contract])
            total += 2 * inner * np.prod(eqn.outvars[0].aval.shape)
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += times * product_flops(inner)
    return total


def real_backward(block, names):
    """The products of jax's backward pass when `names` are kept, and the bytes that it stores for it."""
    body = as_function(block.stack.body)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    chosen = list(block.differentiated)

    def of_chosen(*values):
        args = list(block.stack.avals)
        full = [jnp.zeros(a.shape, a.dtype) for a in args]
        for k, v in zip(chosen, values, strict=True):
            full[k] = v
        return body(*full)

    checkpointed = jax.checkpoint(of_chosen, policy=policy, prevent_cse=False)
    avals = [block.stack.avals[k] for k in chosen]
    out = jax.eval_shape(of_chosen, *avals)

    def backward(leaves, cotangents):
        return jax.tree.unflatten(saved["tree"], leaves)(cotangents)

    saved = {}

    def forward(*values):
        _, vjp = jax.vjp(checkpointed, *values)
        leaves, saved["tree"] = jax.tree.flatten(vjp)
        return leaves

    leaves = jax.eval_shape(forward, *avals)
    closed = jax.make_jaxpr(backward)(leaves, out)
    from jax.interpreters import partial_eval as pe

    dced, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    is_carry = [block.stack.roles[k] == "carry" for k in chosen]
    stored = [
        r
        for r in residuals(checkpointed, *avals)
        # what is no gradient's business here is of whole numbers: the blocks that attention visits
        if jnp.issubdtype(r.dtype, jnp.inexact) and (r.argument is None or is_carry[r.argument])
    ]
    # one carry that several leaves are is stored once
    unique = {r.argument: r.num_bytes for r in stored if r.argument is not None}
    return product_flops(dced), sum(r.num_bytes for r in stored if r.argument is None) + sum(unique.values())


SUBSETS = [
    names
    for n in range(4)
    for names in itertools.combinations(("query_proj", "context", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"), n)
][::3]


@pytest.mark.parametrize("names", SUBSETS, ids=",".join)
def test_recomputed_products_and_stored_bytes_are_those_of_jax(graph, names):
    flops, stored = real_backward(graph, names)
    ops, start = graph.recomputed({v for n in names for v in graph.named[n]})
    recomputed = sum(
        graph.forward.costs[i].flops for i in ops if graph.forward.costs[i].kind in ("matmul", "attention")
    )
    backward = sum(c.flops for c in graph.backward.costs if c.kind in ("matmul", "attention"))
    assert recomputed + backward == pytest.approx(flops, rel=1e-6)
    assert sum(graph.forward.num_bytes[v] for v in start) == stored


def test_forward_and_backward_flops_are_those_of_the_model(graph):
    """Per layer: 2 a multiply-add forward, twice that backward; attention's blocks on the diagonal count whole."""
    model, whole_graph = llama()
    c = model.config
    matrices = 2 * c.embed * c.heads * c.head_dim + 2 * c.embed * c.kv_heads * c.head_dim + 3 * c.embed * c.mlp
    tokens = B * S
    attention = 2 * 2 * tokens * S * c.heads * c.head_dim  # one block of 64 x 64, computed whole
    assert (
        sum_costs(forward_costs(graph)).flops - elementwise(forward_costs(graph)) == 2 * tokens * matrices + attention
    )
    # the backward pass of attention makes the scores again: five products to forward's two, and sums out * dout
    backward = [x for x in graph.backward.costs if x.kind in ("matmul", "attention")]
    assert sum(x.flops for x in backward) == (
        2 * 2 * tokens * matrices + 2.5 * attention + 2 * tokens * c.heads * c.head_dim
    )
    head = 2 * tokens * c.embed * c.vocab
    outside = [x for x in whole_graph.outside.costs if x.kind == "matmul"]
    assert sum(x.flops for x in outside) == 3 * head


def elementwise(costs) -> float:
    return sum(c.flops for c in costs if c.kind not in ("matmul", "attention"))


def test_a_kept_attention_whose_statistics_have_no_name_is_repeated():
    """Case of a kernel that keeps its log-sum-exp to itself: naming the output alone buys nothing."""

    @jax.custom_vjp
    def kernel(q):
        return jnp.tanh(q @ q.T) @ q

    def rule(q):
        scores = q @ q.T
        return jnp.tanh(scores) @ q, (q, scores.sum(-1))

    kernel.defvjp(rule, lambda r, d: (d * r[1][:, None] + r[0],))

    def loss(w, x):
        def layer(x, w):
            return checkpoint_name(kernel(x @ w), "context") + x, None

        return jax.lax.scan(layer, x, w)[0].sum()

    (stack,) = find_stacks(jax.make_jaxpr(loss)(jnp.ones((3, 8, 8)), jnp.ones((4, 8))))
    block = block_graph(stack, [whole(len(a.shape)) for a in stack.avals], {})
    nothing, _ = block.recomputed(set())
    with_context, _ = block.recomputed(set(block.named["context"]))
    products = [i for i in nothing if block.forward.costs[i].kind == "matmul"]
    assert [i for i in with_context if block.forward.costs[i].kind == "matmul"] == products


def test_one_name_at_two_places_of_a_block_is_refused():
    def loss(w, x):
        def layer(x, w):
            x = checkpoint_name(x @ w, "hidden")
            return checkpoint_name(jnp.tanh(x) @ w, "hidden"), None

        return jax.lax.scan(layer, x, w)[0].sum()

    (stack,) = find_stacks(jax.make_jaxpr(loss)(jnp.ones((3, 8, 8)), jnp.ones((4, 8))))
    with pytest.raises(UserError, match=r"gives the name 'hidden' to several activations .*test_block\.py"):
        block_graph(stack, [whole(len(a.shape)) for a in stack.avals], {})


def test_the_gradients_of_weights_are_what_no_other_gradient_needs(graph):
    """Of each product with a weight the backward pass has two: the weight's gradient is as large as the product itself."""

    def products(analysis, positions):
        of = [analysis.costs[i].flops for i in positions if analysis.flat.ops[i].primitive == "dot_general"]
        return len(of), sum(of)

    aside = graph.weight_gradient_ops
    assert (
        products(graph.backward, aside)
        == products(graph.forward, graph.forward_ops)
        == (
            7,
            pytest.approx(
                sum(
                    2 * B * S * np.prod(a.shape)
                    for a, role in zip(graph.stack.avals, graph.stack.roles, strict=True)
                    if role == "layer" and len(a.shape) > 1
                )
            ),
        )
    )
