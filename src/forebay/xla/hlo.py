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
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape: dtype, dimensions, memory space (0 is the device's HBM)."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int

    @property
    def num_bytes(self) -> int:
        """Bytes without padding; 8-bit floats are one byte."""
        return math.ceil(math.prod(self.dims) * _ITEM_BITS.get(self.dtype, 8) / 8)


def arrays_of(shape: str) -> list[Array]:
    """The arrays in the text of a shape, tuples flattened."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        found.append(Array(dtype, sizes, int(space[1]) if space else 0))
    return found


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
    def op_name(self) -> str:
        """Where in the traced program it comes from; scopes are joined by slashes."""
        match = _OP_NAME.search(self.rest)
        return match[1] if match else ""

    def called(self, attribute: str) -> str | None:
        """The computation named by an attribute such as `body`, `condition` or `calls`."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return match[1] if match else None

    @property
    def trip_count(self) -> int | None:
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.rest)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Module:
    """The instructions of every computation, in schedule order where the module is scheduled."""

    computations: dict[str, list[Instruction]]
    entry: str
    scheduled: bool

    def instructions(self) -> Iterator[Instruction]:
        for body in self.computations.values():
            yield from body

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
    return Module(computations, entry, "is_scheduled=true" in first_line)
