"""Llama 3 in plain JAX, top to bottom: weights, block, loss.

Shapes: B batch, S sequence, D embed, L layers, H query heads, G key/value heads, K head size, F MLP
width, V vocabulary. Weights are float32 (or whatever they are given in); arithmetic is in the
compute dtype; norms, softmax and loss in float32.

Activations that are worth keeping, moving or recomputing carry MaxText's names for them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from forebay.models import stacked
from forebay.models.embedding import look_up
from forebay.models.grouped_query import Attention, grouped_query_attention, multiply_adds
from forebay.models.llama.config import LlamaConfig
from forebay.models.rope import rope_frequencies, rope_tables
from forebay.models.stacked import plain_scan
from forebay.ops.cross_entropy import cross_entropy
from forebay.ops.norm import rms_norm
from forebay.sharding import Sharding

# The activations a plan can place, in the order the block makes them.
ACTIVATIONS = (
    "decoder_layer_input",
    "query_proj",
    "key_proj",
    "value_proj",
    "context",
    "out_proj",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer[T]:
    """One decoder layer; stacked, each field has a leading dimension of `layers`.

    `embed`, the dimension that is split over devices, comes first in every matrix: an all-gather along
    a minor dimension makes XLA transpose the whole stack before the loop.
    """

    attention_norm_D: T
    query_DHK: T
    key_DGK: T
    value_DGK: T
    out_DHK: T
    mlp_norm_D: T
    gate_DF: T
    up_DF: T
    down_DF: T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights[T]:
    """All weights. `head_DV` is None where the embeddings are tied."""

    embedding_VD: T
    layers: Layer[T]
    final_norm_D: T
    head_DV: T | None


_LAYER_AXES = Layer(
    attention_norm_D=("layers", None),
    query_DHK=("layers", "embed", "heads", None),
    key_DGK=("layers", "embed", "kv_heads", None),
    value_DGK=("layers", "embed", "kv_heads", None),
    out_DHK=("layers", "embed", "heads", None),
    mlp_norm_D=("layers", None),
    gate_DF=("layers", "embed", "mlp"),
    up_DF=("layers", "embed", "mlp"),
    down_DF=("layers", "embed", "mlp"),
)


def logical_axes(config: LlamaConfig) -> Weights[tuple[str | None, ...]]:
    """The logical axes of every weight (see `forebay.sharding`)."""
    head = None if config.tied_embeddings else ("embed", "vocab")
    return Weights(("vocab", "embed"), _LAYER_AXES, (None,), head)


def shapes(config: LlamaConfig) -> Weights[tuple[int, ...]]:
    """The shape of every weight."""
    L, D, H, G, K, F, V = (
        config.layers, config.embed, config.heads, config.kv_heads, config.head_dim, config.mlp, config.vocab,
    )  # fmt: skip
    layer = Layer(
        (L, D), (L, D, H, K), (L, D, G, K), (L, D, G, K), (L, D, H, K), (L, D), (L, D, F), (L, D, F), (L, D, F)
    )
    return Weights((V, D), layer, (D,), None if config.tied_embeddings else (D, V))


def init(key: jax.Array, config: LlamaConfig, dtype: Any = jnp.float32) -> Weights[jax.Array]:
    """Random weights: normal with standard deviation 0.02, the two projections back into the residual
    stream scaled down by `sqrt(2 * layers)` (GPT-2's initialisation), norms at one."""
    tree = shapes(config)
    leaves, treedef = jax.tree.flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))

    def one(key, path, shape):
        name = path[-1].name
        if "norm" in name:
            return jnp.ones(shape, dtype)
        std = 0.02 / (2 * config.layers) ** 0.5 if name in ("out_DHK", "down_DF") else 0.02
        return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return jax.tree.unflatten(treedef, [one(k, p, s) for k, (p, s) in zip(keys, leaves, strict=True)])


