"""DeepSeek-V3 in plain JAX, top to bottom: weights, attention, blocks, loss (arXiv:2412.19437, section 2).

Shapes: B batch, S sequence, D embed, L layers, H heads, K query and key head size (N without position,
R with), W value head size, Q and C ranks of the down-projections of queries and of keys and values, F MLP
width, E routed experts, k of a token, V vocabulary. Weights are float32 (or whatever they are given in);
arithmetic is in the compute dtype; norms, softmax, router and loss in float32.

Activations that are worth keeping, moving or recomputing carry MaxText's names for them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from forebay.models import experts, stacked
from forebay.models.deepseek.config import DeepSeekConfig
from forebay.models.embedding import look_up
from forebay.models.experts import Carry, LayerStats, empty_table, in_compute_dtype, noted, router_logits
from forebay.models.stacked import plain_scan
from forebay.ops.attention import attention
from forebay.ops.cross_entropy import cross_entropy
from forebay.ops.moe.routing import (
    balance_loss,
    choose_experts,
    relative_load,
    router_weights,
    tokens_per_expert,
)
from forebay.ops.norm import rms_norm
from forebay.sharding import Sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attention[T]:
    """Multi-head latent attention. Without a down-projection of the queries the first two are None and Q is D."""

    query_a_DQ: T | None
    query_norm_Q: T | None
    query_b_QHK: T
    kv_a_DC: T
    """To C for keys and values, then to the R of the rotary key."""
    kv_norm_C: T
    kv_b_CHX: T
    """To each head's N of its key and then W of its value."""
    out_DHW: T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mlp[T]:
    gate_DF: T
    up_DF: T
    down_DF: T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts[T]:
    """The router, the routed experts and the shared one. The router's bias has no gradient (`adjusted_bias`)."""

    router_DE: T
    router_bias_E: T
    gate_DEF: T
    up_DEF: T
    down_DEF: T
    shared: Mlp[T]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer[T]:
    """One decoder layer; stacked, each field has a leading dimension of layers. `mlp` is an `Mlp` or `Experts`.

    `embed`, the dimension that is split over devices, comes first in every matrix (docs/design.md).
    """

    attention_norm_D: T
    attention: Attention[T]
    mlp_norm_D: T
    mlp: Mlp[T] | Experts[T]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mtp[T]:
    """The layer that predicts the token after the next, with a leading dimension of 1."""

    token_norm_D: T
    hidden_norm_D: T
    proj_D2D: T
    """From `[embed, (token, hidden)]` to embed."""
    layer: Layer[T]
    final_norm_D: T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights[T]:
    """All weights. `dense_layers` and `mtp` are None where the model has none."""

    embedding_VD: T
    dense_layers: Layer[T] | None
    moe_layers: Layer[T]
    mtp: Mtp[T] | None
    final_norm_D: T
    head_DV: T


class Aux(NamedTuple):
    """What a forward pass tells besides the loss; everything float32.

    Attributes:
        cross_entropy: of the next token, nats.
        mtp_cross_entropy: of the one after it; 0 where it is not predicted.
        balance_loss: mean over layers, without its factor: 1 is perfect balance.
        overflow: share of rows that found no room, mean over layers.
        load: tokens of each expert over the mean, `[MoE layers, experts]`, the MTP layer last.
    """

    cross_entropy: Any
    mtp_cross_entropy: Any
    balance_loss: Any
    overflow: Any
    load: Any


Parts = experts.Parts[DeepSeekConfig]


# --- weights ----------------------------------------------------------------------------------------


def logical_axes(config: DeepSeekConfig) -> Weights[tuple[str | None, ...]]:
    """The logical axes of every weight (see `forebay.sharding`)."""
    lora = config.query_lora > 0
    attention = Attention(
        query_a_DQ=("layers", "embed", None) if lora else None,
        query_norm_Q=("layers", None) if lora else None,
        query_b_QHK=("layers", "embed", "heads", None),
        kv_a_DC=("layers", "embed", None),
        kv_norm_C=("layers", None),
        kv_b_CHX=("layers", "embed", "heads", None),
        out_DHW=("layers", "embed", "heads", None),
    )
    dense = Mlp(*[("layers", "embed", "mlp")] * 3)
    experts = Experts(
        ("layers", "embed", None), ("layers", None), *[("layers", "expert_embed", "experts", "mlp")] * 3, shared=dense
    )
    norm = ("layers", None)
    layer = functools.partial(Layer, norm, attention, norm)
    mtp = Mtp(norm, norm, ("layers", "embed", None, None), layer(experts), norm)
    return Weights(
        embedding_VD=("vocab", "embed"),
        dense_layers=layer(dense) if config.dense_layers else None,
        moe_layers=layer(experts),
        mtp=mtp if config.mtp else None,
        final_norm_D=(None,),
        head_DV=("embed", "vocab"),
    )


