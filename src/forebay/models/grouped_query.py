"""Grouped-query attention with rotary positions (arXiv:2305.13245), with or without a norm of queries and keys.

Shapes: B batch, S sequence, D embed, H query heads, G key/value heads, K head size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from forebay.models.rope import apply_rope
from forebay.ops.attention import attention
from forebay.ops.norm import rms_norm
from forebay.sharding import Sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attention[T]:
    """The norms, over each head, are None where there are none."""

    query_DHK: T
    key_DGK: T
    value_DGK: T
    out_DHK: T
    query_norm_K: T | None = None
    key_norm_K: T | None = None


def grouped_query_attention(
    weights: Attention[jax.Array],
    h_BSD: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    eps: float,
    sharding: Sharding,
    kernel: str,
) -> jax.Array:
    """Causal attention of normed hidden states, `[batch, sequence, embed]`, weights in the compute dtype.

    Names `query_proj`, `key_proj`, `value_proj`, `context` and `out_proj`. Queries and keys are named turned,
    but before their norm where there is one: its gradient needs what went in, and what comes out costs no product.

    Args:
        rope: cosines and sines `[sequence, K / 2]`, float32.
        eps: of the norms of queries and keys.
    """

    def turned(x: jax.Array) -> jax.Array:
        return x if weights.query_norm_K is not None else apply_rope(x, *rope)

    q_BSHK = turned(jnp.einsum("bsd,dhk->bshk", h_BSD, weights.query_DHK))
    k_BSGK = turned(jnp.einsum("bsd,dgk->bsgk", h_BSD, weights.key_DGK))
    v_BSGK = jnp.einsum("bsd,dgk->bsgk", h_BSD, weights.value_DGK)
    q_BSHK = checkpoint_name(sharding.constrain(q_BSHK, "batch", "sequence", "heads", None), "query_proj")
    k_BSGK = checkpoint_name(sharding.constrain(k_BSGK, "batch", "sequence", "kv_heads", None), "key_proj")
    v_BSGK = checkpoint_name(sharding.constrain(v_BSGK, "batch", "sequence", "kv_heads", None), "value_proj")
    if weights.query_norm_K is not None and weights.key_norm_K is not None:
        q_BSHK = apply_rope(rms_norm(q_BSHK, weights.query_norm_K, eps), *rope)
        k_BSGK = apply_rope(rms_norm(k_BSGK, weights.key_norm_K, eps), *rope)
    context_BSHK = attention(
        q_BSHK, k_BSGK, v_BSGK, kernel=kernel, sharding=sharding, scale=q_BSHK.shape[-1] ** -0.5
    )  # named `context` inside
    out_BSD = jnp.einsum("bshk,dhk->bsd", context_BSHK, weights.out_DHK)
    return checkpoint_name(sharding.constrain(out_BSD, "batch", "sequence", None), "out_proj")


def multiply_adds(*, embed: int, heads: int, kv_heads: int, head_dim: int, seq: int) -> float:
    """Multiply-adds of one token's attention in one layer, forward: its four matrices, and scores and values for the
    mean number of keys that a token of a causal sequence sees, `(seq + 1) / 2`."""
    return 2 * embed * head_dim * (heads + kv_heads) + 2 * heads * head_dim * (seq + 1) / 2
