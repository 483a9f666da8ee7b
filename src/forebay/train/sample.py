"""Sampling from a model, simply: for a look at what it learned, not for serving."""

import jax
import jax.numpy as jnp
import numpy as np

from forebay.train.program import Program


def sample(
    program: Program, weights: object, prompt: np.ndarray, *, tokens: int, temperature: float, seed: int, vocab: int
) -> np.ndarray:
    """Continues a prompt by `tokens` token ids.

    Each token takes a whole forward pass over a window of the training length, which compiles once.

    Args:
        prompt: token ids, int32 `[length]`, at least one.
        temperature: divides the logits; 0 takes the likeliest token.
        vocab: ids from here on are never drawn (those a padded vocabulary has beyond the tokenizer's).

    Returns:
        The new ids, int32 `[tokens]`.
    """
    window = program.config.seq
    rows = program.sharding.size("batch")  # every data-parallel group computes the same

    @jax.jit
    def next_token(weights: object, context: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        weights = jax.device_put(weights, jax.memory.Space.Device)  # those of layers may live in host memory
        tiled = jnp.broadcast_to(context, (rows, window))
        logits = program.model.logits(weights, tiled, sharding=program.sharding, dtype=program.dtype)[0, last, :vocab]
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, logits.argmax())

    ids = [int(i) for i in prompt]
    for key in jax.random.split(jax.random.key(seed), tokens):
        recent = ids[-window:]
        context = np.zeros(window, np.int32)
        context[: len(recent)] = recent
        ids.append(int(next_token(weights, context, np.int32(len(recent) - 1), key)))
    return np.asarray(ids[len(prompt) :], np.int32)
