"""A whole loss function as a graph: its stacks of layers, and everything outside of them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from forebay.errors import UserError
from forebay.graph.auto_name import run_named
from forebay.graph.block import BlockGraph, block_graph
from forebay.graph.costs import Analysis, analyse
from forebay.graph.flat import Array, Flat, flatten
from forebay.graph.partition import Spec, local_shape, spec_of, whole
from forebay.graph.residuals import names_in
from forebay.graph.rewrite import evaluate
from forebay.graph.stacks import Stack, checkpointed_blocks, find_stacks, key_of, unrolled_layers

BOUNDARY = "forebay:boundary:"


@dataclasses.dataclass(frozen=True)
class LossGraph:
    """A loss function and its gradient, per device.

    Attributes:
        blocks: a layer of each stack, in the order in which the stacks run.
        outside: the forward and backward pass of all that is in no stack.
        parameter_bytes: of the differentiated argument.
        layer_bytes: of that, what each stack's layers are, all layers together.
        argument_bytes: of the other arguments.
        cast_bytes: for each stack, what its weights take in the dtype they are multiplied in, where that
            is another; all layers together.
    """

    blocks: tuple[BlockGraph, ...]
    outside: Analysis
    parameter_bytes: int
    layer_bytes: Mapping[str, int]
    argument_bytes: int
    cast_bytes: Mapping[str, int]

    @property
    def stacks(self) -> dict[str, int]:
        return {b.stack.name: b.stack.layers for b in self.blocks}

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        return {b.stack.name: tuple(b.named) for b in self.blocks}


def trace_loss(loss: Callable[..., Any], parameters: Any, *args: Any, axis_sizes: Mapping[str, int]) -> LossGraph:
    """Traces `loss(parameters, *args)`; nothing is computed and no device is needed.

    Args:
        loss: returns a scalar, or a pair of a scalar and something else.
        parameters: what it is differentiated by: a pytree of `ShapeDtypeStruct`s or arrays, with
            `NamedSharding`s where they are split.
        args: its other arguments, likewise.
        axis_sizes: the axes of the mesh.

    Raises:
        UserError: the loss has no stack of layers; two stacks have one name.
    """
    jaxpr, _ = trace(loss, parameters, *args)
    stacks = [with_names(s) for s in find_stacks(jaxpr)]
    if not stacks:
        raise UserError(_nothing(jaxpr))
    leaves = jax.tree.leaves((parameters, args))
    count = len(jax.tree.leaves(parameters))
    specs = [spec_of(getattr(leaf, "sharding", None), len(leaf.shape)) for leaf in leaves]
    outer = analyse(jaxpr, specs, axis_sizes, weights=range(count))
    derived = _derived_from(outer, count)
    blocks, layer_bytes, cast_bytes = [], {}, {}
    for stack in stacks:
        op = next(o for o in outer.flat.ops if key_of(o.eqn) in stack.keys) if not stack.looped else None
        inputs, differentiated = _inputs(stack, op, outer, derived)
        block = block_graph(stack, inputs, axis_sizes, differentiated)
        blocks.append(block)
        layer_bytes[stack.name] = stack.layers * sum(
            _bytes(a.shape, a.dtype, s, axis_sizes)
            for k, (a, s) in enumerate(zip(stack.avals, inputs, strict=True))
            if stack.roles[k] == "layer"
        )
        cast_bytes[stack.name] = stack.layers * _cast_bytes(block)
    sizes = [_bytes(leaf.shape, leaf.dtype, s, axis_sizes) for leaf, s in zip(leaves, specs, strict=True)]
    return LossGraph(
        blocks=tuple(blocks),
        outside=_outside(jaxpr, stacks, specs, count, leaves, axis_sizes),
        parameter_bytes=sum(sizes[:count]),
        layer_bytes=layer_bytes,
        argument_bytes=sum(sizes[count:]),
        cast_bytes=cast_bytes,
    )


def trace(loss: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The closed jaxpr of a loss of flat arguments, its first result the scalar, and the results' structure."""
    leaves, tree = jax.tree.flatten(args)

    def flat(*values: Any) -> Any:
        return loss(*jax.tree.unflatten(tree, values))

    jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    first = jax.tree.leaves(shape)[:1]
    if not first or first[0].shape != () or not jnp.issubdtype(first[0].dtype, np.floating):
        raise UserError("the loss must return a scalar, or a pair whose first part is one")
    return jaxpr, jax.tree.structure(shape)


def with_names(stack: Stack) -> Stack:
    """The stack with names on its activations, where it had none."""
    if stack.names:
        return stack
    body = jax.make_jaxpr(lambda *a: run_named(stack.body, a))(*stack.avals)
    return dataclasses.replace(stack, body=body, names=names_in(body))


def _nothing(jaxpr: Any) -> str:
    layers, blocks = unrolled_layers(jaxpr), checkpointed_blocks(jaxpr)
    if blocks > 1:
        return (
            f"there is nothing to decide: the loss has {blocks} jax.checkpoint blocks and no two are alike (a Python number that "
            f"differs from layer to layer makes them differ): pass what differs as an array, or scan over the layers"
        )
    if layers:
        return (
            f"there is nothing to decide: the loss has no scanned or checkpointed block, but {layers} like layers in a "
            f"Python loop: stack their weights and run them with forebay.scan_layers or jax.lax.scan (a loop also makes the "
            f"compiler keep many layers' buffers at once)"
        )
    return (
        "there is nothing to decide: the loss has no scan over layers and no repeated jax.checkpoint: run its layers with "
        "forebay.scan_layers or jax.lax.scan"
    )


