"""Where a value comes from, back through copies, slices, tuples and loops."""

import re
from collections.abc import Iterator

from forebay.xla.hlo import Instruction, Module

_TRANSPARENT = ("copy", "bitcast", "fusion", "dynamic-slice", "dynamic-update-slice", "async", "reshape", "transpose")


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
        opcode = re.sub(r"-(start|done|update)$", "", current.opcode)
        if current.tuple_index is not None:
            current, index = operands[0], current.tuple_index
        elif opcode == "tuple" and index is not None:
            current, index = operands[index], None
        elif opcode == "while" and index is not None:
            current = module.root(current.called("body") or "")
        elif opcode == "parameter" and current.computation in module.loops:
            current = module.operands(module.loops[current.computation])[0]
        elif opcode in _TRANSPARENT and operands:
            hosts = [o for o in operands if any(a.on_host for a in o.arrays)]
            current = (hosts or operands)[0]
        else:
            return


def parameter_name(module: Module, instruction: Instruction) -> str | None:
    """The name, in the traced program, of the module's argument that the first operand is (a part of)."""
    operands = module.operands(instruction)
    if not operands:
        return None
    trail = [operands[0], *origins(module, operands[0])]
    last = trail[-1]
    return last.op_name if last.opcode == "parameter" and last.computation == module.entry and last.op_name else None
