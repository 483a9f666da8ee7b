"""Grouped products as GPU kernels, written in Pallas and compiled by XLA's Triton.

The same blocks of rows as in `blockwise.py`, all in one launch: a program multiplies one block's rows
with a tile of its group's matrix. Blocks that the group sizes leave unused end at once.

Shapes: M rows, D embed, F MLP width, E groups.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from forebay.ops.moe.blockwise import visits

# Tiles of the result and of the contraction, warps and stages: those of a plain bfloat16 product. Not tuned on a device.
_ROWS, _COLUMNS, _DEPTH = 128, 128, 64
_PARAMS = {"num_warps": 8, "num_stages": 3}


def into(rows_MD, w_DEF, sizes_E, *, interpret: bool = False) -> jax.Array:
    """Each row times its group's matrix, `[M, F]`; rows of no group are not written."""
    return _rowwise(rows_MD, w_DEF, sizes_E, w_DEF.shape[2], transposed=False, interpret=interpret)


def out_of(rows_MF, w_DEF, sizes_E, *, interpret: bool = False) -> jax.Array:
    """Each row times its group's transposed matrix, `[M, D]`; rows of no group are not written."""
    return _rowwise(rows_MF, w_DEF, sizes_E, w_DEF.shape[0], transposed=True, interpret=interpret)


def outer(rows_MD, rows_MF, sizes_E, *, interpret: bool = False) -> jax.Array:
    """For each group the product of its rows of the one, transposed, with those of the other: `[D, E, F]`, added in float32."""
    (M, D), F = rows_MD.shape, rows_MF.shape[1]
    end_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    flops = 2 * M * D * F
    return pl.pallas_call(
        functools.partial(_outer_kernel, rows=M),
        out_shape=jax.ShapeDtypeStruct((D, len(sizes_E), F), rows_MD.dtype),
        grid=(D // _ROWS, F // _COLUMNS, len(sizes_E)),
        compiler_params=plgpu.CompilerParams(**_PARAMS),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0),
        interpret=interpret,
        name="grouped_outer",
    )(rows_MD, rows_MF, end_E - sizes_E, end_E)


def _rowwise(rows, w_DEF, sizes_E, width: int, *, transposed: bool, interpret: bool):
    M, inner = rows.shape
    group, start, stop = visits(sizes_E, M, _ROWS)
    return pl.pallas_call(
        functools.partial(_rowwise_kernel, transposed=transposed, rows=M, inner=inner),
        out_shape=jax.ShapeDtypeStruct((M, width), rows.dtype),
        grid=(width // _COLUMNS, len(group)),  # programs of one block of rows run together and share it in the cache
        compiler_params=plgpu.CompilerParams(**_PARAMS),
        cost_estimate=pl.CostEstimate(flops=2 * M * inner * width, transcendentals=0, bytes_accessed=0),
        interpret=interpret,
        name="grouped_out_of" if transposed else "grouped_into",
    )(rows, w_DEF, group, start, stop)


def _rowwise_kernel(x_ref, w_ref, group_ref, start_ref, stop_ref, out_ref, *, transposed: bool, rows: int, inner: int):
    visit = pl.program_id(1)
    group, start, stop = group_ref[visit], start_ref[visit], stop_ref[visit]
    columns = pl.ds(pl.program_id(0) * _COLUMNS, _COLUMNS)

    @pl.when(start < stop)
    def _():
        positions = start + jnp.arange(_ROWS, dtype=jnp.int32)
        inside = (positions < stop)[:, None]
        here = pl.ds(start, _ROWS)

        def step(i, total):
            depth = pl.ds(i * _DEPTH, _DEPTH)
            x = plgpu.load(x_ref.at[here, depth], mask=inside, other=0)
            w = plgpu.load(w_ref.at[columns, group, depth] if transposed else w_ref.at[depth, group, columns])
            return total + _dot(x, w, 1, 1 if transposed else 0)

        total = jax.lax.fori_loop(0, inner // _DEPTH, step, jnp.zeros((_ROWS, _COLUMNS), jnp.float32))
        plgpu.store(out_ref.at[here, columns], total.astype(out_ref.dtype), mask=inside)


def _dot(a, b, of_a: int, of_b: int):
    """The product that contracts these dimensions of two tiles."""
    return jax.lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)


def _outer_kernel(x_ref, y_ref, start_ref, stop_ref, out_ref, *, rows: int):
    group = pl.program_id(2)
    start, stop = start_ref[group], stop_ref[group]
    left = pl.ds(pl.program_id(0) * _ROWS, _ROWS)
    right = pl.ds(pl.program_id(1) * _COLUMNS, _COLUMNS)

    def step(i, total):
        first = start + i * _DEPTH
        inside = (first + jnp.arange(_DEPTH, dtype=jnp.int32) < stop)[:, None]
        here = pl.ds(first, _DEPTH)
        x = plgpu.load(x_ref.at[here, left], mask=inside, other=0)
        y = plgpu.load(y_ref.at[here, right], mask=inside, other=0)
        return total + _dot(x, y, 0, 0)

    blocks = pl.cdiv(stop - start, _DEPTH)
    total = jax.lax.fori_loop(0, blocks, step, jnp.zeros((_ROWS, _COLUMNS), jnp.float32))
    plgpu.store(out_ref.at[left, group, right], total.astype(out_ref.dtype))