def _inputs(stack: Stack, op: Any, outer: Analysis, derived: set[int]) -> tuple[list[Spec], list[int]]:
    if op is None:  # in a Python loop: the calls are inlined, so nothing is known of their inputs
        ranks = [len(a.shape) for a in stack.avals]
        return [whole(r) for r in ranks], [k for k, r in enumerate(stack.roles) if r != "constant"]
    specs, differentiated = [], []
    for k, (number, role) in enumerate(zip(op.inputs, stack.roles, strict=True)):
        spec = whole(len(stack.avals[k].shape) + (role == "layer")) if number is None else outer.specs[number]
        specs.append(spec[1:] if role == "layer" else spec)
        if role != "constant" or number in derived:
            differentiated.append(k)
    return specs, differentiated


def _derived_from(outer: Analysis, count: int) -> set[int]:
    """Values that depend on the first `count` inputs."""
    found = set(outer.flat.inputs[:count])
    for op in outer.flat.ops:
        if any(i in found for i in op.inputs):
            found.update(op.outputs)
    return found


def _outside(
    jaxpr: Any,
    stacks: Sequence[Stack],
    specs: Sequence[Spec],
    count: int,
    leaves: Sequence[Any],
    axis_sizes: Mapping[str, int],
) -> Analysis:
    """The analysis of loss and gradient with every layer cut out: its carry passes through."""
    keys = {k for s in stacks for k in s.keys}

    def cut(eqn: Any, inputs: list[Any]) -> list[Any]:
        stack = next(s for s in stacks if key_of(eqn) in s.keys)
        carry = [_boundary(stack.name)(inputs[k]) for k in stack.positions("carry")]
        results = []
        for v in eqn.outvars:  # a block called in a loop need not return what it hands on first
            alike = next(
                (k for k, x in enumerate(carry) if (jnp.shape(x), x.dtype) == (v.aval.shape, v.aval.dtype)), None
            )
            results.append(jnp.zeros(v.aval.shape, v.aval.dtype) if alike is None else carry.pop(alike))
        return results

    def scalar(differentiated: list[Any], others: list[Any]) -> Any:
        return evaluate(jaxpr, [*differentiated, *others], cut, lambda e: key_of(e) in keys)[0]

    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    forward = flatten(jax.make_jaxpr(lambda *a: scalar(list(a[:count]), list(a[count:])))(*shapes))
    used = _inputs_of(forward)
    floating = [k for k in range(count) if jnp.issubdtype(leaves[k].dtype, np.inexact) and forward.inputs[k] in used]

    def gradient(*values: Any) -> Any:
        parameters = [values[k] for k in floating]

        def of(chosen: list[Any]) -> Any:
            full = list(values[:count])
            for k, v in zip(floating, chosen, strict=True):
                full[k] = v
            return scalar(full, list(values[count:]))

        return jax.value_and_grad(of)(parameters)

    whole_program = jax.make_jaxpr(gradient)(*shapes)
    scattered = {tuple(sorted(leaf.shape)) for leaf in leaves[:count]}
    return analyse(whole_program, list(specs), axis_sizes, weights=range(count), scattered=scattered)


@functools.cache
def _boundary(stack: str) -> Callable[[Any], Any]:
    """The identity, whose backward pass says where it is: there the backward pass of the stack would run."""

    @jax.custom_vjp
    def mark(x: Any) -> Any:
        return x

    mark.defvjp(lambda x: (x, None), lambda _, dx: (checkpoint_name(dx, BOUNDARY + stack),))
    return mark


def gradients_before(outside: Analysis, stack: str) -> int:
    """The bytes of the gradients outside of the stacks that are there when the backward pass of `stack` begins."""
    flat = outside.flat
    marks = [i for i, op in enumerate(flat.ops) if op.primitive == "name" and op.eqn.params["name"] == BOUNDARY + stack]
    made = {o for op in flat.ops[: marks[0]] for o in op.outputs} if marks else set()
    return sum(outside.num_bytes[o] for o in flat.outputs[1:] if o is not None and o in made)


def _inputs_of(flat: Flat) -> set[int]:
    """The values that the results depend on."""
    producers = flat.producers()
    todo, seen = [o for o in flat.outputs if o is not None], set()
    while todo:
        value = todo.pop()
        if value not in seen:
            seen.add(value)
            if value in producers:
                todo += [i for i in flat.ops[producers[value]].inputs if i is not None]
    return seen


def _cast_bytes(block: BlockGraph) -> int:
    """What one layer's weights take on a device in the dtype that its products use, if that is another."""
    flat, total = block.forward.flat, 0
    weights = {flat.inputs[k] for k in block.stack.positions("layer")}
    for op in flat.ops:
        source = op.inputs[0] if op.inputs else None
        if op.primitive == "convert_element_type" and source in weights and len(flat.values[op.outputs[0]].shape) > 1:
            total += block.forward.num_bytes[op.outputs[0]]
    return total


def _bytes(shape: tuple[int, ...], dtype: Any, spec: Spec, axis_sizes: Mapping[str, int]) -> int:
    local = local_shape(Array(tuple(shape), dtype), spec, axis_sizes)
    return int(np.prod(local, dtype=np.int64)) * getattr(dtype, "itemsize", 8)
