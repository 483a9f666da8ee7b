"""cuDNN's fused attention, with its softmax statistics in our hands.

`jax.nn.dot_product_attention` keeps the log-sum-exp inside its own differentiation rule, where no
checkpoint policy can see it; a plan that moves the attention's output to the host would then still
run the attention twice. So the two rules are called separately here.
"""

import jax
import jax.numpy as jnp

MAX_HEAD_DIM = 128  # cuDNN 9 through jax refuses more, and differing key and value sizes


def supports(head_dim: int, v_head_dim: int) -> bool:
    return head_dim == v_head_dim and head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0


def available() -> bool:
    """Whether a cuDNN that jax can compile against is installed (extras `aot-cudnn`, `cuda13`)."""
    import importlib.util

    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:
        return False


def forward(q_BSHK, k_BTGK, v_BTGK, *, scale: float) -> tuple[jax.Array, jax.Array]:
    """Causal attention: output `[B, S, H, K]` and log-sum-exp `[B, S, H]` in float32."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    results = cudnn.dot_product_attention(
        q_BSHK, k_BTGK, v_BTGK, scale=scale, mask_type=cudnn.MaskType.CAUSAL, return_residual=True
    )
    return results[0], jnp.swapaxes(results[1], 1, 2)


def backward(q_BSHK, k_BTGK, v_BTGK, out_BSHK, lse_BSH, dout_BSHK, *, scale: float):
    """Gradients of queries, keys and values."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    none = jnp.zeros(0, dtype=q_BSHK.dtype)
    residuals = (q_BSHK, k_BTGK, v_BTGK, *[none] * 7, (), jnp.swapaxes(lse_BSH, 1, 2), out_BSHK)
    grads = cudnn._dot_product_attention_bwd_rule(
        scale, 42, 0.0, (False, False), cudnn.MaskType.CAUSAL, cudnn.AttentionLayout.BTNH.value,
        None, None, cudnn.check_cudnn_version(), False, residuals, dout_BSHK,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]
