"""The best placements for a `Problem`: a mixed-integer linear program, solved by HiGHS.

Each stack is cut into at most `variants` ranges of layers. A range has n layers and, for each tensor, a
binary for the device and one for the host. Everything else is continuous and counts layers: in how
many of them a tensor is kept, a value is required, an operation repeated. An operation is repeated
where one of its results is required and not kept; what it reads is then required too. Once the
binaries are fixed these have a least solution, the recomputation that the graph prescribes, so only
the placements need to be integer.
"""

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from forebay.errors import UserError
from forebay.planner.placement import EVERYTHING, Placement, Where
from forebay.planner.problem import COPY_SLOTS, LayerProblem, Predicted, Problem, evaluate

DEFAULT_TIME_LIMIT_S = 20.0
RELATIVE_GAP = 1e-3
"""The solver stops when no plan can be faster by more than this share: less than what a compile is worth."""
_GIB = float(2**30)


@dataclasses.dataclass(frozen=True)
class Solution:
    """The placements found, what they cost, and how far from the optimum they may be (relative).

    `state_host_fraction` is the share of the optimizer's state in host memory: the problem's, where that has one.
    """

    placements: tuple[Placement, ...]
    predicted: Predicted
    gap: float
    state_host_fraction: float = 0.0


class _Program:
    """A mixed-integer program under construction. A term is a pair of a coefficient and a variable."""

    def __init__(self) -> None:
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.cost: list[float] = []
        self.rows: list[tuple[list[tuple[float, int]], float]] = []

    def variable(self, upper: float, *, integer: bool = False, cost: float = 0.0) -> int:
        self.upper.append(upper)
        self.integer.append(integer)
        self.cost.append(cost)
        return len(self.upper) - 1

    def at_most(self, terms: Iterable[tuple[float, int]], bound: float) -> None:
        """The sum of the terms is no more than `bound`."""
        self.rows.append((list(terms), bound))

    def solve(self, time_limit_s: float, relative_gap: float) -> tuple[np.ndarray | None, float]:
        data, columns, starts = [], [], [0]
        for terms, _ in self.rows:
            merged: dict[int, float] = {}
            for coefficient, column in terms:
                merged[column] = merged.get(column, 0.0) + coefficient
            data += merged.values()
            columns += merged.keys()
            starts.append(len(data))
        matrix = csr_array((data, columns, starts), shape=(len(self.rows), len(self.upper)))
        with _silent_stdout():
            result = self._milp(matrix, time_limit_s, relative_gap)
        if result.x is None and result.status == 1:  # its time was up
            raise UserError(
                f"the solver found no plan in {time_limit_s:g} s: give it longer (time_limit_s), or fewer ranges of layers (variants)"
            )
        return result.x, float(result.mip_gap if result.mip_gap is not None else np.inf)

    def _milp(self, matrix: csr_array, time_limit_s: float, relative_gap: float) -> Any:
        return milp(
            c=np.array(self.cost),
            integrality=np.array(self.integer, dtype=int),
            bounds=Bounds(np.zeros(len(self.upper)), np.array(self.upper)),  # pyright: ignore[reportArgumentType]
            constraints=LinearConstraint(matrix, -np.inf, np.array([b for _, b in self.rows])),  # pyright: ignore[reportArgumentType]
            options={"time_limit": time_limit_s, "mip_rel_gap": relative_gap},
        )


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """Sends the process's standard output nowhere: HiGHS writes a line there now and then, whatever it is asked."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


@dataclasses.dataclass
class _Range:
    """The variables of one range of layers."""

    layers: int
    used: int
    device: dict[str, int]
    host: dict[str, int]
    everything: int
    device_bytes: list[tuple[float, int]]
    host_bytes: list[tuple[float, int]]
    in_flight: list[tuple[float, int]]


def solve(
    problem: Problem,
    *,
    variants: int = 2,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    relative_gap: float = RELATIVE_GAP,
) -> Solution | None:
    """The placements of least step time that fit, or None if none do.

    Args:
        problem: what to decide.
        variants: the most ranges of layers per stack.
        time_limit_s: the best placements found by then are returned, with their gap.
        relative_gap: how far from the best step time the answer may be.

    Raises:
        UserError: no placements were found in that time.
    """
    program = _Program()
    scale = problem.outside_s + sum(
        s.layers * (max(s.forward_s, s.forward_weights_s) + max(s.backward_s, s.backward_weights_s))
        for s in problem.stacks
    )
    scale = scale or 1.0
    ranges = {
        s.stack: _stack(program, problem, s, min(variants, s.layers, s.most_ranges or variants), scale)
        for s in problem.stacks
    }
    state = _state(program, problem, scale)
    _memory(program, problem, ranges, state)
    values, gap = program.solve(time_limit_s, relative_gap)
    if values is None:
        return None
    fraction = problem.state_host_fraction
    if fraction is None:
        fraction = 0.0 if state is None else min(1.0, max(0.0, values[state]) * _GIB / sum(problem.state_sizes))
        problem = dataclasses.replace(problem, state_host_fraction=0.0 if fraction < 1e-9 else fraction)
    placements = tuple(p for s in problem.stacks for p in _placements(s, ranges[s.stack], values))
    placements = settle(problem, placements)
    placements = _merge(_explicit(problem, p) for p in placements)
    return Solution(placements, evaluate(problem, placements), gap, problem.state_host_fraction or 0.0)


def settle(problem: Problem, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Of plans that are equally fast, one that recomputes least, then moves least, then stores least.

    Moving all that can be moved, in every range at once, then single changes and moving all that is recomputed of a range,
    are tried until none helps. What waits for the weights anyway
    could recompute for nothing; it should not.
    """

    def key(candidate: Sequence[Placement]) -> tuple[float, ...] | None:
        p = evaluate(problem, candidate)
        kept = sum(len(c.tensors) for c in candidate)
        return (p.recompute_s, p.host_bytes, p.device_bytes, kept) if p.fits(problem) and p.step_s <= limit else None

    limit = evaluate(problem, placements).step_s * (1 + 1e-12)
    best = key(placements)
    moved = tuple(dataclasses.replace(p, tensors=_movable(problem, p)) for p in placements)
    if best is not None and (found := key(moved)) is not None and found < best:
        placements, best = moved, found
    improved = best is not None
    while improved:
        improved = False
        for k, placement in enumerate(placements):
            for tensors in _changes(problem, placement):
                changed = dataclasses.replace(placement, tensors=tensors)
                candidate = (*placements[:k], changed, *placements[k + 1 :])
                found = key(candidate)
                if found is not None and best is not None and found < best:
                    placements, placement, best, improved = candidate, changed, found, True
    return placements


