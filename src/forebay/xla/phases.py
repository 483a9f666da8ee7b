"""Which part of the training step an instruction belongs to, from the scopes that jax leaves in the metadata."""

from typing import Literal

from forebay.xla.hlo import Instruction, Module
from forebay.xla.remat import is_clone

type Phase = Literal["forward", "backward", "recompute", "optimizer", "compiler_remat"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer", "compiler_remat")


def phase_of(module: Module, i: Instruction, before: Phase, differentiated: bool) -> Phase:
    """The part of the step; where the metadata do not say, that of the instruction before.

    `differentiated` is whether anything in the module is of a backward pass.
    """
    if is_clone(i.name):
        return "compiler_remat"
    scope = i.op_name
    if not scope and (inside := i.called("calls")):
        scope = next((x.op_name for x in module.computations.get(inside, ()) if x.op_name), "")
    if "/" not in scope:
        return "forward" if before == "compiler_remat" else before
    if "optimizer/" in f"{scope}/":
        return "optimizer"
    if "rematted_computation" in scope:
        return "recompute"
    if "transpose(" in scope or "/accumulate/" in f"{scope}/":
        return "backward"
    if "jvp(" in scope or not differentiated:
        return "forward"
    # of a differentiated function everything is in one of the two scopes; the rest of the step is the update
    return "optimizer" if scope.startswith(("jit(", "pjit(")) else before
