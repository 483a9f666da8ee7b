"""Which arrays of a training state live in host memory, and how jax is told."""

import math
from collections.abc import Sequence
from typing import Any

import jax

LEAST_BYTES = 2**20
"""Arrays that take less on a device stay there: thousands of small copies cost more than their bytes."""


def choose_hosted(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Which arrays to keep in host memory so that they are at least `fraction` of all bytes, and as few more as possible.

    The same fraction gives the same arrays. Arrays of less than `LEAST_BYTES` stay on the device, so that
    with 1.0 nearly everything moves.

    Args:
        sizes: bytes of each array on one device.
        fraction: 0 to 1.
    """
    movable = [i for i, size in enumerate(sizes) if size >= LEAST_BYTES]
    wanted = min(fraction * sum(sizes) * (1 - 1e-9), sum(sizes[i] for i in movable))
    chosen: set[int] = set()
    left = sorted(movable, key=lambda i: (-sizes[i], i))
    missing = wanted
    while missing > 0 and left:
        after = sum(sizes[i] for i in left[1:])
        # the largest is skipped where those after it suffice and it is more than is missing
        if not (sizes[left[0]] > missing and after >= missing):
            chosen.add(left[0])
            missing -= sizes[left[0]]
        left = left[1:]
    return [i in chosen for i in range(len(sizes))]


def hosted_fraction(sizes: Sequence[int], hosted: Sequence[bool]) -> float:
    """The share of all bytes that is in host memory."""
    return sum(s for s, h in zip(sizes, hosted, strict=True) if h) / max(1, sum(sizes))


def local_bytes(shapes: Any, shardings: Any) -> list[int]:
    """Bytes on one device of each array of a tree."""
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return [math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize for x, sharding in pairs]


def with_memory(shardings: Any, hosted: Any) -> Any:
    """The shardings, those of `hosted` arrays in pinned host memory.

    Compile-only CUDA devices list no memories, and jax drops the kind there without a word: see `settle` and
    `forebay.xla.host_arguments`.
    """
    return jax.tree.map(lambda s, h: s.with_memory_kind("pinned_host") if h else s, shardings, hosted)


def settle(tree: Any, hosted: Any) -> Any:
    """Inside of a jitted function: the arrays as in the memories they are said to be in.

    Changes nothing where jax knows the memories of its arguments already.
    """
    host = jax.memory.Space.Host

    def one(x: jax.Array, h: bool) -> jax.Array:
        return jax.device_put(x, host) if h and jax.typeof(x).memory_space != host else x

    return jax.tree.map(one, tree, hosted)
