"""Lanes that work side by side and share memory bandwidth: the clock of the timeline.

Each lane runs its tasks one after another, in the order in which they were given to it. Tasks of different lanes
run at once. One alone takes its `seconds`; where the bytes per second that all of them want of the HBM, or
of the host's memory, are more than there is, the bandwidth is shared max-min fairly: who wants less than an
equal share gets it, the rest is divided among the others. That slows the tasks that get less than they want.
"""

import dataclasses
import math
from collections import deque

from forebay.timeline.costs import Cost

COMPUTE = "compute"


@dataclasses.dataclass(eq=False, slots=True)
class Task:
    """One piece of work on its lane. Times are in seconds on the engine's clock.

    Attributes:
        left: seconds of work that remain, alone on the machine.
        started, finished: when it began and ended; None until then.
    """

    lane: str
    seconds: float
    hbm_rate: float
    host_rate: float
    left: float
    number: int
    started: float | None = None
    finished: float | None = None


class Engine:
    """The lanes and the time."""

    def __init__(self, hbm_bytes_per_s: float, host_bytes_per_s: float = math.inf):
        self.now = 0.0
        self.lanes: dict[str, deque[Task]] = {}
        self._hbm, self._host = hbm_bytes_per_s, host_bytes_per_s
        self._speeds: list[tuple[Task, float]] | None = None
        self.issued = 0
        """How many tasks there have been; they are numbered so."""

    def issue(self, cost: Cost) -> Task:
        """Gives work to its lane."""
        per_s = 1 / cost.seconds if cost.seconds else 0.0
        hbm, host = cost.hbm_bytes * per_s, cost.host_bytes * per_s
        task = Task(cost.lane, cost.seconds, hbm, host, cost.seconds, self.issued)
        self.issued += 1
        queue = self.lanes.setdefault(cost.lane, deque())
        queue.append(task)
        if len(queue) == 1:
            task.started = self.now
            self._speeds = None
        return task

    def active(self) -> list[Task]:
        """What runs now, one task of each busy lane."""
        return [queue[0] for queue in self.lanes.values() if queue]

    def wait(self, task: Task) -> list[tuple[Task, float]]:
        """Lets time pass until a task is finished; returns the tasks of its lane that ran meanwhile and how long."""
        blamed: list[tuple[Task, float]] = []
        while task.finished is None:
            ahead = self.lanes[task.lane][0]
            before = self.now
            self._advance()
            if blamed and blamed[-1][0] is ahead:
                blamed[-1] = (ahead, blamed[-1][1] + self.now - before)
            else:
                blamed.append((ahead, self.now - before))
        return blamed

    def finish(self) -> None:
        """Lets time pass until all lanes are empty."""
        while any(self.lanes.values()):
            self._advance()

    def skip(self, seconds: float, own_from: int, progress: dict[int, float]) -> None:
        """Moves the clock on by repetitions of what was just seen.

        Tasks with numbers from `own_from` on belong to the repetitions and stay as they are, at a later time;
        of the others those in `progress` (by number) have that many seconds of work less.
        """
        self.now += seconds
        for queue in self.lanes.values():
            for task in queue:
                if task.number >= own_from:
                    task.started = None if task.started is None else task.started + seconds
                else:
                    task.left -= progress.get(task.number, 0.0)

    def _advance(self) -> None:
        """To the next moment at which a task ends."""
        if self._speeds is None:
            self._speeds = self._share()
        step = min(task.left / speed for task, speed in self._speeds)
        self.now += step
        for task, speed in self._speeds:
            task.left -= step * speed
            if task.left <= 1e-12 * task.seconds or task.left <= 0:
                task.left = 0.0
                task.finished = self.now
                queue = self.lanes[task.lane]
                queue.popleft()
                if queue:
                    queue[0].started = self.now
                self._speeds = None

    def _share(self) -> list[tuple[Task, float]]:
        """The tasks that run and their speeds: 1 where they get the bandwidth that they want."""
        tasks = self.active()
        if len(tasks) == 1 and tasks[0].host_rate <= self._host and tasks[0].hbm_rate <= self._hbm:
            return [(tasks[0], 1.0)]  # most of the time
        # first the host's memory, which only the links to it use, then what they still want of the HBM
        granted = _max_min([t.host_rate for t in tasks], self._host)
        speeds = [g / t.host_rate if t.host_rate else 1.0 for t, g in zip(tasks, granted, strict=True)]
        wanted = [t.hbm_rate * s for t, s in zip(tasks, speeds, strict=True)]
        granted = _max_min(wanted, self._hbm)
        return [
            (t, s * (g / w if w else 1.0)) for t, s, g, w in zip(tasks, speeds, granted, wanted, strict=True)
        ]  # fmt: skip


def _max_min(wanted: list[float], capacity: float) -> list[float]:
    """What each gets of a capacity, shared max-min fairly."""
    if sum(wanted) <= capacity:
        return wanted
    granted = [0.0] * len(wanted)
    left = capacity
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for position, n in enumerate(order):
        granted[n] = min(wanted[n], left / (len(order) - position))
        left -= granted[n]
    return granted
