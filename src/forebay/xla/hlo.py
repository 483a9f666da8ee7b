"""A light reader of scheduled HLO text: instructions, computations, loops.

It keeps what forebay asks of a compiled program and no more; it is not a parser of the language.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

HOST_MEMORY_SPACE = 5
"""XLA's memory space of pinned host memory, written `S(5)` in a layout."""

_ITEM_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*\) -> .*)? \{$")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")
_BRACKETS = re.compile(r"[\[{(][^\]})]*[\]})]|/\*[^*]*\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape: dtype, dimensions, memory space (0 is the device's HBM)."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int

    @property
    def on_host(self) -> bool:
        return self.memory_space == HOST_MEMORY_SPACE

    @property
    def num_bytes(self) -> int:
        """Bytes without padding; 8-bit floats are one byte."""
        return math.ceil(math.prod(self.dims) * _ITEM_BITS.get(self.dtype, 8) / 8)


def _closing(text: str) -> int | None:
    """Where the parenthesis that was opened before `text` is closed."""
    end = text.find(")")
    if end >= 0 and text.find("(", 0, end) < 0:  # nearly always
        return end
    depth = 1
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    return None


def arrays_of(shape: str) -> list[Array]:
    """The arrays in the text of a shape, tuples flattened."""
    return list(_arrays_of(shape))


@functools.lru_cache(maxsize=1 << 16)  # a program has few shapes, each many times
def _arrays_of(shape: str) -> tuple[Array, ...]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        found.append(Array(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO. `rest` is what follows the opening parenthesis: operands and attributes."""

    name: str
    computation: str
    shape: str
    opcode: str
    rest: str
    root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result, tuples flattened."""
        return _arrays_of(self.shape)

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the traced program it comes from; scopes are joined by slashes."""
        match = _OP_NAME.search(self.rest)
        return match[1] if match else ""

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the instructions that it reads, in order; empty for parameters and constants."""
        end = _closing(self.rest)
        if end is None or self.opcode in ("parameter", "constant"):
            return ()
        if self.rest.find("%", 0, end) >= 0:
            return tuple(_OPERAND.findall(self.rest, 0, end))
        # names without a percent sign, as XLA prints them on request
        parts = _BRACKETS.sub("", self.rest[:end]).split(",")
        return tuple(part.split()[-1] for part in parts if part.strip())

    def called(self, attribute: str) -> str | None:
        """The computation named by an attribute such as `body`, `condition` or `calls`."""
        if attribute not in self._called:
            match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
            self._called[attribute] = match[1] if match else None
        return self._called[attribute]

    @functools.cached_property
    def _called(self) -> dict[str, str | None]:
        return {}

    @functools.cached_property
    def tuple_index(self) -> int | None:
        """The index of a `get-tuple-element`."""
        match = re.search(r"\bindex=(\d+)", self.rest) if self.opcode == "get-tuple-element" else None
        return int(match[1]) if match else None

    @functools.cached_property
    def integer(self) -> int | None:
        """The value of a scalar integer constant."""
        match = re.match(r"(-?\d+)\)", self.rest) if self.opcode == "constant" else None
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Module:
    """The instructions of every computation, in schedule order where the module is scheduled."""

    computations: dict[str, list[Instruction]]
    entry: str
    scheduled: bool
    devices: int = 1
    """How many run it, partitions and replicas, as far as its first line says."""

    @functools.cached_property
    def _by_name(self) -> dict[str, dict[str, Instruction]]:
        return {name: {i.name: i for i in body} for name, body in self.computations.items()}

    def find(self, computation: str, name: str) -> Instruction | None:
        """The instruction called `name` of one computation."""
        return self._by_name.get(computation, {}).get(name)

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that `instruction` reads, in order."""
        here = self._by_name[instruction.computation]
        return [here[name] for name in instruction.operands if name in here]

    def instructions(self) -> Iterator[Instruction]:
        for body in self.computations.values():
            yield from body

    @functools.cached_property
    def loops(self) -> dict[str, Instruction]:
        """The `while` of each loop body."""
        return {body: i for i in self.instructions() if i.opcode == "while" and (body := i.called("body"))}

    @functools.cached_property
    def executions(self) -> dict[str, int]:
        """How often a run of the module runs each computation whose instructions are scheduled: the entry and
        the bodies of loops and calls. A loop whose trip count is not known counts once."""
        times: dict[str, int] = {}
        pending = [(self.entry, 1)]
        while pending:
            computation, count = pending.pop()
            times[computation] = times.get(computation, 0) + count
            for i in self.computations.get(computation, ()):
                if i.opcode == "while" and (body := i.called("body")):
                    pending.append((body, count * (self.trip_count(i) or 1)))
                elif i.opcode == "call" and (body := i.called("to_apply")):
                    pending.append((body, count))
        return times

    def trip_count(self, loop: Instruction) -> int | None:
        """How often the body of a `while` runs: what the compiler noted, else worked out from its counter."""
        noted = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
        return int(noted[1]) if noted else self._counted(loop)

    def _counted(self, loop: Instruction) -> int | None:
        """Trips of `for (i = first; i < limit; i += step)`, the form that XLA gives loops over layers."""
        compare = self.root(loop.called("condition") or "")
        result = self.root(loop.called("body") or "")
        if compare is None or result is None or not self.operands(loop):
            return None
        values = self.operands(compare)
        if compare.opcode != "compare" or "direction=LT" not in compare.rest or len(values) != 2:
            return None
        index, limit = values[0].tuple_index, values[1].integer
        start, steps = self.operands(loop)[0], self.operands(result)
        if index is None or limit is None or start.opcode != "tuple" or index >= len(steps):
            return None
        first, step = self._constant(self.operands(start)[index]), self._step(steps[index])
        return None if first is None or not step else max(0, -((first - limit) // step))

    def _constant(self, instruction: Instruction) -> int | None:
        while instruction.opcode in ("copy", "bitcast") and self.operands(instruction):
            instruction = self.operands(instruction)[0]
        return instruction.integer

    def _step(self, added: Instruction) -> int | None:
        """What a counter grows by: the one constant of an addition, which may be fused."""
        if added.opcode == "copy":
            added = self.operands(added)[0]
        constants = [c for o in self.operands(added) if (c := self._constant(o)) is not None]
        if added.opcode == "fusion":
            body = self.computations.get(added.called("calls") or "", [])
            root = self.root(added.called("calls") or "")
            constants += [i.integer for i in body if i.integer is not None]
            added = root or added
        return constants[0] if added.opcode == "add" and len(constants) == 1 else None

    def parameter(self, computation: str, number: int = 0) -> Instruction | None:
        start = f"{number})"
        return next(
            (i for i in self.computations.get(computation, ()) if i.opcode == "parameter" and i.rest.startswith(start)),
            None,
        )

    def root(self, computation: str) -> Instruction | None:
        return next((i for i in self.computations.get(computation, ()) if i.root), None)


def parse_module(text: str) -> Module:
    """Reads HLO text. Lines that are not instructions or computation headers are passed over."""
    computations: dict[str, list[Instruction]] = {}
    entry, current, body = "", "", None
    for line in text.splitlines():
        if body is None or not line.startswith(" "):
            header = _COMPUTATION.match(line)
            if header:
                current = header[2]
                body = computations.setdefault(current, [])
                entry = current if header[1] else entry
            continue
        match = _INSTRUCTION.match(line)
        if match:
            body.append(Instruction(match[2], current, match[3], match[4], match[5], bool(match[1])))
    first_line = text[: text.find("\n")]
    counts = [int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", first_line)]
    return Module(computations, entry, "is_scheduled=true" in first_line, math.prod(counts))