def _changes(problem: Problem, placement: Placement) -> Iterable[Mapping[str, Where]]:
    stack = problem.stack(placement.stack)
    if EVERYTHING not in placement.tensors:
        yield {EVERYTHING: "device"}
    movable = _movable(problem, placement)
    yield movable | dict(placement.tensors)  # which frees memory only when it is all of it
    for name in stack.names:
        others: dict[str, Where] = {n: w for n, w in placement.tensors.items() if n != name}
        yield others
        if EVERYTHING not in others:
            yield {**others, name: "device"}
        if name in movable:
            yield {**others, name: "host"}


def _movable(problem: Problem, placement: Placement) -> dict[str, Where]:
    stack, layers = problem.stack(placement.stack), placement.layers[1] - placement.layers[0]
    return {n: "host" for n in stack.names if problem.may_offload(stack, n, layers)}


def _stack(program: _Program, problem: Problem, stack: LayerProblem, variants: int, scale: float) -> list[_Range]:
    ranges = [_range(program, problem, stack, scale) for _ in range(variants)]
    program.at_most([(1, r.layers) for r in ranges], stack.layers)
    program.at_most([(-1, r.layers) for r in ranges], -stack.layers)
    for before, after in itertools.pairwise(ranges):
        program.at_most([(1, after.used), (-1, before.used)], 0)
    return ranges


