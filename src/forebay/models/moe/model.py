"""Mixtral and Qwen3-MoE in plain JAX, top to bottom: weights, block, loss.

Shapes: B batch, S sequence, D embed, L layers, H query heads, G key/value heads, K head size, F width of an
expert's MLP, E experts, k of a token, V vocabulary. Weights are float32 (or whatever they are given in);
arithmetic is in the compute dtype; norms, softmax, router and loss in float32.

Activations that are worth keeping, moving or recomputing carry MaxText's names for them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from forebay.models import experts, stacked
from forebay.models.embedding import look_up
from forebay.models.experts import Carry, LayerStats, empty_table, in_compute_dtype, noted, router_logits
from forebay.models.grouped_query import Attention, grouped_query_attention, multiply_adds
from forebay.models.moe.config import MoeConfig
from forebay.models.rope import rope_frequencies, rope_tables
from forebay.models.stacked import plain_scan
from forebay.ops.cross_entropy import cross_entropy
from forebay.ops.moe.routing import (
    choose_experts,
    load_balancing_loss,
    relative_load,
    router_weights,
    tokens_per_expert,
)
from forebay.ops.norm import rms_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts[T]:
    """The router and the experts."""

    router_DE: T
    gate_DEF: T
    up_DEF: T
    down_DEF: T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer[T]:
    """One decoder layer; stacked, each field has a leading dimension of layers.

    `embed`, the dimension that is split over devices, comes first in every matrix (docs/design.md).
    """

    attention_norm_D: T
    attention: Attention[T]
    mlp_norm_D: T
    mlp: Experts[T]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights[T]:
    embedding_VD: T
    moe_layers: Layer[T]
    final_norm_D: T
    head_DV: T


class Aux(NamedTuple):
    """What a forward pass tells besides the loss; everything float32.

    Attributes:
        cross_entropy: of the next token, nats.
        balance_loss: without its factor: `experts_per_token` is perfect balance.
        overflow: share of rows that found no room, mean over layers.
        load: tokens of each expert over the mean, `[layers, experts]`.
    """

    cross_entropy: Any
    balance_loss: Any
    overflow: Any
    load: Any


Parts = experts.Parts[MoeConfig]


# --- weights ----------------------------------------------------------------------------------------


def logical_axes(config: MoeConfig) -> Weights[tuple[str | None, ...]]:
    """The logical axes of every weight (see `forebay.sharding`)."""
    norm = ("layers", None)
    query, key = ("layers", "embed", "heads", None), ("layers", "embed", "kv_heads", None)
    attention = Attention(query, key, key, query, *[norm if config.qk_norm else None] * 2)
    routed = Experts(("layers", "embed", None), *[("layers", "expert_embed", "experts", "mlp")] * 3)
    return Weights(("vocab", "embed"), Layer(norm, attention, norm, routed), (None,), ("embed", "vocab"))


def shapes(config: MoeConfig) -> Weights[tuple[int, ...]]:
    """The shape of every weight."""
    c = config
    L, D, H, G, K, E, F = c.layers, c.embed, c.heads, c.kv_heads, c.head_dim, c.experts, c.moe_mlp
    attention = Attention((L, D, H, K), (L, D, G, K), (L, D, G, K), (L, D, H, K), *[(L, K) if c.qk_norm else None] * 2)
    routed = Experts((L, D, E), *[(L, D, E, F)] * 3)
    return Weights((c.vocab, D), Layer((L, D), attention, (L, D), routed), (D,), (D, c.vocab))


def init(key: jax.Array, config: MoeConfig, dtype: Any = jnp.float32) -> Weights[jax.Array]:
    """Random weights (`forebay.models.stacked.draw`)."""
    back = ("out_DHK", "down_DEF")
    return stacked.draw(key, shapes(config), dtype, layers=config.layers, back_into_the_stream=back)


def parameter_count(config: MoeConfig) -> int:
    return stacked.parameter_count(shapes(config))


# --- the block --------------------------------------------------------------------------------------


def expert_mlp(weights: Experts[jax.Array], h_BSD: jax.Array, *, parts: Parts) -> tuple[jax.Array, LayerStats]:
    """The experts of normed hidden states; in the statistics each expert's mean probability `[experts]`. All of
    `weights` in the compute dtype but the router's."""
    config = parts.config
    scores_BSE = jax.nn.softmax(router_logits(h_BSD, weights.router_DE, parts.sharding))
    experts_BSk = choose_experts(scores_BSE, experts_per_token=config.experts_per_token)
    weights_BSk = router_weights(scores_BSE, experts_BSk, normalise=config.normalise_weights)
    out = parts.routed(h_BSD, experts_BSk, weights_BSk, weights.gate_DEF, weights.up_DEF, weights.down_DEF)
    load_E = relative_load(tokens_per_expert(experts_BSk, config.experts))
    return out.out_BSD, LayerStats(load_E, scores_BSE.mean((0, 1)), out.overflow)


