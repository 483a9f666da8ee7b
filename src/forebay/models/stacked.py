"""Trees of weights whose layers are stacked: drawing and counting them, one layer of them, a plain scan over them."""

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_shape(x: Any) -> bool:
    """Whether `x` is a leaf of a tree of shapes or of logical axes."""
    return isinstance(x, tuple)


def parameter_count(shapes: Any) -> int:
    return sum(math.prod(s) for s in jax.tree.leaves(shapes, is_leaf=is_shape))


def decayed(shapes: Any) -> Any:
    """False for what weight decay leaves alone: norms and biases."""
    return jax.tree.map_with_path(
        lambda path, _: not any(word in path[-1].name for word in ("norm", "bias")), shapes, is_leaf=is_shape
    )


def one_layer(shapes: Any) -> Any:
    """Abstract float32 weights of one layer, from the shapes of a stack."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s[1:], jnp.float32), shapes, is_leaf=is_shape)


def draw(key: jax.Array, shapes: Any, dtype: Any, *, layers: int, back_into_the_stream: Collection[str]) -> Any:
    """Random weights: normal with standard deviation 0.02, those that are named `back_into_the_stream` scaled
    down by `sqrt(2 * layers)` (GPT-2's initialisation), norms at one, biases at zero."""
    leaves, treedef = jax.tree.flatten_with_path(shapes, is_leaf=is_shape)
    alike: dict[tuple[int, ...], list[int]] = {}
    for n, (path, shape) in enumerate(leaves):
        if not any(word in path[-1].name for word in ("norm", "bias")):
            alike.setdefault(shape[1:], []).append(n)
    weights: list[Any] = [(jnp.ones if "norm" in path[-1].name else jnp.zeros)(shape, dtype) for path, shape in leaves]
    # one draw for all that differ in their first dimension only: compiling the draws is most of a small run's start
    keys = jax.random.split(key, len(alike))
    for one, (tail, members) in zip(keys, alike.items(), strict=True):
        lengths = [leaves[n][1][0] for n in members]
        drawn = jax.random.normal(one, (sum(lengths), *tail), jnp.float32)
        for n, part in zip(members, jnp.split(drawn, np.cumsum(lengths)[:-1]), strict=True):
            back = leaves[n][0][-1].name in back_into_the_stream
            std = 0.02 / (2 * layers) ** 0.5 if back else 0.02
            weights[n] = (std * part).astype(dtype)
    return jax.tree.unflatten(treedef, weights)


def plain_scan(block: Any, x: Any, layers: Any, *constants: Any, stack: str) -> Any:
    """`block` over a stack of layers, nothing placed: for sampling and tests."""
    del stack
    return jax.lax.scan(lambda x, layer: (block(layer, x, *constants), None), x, layers)[0]
