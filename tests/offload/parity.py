"""What the tests of the layer scan share: plans, the plain scan to compare with, and the comparison."""

import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from forebay.planner.placement import Placement

# Programs that run once: LLVM's optimisations would take longer than they save.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def place(*ranges):
    """`place((first, past_last, {name: where}), ...)`"""
    return tuple(Placement("layers", (first, past_last), tensors) for first, past_last, tensors in ranges)


def plain(block, x, layers, *constants):
    return jax.lax.scan(lambda x, layer: (block(layer, x, *constants), None), x, layers)[0]


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def summed(tree):
    """A loss that every floating-point leaf has a part in, none the same part."""
    leaves = [v for v in jax.tree.leaves(tree) if jnp.issubdtype(v.dtype, jnp.inexact)]
    return sum((i + 1) * (v.astype(jnp.float32) ** 2).sum() for i, v in enumerate(leaves))


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        if a.dtype == jax.dtypes.float0:
            continue
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.abs(a - e).max() <= 1e-6 * np.abs(e).max()


@st.composite
def placements(draw, layers, names):
    """Ranges that cover `layers`, each with its own random placement of some of the names."""
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=2))) if layers > 1 else []
    edges = [0, *cuts, layers]
    ranges = []
    for first, past_last in itertools.pairwise(edges):
        tensors = draw(st.dictionaries(st.sampled_from(names), st.sampled_from(["device", "host", "recompute"])))
        if draw(st.booleans()):
            tensors = {"*": "device"} | {n: w for n, w in tensors.items() if w != "recompute"}
        ranges.append((first, past_last, tensors))
    return place(*ranges)
