"""Candidates at other trade-offs than the search's own plan, compiled and ranked by their simulated step time.

The account that plans are made under knows a layer's work and a layer's copies; the compiled program says what
the scheduler made of them. Where the two disagree, it is about what is hidden: so the candidates are the plan
itself, the best plan that moves nothing to the host, and the best under links of half the rate.
"""

import dataclasses
from collections.abc import Callable, Iterator

from forebay.planner.build import Costed
from forebay.planner.search import FAILURES, GAIN, MARGIN, Compile, Decision, Found, choose, decision_of
from forebay.units import format_seconds

WORTH = 1.10
"""A candidate that the account has more than this much slower than the plan is not compiled."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One compiled plan: what it is, and its step time by the account and by its timeline."""

    name: str
    found: Found

    @property
    def step_s(self) -> float:
        """By its timeline."""
        assert self.found.measured is not None and self.found.measured.step_s is not None
        return self.found.measured.step_s


def rank(
    found: Found,
    costed: Costed,
    compile_plan: Compile | None,
    *,
    variants: int,
    max_compiles: int,
    time_limit_s: float,
    margin: float = MARGIN,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Candidate]:
    """The compiled candidates that fit, the one to take first and then by their timelines; the search's plan alone where
    there is nothing to rank by, or no compile left of `max_compiles`.

    The one to take is, of those within `GAIN` of the fastest, the one that moves least to the host: less depends on the link.
    """
    if compile_plan is None or found.measured is None or found.measured.step_s is None or not found.fits:
        return []
    problem = found.problem
    correction = problem.correction_bytes
    if found.measured.host_bytes:  # what was learnt of plans with copies does not hold for those without
        correction = costed.problem.correction_bytes + margin * problem.device_budget
    others = {
        "nothing on the host": {"host_budget": 0.0, "state_host_fraction": 0.0, "correction_bytes": correction},
        "links of half the rate": {
            "d2h_bytes_per_s": problem.d2h_bytes_per_s / 2,
            "h2d_bytes_per_s": problem.h2d_bytes_per_s / 2,
        },
    }

    def decisions() -> Iterator[tuple[str, Decision]]:
        for name, changes in others.items():
            changed = dataclasses.replace(problem, **changes)
            choice = choose(costed, changed, variants=variants, time_limit_s=time_limit_s)
            if choice is not None:
                yield name, decision_of(choice)

    candidates, seen = [Candidate("the planner's own", found)], {found.decision}
    compiles = found.compiles
    for name, decision in decisions():
        placements = decision.placements
        if decision in seen or compiles >= max_compiles:
            continue
        placed = dataclasses.replace(problem, state_host_fraction=decision.state_host_fraction)
        predicted, _ = costed.predict(placements, placed)
        if predicted.step_s > WORTH * found.predicted.step_s:
            continue
        seen.add(decision)
        progress(f"compiling a candidate: {name}, {format_seconds(predicted.step_s)} a step")
        compiles += 1
        try:
            measured = compile_plan(decision)
        except FAILURES as error:
            progress(f"passed over: {error}")
            continue
        fits = (
            not measured.refused
            and measured.device_bytes <= problem.device_budget
            and measured.host_bytes <= problem.host_budget
        )
        if fits and measured.step_s is not None:
            exact = dataclasses.replace(
                predicted, device_bytes=float(measured.device_bytes), host_bytes=float(measured.host_bytes)
            )
            candidates.append(
                Candidate(
                    name,
                    dataclasses.replace(
                        found, placements=placements, predicted=exact, problem=placed, measured=measured
                    ),
                )
            )
    candidates = [
        dataclasses.replace(c, found=dataclasses.replace(c.found, compiles=compiles)) for c in candidates
    ]  # fmt: skip
    candidates.sort(key=lambda c: c.step_s)
    as_fast = [c for c in candidates if c.step_s <= candidates[0].step_s * (1 + GAIN)]
    taken = min(as_fast, key=lambda c: (c.found.predicted.host_bytes, c.step_s))
    return [taken, *(c for c in candidates if c is not taken)]
