"""One layer of a stack as a graph: what its backward pass needs, and what each part of it costs.

The graph is of the forward pass as differentiation runs it: the layer's results and its residuals
(what `jax.vjp` keeps). Under `jax.checkpoint` the backward pass makes those residuals again from what
was kept, so what a recompute repeats is the part of this graph between the two.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util

from forebay.errors import UserError
from forebay.graph.costs import Analysis, Cost, analyse, roots
from forebay.graph.flat import FREE
from forebay.graph.partition import Spec, whole
from forebay.graph.residuals import vjp_by
from forebay.graph.rewrite import as_function
from forebay.graph.stacks import Stack


@dataclasses.dataclass(frozen=True)
class BlockGraph:
    """One layer. Values and operations are numbered as in `forward.flat`; bytes and costs are per device.

    Attributes:
        stack: the layers it is one of.
        forward: the analysis of the forward pass together with the residuals.
        backward: costs of the backward pass, given all residuals.
        forward_ops: positions of the operations that the results need.
        needed: values that the backward pass needs and that are neither weights nor constants as they came.
        residuals: for each input of the backward pass that is a residual, the value that it is; None for a literal.
        named: for each checkpoint name, the values that carry it.
        carry, given: inputs that come from the layer before, and those that are there anyway.
        axis_sizes: the mesh.
        differentiated: positions of the inputs whose gradients are wanted.
    """

    stack: Stack
    forward: Analysis
    backward: Analysis
    forward_ops: tuple[int, ...]
    needed: tuple[int, ...]
    residuals: tuple[int | None, ...]
    named: Mapping[str, tuple[int, ...]]
    carry: tuple[int, ...]
    given: frozenset[int]
    axis_sizes: Mapping[str, int]
    differentiated: tuple[int, ...]

    def recomputed(self, kept: set[int]) -> tuple[list[int], set[int]]:
        """The operations that the backward pass repeats, in order, and the values that it starts from,
        when the values in `kept` are."""
        producers = self._producers
        todo, ops, start = list(self.needed), set(), set()
        seen: set[int] = set()
        while todo:
            value = todo.pop()
            if value in seen or value in self.given:
                continue
            seen.add(value)
            if value in kept or value in self.carry:
                start.add(value)
            elif value in producers:
                op = producers[value]
                if op not in ops:
                    ops.add(op)
                    todo += [i for i in self.forward.flat.ops[op].inputs if i is not None]
        return sorted(ops), start

    @functools.cached_property
    def _producers(self) -> dict[int, int]:
        return self.forward.flat.producers()

    @functools.cached_property
    def input_names(self) -> tuple[str, ...]:
        """Names given to the carry itself."""
        return tuple(n for n, values in self.named.items() if all(self._is_carry(v) for v in values))

    @functools.cached_property
    def weight_gradient_ops(self) -> tuple[int, ...]:
        """Positions of the backward operations that only the gradients of the layer's weights need."""
        flat = self.backward.flat
        others = [o for o, k in zip(flat.outputs, self.differentiated, strict=True) if self.stack.roles[k] != "layer"]
        needed = set(_slice(self.backward, others))
        return tuple(i for i in range(len(flat.ops)) if i not in needed)

    def _is_carry(self, value: int) -> bool:
        while value in self._producers:
            op = self.forward.flat.ops[self._producers[value]]
            if op.primitive not in FREE or op.inputs[0] is None:
                return False
            value = op.inputs[0]
        return value in self.carry