def shapes(config: DeepSeekConfig) -> Weights[tuple[int, ...]]:
    """The shape of every weight."""
    c, D, H, E, F = config, config.embed, config.heads, config.experts, config.moe_mlp
    N, R, W, C = c.nope_dim, c.rope_dim, c.value_dim, c.kv_lora
    Q = c.query_lora or D

    def mlp(L: int, width: int) -> Mlp[tuple[int, ...]]:
        return Mlp(*[(L, D, width)] * 3)

    def experts(L: int) -> Experts[tuple[int, ...]]:
        return Experts((L, D, E), (L, E), *[(L, D, E, F)] * 3, shared=mlp(L, c.shared_experts * F))

    def layer(L: int, rest: Any) -> Layer[tuple[int, ...]]:
        attention = Attention(
            query_a_DQ=(L, D, Q) if c.query_lora else None,
            query_norm_Q=(L, Q) if c.query_lora else None,
            query_b_QHK=(L, Q, H, N + R),
            kv_a_DC=(L, D, C + R),
            kv_norm_C=(L, C),
            kv_b_CHX=(L, C, H, N + W),
            out_DHW=(L, D, H, W),
        )
        return Layer((L, D), attention, (L, D), rest)

    return Weights(
        embedding_VD=(c.vocab, D),
        dense_layers=layer(c.dense_layers, mlp(c.dense_layers, c.mlp)) if c.dense_layers else None,
        moe_layers=layer(c.moe_layers, experts(c.moe_layers)),
        mtp=Mtp((1, D), (1, D), (1, D, 2, D), layer(1, experts(1)), (1, D)) if c.mtp else None,
        final_norm_D=(D,),
        head_DV=(D, c.vocab),
    )


def init(key: jax.Array, config: DeepSeekConfig, dtype: Any = jnp.float32) -> Weights[jax.Array]:
    """Random weights (`forebay.models.stacked.draw`), the router's bias at zero."""
    back = ("out_DHW", "down_DF", "down_DEF")
    return stacked.draw(key, shapes(config), dtype, layers=config.layers, back_into_the_stream=back)


def parameter_count(config: DeepSeekConfig) -> int:
    return stacked.parameter_count(shapes(config))


# --- attention --------------------------------------------------------------------------------------