def block(indexed: tuple[jax.Array, Layer[jax.Array]], carry: Carry, rope: Any, *, parts: Parts) -> Carry:
    """One decoder layer, with its number: the residual stream `[batch, sequence, embed]` to the same, and what its
    router did added to the statistics."""
    (index, layer), (x_BSD, table) = indexed, carry
    eps, sharding = parts.config.norm_eps, parts.sharding
    layer = in_compute_dtype(layer, x_BSD.dtype)
    x_BSD = checkpoint_name(sharding.constrain(x_BSD, "batch", "sequence", None), "decoder_layer_input")
    h_BSD = rms_norm(x_BSD, layer.attention_norm_D, eps)
    x_BSD += grouped_query_attention(layer.attention, h_BSD, rope, eps=eps, sharding=sharding, kernel=parts.kernel)
    out_BSD, stats = expert_mlp(layer.mlp, rms_norm(x_BSD, layer.mlp_norm_D, eps), parts=parts)
    return sharding.constrain(x_BSD + out_BSD, "batch", "sequence", None), noted(table, index, stats)


# --- the whole model --------------------------------------------------------------------------------


def hidden_states(
    weights: Weights[jax.Array], tokens_BS: jax.Array, *, parts: Parts, scan_layers: Callable[..., Any], dtype: Any
) -> Carry:
    """Hidden states after the last layer and the final norm, and the statistics of all layers."""
    c = parts.config
    x_BSD = look_up(weights.embedding_VD, tokens_BS, parts.sharding).astype(dtype)
    rope = rope_tables(rope_frequencies(c.head_dim, c.rope_theta), tokens_BS.shape[1])
    carry = (x_BSD, empty_table(c.layers, c.experts, balance=(c.experts,)))
    numbered = (jnp.arange(c.layers, dtype=jnp.int32), weights.moe_layers)
    x_BSD, table = scan_layers(functools.partial(block, parts=parts), carry, numbered, rope, stack="moe_layers")
    return rms_norm(x_BSD, weights.final_norm_D, c.norm_eps), table


def loss(
    weights: Weights[jax.Array],
    batch: Mapping[str, jax.Array],
    *,
    parts: Parts,
    chunking: str,
    scan_layers: Callable[..., Any],
    dtype: Any,
) -> tuple[jax.Array, Aux]:
    """What is minimised: next-token cross entropy in nats and the load-balancing loss times its factor.

    `batch` holds `inputs` and `targets`, int32 `[batch, sequence]`; negative targets do not count in the
    cross entropy. All tokens count in the balance.
    """
    config = parts.config
    x_BSD, table = hidden_states(weights, batch["inputs"], parts=parts, scan_layers=scan_layers, dtype=dtype)
    entropy = cross_entropy(x_BSD, weights.head_DV, batch["targets"], chunking=chunking, sharding=parts.sharding)
    balance = load_balancing_loss(
        table.load_E, table.balance, experts_per_token=config.experts_per_token, by_layer=config.balance_by_layer
    )
    return entropy + config.balance_factor * balance, Aux(entropy, balance, table.overflow.mean(), table.load_E)


def logits(weights: Weights[jax.Array], tokens_BS: jax.Array, *, parts: Parts, dtype: Any) -> jax.Array:
    """Logits `[batch, sequence, vocabulary]` in float32: for sampling and tests, not for training."""
    x_BSD, _ = hidden_states(weights, tokens_BS, parts=parts, scan_layers=plain_scan, dtype=dtype)
    return jnp.einsum("bsd,dv->bsv", x_BSD, weights.head_DV.astype(dtype), preferred_element_type=jnp.float32)


def flops_per_token(config: MoeConfig, seq: int) -> float:
    """Floating-point operations of one training token: forward and backward, nothing recomputed.

    As for Llama (`forebay.models.llama.model.flops_per_token`), of the experts those that a token goes to.
    """
    c, D = config, config.embed
    attention = multiply_adds(embed=D, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, seq=seq)
    routed = D * c.experts + 3 * D * c.moe_mlp * c.experts_per_token
    return 3 * 2 * (c.layers * (attention + routed) + D * c.vocab)
