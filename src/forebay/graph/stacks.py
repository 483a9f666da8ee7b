"""Finding the layers in a loss function: scans, and blocks under `jax.checkpoint` that repeat.

A *stack* is a run of identical layers of which a plan may decide what each keeps. Functions scanned by
`forebay.scan_layers` without a plan, `jax.lax.scan` over a block with or without `jax.checkpoint`,
and checkpointed blocks called in a Python loop are all stacks.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core as jax_core

from forebay.errors import UserError
from forebay.graph.flat import Scan, flatten, jaxpr_of
from forebay.graph.residuals import names_in
from forebay.graph.rewrite import as_function, close, contains, evaluate, transparent_jaxpr

STACK_SCOPE = "stack:"
"""A scan under `jax.named_scope("stack:NAME")` is the stack called NAME."""
DEFAULT_STACK = "layers"

_REMAT = ("remat2", "remat", "checkpoint")
_HEAVY = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "pallas_call", "shard_map")


Role = Literal["constant", "carry", "layer"]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Identical layers.

    Attributes:
        name: how a plan calls it.
        layers: how many.
        body: the closed jaxpr of one layer, without the `jax.checkpoint` that was around it. Its results
            are the carry and, in a scan, what is stacked.
        roles: for each input of the body whether it is the same for all layers, comes from the layer
            before, or is of this layer.
        names: the checkpoint names in it, in order.
        keys: identify its equations in the traced function (`key_of`).
        looped: in a Python loop rather than a scan.
        reverse: scanned from the last layer to the first.
    """

    name: str
    layers: int
    body: Any
    roles: tuple[Role, ...]
    names: tuple[str, ...]
    keys: frozenset[int]
    looped: bool = False
    reverse: bool = False

    @property
    def avals(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr_of(self.body).invars]

    def positions(self, role: Role) -> list[int]:
        return [k for k, r in enumerate(self.roles) if r == role]


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """An equation as it is run once. `inputs` identify values across the calls around it; `handed_on` says
    which of them an earlier `jax.checkpoint` block led to."""

    eqn: Any
    inputs: tuple[Hashable, ...]
    handed_on: tuple[bool, ...]


def find_stacks(jaxpr: Any) -> tuple[Stack, ...]:
    """The stacks of a closed jaxpr, in the order in which they run.

    Raises:
        UserError: two stacks have one name.
    """
    found: list[tuple[str | None, Stack]] = []
    calls = _calls(jaxpr)
    blocks: dict[str, list[_Call]] = {}
    for call in calls:
        if call.eqn.primitive.name in _REMAT:
            blocks.setdefault(f"{call.eqn.params['jaxpr']}", []).append(call)
    for call in calls:
        eqn = call.eqn
        if eqn.primitive.name == "scan" and _is_stack(eqn):
            scan = Scan.of(eqn)
            roles: list[Role] = [
                "constant" if k < scan.constants else "carry" if k < scan.constants + scan.carry else "layer"
                for k in range(len(eqn.invars))
            ]
            found.append((_scope(eqn), _stack(scan.length, scan.body, tuple(roles), [eqn], reverse=scan.reverse)))
        elif eqn.primitive.name in _REMAT:
            same = blocks[f"{eqn.params['jaxpr']}"]
            if call is same[0] and len(same) > 1 and _products(eqn.params["jaxpr"]):
                stack = _stack(len(same), eqn.params["jaxpr"], _loop_roles(same), [c.eqn for c in same], looped=True)
                found.append((_scope(eqn), stack))
    named = _named(found)
    repeated = [n for n, count in Counter(s.name for s in named).items() if count > 1]
    if repeated:
        raise UserError(f"two stacks of layers are called {repeated[0]!r}: give each its own name (stack=...)")
    return named


def _stack(layers: int, body: Any, roles: tuple[Role, ...], equations: list[Any], **kind: bool) -> Stack:
    body = inline_checkpoints(body)
    return Stack("", layers, body, roles, names_in(body), frozenset(map(key_of, equations)), **kind)


def _loop_roles(calls: list[_Call]) -> tuple[Role, ...]:
    """Of blocks called in turn: what an earlier one led to is carry, what all share is constant."""
    roles: list[Role] = []
    for k, first in enumerate(calls[0].inputs):
        if any(call.handed_on[k] for call in calls):
            roles.append("carry")
        else:
            roles.append("constant" if all(call.inputs[k] == first for call in calls) else "layer")
    return tuple(roles)


def key_of(eqn: Any) -> int:
    """What is in `Stack.keys`: equations are compared by identity."""
    return id(eqn)


