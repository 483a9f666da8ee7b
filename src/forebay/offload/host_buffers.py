"""Buffers in host memory that a step makes for itself.

XLA only allocates them: what they are filled with is not written (its host offloader makes "AllocateBuffer" of the filling
of whatever is then updated slice by slice, on GPUs and TPUs). So nothing may depend on what is in a place before
it is written, and a filling only tells buffers apart.
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp


def host_buffer(shape: tuple[int, ...], dtype: Any, owner: str, number: int) -> jax.Array:
    """Room for an array in host memory, which holds anything; the owner's buffer of this number, none like another's."""
    return jax.device_put(jnp.full(shape, filling(dtype, owner, number), dtype), jax.memory.Space.Host)


def filling(dtype: Any, owner: str, number: int) -> float | int:
    """What to fill an owner's host buffer of this number with: another value of the dtype for each, of its thousands.

    Buffers that look the same would be made one by common subexpression elimination and, host memory to host memory,
    copied apart again, whether they are of one stack, of two, or of two scans over one.
    """
    number += zlib.crc32(owner.encode())
    if jnp.issubdtype(dtype, jnp.inexact):
        info = jnp.finfo(dtype)
        steps, octaves = 2**info.nmant, info.maxexp - info.minexp - 2  # of the last, 8 bits have some
        return (1 + number % steps / steps) * 2.0 ** (info.minexp + 1 + number // steps % octaves)
    return number % (2 if dtype == jnp.bool_ else jnp.iinfo(dtype).max + 1)
