"""The compiler's buffer assignment, read from a dump, and what each byte of its peak holds.

XLA writes three texts for a compiled module (`--xla_dump_to`): the buffer assignment (every
allocation, its size, and the values in it with their offsets), the values (which instruction each
comes from and where it is used) and the live ranges (from which instruction of the schedule to
which each value lives). `read_assignment` joins them; `peak` finds the moment at which the most
bytes of the temporary allocation are in use and says what they are.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from forebay.errors import UserError
from forebay.xla.hlo import HOST_MEMORY_SPACE, Module

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(?:, color (\d+))?(.*)$")
_VALUE = re.compile(r"^ value: <(\d+) (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_VALUE_HEAD = re.compile(r"^<(\d+) ")
_LIVE = re.compile(r"^\s+(\S+)\{([\d,]*)\}:(\d+)-(\d+)$")
_POSITION = re.compile(r"^\s+(\d+):(\S+)$")
_PLACE = re.compile(r"^  ([\w.\-]+)(?:, operand (\d+))?(?: \{([\d,]*)\})?$")


@dataclasses.dataclass(frozen=True)
class Value:
    """One value of an allocation. `live` is its first and last position in the schedule, None if unknown."""

    id: int
    name: str
    index: str
    shape: str
    num_bytes: int
    offset: int
    live: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One block of memory. `kind` is `parameter`, `output`, `temporary`, `constant` or `thread-local`; a
    parameter that is `live_out` is also an output (donated)."""

    number: int
    num_bytes: int
    memory_space: int
    kind: str
    parameter: int | None
    live_out: bool
    values: tuple[Value, ...]

    @property
    def on_host(self) -> bool:
        return self.memory_space == HOST_MEMORY_SPACE


@dataclasses.dataclass(frozen=True)
class Assignment:
    """All allocations of a module, and for each value the instruction it comes from and its aliases.

    `aliases[id]` is the ids of the values that XLA carries through the same loop variable, itself
    included. `sequence` is the schedule that live ranges count in: the instructions' names, those of a loop's body
    before the loop.
    """

    allocations: tuple[Allocation, ...]
    origins: dict[int, str]
    aliases: dict[int, frozenset[int]]
    sequence: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Held:
    """Some bytes at the peak and the values that they hold, most telling first."""

    num_bytes: int
    values: tuple[Value, ...]


def read_assignment(dump: Path, module: Module) -> Assignment:
    """Reads the dump of one module; `module` is its optimised HLO.

    Raises:
        UserError: the texts are not there, as with a compiler that does not dump.
    """
    assignment = _one_file(dump, "*buffer-assignment.txt").read_text()
    origins, places = _read_values(_one_file(dump, "*buffer-assignment-values.txt").read_text())
    ranges = _one_file(dump, "*live-range.txt").read_text()
    allocations = tuple(_read_allocations(assignment, _read_live_ranges(ranges)))
    return Assignment(allocations, origins, _alias_classes(allocations, places, module), _read_sequence(ranges))


def peak(assignment: Assignment, allocation: Allocation) -> tuple[list[Held], int]:
    """What an allocation holds at the moment when most of it is in use, and the bytes that are unused then.

    Bytes that several live values share (a loop's variable and its update in place) are counted once.
    The parts and the unused bytes add up to the allocation.
    """
    moment = _fullest_moment(allocation.values)
    live = [v for v in allocation.values if v.live and v.live[0] <= moment <= v.live[1] and v.num_bytes]
    held, covered = [], 0
    for start, end, owners in _cover(live):
        everyone = {alias for v in owners for alias in assignment.aliases.get(v.id, (v.id,))}
        values = [v for v in allocation.values if v.id in everyone]
        held.append(Held(end - start, tuple(sorted(values, key=lambda v: v not in owners))))
        covered += end - start
    return held, allocation.num_bytes - covered


def _one_file(dump: Path, pattern: str) -> Path:
    found = sorted(dump.glob(pattern), key=lambda p: p.stat().st_size)
    if not found:
        raise UserError(
            f"the compiler wrote no {pattern} into {dump}: this build of XLA cannot say what the memory holds"
        )
    return found[-1]  # helper modules of a step are small; the step is the largest


def _read_allocations(text: str, live: dict[tuple[str, str], tuple[int, int]]) -> Iterable[Allocation]:
    head, values = None, []
    for line in text.splitlines():
        match = _VALUE.match(line)
        if match:
            key = (match[2], match[3] or "")
            values.append(Value(int(match[1]), *key, match[6], int(match[4]), int(match[5]), live.get(key)))
            continue
        match = _ALLOCATION.match(line)
        if match:
            if head:
                yield _allocation(head, values)
            head, values = match, []
    if head:
        yield _allocation(head, values)


