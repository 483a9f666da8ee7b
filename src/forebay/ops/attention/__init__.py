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
    """`compiled`: the kernel in the program. `at_run_time`: the one a machine with every library would use."""

    compiled: str
    at_run_time: str

    @property
    def stands_in(self) -> bool:
        """Whether the program has the blockwise form where a fused kernel will run."""
        return self.compiled == "blockwise" != self.at_run_time

    @property
    def note(self) -> str | None:
        """What to say beside the numbers of a compile whose kernel is not the one that will run."""
        if self.compiled == self.at_run_time:
            return None
        return (
            f"attention compiled with the {self.compiled} kernel; on the device {self.at_run_time} will run: "
            f"working set and schedule inside attention differ (install the extra aot-cudnn to compile it)"
        )


def choose_kernel(requested: str, platform: str, *, seq: int, head_dim: int, v_head_dim: int, sequence_parallel: bool):
    """The kernel for a `platform` ("cpu", "gpu" or "cuda", "tpu") and these sizes.

    Raises:
        UserError: an unknown kernel, or one asked for by name that cannot do these sizes or is not installed.
    """
    if requested not in KERNELS:
        raise unknown("attention kernel", requested, KERNELS)
    gpu, tpu = platform in ("gpu", "cuda"), platform == "tpu"
    fits_cudnn = gpu and cudnn.supports(head_dim, v_head_dim) and not sequence_parallel
    fits_splash = tpu and splash.supports(seq, head_dim, v_head_dim) and not sequence_parallel
    if requested == "cudnn" and not (fits_cudnn and cudnn.available()):
        raise UserError(
            "attention=cudnn needs an NVIDIA GPU, cuDNN (extra aot-cudnn or cuda13), equal head sizes of at most 128 "
            "and no `sequence` axis: use attention=auto"
        )
    if requested == "splash" and not fits_splash:
        raise UserError(
            f"attention=splash needs a TPU, a sequence that is a multiple of 128 (it is {seq}), head sizes that are "
            f"multiples of 64 and no `sequence` axis: use attention=auto"
        )
    if requested != "auto":
        return KernelChoice(requested, requested)
    if fits_cudnn:
        return KernelChoice("cudnn" if cudnn.available() else "blockwise", "cudnn")
    return KernelChoice("splash", "splash") if fits_splash else KernelChoice("blockwise", "blockwise")


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
