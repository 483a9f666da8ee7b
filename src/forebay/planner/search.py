"""Solve, compile, correct, solve again: the compiler has the last word."""

import dataclasses
from collections.abc import Callable
from typing import Any

from forebay.errors import EXIT_DOES_NOT_FIT, CompilerFailedError, UserError, WrongNumbersError
from forebay.planner.build import Costed
from forebay.planner.hosted import choose_hosted
from forebay.planner.placement import Placement
from forebay.planner.problem import Predicted, Problem
from forebay.planner.solve import DEFAULT_TIME_LIMIT_S, solve
from forebay.units import format_bytes, format_seconds

MAX_COMPILES = 5
FOR_CANDIDATES = 2
"""Compiles left for plans at other trade-offs (`rank`): what the account knows nothing of, the scheduler's way with collectives
beside many copies above all, matters more than the last bytes of memory."""
GAIN = 5e-3
"""A plan that is faster by less than this share is not worth another compile."""
MARGIN = 0.015
"""The share of the budget that the first plan leaves free. The estimate is off by 1 % in the median, and a plan that
just does not fit costs a compile."""
DOUBT = 1.15
"""The estimate before any compile was never off by more (benchmarks/planner)."""
_ENOUGH = GAIN / 2
"""What makes less of a difference is not worth another run of the solver."""
_REFINEMENTS = 4
_HALVINGS = 4


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the compiler says of a plan: bytes per device, and whether it accepted it.

    `step_s` is its simulated step time, where there is one. `report` and `notes` go into the plan as they
    are.
    """

    device_bytes: int
    host_bytes: int
    refused: bool
    report: Any = None
    notes: tuple[str, ...] = ()
    step_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a search decides: placements of activations, and the share of the optimizer's state in host memory."""

    placements: tuple[Placement, ...]
    state_host_fraction: float = 0.0


Compile = Callable[[Decision], Measured]
FAILURES = (CompilerFailedError, WrongNumbersError)
"""What a compile raises where the compiler cannot do a plan, or gets it wrong."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        placements: the plan.
        predicted: of it, with what the compiles taught.
        problem: with these corrections, and the share of the optimizer's state in host memory that was decided.
        gap: how far from the best it may be, relative, under the model.
        measured: the compiler's word on it; None where nothing could be compiled.
        compiles: how many plans were compiled.
        fits: whether it was compiled and fits the budgets.
        notes: what else a reader of the plan should know.
    """

    placements: tuple[Placement, ...]
    predicted: Predicted
    problem: Problem
    gap: float
    measured: Measured | None
    compiles: int
    fits: bool
    notes: tuple[str, ...] = ()

    @property
    def decision(self) -> "Decision":
        return Decision(self.placements, self.problem.state_host_fraction or 0.0)


class InfeasibleError(UserError):
    """Nothing fits the budgets; the message says how much is missing and what would free it."""

    exit_code = EXIT_DOES_NOT_FIT


Choice = tuple[tuple[Placement, ...], Predicted, Problem, float]


def choose(costed: Costed, problem: Problem, *, variants: int, time_limit_s: float) -> Choice | None:
    """The best placements, and the best share of the optimizer's state in host memory where that is open.

    The solver moves any number of bytes of the state. Whole arrays are moved: those that come to at least as
    many, and one less, are tried, and none.

    Returns placements, their prediction, the problem as corrected and with its state placed, and the gap;
    None if nothing fits.
    """
    limits = {"variants": variants, "time_limit_s": time_limit_s}
    if problem.state_host_fraction is not None:
        return _refine(costed, problem, **limits)
    solution = solve(problem, **limits)
    if solution is None:
        return None
    hosted = choose_hosted(problem.state_sizes, solution.state_host_fraction)
    moved = sorted(size for size, h in zip(problem.state_sizes, hosted, strict=True) if h)
    less = sum(moved[1:]) / sum(problem.state_sizes) if moved else 0.0
    best = None
    for fraction in dict.fromkeys((solution.state_host_fraction, less, 0.0)):
        found = _refine(costed, dataclasses.replace(problem, state_host_fraction=fraction), **limits)
        if found is not None and (best is None or found[1].step_s < best[1].step_s):
            best = found
        if best is not None and best[1].step_s <= solution.predicted.step_s * (1 + _ENOUGH):
            break  # as fast as with any number of bytes
    return best


