"""Arrays of a training state in host memory: how jax is told."""

from typing import Any

import jax


def with_memory(shardings: Any, hosted: Any) -> Any:
    """The shardings, those of `hosted` arrays in pinned host memory.

    Compile-only CUDA devices list no memories, and jax drops the kind there without a word: see `settle` and
    `forebay.xla.host_arguments`.
    """
    return jax.tree.map(lambda s, h: s.with_memory_kind("pinned_host") if h else s, shardings, hosted)


def settle(tree: Any, hosted: Any) -> Any:
    """Inside of a jitted function: the arrays as in the memories they are said to be in.

    Changes nothing where jax knows the memories of its arguments already.
    """
    host = jax.memory.Space.Host

    def one(x: jax.Array, h: bool) -> jax.Array:
        return jax.device_put(x, host) if h and jax.typeof(x).memory_space != host else x

    return jax.tree.map(one, tree, hosted)
