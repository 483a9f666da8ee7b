"""What models with routed experts share around `forebay.ops.moe`: the router's logits, what their layers hand on, what a
step tells of the experts, and when training must not go on.

Shapes: B batch, S sequence, D embed, L layers, E routed experts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from forebay.ops.moe import RoutedExperts, grouped
from forebay.sharding import Sharding


class ExpertSizes(Protocol):
    """What the configuration of a model with routed experts has.

    Attributes:
        embed: width of the residual stream.
        moe_mlp: width of one expert's MLP.
        experts: routed experts of a layer.
        experts_per_token: routed experts that a token goes to.
        capacity_factor: room for tokens on a device, as a multiple of a perfectly balanced device's.
        overflow_limit: the largest share of rows without room with which training goes on.
        grouped: kernel of the experts' products: auto, blockwise or triton.
    """

    @property
    def embed(self) -> int: ...
    @property
    def moe_mlp(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def capacity_factor(self) -> float: ...
    @property
    def overflow_limit(self) -> float: ...
    @property
    def grouped(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Parts[C: ExpertSizes]:
    """What every block is built with: the kernels of attention and of the experts' products by name."""

    config: C
    sharding: Sharding
    kernel: str
    grouped: str

    @classmethod
    def of(cls, config: C, sharding: Sharding, kernel: str) -> Self:
        """With the experts' kernel that suits the platform and the sizes."""
        platform = sharding.mesh.devices.flat[0].platform
        chosen = grouped.choose_kernel(
            config.grouped, platform, embed=config.embed, mlp=config.moe_mlp // sharding.size("mlp")
        )
        return cls(config, sharding, kernel, chosen)

    @property
    def routed(self) -> RoutedExperts:
        c = self.config
        return RoutedExperts(c.experts, c.experts_per_token, c.capacity_factor, self.grouped, self.sharding)


def router_logits(h_BSD: jax.Array, router_DE: jax.Array, sharding: Sharding) -> jax.Array:
    """A router's logits `[batch, sequence, experts]` for normed hidden states, in float32 whatever the compute dtype:
    a choice is a step, where rounding is not small."""
    logits_BSE = jnp.einsum(
        "bsd,de->bse", h_BSD.astype(jnp.float32), router_DE.astype(jnp.float32), precision="highest"
    )
    return sharding.constrain(logits_BSE, "batch", "sequence", None)


def in_compute_dtype(layer: Any, dtype: Any) -> Any:
    """A layer's weights in the compute dtype, all but the router's."""
    return jax.tree.map_with_path(lambda path, w: w if "router" in path[-1].name else w.astype(dtype), layer)


# --- what layers hand on ----------------------------------------------------------------------------


class LayerStats(NamedTuple):
    """Of one layer of experts: relative load `[experts]`, what the model makes its balance loss of, and the share of
    rows without room."""

    load_E: jax.Array
    balance: jax.Array
    overflow: jax.Array


Carry = tuple[jax.Array, LayerStats]
"""What the layers of experts hand on: the residual stream, and the statistics of all layers, `[layers, ...]`."""


def empty_table(layers: int, experts: int, balance: tuple[int, ...] = ()) -> LayerStats:
    """Statistics of a stack before its first layer; `balance` is the shape of a layer's."""
    return LayerStats(jnp.zeros((layers, experts)), jnp.zeros((layers, *balance)), jnp.zeros(layers))


def noted(table: LayerStats, index: jax.Array, stats: LayerStats) -> LayerStats:
    """The statistics of all layers with those of layer `index`."""
    return jax.tree.map(lambda rows, row: rows.at[index].set(row), table, stats)


# --- what a step tells ------------------------------------------------------------------------------


def metrics(load: jax.Array, balance_loss: jax.Array, overflow: jax.Array) -> dict[str, jax.Array]:
    """How even the experts' load `[layers, experts]` is: `moe_max_violation` is the largest load over the mean, less
    one, in the mean over layers (MaxVio, arXiv:2408.15664), `moe_worst_violation` the same of the worst layer;
    `moe_overflow` the share of rows that found no room."""
    violation = load.max(-1) - 1
    return {
        "moe_balance_loss": balance_loss, "moe_max_violation": violation.mean(),
        "moe_worst_violation": violation.max(), "moe_overflow": overflow,
    }  # fmt: skip


def refusal(record: Mapping[str, Any], config: ExpertSizes) -> str | None:
    """Why training must not go on after a step with this record: more rows without room than the limit."""
    share, limit = record["moe_overflow"], config.overflow_limit
    if share <= limit:
        return None
    return (
        f"{share:.1%} of the experts' rows found no room (sizes.overflow_limit={limit}): raise sizes.capacity_factor above "
        f"{config.capacity_factor}, or allow more with sizes.overflow_limit"
    )