def rope_frequencies(config: DeepSeekConfig) -> np.ndarray:
    """Angular frequencies `[rope_dim / 2]` in radians per position, float32.

    RoPE (arXiv:2104.09864). YaRN (arXiv:2309.00071, section 3.2) divides by its factor the frequencies that
    turn less than `beta_slow` times in the original context, keeps those that turn more than `beta_fast`
    times, and blends linearly, by index, those between.
    """
    R, base, yarn = config.rope_dim, config.rope_theta, config.yarn
    index = np.arange(R // 2, dtype=np.float64)
    frequencies = base ** (-2 * index / R)
    if yarn is not None:

        def index_of(turns: float) -> float:
            return R * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

        first = max(math.floor(index_of(yarn.beta_fast)), 0)
        last = min(math.ceil(index_of(yarn.beta_slow)), R - 1)
        stretched = np.clip((index - first) / max(last - first, 1e-3), 0, 1)
        frequencies = frequencies * (1 - stretched) + frequencies / yarn.factor * stretched
    return frequencies.astype(np.float32)


def _yarn_mscale(factor: float, mscale: float) -> float:
    """How much YaRN raises attention's temperature, as DeepSeek writes it."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def rope_tables(config: DeepSeekConfig, seq: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[seq, rope_dim / 2]` in float32, with YaRN's factor on both."""
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None] * rope_frequencies(config)
    factor, yarn = 1.0, config.yarn
    if yarn is not None:
        factor = _yarn_mscale(yarn.factor, yarn.mscale) / _yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def softmax_scale(config: DeepSeekConfig) -> float:
    yarn = config.yarn
    mscale = 1.0 if yarn is None else _yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return config.head_dim**-0.5 * mscale * mscale


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates neighbouring pairs of the last dimension; in the result the pairs' first parts come first, then the
    second ones. Queries and keys are reordered alike, so that their products are not changed by it."""
    first, second = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def latent_attention(
    weights: Attention[jax.Array],
    h_BSD: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    config: DeepSeekConfig,
    sharding: Sharding,
    kernel: str,
) -> jax.Array:
    """Multi-head latent attention of normed hidden states, `[batch, sequence, embed]`, weights in the compute dtype."""
    cos_SR, sin_SR = rope
    by_head = functools.partial(_constrain_heads, sharding=sharding)
    if weights.query_a_DQ is None or weights.query_norm_Q is None:
        q_BSQ = h_BSD
    else:
        q_BSQ = checkpoint_name(jnp.einsum("bsd,dq->bsq", h_BSD, weights.query_a_DQ), "query_wa_proj")
        q_BSQ = checkpoint_name(rms_norm(q_BSQ, weights.query_norm_Q, config.norm_eps), "mla_q")
    kv_BSC = checkpoint_name(jnp.einsum("bsd,dc->bsc", h_BSD, weights.kv_a_DC), "kv_wa_proj")
    latent_BSC = rms_norm(kv_BSC[..., : config.kv_lora], weights.kv_norm_C, config.norm_eps)
    latent_BSC = checkpoint_name(latent_BSC, "mla_kv")

    q_BSHK = jnp.einsum("bsq,qhk->bshk", q_BSQ, weights.query_b_QHK)
    rotated_BSHR = apply_rope(q_BSHK[..., config.nope_dim :], cos_SR[:, None], sin_SR[:, None])
    q_BSHK = jnp.concatenate([q_BSHK[..., : config.nope_dim], rotated_BSHR], axis=-1)
    k_BSHN, v_BSHW = jnp.split(jnp.einsum("bsc,chx->bshx", latent_BSC, weights.kv_b_CHX), [config.nope_dim], axis=-1)
    rotated_BS1R = apply_rope(kv_BSC[..., config.kv_lora :], cos_SR, sin_SR)[:, :, None]
    rotated_BSHR = jnp.broadcast_to(rotated_BS1R, (*k_BSHN.shape[:3], config.rope_dim))
    k_BSHK = jnp.concatenate([k_BSHN, rotated_BSHR], axis=-1)

    q_BSHK = checkpoint_name(by_head(q_BSHK), "query_proj")
    k_BSHK = checkpoint_name(by_head(k_BSHK), "key_proj")
    v_BSHW = checkpoint_name(by_head(v_BSHW), "value_proj")
    context_BSHW = attention(
        q_BSHK, k_BSHK, v_BSHW, kernel=kernel, sharding=sharding, scale=softmax_scale(config)
    )  # named `context` inside
    out_BSD = jnp.einsum("bshw,dhw->bsd", context_BSHW, weights.out_DHW)
    return checkpoint_name(_constrain_stream(out_BSD, sharding=sharding), "out_proj")


# --- MLPs -------------------------------------------------------------------------------------------


def dense_mlp(weights: Mlp[jax.Array], h_BSD: jax.Array, *, sharding: Sharding) -> jax.Array:
    gate_BSF = sharding.constrain(jnp.einsum("bsd,df->bsf", h_BSD, weights.gate_DF), "batch", "sequence", "mlp")
    up_BSF = sharding.constrain(jnp.einsum("bsd,df->bsf", h_BSD, weights.up_DF), "batch", "sequence", "mlp")
    gate_BSF, up_BSF = checkpoint_name(gate_BSF, "mlpwi_0"), checkpoint_name(up_BSF, "mlpwi_1")
    down_BSD = jnp.einsum("bsf,df->bsd", jax.nn.silu(gate_BSF) * up_BSF, weights.down_DF)
    return checkpoint_name(_constrain_stream(down_BSD, sharding=sharding), "mlpwo")


def expert_mlp(weights: Experts[jax.Array], h_BSD: jax.Array, *, parts: Parts) -> tuple[jax.Array, LayerStats]:
    """Routed and shared experts of normed hidden states. All of `weights` in the compute dtype but the router's."""
    config, sharding = parts.config, parts.sharding
    scores_BSE = jax.nn.sigmoid(router_logits(h_BSD, weights.router_DE, sharding))
    experts_BSk = choose_experts(
        scores_BSE, weights.router_bias_E, experts_per_token=config.experts_per_token,
        groups=config.expert_groups, groups_per_token=config.groups_per_token,
    )  # fmt: skip
    weights_BSk = router_weights(
        scores_BSE, experts_BSk, normalise=config.normalise_weights, route_scale=config.route_scale
    )
    out = parts.routed(h_BSD, experts_BSk, weights_BSk, weights.gate_DEF, weights.up_DEF, weights.down_DEF)
    tokens_BE = tokens_per_expert(experts_BSk, config.experts)
    stats = LayerStats(relative_load(tokens_BE), balance_loss(scores_BSE, tokens_BE), out.overflow)
    return out.out_BSD + dense_mlp(weights.shared, h_BSD, sharding=sharding), stats


