"""Products of rows with the matrix of the group that each belongs to, by the kernel that suits the platform.

A kernel has three functions, in which rows are sorted by group and `sizes_E` counts those of each; rows
beyond the last group are of none:

    into(rows_MD, w_DEF, sizes_E)         each row times its group's matrix, `[M, F]`
    out_of(rows_MF, w_DEF, sizes_E)       each row times its group's matrix transposed, `[M, D]`
    outer(rows_MD, rows_MF, sizes_E)      for each group its rows' transposed times its rows', `[D, E, F]`

Sums are in float32, results in the rows' dtype. `embed` comes first in the matrices as in all weights
(docs/design.md); the groups lie in the middle.
"""

from typing import Any

from forebay.errors import UserError, unknown
from forebay.ops.moe import blockwise

KERNELS = ("auto", "blockwise", "triton")


def choose_kernel(requested: str, platform: str, *, embed: int, mlp: int) -> str:
    """The kernel for a `platform` ("cpu", "gpu" or "cuda", "tpu") and matrices of `embed` x `mlp`.

    Raises:
        UserError: an unknown kernel, or one asked for by name that the platform or the sizes do not allow.
    """
    if requested not in KERNELS:
        raise unknown("grouped product kernel", requested, KERNELS)
    fits_triton = platform in ("gpu", "cuda") and embed % 128 == 0 and mlp % 128 == 0
    if requested == "triton" and not fits_triton:
        raise UserError(
            f"grouped=triton needs a GPU and matrices of multiples of 128 (they are {embed} x {mlp}): use grouped=auto"
        )
    return ("triton" if fits_triton else "blockwise") if requested == "auto" else requested


def kernel(name: str) -> Any:
    """The module of that name."""
    if name == "triton":
        from forebay.ops.moe import triton  # Pallas for GPUs: not imported elsewhere

        return triton
    return blockwise