def _refine(costed: Costed, problem: Problem, *, variants: int, time_limit_s: float) -> Choice | None:
    """The best placements, each with its own working memory: the solver is given that of the last answer."""
    best = None
    seen: set[tuple[Placement, ...]] = set()
    for _ in range(_REFINEMENTS):
        solution = solve(problem, variants=variants, time_limit_s=time_limit_s)
        if solution is None:
            break
        predicted, working = costed.predict(solution.placements, problem)
        before = best
        if predicted.fits(problem) and (best is None or predicted.step_s < best[1].step_s):
            best = (solution.placements, predicted, problem, solution.gap)
        if before is not None and predicted.step_s > before[1].step_s * (1 - _ENOUGH):
            break
        if solution.placements in seen:
            break
        seen.add(solution.placements)
        problem = dataclasses.replace(
            problem,
            stacks=tuple(dataclasses.replace(s, working_bytes=working[s.stack]) for s in problem.stacks),
        )
    return best


def search(
    costed: Costed,
    compile_plan: Compile | None,
    *,
    variants: int = 2,
    max_compiles: int = MAX_COMPILES,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    margin: float = MARGIN,
    progress: Callable[[str], None] = lambda text: None,
) -> Found:
    """The fastest placements that fit, compiled.

    Each compile tells how many bytes the account was off by; the next solve counts them. The search
    ends when the plan fits and solving with the corrected account finds nothing faster by more than
    `GAIN`, or after `max_compiles`; once something fits, `FOR_CANDIDATES` of these are left for `rank`. Where the compiler
    fails on a plan, the best before it is taken; without one, plans that move nothing to the host are tried.

    Raises:
        CompilerFailedError, WrongNumbersError: the compiler fails on all that was tried.
        InfeasibleError: nothing fits.
    """
    problem = costed.problem
    best: Found | None = None
    compiled: dict[Decision, Measured] = {}
    correction = problem.correction_bytes + margin * problem.device_budget
    failed = 0.0  # the correction that the last plan which did not fit asked for
    halvings = 0
    failure: UserError | None = None
    notes: tuple[str, ...] = ()
    while True:
        current = dataclasses.replace(problem, correction_bytes=correction)
        choice = choose(costed, current, variants=variants, time_limit_s=time_limit_s)
        if choice is None and not compiled and correction > problem.correction_bytes:
            correction = problem.correction_bytes  # without anything left free, then
            continue
        if choice is None and best is None and compile_plan is not None:
            # the account may be too large, or what a compile taught may not hold for all plans: let the compiler say
            choice = _nearly(costed, problem)
            choice = None if choice is not None and decision_of(choice) in compiled else choice
        if choice is None:
            if best is not None:
                return dataclasses.replace(best, compiles=len(compiled), notes=notes)
            if failure is not None:
                raise failure
            raise InfeasibleError(_never_fitted(compiled, problem) if compiled else explain_infeasible(costed, problem))
        placements, predicted, corrected, gap = choice
        decision = decision_of(choice)
        if compile_plan is None:
            return Found(placements, predicted, corrected, gap, None, 0, False)
        repeated = decision in compiled and (best is None or decision != best.decision)
        if repeated and best is not None and failed > correction and halvings < _HALVINGS:
            correction, halvings = (correction + failed) / 2, halvings + 1  # between what fits and what did not
            continue
        faster = best is None or predicted.step_s < best.predicted.step_s * (1 - GAIN)
        enough = max_compiles if best is None else max_compiles - FOR_CANDIDATES
        if decision in compiled or not faster or len(compiled) >= enough:
            if best is None:
                raise failure or InfeasibleError(_never_fitted(compiled, problem))
            return dataclasses.replace(best, compiles=len(compiled), notes=notes)
        progress(f"compiling a plan of {format_seconds(predicted.step_s)} a step")
        try:
            measured = compiled[decision] = compile_plan(decision)
        except FAILURES as error:
            notes = (*notes, f"a plan of {format_seconds(predicted.step_s)} a step was passed over: {error}")
            progress(notes[-1])
            if best is not None:
                return dataclasses.replace(best, compiles=len(compiled), notes=notes)
            if failure is not None or not problem.host_budget:
                raise failure or error from None
            failure, problem = error, dataclasses.replace(problem, host_budget=0.0)
            continue
        correction = corrected.correction_bytes + measured.device_bytes - predicted.device_bytes
        fits = (
            not measured.refused
            and measured.device_bytes <= problem.device_budget
            and measured.host_bytes <= problem.host_budget
        )
        if fits:
            exact = dataclasses.replace(
                predicted, device_bytes=float(measured.device_bytes), host_bytes=float(measured.host_bytes)
            )
            best = Found(placements, exact, corrected, gap, measured, len(compiled), True)
        else:
            failed = max(failed, correction)
        if measured.host_bytes > problem.host_budget:
            problem = dataclasses.replace(
                problem, host_budget=problem.host_budget - (measured.host_bytes - problem.host_budget)
            )