# --- blocks -----------------------------------------------------------------------------------------


def decoder_layer(
    layer: Layer[jax.Array], x_BSD: jax.Array, rope: tuple[jax.Array, jax.Array], *, parts: Parts
) -> tuple[jax.Array, LayerStats | None]:
    """One decoder layer: `[batch, sequence, embed]` to the same, and what its router did, if it has one."""
    config, sharding, dtype = parts.config, parts.sharding, x_BSD.dtype
    layer = in_compute_dtype(layer, dtype)
    h_BSD = rms_norm(x_BSD, layer.attention_norm_D, config.norm_eps)
    x_BSD += latent_attention(layer.attention, h_BSD, rope, config=config, sharding=sharding, kernel=parts.kernel)
    h_BSD = rms_norm(x_BSD, layer.mlp_norm_D, config.norm_eps)
    stats = None
    if isinstance(layer.mlp, Experts):
        out_BSD, stats = expert_mlp(layer.mlp, h_BSD, parts=parts)
    else:
        out_BSD = dense_mlp(layer.mlp, h_BSD, sharding=sharding)
    return _constrain_stream(x_BSD + out_BSD, sharding=sharding), stats


def dense_block(layer: Layer[jax.Array], x_BSD: jax.Array, rope: Any, *, parts: Parts) -> jax.Array:
    """A layer of the stack `dense_layers`."""
    x_BSD = checkpoint_name(_constrain_stream(x_BSD, sharding=parts.sharding), "decoder_layer_input")
    return decoder_layer(layer, x_BSD, rope, parts=parts)[0]


def moe_block(indexed: tuple[jax.Array, Layer[jax.Array]], carry: Carry, rope: Any, *, parts: Parts) -> Carry:
    """A layer of the stack `moe_layers`, with its number."""
    (index, layer), (x_BSD, table) = indexed, carry
    x_BSD = checkpoint_name(_constrain_stream(x_BSD, sharding=parts.sharding), "decoder_layer_input")
    x_BSD, stats = decoder_layer(layer, x_BSD, rope, parts=parts)
    assert stats is not None
    return x_BSD, noted(table, index, stats)


def mtp_block(mtp: Mtp[jax.Array], carry: Carry, token_BSD: jax.Array, rope: Any, *, parts: Parts) -> Carry:
    """The layer of the stack `mtp`: joins the hidden state of each position with the embedding of the next token."""
    x_BSD, table = carry
    x_BSD = checkpoint_name(_constrain_stream(x_BSD, sharding=parts.sharding), "decoder_layer_input")
    dtype, eps = x_BSD.dtype, parts.config.norm_eps
    joined = (rms_norm(token_BSD, mtp.token_norm_D, eps), rms_norm(x_BSD, mtp.hidden_norm_D, eps))
    proj_D2D = mtp.proj_D2D.astype(dtype)
    token_BSD, hidden_BSD = (jnp.einsum("bsd,dc->bsc", h, proj_D2D[:, n]) for n, h in enumerate(joined))
    x_BSD = checkpoint_name(_constrain_stream(token_BSD + hidden_BSD, sharding=parts.sharding), "mtp_proj")
    x_BSD, stats = decoder_layer(mtp.layer, x_BSD, rope, parts=parts)
    return x_BSD, jax.tree.map(lambda _, row: row[None], table, stats)


# --- the whole model --------------------------------------------------------------------------------


def hidden_states(
    weights: Weights[jax.Array], tokens_BS: jax.Array, *, parts: Parts, scan_layers: Callable[..., Any], dtype: Any
) -> Carry:
    """Hidden states after the last layer and before the last norm, and the statistics of the layers of experts."""
    config, sharding = parts.config, parts.sharding
    x_BSD = look_up(weights.embedding_VD, tokens_BS, sharding).astype(dtype)
    rope = rope_tables(config, tokens_BS.shape[1])
    if weights.dense_layers is not None:
        block = functools.partial(dense_block, parts=parts)
        x_BSD = scan_layers(block, x_BSD, weights.dense_layers, rope, stack="dense_layers")
    carry = (x_BSD, empty_table(config.moe_layers, config.experts))
    numbered = (jnp.arange(config.moe_layers, dtype=jnp.int32), weights.moe_layers)
    return scan_layers(functools.partial(moe_block, parts=parts), carry, numbered, rope, stack="moe_layers")


