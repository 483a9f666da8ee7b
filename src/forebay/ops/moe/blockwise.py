"""Grouped products as a loop over blocks of rows, in plain JAX: the form that runs everywhere.

A block is some rows of one group; each is multiplied with that group's matrix. The number of blocks is
fixed, enough for any group sizes: the arithmetic exceeds the ideal by at most one block a group.

Shapes: M rows, D embed, F MLP width, E groups, b block.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LARGEST_BLOCK = 1024
_SMALLEST_BLOCK = 16


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: a power of two of which the average group has at least eight, if that is not too small."""
    wanted = max(_SMALLEST_BLOCK, min(LARGEST_BLOCK, rows // (8 * groups)))
    return min(rows, 1 << (wanted.bit_length() - 1))


def visits(sizes_E: jax.Array, rows: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each block its group, its first row and the row it stops before, int32 `[rows // block + E]`.

    Blocks that are not needed stop where they start.
    """
    blocks_E = -(-sizes_E // block)
    past_E = jnp.cumsum(blocks_E, dtype=jnp.int32)
    end_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    number = jnp.arange(rows // block + len(sizes_E), dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(past_E, number, side="right").astype(jnp.int32), len(sizes_E) - 1)
    before = number - (past_E - blocks_E)[group]
    stop = end_E[group]
    start = jnp.minimum((end_E - sizes_E)[group] + before * block, stop)
    return group, start, jnp.minimum(start + block, stop)


def into(rows_MD: jax.Array, w_DEF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Each row times its group's matrix, `[M, F]`; rows of no group give zeros."""
    return _rowwise(rows_MD, w_DEF, sizes_E, w_DEF.shape[2], "bd,df->bf")


def out_of(rows_MF: jax.Array, w_DEF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Each row times its group's transposed matrix, `[M, D]`; rows of no group give zeros."""
    return _rowwise(rows_MF, w_DEF, sizes_E, w_DEF.shape[0], "bf,df->bd")


def outer(rows_MD: jax.Array, rows_MF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """For each group the product of its rows of the one, transposed, with those of the other: `[D, E, F]`, added in float32."""
    M, D = rows_MD.shape
    b = block_rows(M, len(sizes_E))

    def step(total_EDF, visit):
        group, start, stop = visit
        first, inside = _rows(start, stop, M, b)
        x, y = (lax.dynamic_slice_in_dim(r, first, b) for r in (rows_MD, rows_MF))
        x = jnp.where(inside[:, None], x, 0)
        part = jnp.einsum("bd,bf->df", x, y, preferred_element_type=jnp.float32)
        return total_EDF.at[group].add(part), None

    zeros = jnp.zeros((len(sizes_E), D, rows_MF.shape[1]), jnp.float32)
    total_EDF, _ = lax.scan(step, zeros, visits(sizes_E, M, b))
    return jnp.swapaxes(total_EDF, 0, 1).astype(rows_MD.dtype)


def _rowwise(rows, w_DEF, sizes_E, width, product):
    M = len(rows)
    b = block_rows(M, len(sizes_E))

    def step(out, visit):
        group, start, stop = visit
        first, inside = _rows(start, stop, M, b)
        w = lax.dynamic_index_in_dim(w_DEF, group, 1, keepdims=False)
        block = jnp.einsum(product, lax.dynamic_slice_in_dim(rows, first, b), w, preferred_element_type=jnp.float32)
        old = lax.dynamic_slice_in_dim(out, first, b)
        new = jnp.where(inside[:, None], block.astype(out.dtype), old)
        return lax.dynamic_update_slice_in_dim(out, new, first, 0), None

    return lax.scan(step, jnp.zeros((M, width), rows.dtype), visits(sizes_E, M, b))[0]


def _rows(start, stop, rows: int, block: int):
    """A slice's first row, so that it ends within the array, and which of its rows are the block's."""
    first = jnp.minimum(start, rows - block)
    position = first + np.arange(block, dtype=np.int32)
    return first, (position >= start) & (position < stop)