def decision_of(choice: Choice) -> Decision:
    return Decision(choice[0], choice[2].state_host_fraction or 0.0)


def _nearly(costed: Costed, problem: Problem) -> Choice | None:
    """The plan that needs least, if it is over the budget by less than the account may be off."""
    least = least_memory(problem)
    if _least_update_bytes(problem) > problem.device_budget or least is None or least > DOUBT * problem.device_budget:
        return None
    solution = solve(dataclasses.replace(problem, device_budget=least), variants=1)
    if solution is None:
        return None
    problem = dataclasses.replace(problem, state_host_fraction=solution.state_host_fraction)
    predicted, _ = costed.predict(solution.placements, problem)
    return solution.placements, predicted, problem, solution.gap


def _least_update_bytes(problem: Problem) -> float:
    """What the update needs on the device with as much of the optimizer's state in host memory as may be."""
    if problem.state_host_fraction is not None or not problem.movable_state_bytes:
        return problem.update_bytes
    moved = min(problem.movable_state_bytes, problem.host_budget)
    return min(problem.update_bytes, problem.update_bytes - moved + problem.update_slices_bytes)


def explain_infeasible(costed: Costed, problem: Problem) -> str:
    """Why nothing fits: how many bytes are missing and what would free them."""
    budget = problem.device_budget
    of = f"of the {format_bytes(budget)} on each device"
    if (needed := _least_update_bytes(problem)) > budget:
        return (
            f"weights, optimizer state and gradients alone need {format_bytes(needed)} {of}: "
            f"{format_bytes(needed - budget)} too much. What frees memory: more devices to split them over "
            f"(weights take {format_bytes(costed.graph.parameter_bytes)} here), optimizer state on the host, or fewer bytes per "
            f"parameter"
        )
    least = least_memory(problem)
    if least is not None and least > budget:
        return (
            f"the plan that needs least, everything recomputed or on the host, takes {format_bytes(least)} {of}: "
            f"{format_bytes(least - budget)} too much. What frees memory: a smaller batch per device, more microbatches "
            f"(accumulate), more devices, more host memory"
        )
    return (
        f"no plan fits {format_bytes(budget)} of device and {format_bytes(problem.host_budget)} of host memory on each device: "
        f"use a smaller batch per device, or more devices"
    )


def least_memory(problem: Problem) -> float | None:
    """The device bytes of the plan that needs least of them."""
    low, high = 0.0, 2 * problem.device_budget
    free = dataclasses.replace(problem, device_budget=float("1e18"))
    solution = solve(free, variants=1)
    if solution is None:
        return None
    high = max(high, solution.predicted.device_bytes)
    for _ in range(40):
        if high - low < 2**26:
            break
        middle = (low + high) / 2
        found = solve(dataclasses.replace(problem, device_budget=middle), variants=1)
        low, high = (low, middle) if found is not None else (middle, high)
    return high


def _never_fitted(compiled: dict[Decision, Measured], problem: Problem) -> str:
    least = min(m.device_bytes for m in compiled.values())
    return (
        f"no plan fits: of {len(compiled)} that were compiled the smallest needs {format_bytes(least)} on each device, of "
        f"{format_bytes(problem.device_budget)}: use a smaller batch per device, more microbatches, or more devices"
    )
