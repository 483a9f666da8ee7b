"""Which activations a block names, and which of them its backward pass would really keep."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

# jax's primitive behind `jax.ad_checkpoint.checkpoint_name`
_NAME = "name"
# primitives that hand on a value without being its origin
_LOOPS = ("scan", "while")
_TRANSPARENT = ("device_put", "reduce_precision", "sharding_constraint", "optimization_barrier")


@dataclasses.dataclass(frozen=True)
class Residual:
    """A value that the backward pass of a block needs from its forward pass.

    `name` is its checkpoint name, None if it has none; `argument` the index of the flattened argument
    that it is, None if the block computed it. Shape and bytes are of the whole array, all devices.
    """

    name: str | None
    argument: int | None
    shape: tuple[int, ...]
    dtype: Any

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * _itemsize(self.dtype)


@dataclasses.dataclass(frozen=True)
class BlockNames:
    """The checkpoint names in a block, in order, and which of them are residuals of it.

    `residual_bytes[name]` is what keeping the name alone would store for one layer, whole array.
    """

    carried: tuple[str, ...]
    residual_bytes: dict[str, int]
    inputs: tuple[str, ...]
    """Names of the block's own input: they are always kept, on the device or on the host."""

    @property
    def not_residuals(self) -> tuple[str, ...]:
        """Names whose placement changes nothing: the backward pass does not need the value."""
        return tuple(n for n in self.carried if n not in self.residual_bytes)


def vjp_by(function: Callable[..., Any], args: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, Any]:
    """The result of `function(*args)`, and its VJP by the leaves of `args` that are wanted.

    The VJP returns a tuple of one cotangent for each of these. What only the gradients by the others need is
    not kept. `wanted` has an entry for each leaf.
    """
    leaves, tree = jax.tree.flatten(tuple(args))

    def of_wanted(*values: Any) -> Any:
        given = iter(values)
        return function(
            *jax.tree.unflatten(tree, [next(given) if w else v for v, w in zip(leaves, wanted, strict=True)])
        )

    return jax.vjp(of_wanted, *(v for v, w in zip(leaves, wanted, strict=True) if w))


def residuals(function: Callable[..., Any], *args: Any, wanted: Sequence[bool] | None = None) -> list[Residual]:
    """What the VJP of `function` at `args` keeps, one entry per leaf of the VJP, in order.

    `function` may be wrapped in `jax.checkpoint`. `args` are arrays or `ShapeDtypeStruct`s; nothing is
    computed. `wanted` is as of `vjp_by`; all leaves when not given.
    """
    wanted = [True] * len(jax.tree.leaves(args)) if wanted is None else wanted
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(vjp_by(function, a, wanted)[1]))(*args).jaxpr
    invars = {v: i for i, v in enumerate(jaxpr.invars)}
    return [_origin(jaxpr, v, invars) for v in jaxpr.outvars]


def block_names(block: Callable[..., Any], layer: Any, x: Any, *constants: Any) -> BlockNames:
    """The names that `block(layer, x, *constants)` gives its activations.

    All arguments are arrays or `ShapeDtypeStruct`s of one layer.
    """
    args = (layer, x, *constants)
    carried = carried_names(block, *args)
    residual_bytes: dict[str, int] = {}
    for kept in [carried, *((name,) for name in carried)]:
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        found = residuals(jax.checkpoint(block, policy=policy, prevent_cse=False), *args)
        for name in kept:  # alone last: what a name stores by itself is what counts
            size = sum(r.num_bytes for r in found if r.name == name)
            if size:
                residual_bytes[name] = size
    return BlockNames(carried, residual_bytes, input_names(block, layer, x, *constants))


def carried_names(block: Callable[..., Any], *args: Any) -> tuple[str, ...]:
    """The checkpoint names in `block(*args)` and in the differentiation rules of what it calls, in order."""
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(block, *a)))(*args).jaxpr
    return names_in(jaxpr)


def names_in(jaxpr: Any) -> tuple[str, ...]:
    """The checkpoint names in a jaxpr, open or closed, and in all that it calls, in order."""
    return tuple(dict.fromkeys(_names(getattr(jaxpr, "jaxpr", jaxpr))))


def input_names(block: Callable[..., Any], layer: Any, x: Any, *constants: Any) -> tuple[str, ...]:
    """The names that the block gives to its own carry `x`, unchanged."""
    jaxpr = jax.make_jaxpr(block)(layer, x, *constants).jaxpr
    x_leaves = range(len(jax.tree.leaves(layer)), len(jax.tree.leaves((layer, x))))
    return tuple(dict.fromkeys(_names_of(jaxpr, {v: i for i, v in enumerate(jaxpr.invars) if i in x_leaves})))


def _names_of(jaxpr: Any, wanted: dict[Any, int]) -> Iterable[str]:
    """Names given, here or in a nested function, to the input variables in `wanted`."""
    invars = {v: i for i, v in enumerate(jaxpr.invars)}
    wanted_indices = set(wanted.values())
    for eqn in jaxpr.eqns:
        origins = [_origin(jaxpr, v, invars).argument for v in eqn.invars]
        if eqn.primitive.name == _NAME and origins[0] in wanted_indices:
            yield eqn.params["name"]
        inner = _inner(eqn)
        if inner is not None and eqn.primitive.name not in _LOOPS:
            passed = {inner.invars[k]: k for k, origin in enumerate(origins) if origin in wanted_indices}
            if passed:
                yield from _names_of(inner, passed)


def _names(jaxpr: Any) -> Iterable[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == _NAME:
            yield eqn.params["name"]
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _names(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def _origin(jaxpr: Any, var: Any, invars: dict[Any, int]) -> Residual:
    shape, dtype = tuple(var.aval.shape), var.aval.dtype
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    while not isinstance(var, Literal):
        if var in invars:
            return Residual(None, invars[var], shape, dtype)
        eqn = producers.get(var)
        if eqn is None:
            break
        if eqn.primitive.name == _NAME:
            return Residual(eqn.params["name"], None, shape, dtype)
        if eqn.primitive.name in _TRANSPARENT:
            var = eqn.invars[eqn.outvars.index(var)]
            continue
        inner = _inner(eqn)
        if inner is not None:
            found = _origin(inner, inner.outvars[eqn.outvars.index(var)], {v: i for i, v in enumerate(inner.invars)})
            if found.argument is not None and eqn.primitive.name in _LOOPS:
                break  # what enters one iteration is not what entered the loop
            if found.argument is None:
                return dataclasses.replace(found, shape=shape, dtype=dtype)
            var = eqn.invars[found.argument]
            continue
        break
    return Residual(None, None, shape, dtype)


def _inner(eqn: Any) -> Any:
    """The jaxpr of an equation that calls a function on its own inputs and returns its results, else None."""
    inner = next((p for p in eqn.params.values() if _is_jaxpr(p)), None)
    inner = getattr(inner, "jaxpr", inner)
    called = inner is not None and len(inner.outvars) == len(eqn.outvars) and len(inner.invars) == len(eqn.invars)
    return inner if called else None


def _itemsize(dtype: Any) -> int:
    return getattr(dtype, "itemsize", 8)
