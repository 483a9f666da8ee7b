"""Candidates ranked by the step time of what was compiled, against compilers made up for the purpose."""

import dataclasses

from test_search import GIB, Compiler, fake, tight

from forebay.planner.rank import rank
from forebay.planner.search import search


class Timed(Compiler):
    """Says that a step takes `base` seconds, and `per_host` for each GiB on the host."""

    def __init__(self, problem, base: float, per_host: float):
        super().__init__(problem)
        self.base, self.per_host = base, per_host

    def __call__(self, placements):
        measured = super().__call__(placements)
        return dataclasses.replace(measured, step_s=self.base + self.per_host * measured.host_bytes / GIB)


def ranked(compiler: Timed, problem, max_compiles: int = 5):
    found = search(fake(problem), compiler, margin=0)
    return found, rank(found, fake(problem), compiler, variants=2, max_compiles=max_compiles, time_limit_s=5)


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
    compiler = Compiler(PROBLEM)
    found = search(fake(PROBLEM), compiler, margin=0)
    assert rank(found, fake(PROBLEM), compiler, variants=2, max_compiles=5, time_limit_s=5) == []
    assert len(compiler.asked) == found.compiles
