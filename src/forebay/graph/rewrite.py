"""Running a jaxpr with some of its equations replaced.

`evaluate` binds every equation as jax does (so that custom derivatives, shardings and scopes survive),
except those that a handler takes over. Calls that contain such an equation are inlined.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]

from forebay.graph.flat import called_jaxpr, jaxpr_of

# Calls that may be looked into without losing anything. Functions with derivatives of their own may not.
TRANSPARENT = ("jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint")

Handler = Callable[[Any, list[Any]], Sequence[Any] | None]
"""Called with an equation and its inputs; returns its results, or None to have it run as it is."""


def evaluate(jaxpr: Any, args: Sequence[Any], handle: Handler, wanted: Callable[[Any], bool]) -> list[Any]:
    """The results of a closed jaxpr.

    Args:
        jaxpr: closed.
        args: its arguments.
        handle: takes over equations for which `wanted` is true.
        wanted: whether an equation may be taken over; calls that hold one are looked into.
    """
    body = jaxpr.jaxpr
    env: dict[Any, Any] = dict(zip(body.constvars, jaxpr.consts, strict=True))
    env.update(zip(body.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in body.eqns:
        inputs = [read(v) for v in eqn.invars]
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            results = handle(eqn, inputs) if wanted(eqn) else None
            called = transparent_jaxpr(eqn) if results is None else None
            if called is not None and contains(called, wanted):
                results = evaluate(close(called), inputs, handle, wanted)
            if results is None:
                results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
                results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in body.outvars]


def contains(jaxpr: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a jaxpr, or one that it calls, has an equation that is wanted."""
    for eqn in jaxpr_of(jaxpr).eqns:
        if wanted(eqn):
            return True
        called = transparent_jaxpr(eqn)
        if called is not None and contains(called, wanted):
            return True
    return False


def transparent_jaxpr(eqn: Any) -> Any:
    """The jaxpr of a call that may be inlined, else None."""
    return called_jaxpr(eqn) if eqn.primitive.name in TRANSPARENT else None


def close(jaxpr: Any) -> Any:
    """A closed jaxpr of an open one without constants; closed ones are returned."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def as_function(jaxpr: Any) -> Callable[..., list[Any]]:
    """A jaxpr as a function of its flat arguments, returning the list of its results."""
    return jaxpr_as_fun(close(jaxpr))
