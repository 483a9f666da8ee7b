"""Running any loss function under a plan, without editing it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from forebay.errors import UserError
from forebay.graph.loss import trace, with_names
from forebay.graph.rewrite import as_function, evaluate
from forebay.graph.stacks import Stack, find_stacks, key_of
from forebay.offload.policy import apply as apply_placement
from forebay.offload.scan import scan_layers
from forebay.planner.placement import Placement
from forebay.planner.plan import Plan


def apply(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """`function` with its layers under `plan`.

    Its stacks of layers are found as `forebay.plan` finds them: `jax.lax.scan` over layers, with or
    without `jax.checkpoint`; `forebay.scan_layers` without a plan; repeated `jax.checkpoint` blocks in
    a Python loop. Each runs under the plan's placements instead of its own checkpointing. The value and
    the gradients (reverse mode) are those of `function`.

    Args:
        function: of pytrees of arrays, returning a scalar or a pair of a scalar and something else.
        plan: made for this function by `forebay.plan`, or by hand with its stacks' names.

    Returns:
        A function of the same arguments.

    Raises:
        UserError: when it is called: the plan is for other stacks or names.
    """

    def planned(*args: Any) -> Any:
        jaxpr, tree = trace(function, *args)
        stacks = [with_names(s) for s in find_stacks(jaxpr)]
        plan.check({s.name: s.layers for s in stacks}, {s.name: s.names for s in stacks})
        by_key = {key: s for s in stacks for key in s.keys}
        loops = {s.name: iter(range(s.layers)) for s in stacks}

        def run(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
            stack = by_key[key_of(eqn)]
            # a Python number in the traced function is no array yet
            inputs = [
                x if hasattr(x, "shape") else jnp.asarray(x, v.aval.dtype)
                for x, v in zip(inputs, eqn.invars, strict=True)
            ]
            placements = plan.for_stack(stack.name)
            if stack.looped:
                layer = next(loops[stack.name])
                placement = next(p for p in placements if p.layers[0] <= layer < p.layers[1])
                return apply_placement(as_function(stack.body), placement, scanned=False)(*inputs)
            return _run_scan(stack, placements, inputs, len(eqn.outvars))

        results = evaluate(jaxpr, jax.tree.leaves(args), run, lambda eqn: key_of(eqn) in by_key)
        return jax.tree.unflatten(tree, results)

    return planned


def _run_scan(stack: Stack, placements: Sequence[Placement], inputs: list[Any], results: int) -> list[Any]:
    constants, carry, layers = ([inputs[k] for k in stack.positions(r)] for r in ("constant", "carry", "layer"))
    body = as_function(stack.body)
    if stack.reverse:
        return _run_reversed(stack, placements, constants, carry, layers)
    avals = jax.eval_shape(body, *stack.avals)[len(carry) :]
    stacked = [jnp.zeros((stack.layers, *a.shape), a.dtype) for a in avals]
    index = jnp.arange(stack.layers, dtype=jnp.int32)

    def block(layer: Any, x: Any, *constants: Any) -> Any:
        position, weights = layer
        carry, stacked = x
        out = body(*constants, *carry, *weights)
        rows = [
            jax.lax.dynamic_update_index_in_dim(s, row, position, 0, allow_negative_indices=False)
            for s, row in zip(stacked, out[len(carry) :], strict=True)
        ]
        return out[: len(carry)], rows

    carry, stacked = scan_layers(block, placements, (carry, stacked), (index, layers), *constants, stack=stack.name)
    assert len(carry) + len(stacked) == results
    return [*carry, *stacked]


def _run_reversed(
    stack: Stack, placements: Sequence[Placement], constants: list[Any], carry: list[Any], layers: list[Any]
) -> list[Any]:
    if len(placements) > 1:
        raise UserError(
            f"the stack {stack.name!r} is scanned in reverse and the plan gives it {len(placements)} ranges of layers: "
            f"plan it with one range (variants=1)"
        )
    body = apply_placement(as_function(stack.body), placements[0])

    def step(carry: Any, weights: Any) -> Any:
        out = body(*constants, *carry, *weights)
        return out[: len(carry)], out[len(carry) :]

    carry, stacked = jax.lax.scan(step, carry, layers, length=stack.layers, reverse=True)
    return [*carry, *stacked]
