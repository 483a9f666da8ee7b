"""Why a plan is what it is: for each tensor what the alternatives would have cost, and what memory is worth."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from forebay.planner.build import Costed
from forebay.planner.placement import EVERYTHING, WHERES, Placement
from forebay.planner.problem import Problem, evaluate, layer_cost
from forebay.planner.solve import solve

GIB = 2**30
_UNNAMED_SHARE = 0.02
"""A product without a name is worth a word where repeating it takes this share of a layer's forward pass."""


def reasons(problem: Problem, placements: Sequence[Placement]) -> list[dict[str, Any]]:
    """For each tensor of each range: bytes per layer and device, where it went, and the step with it elsewhere.

    An alternative changes this one tensor in this one range: seconds and bytes are of the whole step,
    `fits` says whether that would still fit.
    """
    found = []
    for k, placement in enumerate(placements):
        stack = problem.stack(placement.stack)
        here = layer_cost(stack, placement.tensors)
        for name in stack.names:
            where = _where(placement, name, is_input=name in stack.inputs)
            alternatives = []
            for other in WHERES:
                changed = None if other == where else _moved(problem, placement, name, other)
                if changed is None:
                    continue
                predicted = evaluate(problem, [*placements[:k], changed, *placements[k + 1 :]])
                alternatives.append(
                    {
                        "where": other, "step_time_s": predicted.step_s, "device_bytes": predicted.device_bytes,
                        "host_bytes": predicted.host_bytes, "fits": predicted.fits(problem),
                    }
                )  # fmt: skip
            found.append(
                {
                    "stack": placement.stack, "layers": list(placement.layers), "tensor": name, "where": where,
                    "bytes": stack.size(name), "stored_bytes": here.stored.get(name, 0), "alternatives": alternatives,
                }
            )  # fmt: skip
    return found


def shadow_price(problem: Problem, step_s: float, *, variants: int, time_limit_s: float) -> float | None:
    """Seconds per step that one more GiB of device memory would save; None where nothing was found in time."""
    richer = solve(
        dataclasses.replace(problem, device_budget=problem.device_budget + GIB),
        variants=variants, time_limit_s=time_limit_s,
    )  # fmt: skip
    return None if richer is None else max(0.0, step_s - richer.predicted.step_s)


def unnamed_notes(costed: Costed) -> list[str]:
    """Products that are repeated wherever everything with a name is kept: they, or what follows, have no name."""
    notes = []
    for block in costed.graph.blocks:
        stack = costed.problem.stack(block.stack.name)
        positions, _ = block.recomputed({v for values in block.named.values() for v in values})
        for i in positions:
            cost, op = block.forward.costs[i], block.forward.flat.ops[i]
            seconds = costed.rates.total_s([cost], weights=False)
            if cost.kind in ("matmul", "attention") and seconds > _UNNAMED_SHARE * stack.forward_s:
                size = sum(block.forward.num_bytes[o] for o in op.outputs)
                notes.append(
                    f"the block of {block.stack.name!r} has a {cost.kind} without a name ({_source(op.eqn)}, "
                    f"{size / 2**20:.0f} MiB): every plan but '*=device' repeats it, {1e3 * seconds:.2f} ms a layer; name its "
                    f"result with forebay.name"
                )
    return notes


def _where(placement: Placement, name: str, *, is_input: bool) -> str:
    kept = is_input or EVERYTHING in placement.tensors
    return placement.tensors.get(name, "device" if kept else "recompute")


def _moved(problem: Problem, placement: Placement, name: str, where: str) -> Placement | None:
    stack, layers = problem.stack(placement.stack), placement.layers[1] - placement.layers[0]
    if where == "host" and not problem.may_offload(stack, name, layers):
        return None
    tensors = dict(placement.tensors)
    tensors.pop(name, None)
    if where == "recompute":
        if EVERYTHING in tensors or name in stack.inputs:
            return None
    elif not (where == "device" and EVERYTHING in tensors):
        tensors[name] = where  # type: ignore[assignment]
    return dataclasses.replace(placement, tensors=tensors)


def _source(eqn: Any) -> str:
    from jax._src import source_info_util

    return source_info_util.summarize(eqn.source_info)
