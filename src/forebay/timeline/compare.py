"""A planner's account of a step against the timeline of the compiled one: how far apart, and where."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forebay.hardware import Hardware
from forebay.timeline.build import timeline
from forebay.timeline.timeline import Timeline
from forebay.units import format_seconds

if TYPE_CHECKING:
    from forebay.xla.compile import CompiledStep

CLOSE = 0.10
"""The relative difference in step time up to which the two agree."""


def brief(made: Timeline) -> dict[str, Any]:
    """What a plan file says of its timeline."""
    return {
        "step_time_s": made.step_time_s, "tflops_per_device": made.tflops_per_device, "mfu": made.mfu,
        "compute_s": dict(made.compute_s), "waiting_s": dict(made.waiting_s),
        "collective_s": dict(made.collective_s), "assumptions": list(made.assumptions),
    }  # fmt: skip


def of_compiled(
    compiled: "CompiledStep",
    hardware: Hardware,
    devices: int,
    model_flops: float | None = None,
) -> dict[str, Any] | None:
    """`brief` of a compiled step's timeline; None where the compiler refused the step."""
    if compiled.refused is not None:
        return None
    return brief(timeline(compiled.module, hardware, devices=devices, model_flops=model_flops))


def difference(estimate: Mapping[str, Any], made: Mapping[str, Any]) -> str | None:
    """One line on where the two differ, None where their step times are within `CLOSE`.

    Args:
        estimate: `step_time_s`, `recompute_s` and `exposed_s` of a plan's prediction.
        made: of the compiled step, as `brief` says it.
    """
    theirs, ours = made["step_time_s"], estimate["step_time_s"]
    if not ours or abs(theirs / ours - 1) <= CLOSE:
        return None
    pairs = {
        "recomputing": (estimate["recompute_s"], made["compute_s"]["recompute"] + made["compute_s"]["compiler_remat"]),
        "copies to the host": (estimate["exposed_s"]["d2h"], made["waiting_s"].get("d2h", 0.0)),
        "copies from the host": (estimate["exposed_s"]["h2d"], made["waiting_s"].get("h2d", 0.0)),
    }
    rest = tuple(step - sum(p[n] for p in pairs.values()) for n, step in enumerate((ours, theirs)))
    pairs["everything else"] = (rest[0], rest[1])
    name, (before, after) = max(pairs.items(), key=lambda item: abs(item[1][1] - item[1][0]))
    waits = f", of which {format_seconds(made['waiting_s'].get('collective', 0.0))} wait for collectives"
    return (
        f"the compiled step's timeline takes {format_seconds(theirs)}, {theirs / ours - 1:+.0%} against the planner's "
        f"{format_seconds(ours)}; most of the difference is in {name}: {format_seconds(after)} against {format_seconds(before)}"
        + (waits if name == "everything else" else "")
    )
