"""Routed experts: tokens to the devices of their experts, three grouped products, and back.

Dropless up to a capacity: where the experts are split over the `expert` axis, a device takes
`capacity_factor` times the rows that it would get in perfect balance. What finds no room counts as
nothing in the result and is counted. Where they are not split every row has its place.

The router's weight multiplies what the activation function gives, before the down-projection. The
backward pass then needs no result of the down-projection, nor what the exchange brought back: a layer
that is recomputed repeats neither.

Every function here is differentiable and of whole arrays; inside, `shard_map`. Their differentiation
rules are written out, so that what a backward pass needs is named (`moe_x_sorted`, `moe_dispatched`,
`moe_mlpwi_0`, `moe_mlpwi_1`), and gathered weights are never among it.

Shapes: B batch, S sequence, D embed, E experts, F MLP width, k experts of a token, N rows: tokens times
k, device by device; M rows of the experts' buffers, device by device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from forebay.ops.moe import exchange, grouped
from forebay.sharding import Sharding

__all__ = ["Routed", "RoutedExperts"]


class Routed(NamedTuple):
    """What the experts gave, `[batch, sequence, embed]`, and the share of rows that found no room, a float32 scalar."""

    out_BSD: jax.Array
    overflow: jax.Array


@dataclasses.dataclass(frozen=True)
class RoutedExperts:
    """The experts of one layer and how they are spread.

    Attributes:
        experts: how many.
        experts_per_token: of them a token goes to.
        capacity_factor: room for rows on a device, as a multiple of a perfectly balanced device's.
        kernel: of `forebay.ops.moe.grouped.KERNELS`, except "auto".
        sharding: experts are split over its `expert` axis, tokens over `batch` and `sequence`.
    """

    experts: int
    experts_per_token: int
    capacity_factor: float
    kernel: str
    sharding: Sharding

    def __call__(
        self,
        x_BSD: jax.Array,
        experts_BSk: jax.Array,
        weights_BSk: jax.Array,
        gate_DEF: jax.Array,
        up_DEF: jax.Array,
        down_DEF: jax.Array,
    ) -> Routed:
        """Each token's chosen experts, `down(silu(gate(x)) * up(x))`, weighted and added up.

        Args:
            x_BSD: tokens, in the compute dtype.
            experts_BSk: int32, distinct for each token.
            weights_BSk: float32.
            gate_DEF, up_DEF, down_DEF: in the compute dtype.
        """
        maps = self._maps(experts_BSk)
        x_ND = checkpoint_name(_sorted(self, self.experts_per_token, x_BSD.shape, x_BSD, maps), "moe_x_sorted")
        weights_BSk1 = weights_BSk[..., None]
        weights_N1 = _sorted(self, 1, weights_BSk1.shape, weights_BSk1, maps)
        x_MD, weights_M1 = (checkpoint_name(_dispatched(self, r, maps), "moe_dispatched") for r in (x_ND, weights_N1))
        gate_MF = checkpoint_name(_product(self, True, x_MD, gate_DEF, maps.counts), "moe_mlpwi_0")
        up_MF = checkpoint_name(_product(self, True, x_MD, up_DEF, maps.counts), "moe_mlpwi_1")
        hidden_MF = (jax.nn.silu(gate_MF) * up_MF).astype(jnp.float32) * weights_M1
        out_MD = _product(self, False, hidden_MF.astype(x_BSD.dtype), down_DEF, maps.counts)
        out_MD = checkpoint_name(out_MD, "moe_mlpwo")
        out_BSD = _combined(self, x_BSD.shape, out_MD, maps)
        return Routed(checkpoint_name(out_BSD, "moe_combined"), maps.lost.sum() / experts_BSk.size)

    # --- sizes ---------------------------------------------------------------------------------------

    @property
    def devices(self) -> int:
        """Over how many devices the experts are split."""
        return self.sharding.size("experts")

    @property
    def token_axes(self) -> tuple[str, ...]:
        return (*self.sharding.mesh_axes("batch"), *self.sharding.mesh_axes("sequence"))

    def capacity(self, rows: int) -> int:
        """The rows of a device's buffer, where a device has `rows` before the exchange."""
        if self.devices == 1:
            return rows
        tokens = rows // self.experts_per_token
        most = self.devices * tokens * min(self.experts_per_token, self.experts // self.devices)
        return min(most, -(-math.ceil(self.capacity_factor * rows) // 8) * 8)

    # --- one device ------------------------------------------------------------------------------------

    def _maps(self, experts_BSk: jax.Array) -> "_Maps":
        def local(experts):
            flat = lax.stop_gradient(experts).reshape(-1)
            order, inverse, counts = exchange.sort_by_expert(flat, self.experts)
            if self.devices == 1:
                return order, inverse, counts[None], jnp.zeros(1, jnp.float32)
            counts = lax.all_gather(counts, exchange.AXIS)
            lost = exchange.lost_rows(counts, self.capacity(len(flat))) / self.devices
            return order, inverse, counts, lost[None]

        return _Maps(*self._map(local, "t", "rrrr")(experts_BSk))

    def _map(self, local: Callable[..., Any], ins: str, outs: str) -> Callable[..., Any]:
        """`local` on each device's part. A letter for each array: t tokens `[B, S, .]`, r rows, h rows of the MLP's
        width, w weights."""
        # one device needs no `shard_map`, but Pallas learns from it for which GPU to compile where there is none
        if self.sharding.mesh.size == 1 and self.kernel != "triton":
            return local
        rows = PartitionSpec(self.token_axes or None)
        specs = {
            "t": self.sharding.spec(("batch", "sequence", None)),
            "r": rows,
            "h": PartitionSpec(self.token_axes or None, self.sharding.mesh_axes("mlp") or None),
            "w": self.sharding.spec(("expert_embed", "experts", "mlp")),
        }
        out_specs = tuple(specs[o] for o in outs)
        return jax.shard_map(
            local, mesh=self.sharding.mesh, in_specs=tuple(specs[i] for i in ins),
            out_specs=out_specs if len(outs) > 1 else out_specs[0], check_vma=False,
        )  # fmt: skip

    def _sizes(self, counts_PE: jax.Array, capacity: int) -> jax.Array:
        if self.devices == 1:
            return counts_PE[0]
        return exchange.group_sizes(counts_PE, lax.axis_index(exchange.AXIS), capacity)

    @property
    def _ragged(self) -> bool:
        return self.sharding.mesh.devices.flat[0].platform != "cpu"

    def _gathered(self, w_DEF: jax.Array) -> jax.Array:
        axes = self.sharding.mesh_axes("expert_embed")
        return lax.all_gather(w_DEF, axes, axis=0, tiled=True) if axes else w_DEF

    def _scattered(self, dw_DEF: jax.Array) -> jax.Array:
        axes = self.sharding.mesh_axes("expert_embed")
        if axes:
            dw_DEF = lax.psum_scatter(dw_DEF, axes, scatter_dimension=0, tiled=True)
        rest = tuple(a for a in self.token_axes if a not in (*axes, exchange.AXIS))
        return lax.psum(dw_DEF, rest) if rest else dw_DEF


class _Maps(NamedTuple):
    """How a device's rows are sorted and how many rows each device of the axis has for each expert."""

    order: jax.Array
    inverse: jax.Array
    counts: jax.Array
    lost: jax.Array


def _no_gradients(maps: _Maps) -> _Maps:
    return _Maps(None, None, None, None)  # pyright: ignore[reportArgumentType]


# --- sorting -------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sorted(layer: RoutedExperts, copies: int, shape: tuple[int, ...], x, maps: _Maps):
    """`x` of `shape` `[B, S, ..., .]` as rows sorted by expert, `[N, .]`, each of its rows `copies` times."""

    def local(x, order):
        return exchange.take_sorted(x.reshape(-1, x.shape[-1]), order, copies)

    return layer._map(local, "tr", "r")(x, maps.order)


def _sorted_backward(layer, copies, shape, maps, d):
    return _put_back(layer, copies, shape, d, maps), _no_gradients(maps)


_sorted.defvjp(lambda layer, copies, shape, x, maps: (_sorted(layer, copies, shape, x, maps), maps), _sorted_backward)


def _put_back(layer: RoutedExperts, copies: int, shape: tuple[int, ...], rows, maps: _Maps):
    """The transpose of `_sorted`."""
    sharding = layer.sharding
    local_shape = (shape[0] // sharding.size("batch"), shape[1] // sharding.size("sequence"), *shape[2:])

    def local(rows, inverse):
        return exchange.put_back(rows, inverse, copies).reshape(local_shape)

    return layer._map(local, "rr", "t")(rows, maps.inverse)


# --- exchanging ----------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatched(layer: RoutedExperts, rows_N, maps: _Maps):
    """Sorted rows `[N, .]` as the experts' rows `[M, .]`."""
    return _send(layer, rows_N, maps)


def _dispatched_backward(layer, maps, d):
    return _send_back(layer, d, maps), _no_gradients(maps)


_dispatched.defvjp(lambda layer, rows, maps: (_dispatched(layer, rows, maps), maps), _dispatched_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _combined(layer: RoutedExperts, shape: tuple[int, ...], rows_M, maps: _Maps):
    """The experts' results `[M, D]` added up for each token, of `shape`."""
    return _put_back(layer, layer.experts_per_token, shape, _send_back(layer, rows_M, maps), maps)


def _combined_backward(layer, shape, maps, d):
    rows = _send(layer, _sorted(layer, layer.experts_per_token, shape, d, maps), maps)
    return rows, _no_gradients(maps)


_combined.defvjp(lambda layer, shape, rows, maps: (_combined(layer, shape, rows, maps), maps), _combined_backward)


def _send(layer: RoutedExperts, rows_N, maps: _Maps):
    if layer.devices == 1:
        return rows_N

    def local(rows, counts):
        return exchange.send(rows, counts, capacity=layer.capacity(len(rows)), ragged=layer._ragged)

    return layer._map(local, "rr", "r")(rows_N, maps.counts)


def _send_back(layer: RoutedExperts, rows_M, maps: _Maps):
    if layer.devices == 1:
        return rows_M

    def local(rows, order, counts):
        return exchange.send_back(rows, counts, length=len(order), ragged=layer._ragged)

    return layer._map(local, "rrr", "r")(rows_M, maps.order, maps.counts)


# --- multiplying ---------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(layer: RoutedExperts, into: bool, rows_M, w_DEF, counts):
    """Each row times its expert's matrix (`into` the MLP's width) or the transposed matrix (out of it)."""
    kernel = grouped.kernel(layer.kernel)

    def local(rows, w, counts):
        sizes = layer._sizes(counts, len(rows))
        w = layer._gathered(w)
        if into:
            return kernel.into(rows, w, sizes)
        out = kernel.out_of(rows, w, sizes)
        split = layer.sharding.mesh_axes("mlp")
        return lax.psum(out, split) if split else out

    return layer._map(local, "rwr" if into else "hwr", "h" if into else "r")(rows_M, w_DEF, counts)


def _product_backward(layer, into, saved, d):
    rows, w, counts = saved
    kernel = grouped.kernel(layer.kernel)

    def outer(rows_MD, rows_MF, counts):
        return layer._scattered(kernel.outer(rows_MD, rows_MF, layer._sizes(counts, len(rows_MD))))

    x, h = (rows, d) if into else (d, rows)
    return _product(layer, not into, d, w, counts), layer._map(outer, "rhr", "w")(x, h, counts), None


_product.defvjp(
    lambda layer, into, rows, w, counts: (_product(layer, into, rows, w, counts), (rows, w, counts)),
    _product_backward,
)
