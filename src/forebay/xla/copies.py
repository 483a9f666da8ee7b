"""The copies between device and host of a scheduled module: which way, how much, from start to done, of which tensor.

A copy that XLA makes asynchronous has a start and a done in the scheduled HLO. In a loop it may pass the end of the
body: it is then part of the loop's state and ends in the next iteration. Which tensor it is of is in the scopes around
what stores and fetches it; where the compiler dropped these, another copy of the same buffer tells.
"""

import dataclasses
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from forebay.xla.hlo import Array, Instruction, Module, arrays_of
from forebay.xla.origins import origins

UNNAMED = "unnamed"
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


def copies_within_host(module: Module) -> dict[tuple[str, str], int]:
    """Bytes of each copy from host memory to host memory, by computation and name of its instruction."""
    return {(c.start.computation, c.start.name): c.num_bytes for c, _ in Copies(module).copies("h2h")}


def host_copy_bytes(module: Module) -> int:
    """Bytes copied from host memory to host memory in a step."""
    return sum(copy.num_bytes * times for copy, times in Copies(module).copies("h2h"))


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
    reader = Copies(module)
    return [
        HostCopy(copy.start, copy.direction, *reader.scope(copy), [copy.start, *origins(module, copy.start)][-1])
        for copy, _ in reader.copies("d2h", "h2d")
    ]


type BufferScopes = dict[tuple[str, str], tuple[str, str]]
"""Stack and name of the tensor by an instruction's name and, for one element of a tuple, its index."""


def buffer_scopes(module: Module) -> BufferScopes:
    """Which values are a tensor's buffer in host memory, the states of loops included."""
    buffers = Copies(module).buffers
    scopes: BufferScopes = {(step.name, ""): scope for step, scope in buffers.items()}
    for body, loop in module.loops.items():
        root = module.root(body)
        states = [loop, root, module.parameter(body), module.parameter(loop.called("condition") or "")]
        for index, element in enumerate(module.operands(root) if root else ()):
            if scope := buffers.get(element):
                scopes |= {(state.name, str(index)): scope for state in states if state is not None}
    return scopes


@dataclasses.dataclass(frozen=True)
class Copy:
    """One copy: the instruction that starts it and, where it is asynchronous, the one that ends it."""

    start: Instruction
    done: Instruction | None
    wraps: bool
    """Whether it ends in the next iteration of its loop."""
    direction: str
    num_bytes: int


class Copies:
    """The copies of one module. Lives as long as the module is read."""

    def __init__(self, module: Module):
        self.module = module
        self.loops = module.loops

    def copies(self, *directions: str) -> Iterator[tuple[Copy, int]]:
        """Copies and how often each is made in a step."""
        for computation, times in self.module.executions.items():
            for copy in self.copies_in(computation):
                if copy.direction in directions:
                    yield copy, times

    @functools.cache  # noqa: B019  (a reader lives as long as its module is read)
    def copies_in(self, computation: str) -> tuple[Copy, ...]:
        return tuple(c for i in self.module.computations[computation] if (c := self._copy(i)) is not None)

    @functools.cache  # noqa: B019
    def _users(self, computation: str) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = defaultdict(list)
        for instruction in self.module.computations[computation]:
            for operand in instruction.operands:
                users[operand].append(instruction)
        return users

    def _copy(self, instruction: Instruction) -> Copy | None:
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
        return Copy(instruction, done, wraps, towards, size)

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

    def state_index(self, copy: Copy) -> int | None:
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

    def scope(self, copy: Copy) -> tuple[str, str]:
        return self._scopes[copy.start]

    def _trail(self, copy: Copy) -> list[Instruction]:
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