def inline_checkpoints(body: Any) -> Any:
    """`body`, closed, without the `jax.checkpoint` around (most of) it: the plan decides instead.

    Checkpointed parts that do less than half of its products stay as they are: they belong to the
    layer's own arithmetic.
    """
    body = close(body)
    total = max(_products(body), 1)

    def is_block(eqn: Any) -> bool:
        return eqn.primitive.name in _REMAT and 2 * _products(eqn.params["jaxpr"]) >= total

    if not contains(body, is_block):
        return body

    def inline(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
        return as_function(inline_checkpoints(close(eqn.params["jaxpr"])))(*inputs)

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: evaluate(body, args, inline, is_block))(*avals)


def checkpointed_blocks(jaxpr: Any) -> int:
    """How many `jax.checkpoint` blocks with products in them are called, alike or not."""
    return sum(c.eqn.primitive.name in _REMAT and _products(c.eqn.params["jaxpr"]) > 0 for c in _calls(jaxpr))


def unrolled_layers(jaxpr: Any) -> int:
    """How often the longest-repeating run of products in a Python-looped model repeats; 0 if nothing does.

    Shapes of products are compared, at least four times the same sequence in a row.
    """
    shapes = [tuple(tuple(v.aval.shape) for v in op.eqn.invars) for op in flatten(jaxpr).ops if op.primitive in _HEAVY]
    best = 0
    for period in range(1, len(shapes) // 4 + 1):
        run = longest = 0
        for a, b in zip(shapes, shapes[period:], strict=False):
            run = run + 1 if a == b else 0
            longest = max(longest, run)
        repeats = longest // period + 1
        if repeats >= 4 and repeats * period > len(shapes) // 2:
            best = max(best, repeats)
    return best


def _calls(jaxpr: Any) -> list[_Call]:
    """All equations that run once, calls looked into as often as they are called; in order.

    Functions with derivatives of their own stay whole.
    """
    found: list[_Call] = []
    fresh = itertools.count()
    handed_on: set[Hashable] = set()

    def visit(body: Any, inputs: Sequence[Hashable]) -> list[Hashable]:
        known: dict[Any, Hashable] = dict(zip(body.invars, inputs, strict=True))
        known.update((v, ("constant", id(v))) for v in body.constvars)

        def read(atom: Any) -> Hashable:
            return ("literal", str(atom)) if isinstance(atom, jax_core.Literal) else known[atom]

        for eqn in body.eqns:
            operands = tuple(map(read, eqn.invars))
            called = transparent_jaxpr(eqn)
            results: list[Hashable] = [("value", next(fresh)) for _ in eqn.outvars]
            if called is None or eqn.primitive.name in _REMAT:
                found.append(_Call(eqn, operands, tuple(o in handed_on for o in operands)))
                if eqn.primitive.name in _REMAT or any(o in handed_on for o in operands):
                    handed_on.update(results)
            if called is not None:
                inner = visit(jaxpr_of(called), operands)
                results = results if eqn.primitive.name in _REMAT else inner
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in body.outvars]

    body = jaxpr_of(jaxpr)
    visit(body, [("argument", k) for k in range(len(body.invars))])
    return found


def _is_stack(eqn: Any) -> bool:
    """A scan whose carry keeps shape and that multiplies matrices: not a loop inside a loss or an attention."""
    scan = Scan.of(eqn)
    if STACK_SCOPE in str(eqn.source_info.name_stack):
        return True
    weights = [v for v in eqn.invars[scan.constants + scan.carry :] if len(v.aval.shape) >= 3]
    floating = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in weights)
    return scan.length > 1 and scan.carry > 0 and floating and _products(scan.body) > 0


def _products(jaxpr: Any) -> int:
    count = 0
    for op in flatten(jaxpr).ops:
        if op.primitive in _HEAVY:
            count += 1
        elif op.primitive == "scan":
            count += _products(op.eqn.params["jaxpr"])
    return count


def _scope(eqn: Any) -> str | None:
    found = re.search(rf"{STACK_SCOPE}([^/)]+)", str(eqn.source_info.name_stack))
    return found[1] if found else None


def _named(found: Sequence[tuple[str | None, Stack]]) -> tuple[Stack, ...]:
    unnamed = sum(name is None for name, _ in found)
    numbers = iter(range(len(found)))
    return tuple(
        dataclasses.replace(stack, name=name or (DEFAULT_STACK if unnamed == 1 else f"{DEFAULT_STACK}_{next(numbers)}"))
        for name, stack in found
    )