def block_graph(
    stack: Stack,
    inputs: Sequence[Spec],
    axis_sizes: Mapping[str, int],
    differentiated: Collection[int] | None = None,
    body: Callable[..., Any] | None = None,
) -> BlockGraph:
    """The graph of one layer of `stack`.

    Args:
        stack: the layers.
        inputs: how the inputs of its body are split over the mesh.
        axis_sizes: the mesh.
        differentiated: positions of the inputs whose gradients are wanted; None is all of a floating dtype.
        body: takes the place of the stack's own, for example with names added.

    Raises:
        UserError: one name is given to activations at different places of the code.
    """
    run = body or as_function(stack.body)
    saved: dict[str, Any] = {}

    chosen = [
        k for k, a in enumerate(stack.avals) if _inexact(a) and (differentiated is None or k in set(differentiated))
    ]

    def forward(*args: Any) -> Any:
        results, vjp = vjp_by(run, args, [k in chosen for k in range(len(args))])
        leaves, saved["tree"] = jax.tree.flatten(vjp)
        return results, leaves

    jaxpr, shapes = jax.make_jaxpr(forward, return_shape=True)(*stack.avals)
    weights = stack.positions("layer")
    count = len(shapes[0])
    analysis = analyse(jaxpr, list(inputs), axis_sizes, weights=weights, results=count)
    flat = analysis.flat
    residuals = flat.outputs[count:]
    needed_specs = [analysis.specs[r] if r is not None else whole(0) for r in residuals]

    def backward(leaves: Any, cotangents: Any) -> Any:
        return jax.tree.unflatten(saved["tree"], leaves)(cotangents)

    cotangents = [jax.ShapeDtypeStruct(s.shape, s.dtype if _inexact(s) else jax.dtypes.float0) for s in shapes[0]]
    back = jax.make_jaxpr(lambda leaves, *cts: backward(leaves, _restore(cts, cotangents)))(
        shapes[1], *[c for c in cotangents if c.dtype != jax.dtypes.float0]
    )
    result_specs = [
        analysis.specs[o] if o is not None else whole(len(s.shape))
        for o, s in zip(flat.outputs[:count], shapes[0], strict=True)
        if _inexact(s)
    ]
    scattered = {tuple(sorted(stack.avals[k].shape)) for k in weights}
    weight_leaves = [k for k, r in enumerate(residuals) if r in analysis.from_weights]
    root = roots(flat)
    fused = [k for k, r in enumerate(residuals) if r is not None and root.get(r, r) not in analysis.written]
    backward_analysis = analyse(
        back, needed_specs + result_specs, axis_sizes, weights=weight_leaves, scattered=scattered, fused=fused
    )

    roles = {flat.inputs[k]: role for k, role in enumerate(stack.roles)}
    given = {v for v, role in roles.items() if role != "carry"}
    produced = {o for op in flat.ops for o in op.outputs}
    given |= {v for v in range(len(flat.values)) if v not in produced and v not in roles}  # constants
    named: dict[str, tuple[int, ...]] = {}
    places: dict[str, set[str]] = {}
    for op in flat.ops:
        if op.primitive == "name":
            name = op.eqn.params["name"]
            named[name] = (*named.get(name, ()), op.outputs[0])
            places.setdefault(name, set()).add(source_info_util.summarize(op.eqn.source_info))
    for name, given_at in places.items():
        if len(given_at) > 1:
            raise UserError(
                f"the block of {stack.name!r} gives the name {name!r} to several activations ({', '.join(sorted(given_at))}): "
                f"give each its own"
            )
    return BlockGraph(
        stack=stack,
        forward=analysis,
        backward=backward_analysis,
        forward_ops=tuple(_slice(analysis, flat.outputs[:count])),
        needed=tuple(dict.fromkeys(r for r in residuals if r is not None and r not in given)),
        residuals=tuple(residuals),
        named=named,
        carry=tuple(v for v, role in roles.items() if role == "carry"),
        given=frozenset(given),
        axis_sizes=axis_sizes,
        differentiated=tuple(chosen),
    )


def forward_costs(graph: BlockGraph) -> list[Cost]:
    """The costs of the operations that the forward pass needs."""
    return [graph.forward.costs[i] for i in graph.forward_ops]


def _slice(analysis: Analysis, results: Sequence[int | None]) -> list[int]:
    producers = analysis.flat.producers()
    todo, ops = [r for r in results if r is not None], set()
    while todo:
        op = producers.get(todo.pop())
        if op is not None and op not in ops:
            ops.add(op)
            todo += [i for i in analysis.flat.ops[op].inputs if i is not None]
    return sorted(ops)


def _inexact(shape: Any) -> bool:
    return jnp.issubdtype(shape.dtype, np.inexact)


def _restore(given: Sequence[Any], cotangents: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    values = iter(given)
    return [np.zeros(c.shape, c.dtype) if c.dtype == jax.dtypes.float0 else next(values) for c in cotangents]
