"""The experts' arithmetic in a compiled step."""

from typing import Any


def expert_flops(module: Any) -> float:
    """FLOPs of a step in the experts' kernels, counted in its parsed HLO as if every row of the buffers were of some expert."""
    from forebay.xla.flops import FlopCounter

    class Experts(FlopCounter):
        def instruction(self, instruction: Any) -> float:
            if instruction.opcode in ("dot", "convolution") or instruction.opcode.startswith("custom-call"):
                return super().instruction(instruction) if "/grouped_" in instruction.rest else 0.0
            return super().instruction(instruction)

    return Experts(module).computation(module.entry)
