"""Finding the layers in a loss function: scans, and blocks under `jax.checkpoint` that repeat.

A *stack* is a run of identical layers of which a plan may decide what each keeps. Functions scanned by
`forebay.scan_layers` without a plan, `jax.lax.scan` over a block with or without `jax.checkpoint`,
and checkpointed blocks called in a Python loop are all stacks.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

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


def find_stacks(jaxpr: Any) -> tuple[Stack, ...]:
    """The stacks of a closed jaxpr, in the order in which they run.

    Raises:
        UserError: two stacks have one name.
    """
    found: list[tuple[str | None, Stack]] = []
    equations = _equations(jaxpr)
    blocks: dict[str, list[Any]] = {}
    for eqn in equations:
        if eqn.primitive.name in _REMAT:
            blocks.setdefault(f"{eqn.params['jaxpr']}", []).append(eqn)
    for eqn in equations:
        if eqn.primitive.name == "scan" and _is_stack(eqn):
            scan = Scan.of(eqn)
            roles: list[Role] = [
                "constant" if k < scan.constants else "carry" if k < scan.constants + scan.carry else "layer"
                for k in range(len(eqn.invars))
            ]
            found.append((_scope(eqn), _stack(scan.length, scan.body, tuple(roles), [eqn], reverse=scan.reverse)))
        elif eqn.primitive.name in _REMAT:
            same = blocks[f"{eqn.params['jaxpr']}"]
            if eqn is same[0] and len(same) > 1 and _products(eqn.params["jaxpr"]):
                found.append(
                    (_scope(eqn), _stack(len(same), eqn.params["jaxpr"], _loop_roles(same), same, looped=True))
                )
    named = _named(found)
    repeated = [n for n, count in Counter(s.name for s in named).items() if count > 1]
    if repeated:
        raise UserError(f"two stacks of layers are called {repeated[0]!r}: give each its own name (stack=...)")
    return named


def _stack(layers: int, body: Any, roles: tuple[Role, ...], equations: list[Any], **kind: bool) -> Stack:
    body = inline_checkpoints(body)
    return Stack("", layers, body, roles, names_in(body), frozenset(map(key_of, equations)), **kind)


def _loop_roles(equations: list[Any]) -> tuple[Role, ...]:
    """Of blocks called in turn: what the one before returned is carry, what all share is constant."""
    roles: list[Role] = []
    for k, first in enumerate(equations[0].invars):
        others = [e.invars[k] for e in equations]
        made = {id(v) for e in equations for v in e.outvars}
        if any(id(v) in made for v in others):
            roles.append("carry")
        else:
            roles.append("constant" if all(v is first for v in others) else "layer")
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


def _equations(jaxpr: Any) -> list[Any]:
    """All equations that run once, calls looked into; in order. Functions with derivatives of their own stay whole."""
    found = []
    for eqn in jaxpr_of(jaxpr).eqns:
        called = transparent_jaxpr(eqn)
        if called is None or eqn.primitive.name in _REMAT:
            found.append(eqn)
        if called is not None:
            found += _equations(called)
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
