"""cuDNN's fused attention, with its softmax statistics in our hands.

`jax.nn.dot_product_attention` keeps the log-sum-exp inside its own differentiation rule, where no
checkpoint policy can see it; a plan that moves the attention's output to the host would then still
run the attention twice. So the two kernels are called separately here.

jax asks the GPU of its own process what it can do, of which there is none when a step is compiled for one that is
not there. Its primitives are therefore called without that question; `supports` answers it for the GPU meant.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from forebay.xla.topology import compute_capability, is_absent

_PLAIN, _LATENT = 128, (192, 128)
_HOPPER = 256  # the largest head size there
_LATENT_SINCE = 91100


def missing(device: Any, head_dim: int, v_head_dim: int, dtype: Any) -> str | None:
    """What cuDNN's kernels lack for these heads on a jax GPU, in a few words; None if nothing.

    Of a GPU that is not there a recent cuDNN is assumed; compiling for it takes none.

    Args:
        device: a GPU of jax's.
        head_dim, v_head_dim: of queries and keys, and of values.
        dtype: of all three.
    """
    capability = compute_capability(device)
    if not supports(head_dim, v_head_dim, dtype, capability):
        gpu = ".".join(map(str, capability))
        sizes = f"heads of {head_dim} and {v_head_dim} in {jnp.dtype(dtype).name}"
        return f"cuDNN has none for {sizes} on a GPU of compute capability {gpu}"
    if is_absent(device):
        return None
    if (found := _version()) is None:
        return "jax finds no cuDNN (extra cuda13)"
    if head_dim != v_head_dim and found < _LATENT_SINCE:
        return f"cuDNN has one for heads of {head_dim} and {v_head_dim} since 9.11, and {found} is installed"
    return None


def supports(head_dim: int, v_head_dim: int, dtype: Any, capability: tuple[int, int]) -> bool:
    """Whether cuDNN >= 9.12 (the first for CUDA 13) has both kernels for these sizes of heads on such a GPU.

    That is what cuDNN's frontend checks of a backward pass (cudnn-frontend,
    `node/scaled_dot_product_flash_attention.h`); `benchmarks/attention` asks cuDNN itself. Larger heads that only newer
    releases have on Blackwell are left out.

    Args:
        head_dim, v_head_dim, dtype: see `missing`.
        capability: the GPU's compute capability, (9, 0) for Hopper.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16) or head_dim % 8 or v_head_dim % 8:
        return False
    major = capability[0]
    if head_dim == v_head_dim:
        return head_dim <= (_HOPPER if major == 9 else _PLAIN) and major >= 8
    return (head_dim, v_head_dim) == _LATENT and major in (9, 10)


def _version() -> int | None:
    """Of the cuDNN that jax has loaded, 91501 for 9.15.1; None if there is none."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    try:
        return cudnn.check_cudnn_version()
    except RuntimeError:
        return None


def forward(q_BSHK, k_BTGK, v_BTGV, *, scale: float) -> tuple[jax.Array, jax.Array]:
    """Causal attention: output `[B, S, H, V]` and log-sum-exp `[B, S, H]` in float32."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    out, lse = cudnn._dot_product_attention_fwd_p_wrapper.bind(
        q_BSHK, k_BTGK, v_BTGV, *_unused(q_BSHK), is_training=True, **_parameters(scale)
    )
    return out, jnp.swapaxes(lse, 1, 2)


def backward(q_BSHK, k_BTGK, v_BTGV, out_BSHV, lse_BSH, dout_BSHV, *, scale: float):
    """Gradients of queries, keys and values."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    lse_BHS = jnp.swapaxes(lse_BSH, 1, 2)
    dq, dk, dv, *_ = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        q_BSHK, k_BTGK, v_BTGV, *_unused(q_BSHK), lse_BHS, out_BSHV, dout_BSHV, **_parameters(scale)
    )
    return dq, dk, dv


def _unused(q: jax.Array) -> list[jax.Array]:
    """Bias, lengths and offsets of packed sequences, page tables."""
    return [jnp.zeros(0, q.dtype)] * 7


def _parameters(scale: float) -> dict[str, Any]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    parameters = {
        "scale": scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.CAUSAL, "layout": cudnn.AttentionLayout.BTNH.value, "sliding_window_length": None,
    }  # fmt: skip
    return parameters | ({"score_mod": None} if _has_score_mod() else {})


@functools.cache
def _has_score_mod() -> bool:
    """Since jax 0.12."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return "score_mod" in inspect.signature(cudnn._dot_product_attention_fwd_impl).parameters