def loss(
    weights: Weights[jax.Array],
    batch: Mapping[str, jax.Array],
    *,
    parts: Parts,
    chunking: str,
    scan_layers: Callable[..., Any],
    dtype: Any,
) -> tuple[jax.Array, Aux]:
    """What is minimised: next-token cross entropy, the token after next's, and the balance loss, in nats.

    `batch` holds `inputs` and `targets`, int32 `[batch, sequence]`; negative targets do not count. The
    multi-token-prediction layer sees the main model before its last norm, and shares its embeddings
    (section 2.2 with depth 1).
    """
    config, sharding = parts.config, parts.sharding
    entropy = functools.partial(cross_entropy, chunking=chunking, sharding=sharding)
    x_BSD, table = hidden_states(weights, batch["inputs"], parts=parts, scan_layers=scan_layers, dtype=dtype)
    main = entropy(rms_norm(x_BSD, weights.final_norm_D, config.norm_eps), weights.head_DV, batch["targets"])
    after_next = jnp.float32(0)
    if weights.mtp is not None:
        next_BS = batch["targets"]
        after_BS = jnp.concatenate([next_BS[:, 1:], jnp.full_like(next_BS[:, :1], -1)], axis=1)
        after_BS = jnp.where(next_BS >= 0, after_BS, -1)
        token_BSD = look_up(weights.embedding_VD, jnp.maximum(next_BS, 0), sharding).astype(dtype)
        rope = rope_tables(config, next_BS.shape[1])
        x_BSD, last = scan_layers(
            functools.partial(mtp_block, parts=parts), (x_BSD, empty_table(1, config.experts)), weights.mtp, token_BSD, rope,
            stack="mtp",
        )  # fmt: skip
        # the last norm is outside of the stack: inside, recomputing the layer would repeat all of it
        x_BSD = rms_norm(x_BSD, weights.mtp.final_norm_D[0], config.norm_eps)
        after_next = entropy(x_BSD, weights.head_DV, after_BS)
        table = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), table, last)
    balance = table.balance.mean()
    total = main + config.mtp_factor * after_next + config.balance_factor * len(table.balance) * balance
    return total, Aux(main, after_next, balance, table.overflow.mean(), table.load_E)


def logits(weights: Weights[jax.Array], tokens_BS: jax.Array, *, parts: Parts, dtype: Any) -> jax.Array:
    """Logits `[batch, sequence, vocabulary]` in float32: for sampling and tests, not for training."""
    x_BSD, _ = hidden_states(weights, tokens_BS, parts=parts, scan_layers=plain_scan, dtype=dtype)
    x_BSD = rms_norm(x_BSD, weights.final_norm_D, parts.config.norm_eps)
    return jnp.einsum("bsd,dv->bsv", x_BSD, weights.head_DV.astype(dtype), preferred_element_type=jnp.float32)


def flops_per_token(config: DeepSeekConfig, seq: int) -> float:
    """Floating-point operations of one training token: forward and backward, nothing recomputed.

    As for Llama (`forebay.models.llama.model.flops_per_token`): two per multiply-add, backward twice the
    forward, causal attention by the mean number of keys seen; of the experts those that a token goes to.
    The multi-token-prediction layer and its share of the head are counted.
    """
    c, D, H = config, config.embed, config.heads
    query = D * c.query_lora + c.query_lora * H * c.head_dim if c.query_lora else D * H * c.head_dim
    kv = D * (c.kv_lora + c.rope_dim) + c.kv_lora * H * (c.nope_dim + c.value_dim)
    attention = query + kv + H * c.value_dim * D + H * (c.head_dim + c.value_dim) * (seq + 1) / 2
    moe = D * c.experts + 3 * D * c.moe_mlp * (c.experts_per_token + c.shared_experts)
    layers = c.layers * attention + c.dense_layers * 3 * D * c.mlp + c.moe_layers * moe
    mtp = attention + moe + 2 * D * D + D * c.vocab if c.mtp else 0
    return 3 * 2 * (layers + mtp + D * c.vocab)


def _constrain_stream(x_BSD: jax.Array, *, sharding: Sharding) -> jax.Array:
    return sharding.constrain(x_BSD, "batch", "sequence", None)


def _constrain_heads(x_BSHK: jax.Array, *, sharding: Sharding) -> jax.Array:
    return sharding.constrain(x_BSHK, "batch", "sequence", "heads", None)
