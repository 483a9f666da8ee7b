"""A jaxpr as one flat list of operations: what it calls is inlined, loops and kernels stay whole.

A value of a flat program has a number. Inside `shard_map` shapes are those of one device; outside they
are of the whole array, and `forebay.graph.partition` says how they are split.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

# Equations whose jaxpr is evaluated once, on their own inputs, and returns their results.
CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "remat",
    "checkpoint",
)
# Operations that cost nothing: they name, place or reinterpret a value.
FREE = (
    "name", "sharding_constraint", "optimization_barrier", "reshard", "enter", "leave", "squeeze", "expand_dims",
    "device_put", "stop_gradient", "copy", "pvary",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Array:
    """The shape and dtype of a value; `local` ones are of one device already."""

    shape: tuple[int, ...]
    dtype: Any
    local: bool = False

    @property
    def num_bytes(self) -> int:
        size = getattr(self.dtype, "itemsize", 8)
        for d in self.shape:
            size *= d
        return size


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation. `inputs` are numbers of values, None for literals; `eqn` is jax's equation.

    `primitive` is jax's name of it, or "enter" and "leave" where a value crosses the edge of a `shard_map`.
    """

    primitive: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    eqn: Any
    mesh: Any = None
    """The mesh of the innermost `shard_map` around it; None outside."""
    position: int = 0
    """Of "enter" and "leave": which argument or result of the `shard_map` crosses."""


@dataclasses.dataclass
class Flat:
    """A flat program. `inputs` and `outputs` are numbers of values; an output that is a literal is None."""

    values: list[Array]
    ops: list[Op]
    inputs: list[int]
    outputs: list[int | None]

    def producers(self) -> dict[int, int]:
        """For each value that an operation makes, that operation's position."""
        return {v: i for i, op in enumerate(self.ops) for v in op.outputs}


def jaxpr_of(value: Any) -> Any:
    """The open jaxpr in a closed one, or the jaxpr itself; None if it is neither."""
    inner = getattr(value, "jaxpr", value)
    return inner if hasattr(inner, "eqns") else None


def called_jaxpr(eqn: Any) -> Any:
    """The jaxpr of a call-like equation, closed if it has constants; None for other equations."""
    if eqn.primitive.name not in CALLS:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return eqn.params[key]
    return None


@dataclasses.dataclass(frozen=True)
class Scan:
    """The parts of a `scan` equation: its inputs are constants, then the carry, then what it scans over."""

    constants: int
    carry: int
    length: int
    reverse: bool
    body: Any

    @classmethod
    def of(cls, eqn: Any) -> "Scan":
        p = eqn.params
        if "ft_in" in p:  # jax >= 0.12
            constants, carry = (len(list(part)) for part in p["ft_in"].unpack()[:2])
        else:
            constants, carry = p["num_consts"], p["num_carry"]
        return cls(constants, carry, p["length"], p["reverse"], p["jaxpr"])


def flatten(jaxpr: Any, *, local: bool = False, mesh: Any = None) -> Flat:
    """The flat program of a jaxpr, open or closed."""
    flat = Flat([], [], [], [])
    inner = jaxpr_of(jaxpr)
    flat.inputs = [_new(flat, v.aval, local) for v in inner.invars]
    env: dict[Any, int | None] = dict(zip(inner.invars, flat.inputs, strict=True))
    flat.outputs = _inline(flat, inner, env, local, mesh)
    return flat


def _inline(flat: Flat, jaxpr: Any, env: dict[Any, int | None], local: bool, mesh: Any) -> list[int | None]:
    for v in jaxpr.constvars:
        env[v] = _new(flat, v.aval, local)

    def read(atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        called = called_jaxpr(eqn)
        if called is not None:
            body = jaxpr_of(called)
            inner = _bind(flat, body, inputs, local)
            env.update(zip(eqn.outvars, _inline(flat, body, inner, local, mesh), strict=True))
        elif eqn.primitive.name == "shard_map":
            env.update(zip(eqn.outvars, _inline_shard_map(flat, eqn, inputs), strict=True))
        else:
            outputs = [_new(flat, v.aval, local) for v in eqn.outvars]
            flat.ops.append(Op(eqn.primitive.name, tuple(inputs), tuple(outputs), eqn, mesh))
            env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _inline_shard_map(flat: Flat, eqn: Any, inputs: Sequence[int | None]) -> list[int]:
    body = jaxpr_of(eqn.params["jaxpr"])
    mesh = eqn.params["mesh"]
    entered: list[int | None] = []
    for k, (outer, inner) in enumerate(zip(inputs, body.invars, strict=True)):
        number = _new(flat, inner.aval, True)
        flat.ops.append(Op("enter", (outer,), (number,), eqn, mesh, k))
        entered.append(number)
    left = []
    for k, inner in enumerate(_inline(flat, body, _bind(flat, body, entered, True), True, mesh)):
        number = _new(flat, eqn.outvars[k].aval, False)
        flat.ops.append(Op("leave", (inner,), (number,), eqn, mesh, k))
        left.append(number)
    return left


def _bind(flat: Flat, body: Any, inputs: Sequence[int | None], local: bool) -> dict[Any, int | None]:
    """The environment of a called jaxpr; literal arguments become values that nothing produces."""
    return {
        v: number if number is not None else _new(flat, v.aval, local)
        for v, number in zip(body.invars, inputs, strict=True)
    }


def _new(flat: Flat, aval: Any, local: bool) -> int:
    flat.values.append(Array(tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None), local))
    return len(flat.values) - 1
