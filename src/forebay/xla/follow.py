"""Scheduled HLO run for its integers alone: which place of which buffer each copy goes to, in every iteration.

Loops over layers count; the positions of their copies are sums and differences of counters. So the integers
of a program can be followed through its loops without any of its arithmetic. What is not an integer scalar, or
comes of something else than counters and constants, is unknown.
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping

from forebay.xla.hlo import Instruction, Module

type Value = int | list["Value"] | None
"""An integer, something that is not known, or a tuple of these."""

_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": min, "maximum": max,
    "and": operator.and_, "or": operator.or_,
}  # fmt: skip
_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
_SAME = ("copy", "bitcast", "convert", "reshape")
_FOLLOWED = re.compile(r"^(\(|(pred|[su]\d+)\[\])")  # tuples and integer scalars
_MOST_TRIPS = 100_000


@dataclasses.dataclass(frozen=True)
class Step:
    """One execution of an instruction.

    `iterations` are of the loops around it, the innermost first, counted from 0.
    """

    instruction: Instruction
    iterations: tuple[int, ...]
    frame: "_Frame"

    def value(self, instruction: Instruction) -> Value:
        """The value of an instruction of the same computation."""
        return self.frame.value(instruction)

    def inside(self, target: str) -> Callable[[Instruction], Value]:
        """Evaluates the instructions of a computation that the instruction calls."""
        return self.frame.call(self.instruction, target).value


@dataclasses.dataclass(frozen=True)
class Miscount:
    """A loop that would run another number of times by its condition than the compiler noted."""

    loop: Instruction
    noted: int
    counted: int


class Follower:
    """Follows one run of a module.

    Attributes:
        miscounts: the loops found, while following, whose noted number of iterations is wrong.
    """

    def __init__(self, module: Module, wanted: Callable[[Instruction], bool]):
        """`wanted` says which instructions to yield; loops without any are passed over."""
        self.module = module
        self.wanted = wanted
        self.miscounts: list[Miscount] = []
        self._worth: dict[str, bool] = {}

    def steps(self) -> Iterator[Step]:
        """The wanted instructions in the order of the schedule, each as often as it runs."""
        yield from self._run(_Frame(self.module, self.module.entry, [], {}), ())

    def _run(self, frame: "_Frame", iterations: tuple[int, ...]) -> Iterator[Step]:
        for instruction in self.module.computations[frame.computation]:
            if self.wanted(instruction):
                yield Step(instruction, iterations, frame)
            body = instruction.called("body") if instruction.opcode == "while" else None
            if body and self._is_worth_following(body):
                yield from self._loop(frame, instruction, body, iterations)
            target = instruction.called("to_apply") if instruction.opcode == "call" else None
            if target and self._is_worth_following(target):
                inner = frame.call(instruction, target)
                yield from self._run(inner, iterations)

    def _loop(self, frame: "_Frame", loop: Instruction, body: str, iterations: tuple[int, ...]) -> Iterator[Step]:
        condition = loop.called("condition") or ""
        state: Value = frame.value(self.module.operands(loop)[0])
        noted = self.module.trip_count(loop)
        trips = 0
        while trips < _MOST_TRIPS:
            goes_on = _Frame(self.module, condition, [state], {}).result()
            if goes_on is None:
                goes_on = noted is not None and trips < noted
            if not goes_on:
                break
            inner = _Frame(self.module, body, [state], {})
            yield from self._run(inner, (trips, *iterations))
            state = inner.result()
            trips += 1
        if noted is not None and noted != trips and all(m.loop != loop for m in self.miscounts):
            self.miscounts.append(Miscount(loop, noted, trips))
        frame.known[loop.name] = state

    def _is_worth_following(self, computation: str) -> bool:
        if computation not in self._worth:
            body = self.module.computations.get(computation, [])
            inner = [
                c for i in body if (c := i.called("body") or i.called("to_apply")) and i.opcode in ("while", "call")
            ]
            self._worth[computation] = any(map(self.wanted, body)) or any(map(self._is_worth_following, inner))
        return self._worth[computation]


class _Frame:
    """One execution of a computation: its arguments, and what is known of its values."""

    def __init__(self, module: Module, computation: str, arguments: list[Value], known: dict[str, Value]):
        self.module = module
        self.computation = computation
        self.arguments = arguments
        self.known = known

    def result(self) -> Value:
        root = self.module.root(self.computation)
        return None if root is None else self.value(root)

    def call(self, instruction: Instruction, target: str) -> "_Frame":
        return _Frame(self.module, target, [self.value(o) for o in self.module.operands(instruction)], {})

    def value(self, instruction: Instruction) -> Value:
        """The value of an instruction of this computation."""
        if instruction.name not in self.known:
            self.known[instruction.name] = self._evaluate(instruction)
        return self.known[instruction.name]

    def _evaluate(self, i: Instruction) -> Value:
        if not _FOLLOWED.match(i.shape):
            return None
        if i.opcode == "parameter":
            number = re.match(r"\d+", i.rest)
            position = int(number[0]) if number else len(self.arguments)
            return self.arguments[position] if position < len(self.arguments) else None
        if i.opcode == "constant":
            return {"true": 1, "false": 0}.get(i.rest.partition(")")[0], i.integer)
        operands = self.module.operands(i)
        if i.opcode == "tuple":
            return [self.value(o) for o in operands]
        if i.tuple_index is not None:
            whole = self.value(operands[0])
            return whole[i.tuple_index] if isinstance(whole, list) and i.tuple_index < len(whole) else None
        if i.opcode == "fusion" and (target := i.called("calls")):
            return self.call(i, target).result()
        if i.opcode in _SAME:
            return self.value(operands[0])
        if i.shape.startswith("("):
            return None
        return self._arithmetic(i, operands)

    def _arithmetic(self, i: Instruction, operands: list[Instruction]) -> Value:
        values = [self.value(o) for o in operands]
        if i.opcode == "select":
            return values[1 if values[0] else 2] if isinstance(values[0], int) else None
        numbers = [v for v in values if isinstance(v, int)]
        if len(numbers) != len(values) or not numbers:
            return None
        if i.opcode in _BINARY and len(numbers) == 2:
            return _BINARY[i.opcode](*numbers)
        if i.opcode == "compare" and len(numbers) == 2 and (way := re.search(r"direction=(\w+)", i.rest)):
            return int(_COMPARE[way[1]](*numbers))
        if i.opcode == "negate":
            return -numbers[0]
        if i.opcode == "clamp" and len(numbers) == 3:
            return max(numbers[0], min(numbers[1], numbers[2]))
        return None
