"""What changed between two timelines: two plans, two sets of flags, a prediction and a measurement."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from forebay.timeline.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class Change:
    """One quantity in two timelines, in seconds of a step."""

    group: str
    name: str
    before_s: float
    after_s: float

    @property
    def change_s(self) -> float:
        return self.after_s - self.before_s


def diff(before: Timeline, after: Timeline) -> list[Change]:
    """The step, its parts and waits (in this order), then what is exposed, the largest change first.

    Parts and waits add up to the step; what is exposed is by tensor, and adds up to the waits.
    """
    changes = [Change("step", "step", before.step_time_s, after.step_time_s)]
    for group in ("compute_s", "waiting_s"):
        changes += _changes(group.removesuffix("_s"), getattr(before, group), getattr(after, group))
    exposed = _changes("exposed", _by_name(before), _by_name(after))
    return changes + sorted((c for c in exposed if c.change_s), key=lambda c: -abs(c.change_s))


def diff_json(before: Timeline, after: Timeline) -> dict[str, Any]:
    """`diff` for a program."""
    return {
        "schema": "forebay.timeline-diff/1",
        "speedup": before.step_time_s / after.step_time_s if after.step_time_s else None,
        "changes": [dataclasses.asdict(c) | {"change_s": c.change_s} for c in diff(before, after)],
    }


def _changes(group: str, before: Mapping[str, float], after: Mapping[str, float]) -> list[Change]:
    return [Change(group, n, before.get(n, 0.0), after.get(n, 0.0)) for n in dict.fromkeys([*before, *after])]


def _by_name(timeline: Timeline) -> dict[str, float]:
    total: dict[str, float] = {}
    for e in timeline.exposed:
        name = f"{e.kind} {e.name} ({e.phase})"
        total[name] = total.get(name, 0.0) + e.exposed_s
    return total
