"""What keeping a value moves, for a small layer worked out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from forebay.graph.kept import Keeping, Moved, keeping
from forebay.graph.loss import trace_loss

TOKENS, WIDTH, HIDDEN, LAYERS = 256, 128, 512, 4
WIDE = TOKENS * HIDDEN * 2
"""Bytes of a hidden activation in bfloat16."""


def block(x, weights):
    into, out = weights
    product = checkpoint_name(x @ into, "product")
    squashed = checkpoint_name(jnp.tanh(product), "squashed")
    return x + squashed @ out, None


def loss(weights, batch):
    x, _ = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), batch["x"], weights)
    return jnp.sum(x.astype(jnp.float32))


@pytest.fixture(scope="module")
def layer():
    weights = tuple(
        jax.ShapeDtypeStruct((LAYERS, *s), jnp.bfloat16) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )  # fmt: skip
    graph = trace_loss(loss, weights, {"x": jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)}, axis_sizes={})
    return graph.blocks[0]


def of(layer, platform: str, name: str) -> Keeping:
    (value,) = layer.named[name]
    return keeping(layer, platform)[value]


def test_what_a_product_makes_is_copied_on_gpus_and_written_once_more_on_tpus(layer):
    # only tanh reads it, which reads the stack instead
    assert of(layer, "cuda", "product") == Keeping(Moved(2 * WIDE, 0), Moved(0, 0))
    assert of(layer, "tpu", "product") == Keeping(Moved(WIDE, 0), Moved(0, 0))


def test_what_a_product_reads_is_copied_out_of_the_stack(layer):
    # the gradient of `out` is a product of it
    assert of(layer, "cuda", "squashed") == Keeping(Moved(2 * WIDE, 2 * WIDE), Moved(0, 0))


def test_what_stays_inside_a_fused_kernel_moves_on_the_way_to_the_host_too():
    """tanh's gradient needs its result in float32 here; no product does."""

    def wide(x, weights):
        into, out = weights
        squashed = checkpoint_name(jnp.tanh((x @ into).astype(jnp.float32)), "squashed")
        return x + squashed.astype(jnp.bfloat16) @ out, None

    def total(weights, batch):
        x, _ = jax.lax.scan(jax.checkpoint(wide, prevent_cse=False), batch["x"], weights)
        return jnp.sum(x.astype(jnp.float32))

    weights = tuple(
        jax.ShapeDtypeStruct((LAYERS, *s), jnp.bfloat16) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )  # fmt: skip
    graph = trace_loss(total, weights, {"x": jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)}, axis_sizes={})
    size = 2 * WIDE
    assert of(graph.blocks[0], "cuda", "squashed") == Keeping(Moved(2 * size, size), Moved(2 * size, size))


def test_a_residual_that_is_not_kept_costs_the_forward_pass_nothing(layer):
    """x and the weights are read, the product and what is squashed are written and read once, the result is written."""
    forward = [layer.forward.costs[i] for i in layer.forward_ops]
    narrow, weight = TOKENS * WIDTH * 2, WIDTH * HIDDEN * 2
    # x for the product and for the sum; the second product is written and read for the sum
    expected = 2 * narrow + 2 * weight + 2 * WIDE + 2 * WIDE + 2 * narrow + narrow
    assert sum(c.hbm_bytes for c in forward) == expected
