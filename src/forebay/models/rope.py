"""Rotary positions over two halves of a head (RoPE, arXiv:2104.09864), with Llama 3.1's scaling."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies beyond the original context length.

    Field names and meaning are those of the Hugging Face configuration (`rope_type: llama3`).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angular frequencies `[head_dim / 2]` in radians per position, float32.

    Llama 3.1's scaling divides the frequencies whose wavelength exceeds the original context by `factor`,
    keeps the short ones, and blends those between.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = keep * frequencies + (1 - keep) * frequencies / scaling.factor
    return frequencies.astype(np.float32)


def rope_tables(frequencies: np.ndarray, seq: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[seq, head_dim / 2]` in float32."""
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_BSHK: jax.Array, cos_SK: jax.Array, sin_SK: jax.Array) -> jax.Array:
    """Rotates the two halves of the head dimension against each other (Hugging Face's layout)."""
    first, second = jnp.split(x_BSHK.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_SK[:, None], sin_SK[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BSHK.dtype)