def _range(program: _Program, problem: Problem, stack: LayerProblem, scale: float) -> _Range:
    L = float(stack.layers)
    n = program.variable(L, integer=True)
    used = program.variable(1, integer=True)
    program.at_most([(1, n), (-L, used)], 0)
    program.at_most([(1, used), (-1, n)], 0)

    def switched(switch: int) -> int:
        """A variable that is n where the switch is 1, else 0."""
        amount = program.variable(L)
        program.at_most([(1, amount), (-L, switch)], 0)
        program.at_most([(1, amount), (-1, n)], 0)
        program.at_most([(1, n), (-1, amount), (L, switch)], L)
        return amount

    device = {name: program.variable(1, integer=True) for name in stack.names}
    host = {name: program.variable(1 if problem.may_offload(stack, name) else 0, integer=True) for name in stack.names}
    everything = program.variable(1, integer=True)
    kept_device = {name: switched(b) for name, b in device.items()}
    kept_host = {name: switched(b) for name, b in host.items()}
    kept_all = switched(everything)
    for name in stack.names:
        program.at_most([(1, device[name]), (1, host[name])], 1)
        program.at_most([(2, host[name]), (-1, n)], 0)  # see `Placement.in_loop`
        program.at_most([(1, everything), (-1, device[name]), (-1, host[name])], 0)

    name_of, producers, unnamed = stack.name_of, stack.producers, set(stack.unnamed)
    repeated = {i: program.variable(L) for i in range(len(stack.ops))}
    required: dict[int, int] = {}
    device_bytes = [(stack.num_bytes[v] / _GIB, kept_all) for v in unnamed]
    host_bytes: list[tuple[float, int]] = []
    storing: list[tuple[float, int]] = []
    loading: list[tuple[float, int]] = []

    def keep(value: int, where: Literal["device", "host"], amount: int) -> None:
        kept = stack.keep(value, where)
        storing.extend([(kept.store_s / scale, amount)] if kept.store_s else [])
        loading.extend([(kept.load_s / scale, amount)] if kept.load_s else [])

    for value in unnamed:
        keep(value, "device", kept_all)

    def require(value: int, amount: int) -> None:
        """Each layer counted in `amount` requires `value`."""
        if value in name_of or value in stack.carry:
            if value not in required:
                required[value] = program.variable(L)
                store(value)
            program.at_most([(1, amount), (-1, required[value])], 0)
        elif value in producers:
            kept = [(-1.0, kept_all)] if value in unnamed else []
            program.at_most([(1, amount), (-1, repeated[producers[value]]), *kept], 0)

    def store(value: int) -> None:
        size, amount = stack.num_bytes[value] / _GIB, required[value]
        if value in stack.carry:
            device_bytes.append((size, amount))
            keep(value, "device", amount)
            return
        name = name_of[value]
        places: tuple[tuple[int, list[tuple[float, int]], Literal["device", "host"]], ...] = (
            (kept_device[name], device_bytes, "device"),
            (kept_host[name], host_bytes, "host"),
        )
        for kept, total, where in places:
            stored = program.variable(L)
            program.at_most([(1, amount), (1, kept), (-1, n), (-1, stored)], 0)
            total.append((size, stored))
            keep(value, where, stored)
        if value in producers:
            again = repeated[producers[value]]
            program.at_most([(1, amount), (-1, kept_device[name]), (-1, kept_host[name]), (-1, again)], 0)

    for value in stack.needed:
        require(value, n)
    for i, op in enumerate(stack.ops):
        for value in op.inputs:
            require(value, repeated[i])

    recompute = [(op.seconds / scale, repeated[i]) for i, op in enumerate(stack.ops) if op.seconds]
    forward, backward = (program.variable(np.inf, cost=1.0) for _ in range(2))
    program.at_most([(stack.forward_s / scale, n), *storing, (-1, forward)], 0)
    program.at_most([(stack.forward_weights_s / scale, n), (-1, forward)], 0)
    if stack.fetched_bytes:
        program.at_most([(stack.fetched_bytes / problem.h2d_bytes_per_s / scale, n), (-1, forward)], 0)
    if stack.sent_bytes:
        program.at_most([(stack.sent_bytes / problem.d2h_bytes_per_s / scale, n), (-1, backward)], 0)
    program.at_most([(stack.backward_s / scale, n), *loading, *recompute, (-1, backward)], 0)
    program.at_most([(stack.backward_weights_s / scale, n), (-1, backward)], 0)
    movable = [name for name in stack.names if problem.may_offload(stack, name)]
    in_flight = [(stack.size(name) / _GIB, host[name]) for name in movable]
    if movable:
        out, back = (_GIB / rate / scale for rate in (problem.d2h_bytes_per_s, problem.h2d_bytes_per_s))
        program.at_most([*((size * out, v) for size, v in host_bytes), (-1, forward)], 0)
        fetched = (stack.fetched_bytes / _GIB * back, n)
        program.at_most([*((size * back, v) for size, v in host_bytes), fetched, (-1, backward)], 0)
    return _Range(n, used, device, host, everything, device_bytes, host_bytes, in_flight)