def block(
    layer: Layer[jax.Array],
    x_BSD: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    config: LlamaConfig,
    sharding: Sharding,
    kernel: str,
) -> jax.Array:
    """One decoder layer: `[batch, sequence, embed]` to the same."""
    dtype = x_BSD.dtype
    layer = jax.tree.map(lambda w: w.astype(dtype), layer)
    residual_stream = functools.partial(_constrain_stream, sharding=sharding)

    x_BSD = checkpoint_name(residual_stream(x_BSD), "decoder_layer_input")

    h_BSD = rms_norm(x_BSD, layer.attention_norm_D, config.norm_eps)
    weights = Attention(layer.query_DHK, layer.key_DGK, layer.value_DGK, layer.out_DHK)
    x_BSD += grouped_query_attention(weights, h_BSD, rope, eps=config.norm_eps, sharding=sharding, kernel=kernel)

    h_BSD = rms_norm(x_BSD, layer.mlp_norm_D, config.norm_eps)
    gate_BSF = sharding.constrain(jnp.einsum("bsd,df->bsf", h_BSD, layer.gate_DF), "batch", "sequence", "mlp")
    up_BSF = sharding.constrain(jnp.einsum("bsd,df->bsf", h_BSD, layer.up_DF), "batch", "sequence", "mlp")
    gate_BSF, up_BSF = checkpoint_name(gate_BSF, "mlpwi_0"), checkpoint_name(up_BSF, "mlpwi_1")
    down_BSD = jnp.einsum("bsf,df->bsd", jax.nn.silu(gate_BSF) * up_BSF, layer.down_DF)
    return residual_stream(x_BSD + checkpoint_name(residual_stream(down_BSD), "mlpwo"))


def hidden_states(
    weights: Weights[jax.Array],
    tokens_BS: jax.Array,
    *,
    config: LlamaConfig,
    sharding: Sharding,
    kernel: str,
    scan_layers: Callable[..., Any],
    dtype: Any,
) -> jax.Array:
    """The residual stream `[batch, sequence, embed]` after the last layer and the final norm.

    `scan_layers(block, x, layers, *constants, stack=name)` runs `block` over a stack of layers; what
    it keeps, moves and recomputes is its business (`forebay.offload`).
    """
    x_BSD = look_up(weights.embedding_VD, tokens_BS, sharding).astype(dtype)
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    rope = rope_tables(frequencies, tokens_BS.shape[1])
    layer_block = functools.partial(block, config=config, sharding=sharding, kernel=kernel)
    x_BSD = scan_layers(layer_block, x_BSD, weights.layers, rope, stack="layers")
    return rms_norm(x_BSD, weights.final_norm_D, config.norm_eps)


def loss(
    weights: Weights[jax.Array],
    batch: Mapping[str, jax.Array],
    *,
    config: LlamaConfig,
    sharding: Sharding,
    kernel: str,
    chunking: str,
    scan_layers: Callable[..., Any],
    dtype: Any,
) -> jax.Array:
    """Mean next-token cross entropy in nats.

    `batch` holds `inputs` and `targets`, int32 `[batch, sequence]`; negative targets do not count.
    """
    x_BSD = hidden_states(
        weights, batch["inputs"], config=config, sharding=sharding, kernel=kernel, scan_layers=scan_layers, dtype=dtype
    )
    return cross_entropy(x_BSD, head(weights), batch["targets"], chunking=chunking, sharding=sharding)


def logits(
    weights: Weights[jax.Array], tokens_BS: jax.Array, *, config: LlamaConfig, sharding: Sharding, dtype: Any
) -> jax.Array:
    """Logits `[batch, sequence, vocabulary]` in float32: for sampling and tests, not for training."""
    x_BSD = hidden_states(
        weights, tokens_BS, config=config, sharding=sharding, kernel="blockwise", scan_layers=plain_scan, dtype=dtype
    )
    return jnp.einsum("bsd,dv->bsv", x_BSD, head(weights).astype(dtype), preferred_element_type=jnp.float32)


def head(weights: Weights[jax.Array]) -> jax.Array:
    """The output embedding `[embed, vocabulary]`."""
    return weights.embedding_VD.T if weights.head_DV is None else weights.head_DV


def parameter_count(config: LlamaConfig) -> int:
    return stacked.parameter_count(shapes(config))


def flops_per_token(config: LlamaConfig, seq: int) -> float:
    """Floating-point operations of one training token: forward and backward, nothing recomputed.

    Two per multiply-add; backward counted as twice the forward. A weight matrix of n elements costs
    2n; causal attention over a sequence of S costs `2 * 2 * heads * head_dim * (S + 1) / 2` per layer
    (scores and values, the mean over positions of the keys seen). Embedding look-up, norms and
    softmax are not counted. The convention is PaLM's (arXiv:2204.02311, appendix B) with the causal
    half taken off.
    """
    c, D = config, config.embed
    attention = multiply_adds(embed=D, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, seq=seq)
    return 3 * 2 * (c.layers * (attention + 3 * D * c.mlp) + D * c.vocab)


def _constrain_stream(x_BSD: jax.Array, *, sharding: Sharding) -> jax.Array:
    return sharding.constrain(x_BSD, "batch", "sequence", None)
