"""Candidates ranked by the step time of what was compiled, against compilers made up for the purpose."""

import dataclasses
from typing import Any

from test_search import GIB, fake, tight

from forebay.planner.problem import Problem, evaluate
from forebay.planner.rank import rank
from forebay.planner.search import Decision, Measured, search


class Timed:
    """A compiler that agrees with the account's bytes, and says that a step takes `base` seconds and `per_host` for
    each GiB on the host; without a `base` it says nothing."""

    def __init__(self, problem: Problem, base: float | None, per_host: float = 0.0):
        self.problem, self.base, self.per_host = problem, base, per_host
        self.asked: list[Decision] = []

    def __call__(self, decision: Decision) -> Measured:
        self.asked.append(decision)
        predicted = evaluate(dataclasses.replace(self.problem, correction_bytes=0), decision.placements)
        step_s = None if self.base is None else self.base + self.per_host * predicted.host_bytes / GIB
        return Measured(int(predicted.device_bytes), int(predicted.host_bytes), False, step_s=step_s)


def ranked(compiler: Timed, problem: Problem, max_compiles: int = 5) -> Any:
    found = search(fake(problem), compiler, margin=0)
    return found, rank(found, fake(problem), compiler, variants=2, max_compiles=max_compiles, time_limit_s=5, margin=0)


PROBLEM = tight(12, d2h_bytes_per_s=2 * GIB, h2d_bytes_per_s=2 * GIB)


def test_the_fastest_timeline_comes_first():
    found, candidates = ranked(Timed(PROBLEM, 1.0, 0.1), PROBLEM)
    assert found.predicted.host_bytes > 0, "the account moves something to the host"
    assert len(candidates) > 1
    assert [c.step_s for c in candidates] == sorted(c.step_s for c in candidates)
    # what is on the host costs, so the candidate with least there wins
    assert candidates[0].found.predicted.host_bytes == min(c.found.predicted.host_bytes for c in candidates)
    assert candidates[0].found.placements != found.placements


def test_the_planners_own_stays_where_its_timeline_is_the_fastest():
    found, candidates = ranked(Timed(PROBLEM, 10.0, -0.1), PROBLEM)
    assert candidates[0].found.placements == found.placements
    assert candidates[0].name == "the planner's own"


def test_no_more_is_compiled_than_allowed():
    compiler = Timed(PROBLEM, 1.0, 0.1)
    found, candidates = ranked(compiler, PROBLEM, max_compiles=1)
    assert len(compiler.asked) == found.compiles
    assert [c.name for c in candidates] == ["the planner's own"]


def test_without_timelines_there_is_nothing_to_rank():
    compiler = Timed(PROBLEM, None)
    found = search(fake(PROBLEM), compiler, margin=0)
    assert rank(found, fake(PROBLEM), compiler, variants=2, max_compiles=5, time_limit_s=5) == []
    assert len(compiler.asked) == found.compiles


def test_nothing_on_the_host_leaves_no_optimizer_state_there_either():
    problem = dataclasses.replace(PROBLEM, state_sizes=(GIB // 4, GIB // 4), state_host_fraction=0.5)
    compiler = Timed(problem, 1.0, 0.1)
    found, candidates = ranked(compiler, problem)
    assert found.decision.state_host_fraction == 0.5
    (nothing,) = (c for c in candidates if c.name == "nothing on the host")
    assert nothing.found.decision.state_host_fraction == 0.0 and nothing.found.decision in compiler.asked
    assert not any(p.names("host") for p in nothing.found.placements)


def test_what_is_learnt_of_plans_with_copies_is_not_held_against_one_without():
    """Plans that move anything need 3 GiB more than the account says; the one that moves nothing what it says."""

    class Copies(Timed):
        def __call__(self, decision: Decision) -> Measured:
            made = super().__call__(decision)
            more = 3 * GIB if made.host_bytes else 0
            return dataclasses.replace(made, device_bytes=made.device_bytes + more)

    found, candidates = ranked(Copies(PROBLEM, 1.0, 0.1), PROBLEM)
    assert found.predicted.host_bytes and found.problem.correction_bytes == 3 * GIB
    (nothing,) = (c for c in candidates if c.name == "nothing on the host")
    exactly = search(fake(dataclasses.replace(PROBLEM, host_budget=0.0)), Timed(PROBLEM, 1.0), margin=0)
    assert nothing.found.placements == exactly.placements


def test_of_plans_as_fast_the_one_that_moves_less_is_taken():
    """The plan with copies is faster by less than a search would compile another plan for, then by more."""
    for per_host, copies_are_taken in ((-1e-4, False), (-0.1, True)):
        found, candidates = ranked(Timed(PROBLEM, 10.0, per_host), PROBLEM)
        assert found.predicted.host_bytes > 0
        hosted = [c.found.predicted.host_bytes for c in candidates]
        assert (hosted[0] == max(hosted)) == copies_are_taken and len(set(hosted)) > 1
        if not copies_are_taken:
            assert candidates[0].step_s > candidates[1].step_s and hosted[0] == min(hosted)