def _allocation(head: re.Match[str], values: list[Value]) -> Allocation:
    rest = head[4]
    parameter = re.search(r"\bparameter (\d+)", rest)
    kinds = {"thread-local": "thread-local", "constant": "constant", "preallocated-temp": "temporary"}
    kind = next((k for word, k in kinds.items() if word in rest), "output" if "live-out" in rest else "temporary")
    return Allocation(
        int(head[1]), int(head[2]), int(head[3] or 0), "parameter" if parameter else kind,
        int(parameter[1]) if parameter else None, "live-out" in rest, tuple(values),
    )  # fmt: skip


def _read_values(text: str) -> tuple[dict[int, str], dict[int, list[tuple[str, str]]]]:
    """For each value the text of its instruction, and the (instruction, tuple index) at which it appears."""
    origins: dict[int, str] = {}
    places: dict[int, list[tuple[str, str]]] = {}
    current = -1
    for line in text.splitlines():
        if line.startswith("<"):
            head = _VALUE_HEAD.match(line)
            current = int(head[1]) if head else -1
            places[current] = []
        elif line.startswith(" from instruction: "):
            origins[current] = line.removeprefix(" from instruction: ")
        elif current in places and (match := _PLACE.match(line)) and match[2] in (None, "0"):
            # a use as operand 0 of a loop names the loop's variable; positions name tuples
            places[current].append((match[1], match[3] or ""))
    return origins, places


def _read_live_ranges(text: str) -> dict[tuple[str, str], tuple[int, int]]:
    start = text.find("BufferLiveRange:")
    end = text.find("Live ranges at", start)
    ranges = {}
    for line in text[start:end].splitlines():
        match = _LIVE.match(line)
        if match:
            ranges[match[1], match[2]] = (int(match[3]), int(match[4]))
    return ranges


def _read_sequence(text: str) -> tuple[str, ...]:
    start = text.find("InstructionSequence:")
    lines = text[start : text.find("BufferLiveRange:", start)].splitlines()
    return tuple(match[2] for line in lines if (match := _POSITION.match(line)))


def _alias_classes(
    allocations: tuple[Allocation, ...], places: dict[int, list[tuple[str, str]]], module: Module
) -> dict[int, frozenset[int]]:
    loop_of: dict[str, str] = {}
    for instruction in module.instructions():
        if instruction.opcode == "while":
            for computation in (instruction.called("body"), instruction.called("condition")):
                parameter = module.parameter(computation or "")
                root = module.root(computation or "")
                loop_of.update({i.name: instruction.name for i in (parameter, root) if i is not None})
            loop_of[instruction.name] = instruction.name
    parents: dict[int, int] = {}

    def find(v: int) -> int:
        while parents.setdefault(v, v) != v:
            v = parents[v]
        return v

    for allocation in allocations:
        owners: dict[tuple[str, str, int, int], int] = {}
        for value in allocation.values:
            for instruction, index in places.get(value.id, ()):
                loop = loop_of.get(instruction)
                if loop is not None:
                    # only values at one place of one allocation can be one buffer
                    first = owners.setdefault((loop, index, value.offset, value.num_bytes), value.id)
                    parents[find(value.id)] = find(first)
    classes: dict[int, set[int]] = {}
    for v in list(parents):
        classes.setdefault(find(v), set()).add(v)
    return {v: frozenset(members) for members in classes.values() for v in members}


def _fullest_moment(values: Iterable[Value]) -> int:
    """The position in the schedule at which most distinct bytes are live."""
    events: dict[int, tuple[list[Value], list[Value]]] = {}
    for v in values:
        if v.live and v.num_bytes:
            events.setdefault(v.live[0], ([], []))[0].append(v)
            events.setdefault(v.live[1] + 1, ([], []))[1].append(v)
    live: dict[int, Value] = {}
    best, moment, upper = -1, 0, 0
    for position in sorted(events):
        starting, ending = events[position]
        for v in ending:
            live.pop(v.id, None)
            upper -= v.num_bytes
        for v in starting:
            live[v.id] = v
            upper += v.num_bytes
        if starting and upper > best:  # overlaps only lower the sum, so most positions need no exact count
            exact = sum(end - start for start, end, _ in _cover(live.values()))
            if exact > best:
                best, moment = exact, position
    return moment


def _cover(values: Iterable[Value]) -> Iterable[tuple[int, int, list[Value]]]:
    """Disjoint byte ranges `(start, end, owners)` that together are the union of the values' ranges."""
    values = list(values)
    points = sorted({p for v in values for p in (v.offset, v.offset + v.num_bytes)})
    starts: dict[int, list[Value]] = {}
    for v in values:
        starts.setdefault(v.offset, []).append(v)
    active: list[Value] = []
    for start, end in itertools.pairwise(points):
        active = [v for v in active if v.offset + v.num_bytes > start] + starts.get(start, [])
        if active:
            yield start, end, active
