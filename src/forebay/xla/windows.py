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
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Literal

from forebay.xla.flops import FlopCounter
from forebay.xla.hlo import Array, Instruction, Module, arrays_of
from forebay.xla.origins import origins

UNNAMED = "unnamed"
HIDDEN_WINDOW = 0.9
"""The window from which a copy counts as hidden behind a layer's work."""

SCOPE = re.compile(r"\b(?:save|load):([^/:]+):([\w.\-]+)")
"""The scope around a residual's storing and fetching: stack and name."""

WEIGHT, GRADIENT = "weight.", "gradient."
"""What the names of weights and gradients begin with, where these are in host memory; those of activations are plain."""

UPDATE = "optimizer update"
"""In place of a stack, for copies of what is streamed through the device."""
UPDATE_SCOPE = re.compile(r"\bupdate:([\w.\-]+)")
"""The scope around what is streamed through the device: the name of the array."""

_FARTHEST = 256
"""Steps back from a copy beyond which a scope is not its own."""

_MOVING = ("copy", "fusion", "dynamic-slice", "dynamic-update-slice", "async")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Copies of one tensor between device and host in a step: `count` of `num_bytes` each, per device.

    Attributes:
        direction: "d2h" or "h2d".
        where: "loop" in a loop over layers; "update" in the optimizer; "boundary" in the iterations that the compiler
            peeled off, and wherever else the program is not in such a loop.
        window: the share of a layer's matrix and attention FLOPs between start and done, 0 to 1, in an update of
            its bytes in the other direction; the smallest where the copies differ.
        depth: how many loops the copy is in.
        exposed_bytes: of all copies, each one's bytes times what its own window lacks of a layer's work.
    """

    name: str
    stack: str
    direction: str
    where: str
    num_bytes: int
    count: int
    window: float
    depth: int = 0
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


def copies_within_host(module: Module) -> dict[tuple[str, str], int]:
    """Bytes of each copy from host memory to host memory, by computation and name of its instruction."""
    return {(c.start.computation, c.start.name): c.num_bytes for c, _ in _Reader(module).copies("h2h")}


def host_copy_bytes(module: Module) -> int:
    """Bytes copied from host memory to host memory in a step."""
    return sum(copy.num_bytes * times for copy, times in _Reader(module).copies("h2h"))


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """An instruction that copies between device and host, as often as it runs.

    `buffer` is where the host memory that it reads or writes comes from, back through loops and updates: the
    same for all copies of one buffer. Stack and name are empty and "unnamed" where there is none.
    """

    start: Instruction
    direction: str
    stack: str
    name: str
    buffer: Instruction


def host_copies(module: Module) -> list[HostCopy]:
    """The copies between device and host of a scheduled module."""
    reader = _Reader(module)
    return [
        HostCopy(copy.start, copy.direction, *reader.scope(copy), [copy.start, *origins(module, copy.start)][-1])
        for copy, _ in reader.copies("d2h", "h2d")
    ]


type BufferScopes = dict[tuple[str, str], tuple[str, str]]
"""Stack and name of the tensor by an instruction's name and, for one element of a tuple, its index."""


def buffer_scopes(module: Module) -> BufferScopes:
    """Which values are a tensor's buffer in host memory, the states of loops included."""
    buffers = _Reader(module).buffers
    scopes: BufferScopes = {(step.name, ""): scope for step, scope in buffers.items()}
    for body, loop in module.loops.items():
        root = module.root(body)
        states = [loop, root, module.parameter(body), module.parameter(loop.called("condition") or "")]
        for index, element in enumerate(module.operands(root) if root else ()):
            if scope := buffers.get(element):
                scopes |= {(state.name, str(index)): scope for state in states if state is not None}
    return scopes


@dataclasses.dataclass(frozen=True)
class _Copy:
    """One copy: the instruction that starts it and, where it is asynchronous, the one that ends it."""

    start: Instruction
    done: Instruction | None
    wraps: bool
    """Whether it ends in the next iteration of its loop."""
    direction: str
    num_bytes: int


