"""Elementwise work on arrays in host memory, a slice at a time: in, worked on, and out again.

The loop keeps a link busy in both directions at once. Within one iteration an array in host memory is
either *written first* (the slice worked on before goes out, then the next one comes in: it is fetched ahead)
or *read first* (this slice comes in, is worked on, and goes out). While arrays of one kind go out, those of the
other come in. Each of these copies depends on the one before it of the same array, by its data; an
order left to the compiler would have it keep a second copy of the array.

On the device are then at most three slices: one coming in, one worked on, one going out.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

SLICE_BYTES = 2**26
"""The most that a slice of one array takes on a device: 0.4 ms on a link of 170 GB/s, long beside a copy's latency."""
LEAST_SLICE_BYTES = 2**22
SLICES = 8
"""Slices that an array is cut into where they are not smaller than `LEAST_SLICE_BYTES`: the first to come in and the last
to go out have nothing beside them."""

Slice = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Cut:
    """An array cut into `count` equal slices along `axis`."""

    axis: int = 0
    count: int = 1


def cut(shape: tuple[int, ...], itemsize: int, sharding: Any = None, slice_bytes: int = SLICE_BYTES) -> Cut:
    """The cut of an array into about `SLICES` slices, or as many as it takes for each to be at most `slice_bytes` on a
    device.

    Only a dimension that is not split over devices is cut, the first that can be cut finely enough; where
    none can, the one that gives the smallest slices. A TPU keeps the last two dimensions in tiles of 8 x 128
    (one dimension in tiles of 1024), which are not cut through.

    Args:
        shape: of the whole array.
        itemsize: bytes of an element.
        sharding: how it is split over devices; None where it is not.
        slice_bytes: per device.
    """
    local = shape if sharding is None else sharding.shard_shape(shape)
    num_bytes = math.prod(local) * itemsize
    least = -(-num_bytes // slice_bytes)
    wanted = max(least, min(SLICES, num_bytes // LEAST_SLICE_BYTES), 1)
    tiles = [1024] if len(shape) == 1 else [*(1 for _ in shape[:-2]), 8, 128]
    best = Cut()
    for axis, (size, here, tile) in enumerate(zip(shape, local, tiles, strict=True)):
        if size != here:
            continue
        counts = [n for n in range(1, size + 1) if size % n == 0 and (n == 1 or size // n % tile == 0)]
        if enough := [n for n in counts if n >= least]:
            return Cut(axis, min(enough, key=lambda n: abs(math.log(n / wanted))))
        if counts[-1] > best.count:
            best = Cut(axis, counts[-1])
    return best


def on_host(x: Any) -> bool:
    """Whether an array, as jax sees it while tracing, is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def stream(
    work: Callable[[Slice], Slice],
    arrays: Mapping[str, jax.Array],
    how: Cut,
    writes: Collection[str],
    scope: str,
    after: Any = None,
) -> dict[str, jax.Array]:
    """`work` on each slice of `arrays` in turn.

    Args:
        work: from a slice of each array, all on the device, to the new slices of those it writes.
        arrays: of the same shape, on the device or in host memory.
        how: the cut of each.
        writes: the arrays that `work` returns; each stays where it is.
        scope: what the compiled program calls the copies.
        after: what must be there before the first slice comes in: what the call before returned. Without it the
            compiler fetches the first slices of all calls at once, and writes all of the last ones in the end.

    Returns:
        The arrays of `writes`, after the work.
    """
    arrays, _ = jax.lax.optimization_barrier((dict(arrays), after))
    hosted = [name for name, x in arrays.items() if on_host(x)]
    ahead, direct = _balance(hosted, arrays, writes)
    device = [name for name in arrays if name not in hosted]

    def take(x: jax.Array, k: Any) -> jax.Array:
        size = x.shape[how.axis] // how.count
        part = jax.lax.dynamic_slice_in_dim(x, k * size, size, how.axis, allow_negative_indices=False)
        return jax.device_put(part, jax.memory.Space.Device)

    def put(x: jax.Array, part: jax.Array, k: Any) -> jax.Array:
        part = jax.device_put(part.astype(x.dtype), jax.typeof(x).memory_space)
        size = x.shape[how.axis] // how.count
        return jax.lax.dynamic_update_slice_in_dim(x, part, k * size, how.axis, allow_negative_indices=False)

    out = [name for name in ahead if name in writes]
    last = how.count - 1

    def body(state: Any) -> Any:
        k, arrays, slices, done = state
        arrays = dict(arrays)
        with jax.named_scope(f"update:{scope}"):
            for name in out:  # in the first iteration what it holds already
                arrays[name] = put(arrays[name], done[name], jnp.maximum(k - 1, 0))
            now = dict(slices) | {name: take(arrays[name], k) for name in (*direct, *device)}
        results = work(now)
        with jax.named_scope(f"update:{scope}"):
            for name in writes:
                if name not in out:
                    arrays[name] = put(arrays[name], results[name], k)
            following = {name: take(arrays[name], jnp.minimum(k + 1, last)) for name in ahead}
        return k + 1, arrays, following, {name: results[name].astype(arrays[name].dtype) for name in out}

    with jax.named_scope(f"update:{scope}"):
        first = {name: take(arrays[name], 0) for name in ahead}
    state = (jnp.int32(0), arrays, first, {name: first[name] for name in out})
    if how.count == 1:
        _, finished, _, done = body(state)
    else:
        _, finished, _, done = jax.lax.while_loop(lambda s: s[0] < how.count, body, state)
    with jax.named_scope(f"update:{scope}"):
        for name in out:
            finished[name] = put(finished[name], done[name], last)
    return {name: finished[name] for name in writes}


def _balance(
    hosted: Collection[str], arrays: Mapping[str, jax.Array], writes: Collection[str]
) -> tuple[list[str], list[str]]:
    """Arrays to write first and arrays to read first, about as many bytes of each; what is only read is read ahead."""
    ahead = [name for name in hosted if name not in writes]
    direct: list[str] = []
    sizes: dict[bool, int] = {True: 0, False: 0}
    for name in sorted((n for n in hosted if n in writes), key=lambda n: -arrays[n].nbytes):
        first = sizes[True] <= sizes[False]
        (ahead if first else direct).append(name)
        sizes[first] += arrays[name].nbytes
    return ahead, direct
