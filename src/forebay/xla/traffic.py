"""Bytes of device memory that an instruction reads and writes, counted from its HLO.

A fusion reads of each operand what its computation needs of it: one layer's slice of stacked weights and
not the stack; what it updates in place it writes only where it does. This is how XLA's own cost analysis
counts (`xla/service/hlo_cost_analysis.cc`, operand utilisation), by elements and without caches.
"""

import functools
import math

from forebay.xla.hlo import Array, Instruction, Module

_HBM = (0,)
_HBM_GPU = (0, 1)
"""Memory spaces that are HBM; 1 is what collectives registered on a GPU, and the core's own memory on a TPU."""

_SLICES = ("slice", "dynamic-slice", "gather")
_NO_READ = ("parameter", "constant", "iota", "partition-id", "replica-id")


class TrafficCounter:
    """HBM bytes of the instructions of one module."""

    def __init__(self, module: Module, platform: str):
        self._module = module
        self._spaces = _HBM if platform == "tpu" else _HBM_GPU
        self._fused = functools.cache(self._fused_of)

    def instruction(self, instruction: Instruction) -> float:
        """Bytes read and written by one instruction, what a fusion calls included; a loop or call counts nothing."""
        operands = self._module.operands(instruction)
        if instruction.opcode.startswith("fusion"):
            read, written = self._fused(instruction.called("calls") or "")
            total = sum(
                share * self._bytes(o.arrays) for o, share in zip(operands, read, strict=False) if share and o.arrays
            )
            for n, array in enumerate(outputs(instruction)):
                share = written[n] if n < len(written) else 1.0
                total += share * self._bytes((array,))
            return total
        total = 0.0
        for operand, elements in self._reads(instruction, operands, _size(instruction), in_place=True):
            total += self._bytes(operand.arrays) * min(1.0, elements / max(1, _size(operand)))
        return total + self._written(instruction, operands) * self._bytes(outputs(instruction))

    def _bytes(self, arrays: tuple[Array, ...]) -> int:
        return sum(a.num_bytes for a in arrays if a.memory_space in self._spaces)

    def _written(self, instruction: Instruction, operands: list[Instruction]) -> float:
        """The share of its result that an instruction writes: of an update in place, the update."""
        update = {"dynamic-update-slice": 1, "scatter": 2}.get(instruction.opcode.removesuffix("-start"))
        if update is None or len(operands) <= update:
            return 1.0
        return min(1.0, _size(operands[update]) / max(1, _size(instruction)))

    def _fused_of(self, computation: str) -> tuple[list[float], list[float]]:
        """The share of each parameter that a fused computation reads, and of each result that it writes."""
        body = self._module.computations.get(computation, [])
        root = self._module.root(computation)
        if root is None:
            return [], []
        results = self._module.operands(root) if root.opcode == "tuple" else [root]
        in_place = {self._behind(r).name: self._behind(r) for r in results}
        needed: dict[str, float] = {r.name: float(_size(r)) for r in results}
        for i in reversed(body):
            elements = needed.get(i.name, 0.0)
            if not elements or i.opcode in _NO_READ:
                continue
            here = i.name in in_place
            for operand, count in self._reads(i, self._module.operands(i), elements, in_place=here):
                needed[operand.name] = min(float(_size(operand)), needed.get(operand.name, 0.0) + count)
        read: dict[int, float] = {}
        for i in body:
            if i.opcode == "parameter":
                number = int(i.rest.partition(")")[0])
                read[number] = needed.get(i.name, 0.0) / max(1, _size(i))
        written = [
            self._written(behind, self._module.operands(behind)) for behind in (self._behind(r) for r in results)
        ]
        return [read.get(n, 0.0) for n in range(max(read, default=-1) + 1)], written

    def _behind(self, instruction: Instruction) -> Instruction:
        """What a result is, under another shape or not."""
        while instruction.opcode == "bitcast" and self._module.operands(instruction):
            instruction = self._module.operands(instruction)[0]
        return instruction

    def _reads(
        self, i: Instruction, operands: list[Instruction], elements: float, *, in_place: bool
    ) -> list[tuple[Instruction, float]]:
        """How many elements of each operand it takes to make `elements` of the result."""
        opcode = i.opcode.removesuffix("-start")
        share = min(1.0, elements / max(1, _size(i)))
        if opcode in _SLICES:
            return [(operands[0], elements), *((o, _size(o) * share) for o in operands[1:])]
        if opcode == "dynamic-update-slice":
            kept = [] if in_place else [(operands[0], elements)]
            return [*kept, (operands[1], _size(operands[1])), *((o, 1.0) for o in operands[2:])]
        if opcode == "scatter":
            # what is added to is read where it changes
            first = _size(operands[2]) if in_place and len(operands) > 2 else elements
            return [(operands[0], first), *((o, _size(o)) for o in operands[1:])]
        if opcode in ("dot", "convolution", "custom-call", "sort", "ragged-dot"):
            return [(o, _size(o)) for o in operands]
        if opcode in ("reduce", "reduce-window", "concatenate", "pad"):
            return [(o, _size(o) * share) for o in operands]
        if opcode == "fusion":
            read, _ = self._fused(i.called("calls") or "")
            return [(o, _size(o) * s) for o, s in zip(operands, read, strict=False)]
        return [(o, min(_size(o), elements)) for o in operands]


def _size(instruction: Instruction) -> int:
    return sum(math.prod(a.dims) for a in instruction.arrays)


def outputs(instruction: Instruction) -> tuple[Array, ...]:
    """The arrays of the result; an asynchronous start's shape also lists its operands, then a context."""
    arrays = instruction.arrays
    if not instruction.opcode.endswith("-start"):
        return arrays
    if instruction.opcode == "copy-start":  # the one that names its result first
        return arrays[:1]
    context = arrays[-1:] and not arrays[-1].dims and len(arrays) > 1
    operands = len(arrays) - 1 - bool(context)
    return arrays[operands : operands + 1] if operands >= 0 else arrays
