"""The loop with the compiler, against compilers made up for the purpose."""

import dataclasses
import re
from typing import Any

import pytest
from problems import random_stack
from test_solve import GIB, chain, problem

from forebay.errors import CompilerFailedError, WrongNumbersError
from forebay.planner.problem import Problem, evaluate
from forebay.planner.search import Decision, InfeasibleError, Measured, explain_infeasible, search


@dataclasses.dataclass(frozen=True)
class Graph:
    parameter_bytes: int = 3 * GIB


@dataclasses.dataclass(frozen=True)
class FakeCosted:
    """What `search` needs of a `Costed`: the problem, and predictions that are the problem's own."""

    problem: Problem
    graph: object = dataclasses.field(default_factory=lambda: Graph())

    rates: Any = None

    def predict(self, placements, problem=None):
        problem = problem or self.problem
        return evaluate(problem, placements), {s.stack: s.working_bytes for s in problem.stacks}


def fake(p: Problem) -> Any:
    return FakeCosted(p)


class Compiler:
    """Needs `factor` times what the account says, and `more` bytes."""

    def __init__(self, p: Problem, factor: float = 1.0, more: float = 0.0, refuses: bool = False):
        self.problem, self.factor, self.more, self.refuses = p, factor, more, refuses
        self.asked: list = []

    def __call__(self, decision):
        placements = decision.placements
        self.asked.append(placements)
        predicted = evaluate(dataclasses.replace(self.problem, correction_bytes=0), placements)
        return Measured(int(predicted.device_bytes * self.factor + self.more), int(predicted.host_bytes), self.refuses)


def tight(budget: float, **changes) -> Problem:
    """Eight layers that store up to 2 GiB each over a link too slow to move it all."""
    slow = {"d2h_bytes_per_s": GIB / 8, "h2d_bytes_per_s": GIB / 8}
    return problem(chain(8), device_budget=budget * GIB, **(slow | changes))


def test_a_right_account_needs_one_compile():
    p = tight(12)
    compiler = Compiler(p)
    found = search(fake(p), compiler, margin=0)
    assert found.fits
    assert len(compiler.asked) == found.compiles == 1
    assert found.predicted.device_bytes == compiler(found.decision).device_bytes


def test_a_plan_that_the_compiler_makes_too_large_is_replaced_by_one_that_fits():
    p = tight(14)
    compiler = Compiler(p, more=5 * GIB)  # the account comes to 10 GiB
    found = search(fake(p), compiler, margin=0)
    assert found.fits
    assert found.measured is not None
    assert found.measured.device_bytes <= p.device_budget
    assert compiler(Decision(compiler.asked[0])).device_bytes > p.device_budget  # the first one did not


def test_room_that_the_account_did_not_see_is_used():
    """The compiler needs 4 GiB less than the account: the second plan recomputes less."""
    p = tight(12, fixed_bytes=4 * GIB)
    compiler = Compiler(p, more=-4 * GIB)
    found = search(fake(p), compiler, margin=0)
    assert found.compiles >= 2
    first = evaluate(p, compiler.asked[0])
    assert found.predicted.step_s < first.step_s


def test_what_was_not_compiled_is_not_called_fitting():
    found = search(fake(tight(12)), None)
    assert not found.fits
    assert found.measured is None


def test_a_compiler_that_always_needs_more_ends_in_an_error_and_not_in_a_plan():
    p = tight(14)
    compiler = Compiler(p, factor=1.0, more=100 * GIB)
    with pytest.raises(InfeasibleError):
        search(fake(p), compiler, margin=0)
    assert len(compiler.asked) <= 5


def test_a_refusal_is_not_a_fit():
    p = tight(14)
    with pytest.raises(InfeasibleError):
        search(fake(p), Compiler(p, refuses=True))


def test_the_number_of_compiles_is_bounded():
    p = tight(14)
    compiler = Compiler(p, factor=1.3)
    search(fake(p), compiler, max_compiles=3, margin=0)
    assert len(compiler.asked) <= 3


def test_a_plan_that_fits_leaves_compiles_for_candidates():
    """Each compile shows more room than the one before, so that the next plan is always faster."""

    class Roomier(Compiler):
        def __call__(self, decision):
            self.more -= GIB
            return super().__call__(decision)

    p = tight(4)
    counts = {}
    for most in (1, 2, 3, 5, 7):
        compiler = Roomier(p)
        found = search(fake(p), compiler, max_compiles=most, margin=0)
        assert found.fits and found.compiles == len(compiler.asked)
        counts[most] = found.compiles
    assert counts == {1: 1, 2: 1, 3: 1, 5: 3, 7: 5}


def test_a_budget_below_the_state_says_what_is_missing_and_what_would_free_it():
    p = problem(dataclasses.replace(chain(), gradient_bytes=4 * GIB), fixed_bytes=10 * GIB, device_budget=8 * GIB)
    with pytest.raises(InfeasibleError) as error:
        search(fake(p), None)
    text = str(error.value)
    assert "6.00 GiB too much" in text  # 10 + 4 of 8
    assert "optimizer state on the host" in text and "more devices" in text and "bytes per parameter" in text


