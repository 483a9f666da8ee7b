"""Causal attention that is linear in memory, by the best kernel the platform has.

`attention` is differentiable; its output and its softmax statistics both carry the checkpoint name
`context`, so that a plan which keeps or moves them spares the backward pass a second attention.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from forebay.errors import UserError, unknown
from forebay.ops.attention import blockwise, cudnn, splash
from forebay.sharding import Sharding

KERNELS = ("auto", "cudnn", "splash", "blockwise")
CONTEXT = "context"


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """A kernel of `KERNELS`, and in one line why it is not the fused one of its platform, if it is not."""

    name: str
    note: str | None = None


def choose_kernel(
    requested: str, device: Any, *, seq: int, head_dim: int, v_head_dim: int, dtype: Any, sequence_parallel: bool
) -> KernelChoice:
    """The kernel for a `device` of jax's, there or not, and these sizes and compute `dtype`.

    Raises:
        UserError: an unknown kernel, or one asked for by name that cannot do these sizes or is not installed.
    """
    if requested not in KERNELS:
        raise unknown("attention kernel", requested, KERNELS)
    fused = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(device.platform)
    if sequence_parallel:
        missing = "it does not split the sequence over devices"
    elif fused == "splash":
        missing = splash.missing(seq, head_dim, v_head_dim)
    else:
        missing = cudnn.missing(device, head_dim, v_head_dim, dtype)
    if requested == "blockwise" or (requested == "auto" and fused is None):
        return KernelChoice("blockwise")
    if requested not in ("auto", fused):
        needs = "a TPU" if requested == "splash" else "an NVIDIA GPU"
        raise UserError(f"attention={requested} needs {needs}: use attention=auto")
    if not missing:
        assert fused is not None
        return KernelChoice(fused)
    if requested == "auto":
        return KernelChoice("blockwise", f"attention runs in blocks, slower than {fused}'s kernel would: {missing}")
    raise UserError(f"attention={requested}: {missing}; use attention=auto")


_RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    name: (module.forward, module.backward)
    for name, module in (("blockwise", blockwise), ("cudnn", cudnn), ("splash", splash))
}


def attention(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGV: jax.Array, *, kernel: str, sharding: Sharding, scale: float
) -> jax.Array:
    """Causal self-attention with grouped key/value heads.

    Args:
        q_BSHK: queries `[batch, sequence, heads, head size]`, after position encoding.
        k_BTGK, v_BTGV: keys and values `[batch, sequence, kv heads, head size]`; `heads` is a multiple of `kv heads`.
        kernel: one of `KERNELS` except "auto"; see `choose_kernel`.
        sharding: batch, sequence and heads are split over the mesh by it. Each device computes the
            heads and queries it holds; along `sequence` the keys and values are gathered.
        scale: factor on the scores, usually `head_size ** -0.5`.

    Returns:
        `[batch, sequence, heads, value head size]` in the queries' dtype.
    """
    return _attention(kernel, sharding, scale, q_BSHK, k_BTGK, v_BTGV)  # pyright: ignore[reportCallIssue]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(kernel, sharding, scale, q, k, v):
    return _forward(kernel, sharding, scale, q, k, v)[0]


def _forward(kernel, sharding, scale, q, k, v):
    out, lse = _on_each_device(sharding, _local_forward, kernel, scale, outputs="qs")(q, k, v)
    out, lse = checkpoint_name(out, CONTEXT), checkpoint_name(lse, CONTEXT)
    return out, (q, k, v, out, lse)


def _backward(kernel, sharding, scale, residuals, dout):
    return _on_each_device(sharding, _local_backward, kernel, scale, outputs="qkk")(*residuals, dout)


_attention.defvjp(_forward, _backward)


def _on_each_device(
    sharding: Sharding, local: Callable[..., Any], kernel: str, scale: float, *, outputs: str
) -> Callable[..., Any]:
    """`local` under `shard_map`. Arguments are queries, keys, values and then, in the backward pass,
    output, statistics and the output's cotangent; `outputs` says which of these each result is like."""
    axes = sharding.mesh_axes("sequence")
    local = functools.partial(local, kernel=kernel, scale=scale, sequence_axis=axes[0] if axes else None)
    if sharding.mesh.size == 1:
        return local
    q = sharding.spec(("batch", "sequence", "heads", None))
    kv = sharding.spec(("batch", "sequence", "kv_heads", None))
    stats = PartitionSpec(*q[:3])
    ins = (q, kv, kv, q, stats, q)
    outs = tuple({"q": q, "k": kv, "s": stats}[o] for o in outputs)

    def call(*args):
        run = jax.shard_map(local, mesh=sharding.mesh, in_specs=ins[: len(args)], out_specs=outs, check_vma=False)
        return run(*args)

    return call


def _local_forward(q, k, v, *, kernel, scale, sequence_axis):
    forward = _RULES[kernel][0]
    if sequence_axis is None:
        return forward(q, k, v, scale=scale)
    k, v = (jax.lax.all_gather(x, sequence_axis, axis=1, tiled=True) for x in (k, v))
    return forward(q, k, v, scale=scale, q_offset=jax.lax.axis_index(sequence_axis) * q.shape[1])


def _local_backward(q, k, v, out, lse, dout, *, kernel, scale, sequence_axis):
    backward = _RULES[kernel][1]
    if sequence_axis is None:
        return backward(q, k, v, out, lse, dout, scale=scale)
    k, v = (jax.lax.all_gather(x, sequence_axis, axis=1, tiled=True) for x in (k, v))
    offset = jax.lax.axis_index(sequence_axis) * q.shape[1]
    dq, dk, dv = backward(q, k, v, out, lse, dout, scale=scale, q_offset=offset)
    dk, dv = (jax.lax.psum_scatter(x, sequence_axis, scatter_dimension=1, tiled=True) for x in (dk, dv))
    return dq, dk, dv
