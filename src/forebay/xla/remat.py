"""What the compiler recomputes of its own accord.

When XLA's scheduler counts more memory than it believes there is, HloRematerialization clones
instructions to run again where their results are used; the clones' names end in `.remat`.
"""

import dataclasses
import re

from forebay.xla.flops import FlopCounter
from forebay.xla.hlo import Module

_CLONE = re.compile(r"\.remat\d*(\.|$)")
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute", "ragged-all-to-all")


@dataclasses.dataclass(frozen=True)
class RematClones:
    """Cloned instructions in the program's text, and per step and device what the scheduled ones cost.

    Attributes:
        count: instructions, those inside fused computations included.
        flops: matrix and attention FLOPs that are spent a second time.
        collectives: how often a cloned collective runs.
    """

    count: int
    flops: float
    collectives: int


def is_clone(name: str) -> bool:
    """Whether an instruction of that name was cloned to run again."""
    return _CLONE.search(name) is not None


def remat_clones(module: Module) -> RematClones:
    counter, flops, collectives = FlopCounter(module), 0.0, 0
    for computation, times in module.executions.items():
        for i in module.computations[computation]:
            if is_clone(i.name) and not i.opcode.endswith("-done"):
                flops += times * counter.instruction(i)
                collectives += times * i.opcode.startswith(_COLLECTIVES)
    return RematClones(sum(is_clone(i.name) for i in module.instructions()), flops, collectives)