def test_a_budget_below_the_least_plan_says_how_much_that_is():
    """x stays, 4 GiB over four layers, with 3 GiB for the loss; without a link nothing can leave."""
    p = problem(chain(), device_budget=6 * GIB, loss_bytes=3 * GIB, d2h_bytes_per_s=0.0, h2d_bytes_per_s=0.0)
    text = explain_infeasible(fake(p), p)
    assert re.search(r"takes 7\.0\d GiB of the 6\.00 GiB", text)  # found by halving, to 64 MiB
    assert "smaller batch" in text


def test_random_problems_never_yield_a_plan_that_does_not_fit():
    import random

    for seed in range(15):
        generator = random.Random(seed)
        stack = random_stack(generator, names=4, layers=6)
        p = problem(stack, device_budget=generator.uniform(0.3, 1.0) * 6 * sum(stack.num_bytes))
        compiler = Compiler(p, factor=generator.uniform(0.8, 1.3), more=generator.uniform(-2, 2) * GIB)
        try:
            found = search(fake(p), compiler, margin=0)
        except InfeasibleError:
            continue
        assert found.measured is not None
        assert found.measured.device_bytes <= p.device_budget


def test_an_estimate_that_is_a_little_over_the_budget_is_put_to_the_compiler():
    """The least plan is 7 GiB by the account, the budget 6.5, and the compiler needs 6.3."""
    p = problem(chain(), device_budget=6.5 * GIB, loss_bytes=3 * GIB, d2h_bytes_per_s=0.0, h2d_bytes_per_s=0.0)
    found = search(fake(p), Compiler(p, factor=0.9))
    assert found.fits
    with pytest.raises(InfeasibleError, match=r"of 1 that were compiled the smallest needs 7\.00 GiB"):
        search(fake(p), Compiler(p))


def test_the_first_plan_leaves_something_free_unless_it_must_not():
    p = tight(14)
    compiler = Compiler(p)
    search(fake(p), compiler, margin=0.1)
    assert evaluate(p, compiler.asked[0]).device_bytes <= 0.9 * p.device_budget
    # the least plan needs all of a smaller budget
    least = problem(chain(), device_budget=7 * GIB, loss_bytes=3 * GIB, d2h_bytes_per_s=0.0, h2d_bytes_per_s=0.0)
    assert search(fake(least), Compiler(least), margin=0.1).fits


def test_a_compiler_that_charges_for_offloading_does_not_end_the_search():
    """What the first compile teaches holds for plans that move much, not for those that recompute."""
    p = problem(chain(8), device_budget=14.5 * GIB)

    class Charging(Compiler):
        def __call__(self, decision):
            measured = super().__call__(decision)
            more = 6 * GIB if measured.host_bytes else 0
            return dataclasses.replace(measured, device_bytes=measured.device_bytes + more)

    compiler = Charging(p)
    found = search(fake(p), compiler, margin=0)
    assert compiler.asked[0] != found.placements  # the first one moved something
    assert found.fits and found.measured is not None
    assert found.measured.device_bytes <= p.device_budget


@pytest.mark.parametrize("error", [CompilerFailedError, WrongNumbersError])
def test_a_plan_that_the_compiler_fails_on_gives_way_to_one_that_moves_nothing(error):
    p = tight(12)
    compiler = Compiler(p)

    def failing(decision):
        if any(placement.names("host") for placement in decision.placements):
            raise error("no such bitcast")
        return compiler(decision)

    found = search(fake(p), failing, margin=0)
    assert any(placement.names("host") for placement in search(fake(p), compiler, margin=0).placements)
    assert found.fits and found.predicted.host_bytes == 0
    assert len(found.notes) == 1 and "passed over: no such bitcast" in found.notes[0]


def test_a_plan_that_fits_is_not_lost_when_the_compiler_fails_on_the_next():
    p = tight(8)
    compiler, asked = Compiler(p, more=-2 * GIB), []  # less than the account says: the search goes on

    def failing(decision):
        asked.append(decision)
        if len(asked) > 1:
            raise CompilerFailedError("no such bitcast")
        return compiler(decision)

    found = search(fake(p), failing, margin=0)
    assert len(asked) == 2 and found.fits and found.decision == asked[0]
    assert "no such bitcast" in found.notes[0]


def test_a_compiler_that_always_fails_says_so():
    def failing(decision):
        raise CompilerFailedError("no such bitcast")

    with pytest.raises(CompilerFailedError, match="no such bitcast"):
        search(fake(tight(12)), failing)
    with pytest.raises(CompilerFailedError, match="no such bitcast"):  # where nothing else could fit either
        search(fake(tight(5)), failing)
