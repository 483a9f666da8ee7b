"""Running a schedule on the engine: instructions in order, copies and collectives beside them, loops in short.

The compute stream takes the instructions one after another. A start gives its work to another lane and the
stream goes on; the done waits for it. What is under way may pass from one iteration of a loop to the next,
into it and out of it, as it does in the program: through tuples.

Of a loop only the first iterations are run, until one takes as long as the one before and leaves as much
under way; then all but the last are skipped at once, and the last is run. If something from outside of
the loop is under way, only as many are skipped as it lasts.
"""

import dataclasses
import itertools
import math
from typing import Any

from forebay.timeline.costs import Cost, CostModel
from forebay.timeline.engine import COMPUTE, Engine, Task
from forebay.xla.schedule import Op, Schedule

_SETTLING = 24
"""Iterations after which a loop is taken to go on as it did last, whether it has settled or not."""
_SAME = 1e-9
"""The relative difference below which two iterations took equally long."""


@dataclasses.dataclass(eq=False, slots=True)
class Event:
    """What happened once in the simulation, and `count` times in the step.

    Attributes:
        kind: "work" on the compute stream; "transfer" on another lane; "wait" of the compute stream for `op`;
            "window": the compute stream reached the end of the transfer `op`.
        lane: where it runs; of a wait, where what is waited for runs.
        start, seconds: on the clock of the simulation. Of a window, from the start of its transfer.
        alone: what the work takes alone on the machine; of a window, the work of the compute stream in it.
        loop, iteration: the innermost loop around it, and which of its iterations, from 0.
        depth: how many loops are around it.
    """

    kind: str
    op: Op
    lane: str
    start: float
    seconds: float
    alone: float
    loop: str
    iteration: int
    depth: int
    count: float = 1.0
    task: Task | None = None


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Iterations of a loop that were not run: `iterations` between `start` and `end` on the clock."""

    loop: str
    start: float
    end: float
    iterations: int
    depth: int


@dataclasses.dataclass(frozen=True)
class Run:
    """A simulated step."""

    seconds: float
    events: tuple[Event, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]


def simulate(schedule: Schedule, costs: CostModel, trip_counts: dict[str, int] | None = None) -> Run:
    """One step of a schedule.

    Args:
        trip_counts: iterations of loops that do not say, by the name of the `while`; "" is for all others.
            Without, one is assumed and noted.
    """
    return _Simulator(schedule, costs, trip_counts or {}).run()


class _Simulator:
    def __init__(self, schedule: Schedule, costs: CostModel, trip_counts: dict[str, int]):
        self.schedule, self.costs, self.trip_counts = schedule, costs, trip_counts
        self.engine = Engine(costs.hbm_bytes_per_s, costs.host_bytes_per_s)
        self.events: list[Event] = []
        self.skipped: list[Skipped] = []
        self.notes: dict[str, None] = {}
        self.busy = 0.0
        """What the compute stream has worked so far."""
        self.under_way: dict[Task, tuple[Op, float, float]] = {}
        """Of each transfer its op, and when and after how much work it was started."""
        self.loops: list[tuple[str, int]] = []
        self._costs: dict[Op, Cost] = {}

    def run(self) -> Run:
        self._computation(self.schedule.entry, [])
        self.engine.finish()
        for e in self.events:
            if e.task is not None and e.task.finished is not None and e.task.started is not None:
                e.start, e.seconds = e.task.started, e.task.finished - e.task.started
        return Run(self.engine.now, tuple(self.events), tuple(self.skipped), tuple(self.notes))

    def _computation(self, name: str, arguments: list[Any]) -> Any:
        """Runs a computation; values are what is under way: a task, or a dictionary of a tuple's elements."""
        values = {p: a for p, a in zip(self.schedule.parameters[name], arguments, strict=False) if a is not None}
        for op in self.schedule.ops[name]:
            value = self._op(op, values)
            if value is not None:
                values[op.instruction] = value
        return values.get(self.schedule.roots[name])

    def _op(self, op: Op, values: dict[str, Any]) -> Any:
        role = op.role
        if role == "run":
            self._work(op)
        elif role == "start":
            return self._start(op)
        elif role == "done":
            value = values.get(op.operands[0]) if op.operands else None
            if isinstance(value, Task):
                self._done(value)
        elif role == "tuple":
            return {n: v for n, o in enumerate(op.operands) if (v := values.get(o)) is not None} or None
        elif role == "element":
            value = values.get(op.operands[0])
            return value.get(op.index) if isinstance(value, dict) else None
        elif role == "pass":
            return values.get(op.operands[0]) if op.operands else None
        elif role == "loop":
            return self._loop(op, values.get(op.operands[0]) if op.operands else None)
        elif role == "call" and op.bodies:
            return self._computation(op.bodies[0], [values.get(o) for o in op.operands])
        elif role == "branch" and op.bodies:
            return self._branch(op, values)
        return None

    def _cost(self, op: Op) -> Cost:
        if op not in self._costs:
            assert op.work is not None
            self._costs[op] = self.costs.cost(op.work, op.thread)
        return self._costs[op]

    def _event(self, kind: str, op: Op, lane: str, start: float, seconds: float, alone: float) -> Event:
        loop, iteration = self.loops[-1] if self.loops else ("", 0)
        event = Event(kind, op, lane, start, seconds, alone, loop, iteration, len(self.loops))
        self.events.append(event)
        return event

    def _work(self, op: Op) -> None:
        """Work that the compute stream does, or waits for without having started it before."""
        cost = self._cost(op)
        if cost.lane != COMPUTE:
            self._done(self._start(op))
            return
        start = self.engine.now
        self.engine.wait(self.engine.issue(cost))
        self.busy += self.engine.now - start
        self._event("work", op, COMPUTE, start, self.engine.now - start, cost.seconds)

    def _start(self, op: Op) -> Task:
        cost = self._cost(op)
        if cost.lane == COMPUTE:  # what runs on the compute units has no lane of its own
            cost = dataclasses.replace(cost, lane="copy" if op.opcode.startswith("copy") else "async")
        task = self.engine.issue(cost)
        self.under_way[task] = (op, self.engine.now, self.busy)
        self._event("transfer", op, cost.lane, self.engine.now, cost.seconds, cost.seconds).task = task
        return task

    def _done(self, task: Task) -> None:
        if task not in self.under_way:
            return
        op, issued, busy = self.under_way[task]
        start = self.engine.now
        self._event("window", op, task.lane, issued, start - issued, self.busy - busy)
        for ahead, seconds in self.engine.wait(task):
            if seconds > 0:
                # a transfer is waited for while it runs, not while it queues: then the one before it is
                blamed = self.under_way[ahead][0] if ahead in self.under_way else op
                self._event("wait", blamed, task.lane, start, seconds, seconds)
                start += seconds
        del self.under_way[task]

    def _branch(self, op: Op, values: dict[str, Any]) -> Any:
        """The dearest branch: which one is taken is not in the program."""
        dearest = max(range(len(op.bodies)), key=lambda n: self._alone(op.bodies[n]))
        if len(set(op.bodies)) > 1:
            self.notes["of conditionals the dearest branch was taken"] = None
        operand = op.operands[dearest + 1] if len(op.operands) > dearest + 1 else None
        return self._computation(op.bodies[dearest], [values.get(operand) if operand else None])

    def _alone(self, computation: str) -> float:
        """What a computation's work takes, one after another."""
        total = 0.0
        for op in self.schedule.ops[computation]:
            if op.role in ("run", "start"):
                total += self._cost(op).seconds
            parts = [self._alone(b) for b in op.bodies]
            total += self._trips(op) * sum(parts) if op.role == "loop" else max(parts, default=0.0)
        return total

    def _trips(self, op: Op) -> int:
        if op.trips is not None:
            return op.trips
        given = self.trip_counts.get(op.instruction, self.trip_counts.get(""))
        if given is None:
            self.notes[
                f"the loop {op.instruction} does not say how often it runs: 1 was assumed, set it with --trip-count"
            ] = None
        return 1 if given is None else given

    def _loop(self, op: Op, value: Any) -> Any:
        trips, own_from, done, run = self._trips(op), self.engine.issued, 0, 0
        previous: tuple[Any, ...] | None = None
        while done < trips:
            before = _Mark(len(self.events), self.engine.now, self.busy, self._foreign(own_from))
            self.loops.append((op.instruction, done))
            value = self._computation(op.bodies[0], [value])
            self.loops.pop()
            done, run = done + 1, run + 1
            seconds = self.engine.now - before.now
            state = self._state(own_from, before.now)
            left = trips - done - 1  # the last is run
            settled = previous is not None and _same(state, previous, seconds)
            if left > 0 and (settled or run >= _SETTLING):
                if not settled:
                    self.notes[f"the loop {op.instruction} did not settle in {_SETTLING} iterations"] = None
                times = min(left, self._until_foreign_ends(own_from, before.foreign))
                if times > 0:
                    self._skip(op, before, times, own_from)
                    done += times
            previous = state
        return value

    def _state(self, own_from: int, since: float) -> tuple[Any, ...]:
        """How long an iteration took and what it leaves under way, its own and that from outside."""
        running = [
            (task.lane, self.under_way[task][0] if own else task, task.left if own else 0.0)
            for queue in self.engine.lanes.values()
            for task in queue
            for own in (task.number >= own_from,)
        ]
        return (self.engine.now - since, running)

    def _foreign(self, own_from: int) -> dict[int, float]:
        """Seconds of work left of what was started outside of the loop."""
        return {t.number: t.left for queue in self.engine.lanes.values() for t in queue if t.number < own_from}

    def _until_foreign_ends(self, own_from: int, before: dict[int, float]) -> int:
        """How many more iterations like the last one end before anything from outside of the loop does."""
        now = self._foreign(own_from)
        paces = [(left, before[n] - left) for n, left in now.items() if before.get(n, left) > left]
        return min((math.ceil(left / pace) - 1 for left, pace in paces), default=1 << 62)

    def _skip(self, op: Op, before: "_Mark", times: int, own_from: int) -> None:
        """As if the iteration since `before` had been repeated."""
        now = self.engine.now
        foreign = self._foreign(own_from)
        progress = {n: times * (before.foreign[n] - left) for n, left in foreign.items() if n in before.foreign}
        seconds = times * (now - before.now)
        for event in itertools.islice(self.events, before.events, None):
            event.count *= 1 + times
        work = times * (self.busy - before.busy)
        self.busy += work
        self.engine.skip(seconds, own_from, progress)
        for task, (mine, issued, busy) in self.under_way.items():
            if task.number >= own_from:
                self.under_way[task] = (mine, issued + seconds, busy + work)
        self.skipped.append(Skipped(op.instruction, now, now + seconds, times, len(self.loops)))


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Where things stood before an iteration."""

    events: int
    now: float
    busy: float
    foreign: dict[int, float]


def _same(a: tuple[Any, ...], b: tuple[Any, ...], seconds: float) -> bool:
    """Whether two iterations went alike."""
    (seconds_a, running_a), (seconds_b, running_b) = a, b
    close = _SAME * max(seconds, 1e-12)
    return (
        abs(seconds_a - seconds_b) <= close
        and len(running_a) == len(running_b)
        and all(
            x[0] == y[0] and x[1] is y[1] and abs(x[2] - y[2]) <= close
            for x, y in zip(running_a, running_b, strict=True)
        )
    )
