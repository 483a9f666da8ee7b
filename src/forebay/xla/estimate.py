"""Bytes of a step that are known before it is compiled."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax


def local_bytes(shapes: Any, shardings: Any) -> list[int]:
    """Bytes on one device of each array of a tree."""
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return [math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize for x, sharding in pairs]


def argument_bytes(shapes: Any, shardings: Any, hosted: Sequence[bool] | None = None) -> int:
    """Bytes of a pytree of arrays on one device, less those that are `hosted`."""
    sizes = local_bytes(shapes, shardings)
    return sum(s for s, h in zip(sizes, hosted or [False] * len(sizes), strict=True) if not h)


def offloaded_bytes(jaxpr: Any, devices: int) -> int:
    """Bytes on one device's host of what the loops of a traced program leave there, split evenly over `devices`.

    These are the stacks of residuals. What tensor parallelism leaves whole on several devices is counted
    once.
    """
    kept = 0
    for equation in _equations(jaxpr):
        if equation.primitive.name in ("scan", "while"):
            avals = [v.aval for v in equation.outvars]
            host = [a for a in avals if getattr(a, "memory_space", None) == jax.memory.Space.Host]
            kept += sum(math.prod(a.shape) * a.dtype.itemsize for a in host)
    return kept // devices


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)
