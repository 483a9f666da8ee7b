"""The TPU's block-sparse flash attention kernel (`jax.experimental.pallas.ops.tpu.splash_attention`).

Its forward and backward kernels are called separately, for the reason given in `cudnn.py`.
"""

import functools

import jax
import jax.numpy as jnp

BLOCK = 512
_LANES = 128  # the kernel's tiles are multiples of the vector unit's lanes


def missing(seq: int, head_dim: int, v_head_dim: int) -> str | None:
    """What the kernel lacks for a sequence and heads of these sizes, in a few words; None if nothing."""
    if seq % _LANES:
        return f"the kernel needs a sequence that is a multiple of {_LANES} (it is {seq})"
    if head_dim % 64 or v_head_dim % 64:
        return f"the kernel needs head sizes that are multiples of 64 (they are {head_dim} and {v_head_dim})"
    return None


def forward(q_BSHK, k_BTGK, v_BTGV, *, scale: float) -> tuple[jax.Array, jax.Array]:
    """Causal attention: output `[B, S, H, V]` and log-sum-exp `[B, S, H]` in float32."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    kernel = _kernel(q_BSHK.shape[2], q_BSHK.shape[1])

    def one(q, k, v):
        options = {k: v for k, v in kernel.kwargs.items() if k != "save_residuals"}
        out, (lse,) = splash._splash_attention_forward(
            kernel.fwd_mask_info, q, k, v, None, None, save_residuals=True, **options
        )
        return out, lse

    # the kernel has no scale of its own
    out, lse = jax.vmap(one)(*_heads_first(q_BSHK * jnp.asarray(scale, q_BSHK.dtype), k_BTGK, v_BTGV))
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)


def backward(q_BSHK, k_BTGK, v_BTGV, out_BSHV, lse_BSH, dout_BSHV, *, scale: float):
    """Gradients of queries, keys and values."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    kernel = _kernel(q_BSHK.shape[2], q_BSHK.shape[1])
    factor = jnp.asarray(scale, q_BSHK.dtype)

    def one(q, k, v, out, lse, dout):
        residuals = (q, k, v, None, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
        return splash._splash_attention_bwd(res=residuals, do=dout, **kernel.kwargs)[3:6]

    args = _heads_first(q_BSHK * factor, k_BTGK, v_BTGV, out_BSHV, lse_BSH, dout_BSHV)
    dq, dk, dv = jax.vmap(one)(*args)
    return jnp.swapaxes(dq, 1, 2) * factor, jnp.swapaxes(dk, 1, 2), jnp.swapaxes(dv, 1, 2)


def _heads_first(*arrays):
    return tuple(jnp.swapaxes(x, 1, 2) for x in arrays)


def _kernel(heads: int, seq: int):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block = functools.reduce(lambda b, _: b if seq % b == 0 else b // 2, range(2), min(BLOCK, seq))
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((seq, seq))] * heads)
    return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