def _state(program: _Program, problem: Problem, scale: float) -> int | None:
    """A variable for the optimizer's state in host memory, in GiB, where that is to be decided."""
    if problem.state_host_fraction is not None or not problem.movable_state_bytes:
        return None
    state = program.variable(problem.movable_state_bytes / _GIB)
    # the step that is minimised is of one microbatch, and the update comes once for all of them
    update = program.variable(np.inf, cost=1.0)
    share = scale * problem.microbatches
    program.at_most([(-1, update)], -problem.update_s / share)
    for fixed, rate in zip(problem.update_copies(0), (problem.d2h_bytes_per_s, problem.h2d_bytes_per_s), strict=True):
        program.at_most([(_GIB / rate / share, state), (-1, update)], -fixed / rate / share)
    return state


def _memory(program: _Program, problem: Problem, ranges: dict[str, list[_Range]], state: int | None) -> None:
    freed = [] if state is None else [(-1.0, state)]
    base = problem.base_bytes
    stored: list[tuple[float, int]] = []
    later_gradients = problem.gradient_bytes
    for stack in problem.stacks:
        for r in ranges[stack.stack]:
            stored += r.device_bytes
            room = problem.device_budget - base - later_gradients - stack.outside_gradient_bytes
            copies = [(COPY_SLOTS * size, v) for size, v in r.in_flight]
            working = stack.working_bytes + COPY_SLOTS * (stack.fetched_bytes + stack.sent_bytes)
            program.at_most([*stored, (working / _GIB, r.used), *copies, *freed], room / _GIB)
            stored += r.in_flight
        later_gradients -= stack.gradient_bytes
    program.at_most([*stored, *freed], (problem.device_budget - base - problem.loss_bytes) / _GIB)
    slices = problem.update_slices_bytes if state is not None else 0
    program.at_most(freed, (problem.device_budget - problem.update_bytes - slices) / _GIB)
    on_host = [term for rs in ranges.values() for r in rs for term in r.host_bytes]
    if (on_host or state is not None or problem.base_host_bytes) and np.isfinite(problem.host_budget):
        in_host = [] if state is None else [(1.0, state)]
        program.at_most([*on_host, *in_host], (problem.host_budget - problem.base_host_bytes) / _GIB)


def _placements(stack: LayerProblem, ranges: Sequence[_Range], values: np.ndarray) -> list[Placement]:
    found: list[Placement] = []
    first = 0
    for r in ranges:
        n = round(values[r.layers])
        if not n:
            continue
        tensors = {name: "host" for name in stack.names if values[r.host[name]] > 0.5}
        if values[r.everything] > 0.5:
            tensors[EVERYTHING] = "device"
        else:
            tensors |= {name: "device" for name in stack.names if values[r.device[name]] > 0.5}
        ordered = {name: tensors[name] for name in (EVERYTHING, *stack.names) if name in tensors}
        found.append(Placement(stack.stack, (first, first + n), ordered))  # type: ignore[arg-type]
        first += n
    return found


def _explicit(problem: Problem, placement: Placement) -> Placement:
    """The placement with the layer's input named too, and the tensors in the order of the layer."""
    stack = problem.stack(placement.stack)
    tensors = dict(placement.tensors)
    if EVERYTHING not in tensors:
        tensors = dict.fromkeys(stack.inputs, "device") | tensors
    ordered = {name: tensors[name] for name in (EVERYTHING, *stack.names) if name in tensors}
    return dataclasses.replace(placement, tensors=ordered)


def _merge(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """Neighbouring ranges with the same tensors as one."""
    merged: list[Placement] = []
    for p in placements:
        last = merged[-1] if merged else None
        if last is not None and (last.stack, dict(last.tensors)) == (p.stack, dict(p.tensors)):
            merged[-1] = dataclasses.replace(last, layers=(last.layers[0], p.layers[1]))
        else:
            merged.append(p)
    return tuple(merged)
