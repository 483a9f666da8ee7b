"""How much arithmetic there is to hide each copy between device and host behind, from the schedule.

A copy that XLA makes asynchronous has a start and a done in the scheduled HLO, and what lies between
them runs meanwhile. Its *window* is the share of one layer's matrix and attention FLOPs that does,
at most 1. In a loop it may pass the end of the body: the copy is then part of the loop's state and ends
in the next iteration. Where the compiler unrolled the loop, an iteration is several layers. A copy
without start and done has a window of 0.

An optimizer's update has no such work; its slices come in and go out (`forebay.offload.stream`), and the window of
a copy in its loops is the share of its bytes that go the other way at the same time.

A window is an opportunity: whether the copy is over by then depends on its bytes and on the link.
"""

import dataclasses
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator

from forebay.xla.copies import GRADIENT, UPDATE, Copies, Copy
from forebay.xla.flops import FlopCounter
from forebay.xla.hlo import Instruction, Module

HIDDEN_WINDOW = 0.9
"""The window from which a copy counts as hidden behind a layer's work."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Copies of one tensor between device and host in a step: `count` of `num_bytes` each, per device.

    Attributes:
        direction: "d2h" or "h2d".
        where: "loop" in a loop over layers; "update" in the optimizer; "boundary" in the iterations that the compiler
            peeled off, and wherever else the program is not in such a loop.
        window: the share of a layer's matrix and attention FLOPs between start and done, 0 to 1, in an update of
            its bytes in the other direction; the smallest where the copies differ.
        exposed_bytes: of all copies, each one's bytes times what its own window lacks of a layer's work.
    """

    name: str
    stack: str
    direction: str
    where: str
    num_bytes: int
    count: int
    window: float
    exposed_bytes: float = dataclasses.field(default=0.0, compare=False)


def transfers(module: Module) -> list[Transfer]:
    """All copies between device and host of a scheduled module, largest first within each direction."""
    groups: dict[tuple[str, str, str, str, int], list[Transfer]] = defaultdict(list)
    for _, t in _Reader(module).transfers():
        groups[t.name, t.stack, t.direction, t.where, t.num_bytes].append(t)
    return sorted(map(_together, groups.values()), key=lambda t: (t.direction, t.where != "loop", -t.num_bytes, t.name))


def _together(same: list[Transfer]) -> Transfer:
    """Copies of one tensor, size and place in the step as one. An update's window is the mean over its slices."""
    count = sum(t.count for t in same)
    exposed = sum(t.num_bytes * t.count * (1 - t.window) for t in same)
    mean = 1 - exposed / (same[0].num_bytes * count) if count and same[0].num_bytes else 0.0
    window = mean if same[0].where == "update" else min(t.window for t in same)
    return dataclasses.replace(same[0], count=count, window=window, exposed_bytes=exposed)


def transfers_by_instruction(module: Module) -> dict[tuple[str, str], Transfer]:
    """Each copy between device and host by the computation and the name of the instruction that starts it."""
    return {(start.computation, start.name): transfer for start, transfer in _Reader(module).transfers()}


class _Reader:
    def __init__(self, module: Module):
        self.module = module
        self.flops = FlopCounter(module)
        self.copies = Copies(module)
        self.loops = module.loops

    def transfers(self) -> Iterator[tuple[Instruction, Transfer]]:
        found = list(self.copies.copies("d2h", "h2d"))
        layer_loops = self._layer_loops({copy.start.computation for copy, _ in found})
        layer_flops: dict[tuple[str, str], float] = {}
        for copy, _ in found:
            if (body := copy.start.computation) in layer_loops:
                per_layer = self.flops.computation(body) / self._layers_of_iteration(body)
                layer_flops[self.copies.scope(copy)[0], copy.direction] = per_layer
        for copy, times in found:
            stack, name = self.copies.scope(copy)
            body = copy.start.computation
            in_loop = body in layer_loops
            if in_loop and stack == UPDATE and self.flops.computation(body):
                name = f"{GRADIENT}{name}"  # made by the layers, and known by the update that reads it
            elif stack == UPDATE or "optimizer/" in f"{copy.start.op_name}/":
                window = self._both_ways(copy)
                yield copy.start, Transfer(name, stack, copy.direction, "update", copy.num_bytes, times, window)
                continue
            if in_loop:
                layer = self.flops.computation(body) / self._layers_of_iteration(body)
            else:  # of a stack without a loop there is no layer to compare with but all that is done here
                layer = layer_flops.get((stack, copy.direction), self.flops.computation(body))
            window = min(1.0, self._flops_between(copy) / layer) if layer else 0.0
            where = "loop" if in_loop else "boundary"
            yield copy.start, Transfer(name, stack, copy.direction, where, copy.num_bytes, times, window)

    def _layer_loops(self, bodies: set[str]) -> set[str]:
        """The loop bodies with copies in which no other such loop is nested."""
        return {b for b in bodies & set(self.loops) if not any(self._contains(b, other) for other in bodies - {b})}

    def _contains(self, outer: str, inner: str) -> bool:
        while inner in self.loops:
            inner = self.loops[inner].computation
            if inner == outer:
                return True
        return False

    @functools.cache  # noqa: B019
    def _positions(self, computation: str) -> tuple[dict[str, int], list[float]]:
        """Each instruction's place in the schedule, and the FLOPs scheduled before each place."""
        body = self.module.computations[computation]
        before = [0.0, *itertools.accumulate(self.flops.instruction(i) for i in body)]
        return {i.name: place for place, i in enumerate(body)}, before

    def _flops_between(self, copy: Copy) -> float:
        if copy.done is None:
            return 0.0
        place, before = self._positions(copy.start.computation)
        start, done = before[place[copy.start.name]], before[place[copy.done.name]]
        return before[-1] - start + done if copy.wraps else done - start

    def _both_ways(self, copy: Copy) -> float:
        """The share of a copy's bytes that copies in the other direction move between its start and its done."""
        if copy.done is None or copy.wraps:
            return 0.0
        place, _ = self._positions(copy.start.computation)
        start, done = place[copy.start.name], place[copy.done.name]
        others = sum(
            other.num_bytes
            for other in self.copies.copies_in(copy.start.computation)
            if other.direction in {"d2h", "h2d"} - {copy.direction} and other.done is not None
            if place[other.start.name] < done and place[other.done.name] > start
        )
        return min(1.0, others / copy.num_bytes)

    @functools.cache  # noqa: B019
    def _layers_of_iteration(self, body: str) -> int:
        """How many layers one iteration is: the most copies of one host buffer in one direction."""
        buffers: Counter[tuple[str, int | None]] = Counter()
        for copy in self.copies.copies_in(body):
            if copy.direction in ("d2h", "h2d") and (buffer := self.copies.state_index(copy)) is not None:
                buffers[copy.direction, buffer] += 1
        return max(buffers.values(), default=1)
