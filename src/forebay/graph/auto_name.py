"""Names for the activations of code that has none."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from forebay.graph.costs import fusible, is_collective
from forebay.graph.flat import Op, flatten, jaxpr_of
from forebay.graph.residuals import names_in
from forebay.graph.rewrite import TRANSPARENT, evaluate


def auto_name(block: Callable[..., Any]) -> Callable[..., Any]:
    """`block` with names on the activations that are worth placing, if it has no names of its own.

    Named are the results of matrix products (`dot_0`, `dot_1`, ...), of attention and other kernels and
    loops (`scan_0`, `pallas_call_0`, ...), of collectives (`psum_0`, ...), and what is computed element
    by element and then multiplied, if it is as large as a product (`operand_0`, ...). Numbers count in
    the order of the program. Values and gradients are unchanged.

    Args:
        block: a function of pytrees of arrays.

    Returns:
        A function of the same arguments. Where the block names anything itself, it is run as it is.
    """

    def named(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))

        def flat(*values: Any) -> Any:
            a, k = jax.tree.unflatten(tree, values)
            return block(*a, **k)

        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        if names_in(jaxpr):
            return block(*args, **kwargs)
        return jax.tree.unflatten(jax.tree.structure(shape), run_named(jaxpr, leaves))

    return named


def run_named(jaxpr: Any, args: Any) -> list[Any]:
    """The results of a closed jaxpr, run with names on what `auto_name` names."""
    count: Counter[str] = Counter()
    operands = _large_operands(jaxpr)

    def name(eqn: Any, inputs: list[Any]) -> list[Any] | None:
        if eqn.primitive.name in TRANSPARENT:
            return None
        kind = _kind(eqn)
        if kind is None and not any(id(v) in operands for v in eqn.outvars):
            return None
        results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
        results = list(results) if eqn.primitive.multiple_results else [results]
        for k, (var, result) in enumerate(zip(eqn.outvars, results, strict=True)):
            label = kind or ("operand" if id(var) in operands else None)
            if label and _is_array(result):
                results[k] = checkpoint_name(result, f"{label}_{count[label]}")
                count[label] += 1
        return results

    return evaluate(jaxpr, args, name, lambda eqn: True)


def _kind(eqn: Any) -> str | None:
    name = eqn.primitive.name
    if name in ("name", "dynamic_update_slice", "gather", "cond", "while"):
        return None
    if name == "dot_general" or name.startswith("ragged_dot"):
        return "dot"
    op = Op(name, (), (), eqn)
    if name in ("custom_vjp_call", "custom_jvp_call", "shard_map"):
        return "call" if _has_products(eqn) else None
    return name if is_collective(op) or not fusible(op) else None


def _has_products(eqn: Any) -> bool:
    inner = next((jaxpr_of(p) for p in eqn.params.values() if jaxpr_of(p) is not None), None)
    return inner is not None and any(not fusible(op) for op in flatten(inner).ops)


def _large_operands(jaxpr: Any) -> set[int]:
    """Variables that are computed element by element, feed a product, and are no smaller than the smallest product."""
    products = [e for e in _all(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    if not products:
        return set()
    least = min(_size(e.outvars[0]) for e in products)
    fed = {id(v) for e in products for v in e.invars}
    arguments = {id(v) for v in jaxpr.jaxpr.invars}
    return {
        id(v)
        for e in _all(jaxpr.jaxpr)
        if e.primitive.name
        in ("mul", "add", "sub", "div", "max", "select_n", "convert_element_type", "exp", "logistic")
        and not all(id(i) in arguments for i in e.invars)
        for v in e.outvars
        if id(v) in fed and _size(v) >= least
    }


def _all(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        if eqn.primitive.name in TRANSPARENT:
            found += _all(getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"]))
    return found


def _size(var: Any) -> int:
    return int(np.prod(var.aval.shape, dtype=np.int64)) * getattr(var.aval.dtype, "itemsize", 8)


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, np.inexact) and x.ndim > 0
