"""Which experts each token goes to, and how evenly: DeepSeek-V3's router (arXiv:2412.19437, section 2.1.2), of which one
without bias and groups is a case, and the balance losses.

Shapes: B batch, S sequence, E experts, k experts that a token goes to, L layers.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

MAPS = "moe_routing_maps"


def choose_experts(
    scores_BSE: jax.Array,
    bias_E: jax.Array | None = None,
    *,
    experts_per_token: int,
    groups: int = 1,
    groups_per_token: int = 1,
) -> jax.Array:
    """The experts of each token, int32 `[batch, sequence, k]`, the best first; carries the name `moe_routing_maps`.

    The bias counts in this choice alone. Experts are in `groups` of neighbours, of which a token uses
    those `groups_per_token` whose two best experts score highest together.

    Args:
        scores_BSE: affinities in (0, 1), float32.
        bias_E: float32, added to the scores.
    """
    choice = jax.lax.stop_gradient(scores_BSE if bias_E is None else scores_BSE + bias_E)
    if groups_per_token < groups:
        by_group = choice.reshape(*choice.shape[:-1], groups, -1)
        of_group = jax.lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum(-1)
        chosen = jax.lax.top_k(of_group, groups_per_token)[1]
        open_groups = (chosen[..., None] == jnp.arange(groups, dtype=jnp.int32)).any(-2)
        choice = jnp.where(open_groups[..., None], by_group, -jnp.inf).reshape(choice.shape)
    return checkpoint_name(jax.lax.top_k(choice, experts_per_token)[1], MAPS)


def router_weights(
    scores_BSE: jax.Array, experts_BSk: jax.Array, *, normalise: bool, route_scale: float = 1.0
) -> jax.Array:
    """What each chosen expert's result counts, `[batch, sequence, k]`: its score, over the sum of the chosen
    ones' where `normalise`, times `route_scale`."""
    weights = jnp.take_along_axis(scores_BSE, experts_BSk, axis=-1)
    if normalise:
        weights /= weights.sum(-1, keepdims=True) + 1e-20
    return weights * route_scale


def tokens_per_expert(experts_BSk: jax.Array, experts: int) -> jax.Array:
    """How many tokens of each sequence chose each expert, float32 `[batch, experts]`."""
    chosen = experts_BSk[..., None] == jnp.arange(experts, dtype=jnp.int32)
    return chosen.sum((1, 2), dtype=jnp.float32)


def balance_loss(scores_BSE: jax.Array, tokens_BE: jax.Array) -> jax.Array:
    """The sequence-wise balance loss without its factor, a scalar; 1 for perfect balance.

    The mean over sequences of `sum_e f_e P_e`, with f the share of a sequence's choices that fell on an
    expert times the number of experts, and P the expert's mean share of a token's scores (equations 17
    to 20). Gradients flow through P alone.
    """
    experts = scores_BSE.shape[-1]
    f_BE = jax.lax.stop_gradient(tokens_BE / tokens_BE.sum(-1, keepdims=True)) * experts
    p_BE = (scores_BSE / scores_BSE.sum(-1, keepdims=True)).mean(1)
    return (f_BE * p_BE).sum(-1).mean()


def load_balancing_loss(
    load_LE: jax.Array, probability_LE: jax.Array, *, experts_per_token: int, by_layer: bool
) -> jax.Array:
    """Switch Transformer's balance loss with k choices, without its factor, a scalar; k for perfect balance.

    `E sum_e f_e P_e`, with f how many of a token's choices fell on an expert, in the mean, and P the expert's
    mean probability (arXiv:2101.03961, equations 4 to 6). By layer, the mean of each layer's own; otherwise over the
    tokens of all layers together, as transformers' `load_balancing_loss_func` has it, where a layer's lack of balance
    may make up for another's. Gradients flow through P alone.

    Args:
        load_LE: relative loads (`relative_load`).
        probability_LE: the mean over tokens of each expert's probability, float32.
    """
    load_LE = jax.lax.stop_gradient(load_LE)
    if not by_layer:
        load_LE, probability_LE = load_LE.mean(0, keepdims=True), probability_LE.mean(0, keepdims=True)
    return experts_per_token * (load_LE * probability_LE).sum(-1).mean()  # f is load * k / E


def relative_load(tokens_BE: jax.Array) -> jax.Array:
    """The tokens that each expert got over what it would get in perfect balance, float32 `[experts]`."""
    total_E = jax.lax.stop_gradient(tokens_BE.sum(0))
    return total_E / total_E.mean()


def adjusted_bias(bias: jax.Array, load: jax.Array, speed: float) -> jax.Array:
    """The bias after a step, `[..., experts]`: `speed` lower where an expert's load is above the mean, higher where
    it is below (arXiv:2408.15664, algorithm 1). `load` is relative, with a mean of 1."""
    return bias + speed * jnp.sign(1 - load)
