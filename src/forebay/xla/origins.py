"""Where a value comes from, back through copies, slices, tuples and loops."""

import itertools
import re
from collections.abc import Iterator

from forebay.xla.hlo import Instruction, Module

_TRANSPARENT = ("copy", "bitcast", "fusion", "dynamic-slice", "dynamic-update-slice", "async", "reshape", "transpose")
_ENDING = re.compile(r"-(start|done|update)$")
_FARTHEST = 64
"""Steps from an argument to what is made of it alone; more is a program that computes."""


def origins(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """What the first operand's value comes from, nearest first; of several operands, one in host memory."""
    seen: set[tuple[str, str, int | None]] = set()
    index: int | None = None
    current: Instruction | None = instruction
    while current is not None:
        key = (current.computation, current.name, index)
        if key in seen:
            return
        seen.add(key)
        if current is not instruction:
            yield current
        operands = module.operands(current)
        opcode = _ENDING.sub("", current.opcode)
        if current.tuple_index is not None:
            current, index = operands[0], current.tuple_index
        elif opcode == "tuple" and index is not None:
            current, index = operands[index], None
        elif opcode == "while" and index is not None:
            current = module.root(current.called("body") or "")
        elif opcode == "parameter" and current.computation in module.loops:
            current = module.operands(module.loops[current.computation])[0]
        elif opcode == "fusion" and (source := single_source(module, current, index or 0)) is not None:
            current, index = source, None
        elif opcode in _TRANSPARENT and operands:
            hosts = [o for o in operands if any(a.on_host for a in o.arrays)]
            current = (hosts or operands)[0]
        else:
            return


def single_source(module: Module, fusion: Instruction, index: int) -> Instruction | None:
    """The operand from which alone a fusion makes its result number `index`; None if it takes several arrays."""
    current = module.root(fusion.called("calls") or "")
    operands = module.operands(fusion)
    if current is not None and current.opcode == "tuple":
        results = module.operands(current)
        current = results[index] if index < len(results) else None
    while current is not None and current.opcode != "parameter":
        arrays = [o for o in module.operands(current) if any(a.dims for a in o.arrays)]
        current = arrays[0] if len(arrays) == 1 else None
    number = -1 if current is None else int(current.rest.partition(")")[0])
    return operands[number] if 0 <= number < len(operands) else None


def parameter_name(module: Module, instruction: Instruction) -> str | None:
    """The name, in the traced program, of the module's argument that the first operand is, or is a part of.

    None where it is computed from several arrays.
    """
    operands = module.operands(instruction)
    if not operands:
        return None
    for step in itertools.chain(operands[:1], itertools.islice(origins(module, operands[0]), _FARTHEST)):
        if step.opcode == "fusion" and not any(
            single_source(module, step, n) is not None for n in range(len(step.arrays))
        ):
            return None
        if step.opcode == "parameter" and step.computation == module.entry:
            return step.op_name or None
    return None