class _Reader:
    def __init__(self, module: Module):
        self.module = module
        self.flops = FlopCounter(module)
        self.loops = module.loops

    def copies(self, *directions: str) -> Iterator[tuple[_Copy, int]]:
        """Copies and how often each is made in a step."""
        for computation, times in self.module.executions.items():
            for copy in self._copies_in(computation):
                if copy.direction in directions:
                    yield copy, times

    def transfers(self) -> Iterator[tuple[Instruction, Transfer]]:
        found = list(self.copies("d2h", "h2d"))
        layer_loops = self._layer_loops({copy.start.computation for copy, _ in found})
        layer_flops: dict[tuple[str, str], float] = {}
        for copy, _ in found:
            if (body := copy.start.computation) in layer_loops:
                per_layer = self.flops.computation(body) / self._layers_of_iteration(body)
                layer_flops[self.scope(copy)[0], copy.direction] = per_layer
        for copy, times in found:
            stack, name = self.scope(copy)
            body = copy.start.computation
            in_loop = body in layer_loops
            if in_loop and stack == UPDATE and self.flops.computation(body):
                name = f"{GRADIENT}{name}"  # made by the layers, and known by the update that reads it
            elif stack == UPDATE or "optimizer/" in f"{copy.start.op_name}/":
                window = self._both_ways(copy)
                depth = self._depth(body)
                yield copy.start, Transfer(name, stack, copy.direction, "update", copy.num_bytes, times, window, depth)
                continue
            if in_loop:
                layer = self.flops.computation(body) / self._layers_of_iteration(body)
            else:  # of a stack without a loop there is no layer to compare with but all that is done here
                layer = layer_flops.get((stack, copy.direction), self.flops.computation(body))
            window = min(1.0, self._flops_between(copy) / layer) if layer else 0.0
            where = "loop" if in_loop else "boundary"
            depth = self._depth(body)
            yield copy.start, Transfer(name, stack, copy.direction, where, copy.num_bytes, times, window, depth)

    def _layer_loops(self, bodies: set[str]) -> set[str]:
        """The loop bodies with copies in which no other such loop is nested."""
        return {b for b in bodies & set(self.loops) if not any(self._contains(b, other) for other in bodies - {b})}

    def _depth(self, computation: str) -> int:
        depth = 0
        while computation in self.loops:
            computation, depth = self.loops[computation].computation, depth + 1
        return depth

    def _contains(self, outer: str, inner: str) -> bool:
        while inner in self.loops:
            inner = self.loops[inner].computation
            if inner == outer:
                return True
        return False

    @functools.cache  # noqa: B019  (a reader lives as long as its module is read)
    def _copies_in(self, computation: str) -> tuple[_Copy, ...]:
        return tuple(c for i in self.module.computations[computation] if (c := self._copy(i)) is not None)

    @functools.cache  # noqa: B019
    def _users(self, computation: str) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = defaultdict(list)
        for instruction in self.module.computations[computation]:
            for operand in instruction.operands:
                users[operand].append(instruction)
        return users

    @functools.cache  # noqa: B019
    def _positions(self, computation: str) -> tuple[dict[str, int], list[float]]:
        """Each instruction's place in the schedule, and the FLOPs scheduled before each place."""
        body = self.module.computations[computation]
        before = [0.0, *itertools.accumulate(self.flops.instruction(i) for i in body)]
        return {i.name: place for place, i in enumerate(body)}, before

    def _copy(self, instruction: Instruction) -> _Copy | None:
        opcode, is_start = instruction.opcode.removesuffix("-start"), instruction.opcode.endswith("-start")
        if opcode not in _MOVING:
            return None
        done, wraps = self._done(instruction) if is_start else (None, False)
        if is_start and done is None:
            return None
        results = arrays_of(instruction.shape if done is None else done.shape)
        operands = [a for o in self.module.operands(instruction) for a in arrays_of(o.shape)]
        towards, moved = direction(results, operands)
        if not moved:
            return None
        size = max(a.num_bytes for a in moved)
        return _Copy(instruction, done, wraps, towards, size)

    def _done(self, start: Instruction) -> tuple[Instruction | None, bool]:
        """The end of an asynchronous operation, and whether it is in the next iteration of the loop."""
        for user in self._users(start.computation).get(start.name, ()):
            if user.opcode.endswith("-done"):
                return user, False
            if user.opcode.endswith("-update"):
                return self._done(user)
            if user.root and user.opcode == "tuple" and start.computation in self.loops:
                index = user.operands.index(start.name)
                for carried in self._carried(start.computation, index):
                    for end in self._users(start.computation).get(carried.name, ()):
                        if end.opcode.endswith("-done"):
                            return end, True
        return None, False

    def _carried(self, body: str, index: int) -> list[Instruction]:
        """What reads the loop's state at `index`."""
        parameter = self.module.parameter(body)
        users = self._users(body).get(parameter.name, ()) if parameter else ()
        return [u for u in users if u.tuple_index == index]

    def _flops_between(self, copy: _Copy) -> float:
        if copy.done is None:
            return 0.0
        place, before = self._positions(copy.start.computation)
        start, done = before[place[copy.start.name]], before[place[copy.done.name]]
        return before[-1] - start + done if copy.wraps else done - start

    def _both_ways(self, copy: _Copy) -> float:
        """The share of a copy's bytes that copies in the other direction move between its start and its done."""
        if copy.done is None or copy.wraps:
            return 0.0
        place, _ = self._positions(copy.start.computation)
        start, done = place[copy.start.name], place[copy.done.name]
        others = sum(
            other.num_bytes
            for other in self._copies_in(copy.start.computation)
            if other.direction in {"d2h", "h2d"} - {copy.direction} and other.done is not None
            if place[other.start.name] < done and place[other.done.name] > start
        )
        return min(1.0, others / copy.num_bytes)

    @functools.cache  # noqa: B019
    def _layers_of_iteration(self, body: str) -> int:
        """How many layers one iteration is: the most copies of one host buffer in one direction."""
        buffers: Counter[tuple[str, int | None]] = Counter()
        for copy in self._copies_in(body):
            if copy.direction in ("d2h", "h2d") and (buffer := self._state_index(copy)) is not None:
                buffers[copy.direction, buffer] += 1
        return max(buffers.values(), default=1)

    def _state_index(self, copy: _Copy) -> int | None:
        """The index in the loop's state of the host buffer that a copy reads or writes."""
        for instruction in origins(self.module, copy.start):
            if instruction.computation != copy.start.computation:
                return None
            if instruction.tuple_index is not None:
                return instruction.tuple_index
        return None

    @functools.cached_property
    def _scopes(self) -> dict[Instruction, tuple[str, str]]:
        """Stack and name of the tensor of each copy, by the instruction that starts it.

        They are in the scopes of the copy itself or of what its value comes from. The compiler drops those of
        some copies; these have the name of another copy of the same buffer.
        """
        unnamed = ("", UNNAMED)
        return {
            start: self._scope_in(trail) or next((self.buffers[s] for s in trail if s in self.buffers), unnamed)
            for start, trail in self._trails.items()
        }

    @functools.cached_property
    def _trails(self) -> dict[Instruction, list[Instruction]]:
        return {copy.start: self._trail(copy) for copy, _ in self.copies("d2h", "h2d")}

    @functools.cached_property
    def buffers(self) -> dict[Instruction, tuple[str, str]]:
        """The tensor that is kept in each value that is one array in host memory."""
        return {
            step: scope
            for trail in self._trails.values()
            if (scope := self._scope_in(trail))
            for step in trail
            if _on_host_only(step)
        }

    def scope(self, copy: _Copy) -> tuple[str, str]:
        return self._scopes[copy.start]

    def _trail(self, copy: _Copy) -> list[Instruction]:
        """The copy and where its value comes from: as far as its name and its buffer can be told from that."""
        trail = [copy.start] if copy.done is None else [copy.start, copy.done]
        named = self._scope_in(trail) is not None
        for step in itertools.islice(origins(self.module, copy.start), _FARTHEST):
            trail.append(step)
            named = named or self._scope_in([step]) is not None
            if named and not any(a.on_host for a in step.arrays):
                break
        return trail

    def _scope_in(self, trail: list[Instruction]) -> tuple[str, str] | None:
        for instruction in trail:
            texts = [instruction.op_name]
            if body := instruction.called("calls"):
                texts += [i.op_name for i in self.module.computations.get(body, ())]
            for text in texts:
                if scope := SCOPE.search(text):
                    return scope[1], scope[2]
                if scope := UPDATE_SCOPE.search(text):
                    return UPDATE, scope[1]
        return None


def _on_host_only(instruction: Instruction) -> bool:
    """Whether the value is one buffer in host memory, perhaps being written, and not a loop's state."""
    arrays = arrays_of(instruction.shape)
    writing = instruction.opcode.endswith("-start") and arrays[0].on_host
    return writing or (len(arrays) == 1 and arrays[0].on_host)


def direction(results: list[Array], operands: list[Array]) -> tuple[Literal["d2h", "h2d", "h2h", ""], list[Array]]:
    """Which way data goes, and the arrays that go; none for work that stays on the device.

    Scalars are positions, not data: they are always on the device.
    """
    results, operands = [a for a in results if a.dims], [a for a in operands if a.dims]
    host_results, host_operands = [a for a in results if a.on_host], [a for a in operands if a.on_host]
    device_operands = [a for a in operands if not a.on_host]
    if host_results:
        return ("d2h", device_operands) if device_operands else ("h2h", host_operands)
    return ("h2d", results) if host_operands else ("", [])
