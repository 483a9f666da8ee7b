"""Bringing tokens to the devices that hold their experts, and back: `ragged_all_to_all` over the `expert` axis.

Every device sorts its tokens by expert. Rows for one expert are one slice, and a slice is sent straight
to its place among the receiver's rows, which are so sorted by expert too, without a second sort. The
receiver's buffer has a fixed capacity; what would lie beyond its end is not sent, and is counted.

Both directions follow from one table, how many rows each device has for each expert, and each is the
other's gradient. XLA for CPUs has no ragged collective; there every device gathers all rows and picks
its own, with the same result to the bit.

All functions of this module but `tables` are called inside `shard_map`, on one device's arrays.

Shapes: P devices along the axis, E experts, of which each device holds e = E / P, n rows of one device
before the exchange, C capacity.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "expert"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slices:
    """Where slices lie and how long they are, seen from one device; int32 `[E]`, slices by peer, then expert.

    Going: slice i goes to the device that holds expert i. Coming: slice (p, j) comes from device p, for
    this device's expert j.
    """

    going_start: jax.Array
    """In this device's rows before the exchange."""
    going_size: jax.Array
    landing_start: jax.Array
    """Of what goes: in the receiver's buffer."""
    coming_start: jax.Array
    """In this device's buffer."""
    coming_size: jax.Array
    origin_start: jax.Array
    """Of what comes: in the sender's rows."""


def slices(counts_PE: jax.Array, me: jax.Array, capacity: int) -> Slices:
    """The slices of device `me`, from how many rows each device has for each expert, int32 `[P, E]`."""
    P, E = counts_PE.shape
    start_PE = _starts(counts_PE)
    # a receiver's buffer: its experts in order, for each the senders in order; [receiver, expert, sender]
    arriving = jnp.swapaxes(counts_PE.reshape(P, P, E // P), 0, 1).swapaxes(1, 2)
    landing = _starts(arriving.reshape(P, E)).reshape(P, E // P, P)
    taken = jnp.clip(capacity - landing, 0, arriving)
    landing = jnp.minimum(landing, capacity)

    def mine_going(table):  # [receiver, expert, sender] -> [E]
        return jnp.take(table, me, axis=2).reshape(E)

    def mine_coming(table):  # -> [sender, expert]
        return jnp.take(table, me, axis=0).swapaxes(0, 1).reshape(E)

    return Slices(
        going_start=jnp.take(start_PE, me, axis=0),
        going_size=mine_going(taken),
        landing_start=mine_going(landing),
        coming_start=mine_coming(landing),
        coming_size=mine_coming(taken),
        origin_start=jnp.take(start_PE.reshape(P, P, E // P), me, axis=1).reshape(E),
    )


def group_sizes(counts_PE: jax.Array, me: jax.Array, capacity: int) -> jax.Array:
    """How many of the rows in the buffer of device `me` are for each of its experts, int32 `[e]`."""
    P, E = counts_PE.shape
    return slices(counts_PE, me, capacity).coming_size.reshape(P, E // P).sum(0)


def send(rows: jax.Array, counts_PE: jax.Array, *, capacity: int, ragged: bool) -> jax.Array:
    """Rows `[n, ...]`, sorted by expert, to the devices of their experts: the buffer `[C, ...]`, sorted by expert,
    zero where nothing came. `ragged`: whether the platform has the ragged collective."""
    s = slices(counts_PE, lax.axis_index(AXIS), capacity)
    if ragged:
        out = _zeros((capacity, *rows.shape[1:]), rows.dtype, counts_PE)
        return lax.ragged_all_to_all(
            rows, out, s.going_start, s.going_size, s.landing_start, s.coming_size, axis_name=AXIS
        )
    return _pick(rows, s.coming_start, s.coming_size, s.origin_start, capacity)


def send_back(rows: jax.Array, counts_PE: jax.Array, *, length: int, ragged: bool) -> jax.Array:
    """The inverse of `send`: the buffer `[C, ...]` to rows `[n, ...]` with n = `length`, zero where a row had not been sent."""
    s = slices(counts_PE, lax.axis_index(AXIS), rows.shape[0])
    if ragged:
        out = _zeros((length, *rows.shape[1:]), rows.dtype, counts_PE)
        return lax.ragged_all_to_all(
            rows, out, s.coming_start, s.coming_size, s.origin_start, s.going_size, axis_name=AXIS
        )
    return _pick(rows, s.going_start, s.going_size, s.landing_start, length)


def lost_rows(counts_PE: jax.Array, capacity: int) -> jax.Array:
    """How many rows find no room, all devices of the axis together: a float32 scalar."""
    P, E = counts_PE.shape
    arriving = counts_PE.reshape(P, P, E // P).sum((0, 2))
    return jnp.maximum(arriving - capacity, 0).sum().astype(jnp.float32)


def _starts(sizes: jax.Array) -> jax.Array:
    """Where each slice starts, slices lying one behind another along the last dimension."""
    return jnp.cumsum(sizes, -1, dtype=jnp.int32) - sizes


def _zeros(shape: tuple[int, ...], dtype, tied_to: jax.Array) -> jax.Array:
    """Zeros that XLA does not make before the loop over layers, to keep them for the whole step: they wait for
    `tied_to`, which each layer computes anew."""
    zero, _ = lax.optimization_barrier((jnp.zeros((), dtype), tied_to))
    return jnp.broadcast_to(zero, shape)


def _pick(rows: jax.Array, start: jax.Array, size: jax.Array, origin: jax.Array, length: int) -> jax.Array:
    """What arrives in `length` rows, gathered: slice (p, j) of the peers' rows, from `origin` on, to `start`."""
    everyone = lax.all_gather(rows, AXIS)  # [P, n, ...]
    peers = everyone.shape[0]
    position = jnp.arange(length, dtype=jnp.int32)
    inside = (position[:, None] >= start) & (position[:, None] < start + size)
    which = jnp.argmax(inside, axis=1)
    peer = which // (len(start) // peers)
    row = jnp.clip(origin[which] + position - start[which], 0, rows.shape[0] - 1)
    picked = everyone[peer, row]
    filled = inside.any(1).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(filled, picked, jnp.zeros((), rows.dtype))


def sort_by_expert(experts_n: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For the experts of this device's rows: the order that sorts them, its inverse, and the rows of each expert.

    Rows of one expert keep their order. int32 `[n]`, `[n]`, `[experts]`.
    """
    order = jnp.argsort(experts_n, stable=True).astype(jnp.int32)
    position = jnp.arange(len(experts_n), dtype=jnp.int32)
    inverse = jnp.zeros_like(position).at[order].set(position, unique_indices=True)
    counts = (experts_n[:, None] == jnp.arange(experts, dtype=jnp.int32)).sum(0, dtype=jnp.int32)
    return order, inverse, counts


def take_sorted(x: jax.Array, order: jax.Array, copies: int) -> jax.Array:
    """Rows `[n, ...]` of `x` `[n / copies, ...]`, each repeated `copies` times, in sorted order."""
    return jnp.take(x, order // copies, axis=0)


def put_back(rows: jax.Array, inverse: jax.Array, copies: int) -> jax.Array:
    """The transpose of `take_sorted`: in the original order the sum over the copies of each row, added in float32."""
    parts = jnp.take(rows, inverse, axis=0).reshape(-1, copies, *rows.shape[1:])
    return parts.sum(1, dtype=jnp.float32).astype(rows.dtype)
