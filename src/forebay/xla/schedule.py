"""A scheduled module as what a machine does, in order: the form in which the timeline reads a program.

Each instruction that takes time or hands on something that is under way becomes an `Op` with its work:
arithmetic, bytes of device memory, bytes over a link.
"""

import dataclasses
import re

from forebay.errors import UserError
from forebay.xla.copies import UNNAMED
from forebay.xla.flops import called
from forebay.xla.hlo import Instruction, Module
from forebay.xla.opcodes import FREE
from forebay.xla.origins import parameter_name
from forebay.xla.phases import PHASES, Phase, phase_of
from forebay.xla.work import Collective, Work, WorkReader, target_of

__all__ = ["PHASES", "Collective", "Op", "Schedule", "Work", "read_schedule"]


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One step of a computation.

    Attributes:
        role: "run" takes time; "start" begins something that goes on beside the computation until a "done";
            "tuple", "element" and "pass" hand on what is under way; "loop", "call" and "branch" run others.
        operands: names in the same computation, in order.
        index: of an element.
        bodies: the computations that it runs: one, or a conditional's branches.
        trips: how often a loop runs; None if the program does not say.
        thread: "sparsecore" or "host" where it runs there.
        name: the tensor, for a copy or a collective that has one; of an unknown custom call the target.
        layer_window: for a copy between host and device, the share of a layer's FLOPs between start and done.
    """

    instruction: str
    opcode: str
    role: str
    phase: Phase
    operands: tuple[str, ...] = ()
    work: Work | None = None
    index: int = 0
    bodies: tuple[str, ...] = ()
    trips: int | None = None
    thread: str = ""
    name: str = ""
    layer_window: float | None = None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The ops of every computation that is scheduled, and what the program says of itself."""

    entry: str
    ops: dict[str, tuple[Op, ...]]
    parameters: dict[str, tuple[str, ...]]
    """The names of each computation's parameters, by number."""
    roots: dict[str, str]
    devices: int
    notes: tuple[str, ...]


def read_schedule(module: Module, platform: str, devices: int | None = None) -> Schedule:
    """The schedule of a scheduled module.

    Args:
        platform: "cuda" or "tpu".
        devices: how many run it; by default what the module says.

    Raises:
        UserError: an instruction without what its cost is counted from.
    """
    return _Reader(module, platform, devices or module.devices or 1).schedule()


class _Reader:
    def __init__(self, module: Module, platform: str, devices: int):
        self.module = module
        self.devices = devices
        self.work = WorkReader(module, platform, devices)
        self.differentiated = any("transpose(" in i.op_name for i in module.instructions())

    def schedule(self) -> Schedule:
        ops, parameters, roots = {}, {}, {}
        pending: list[tuple[str, Phase]] = [(self.module.entry, "forward")]
        while pending:
            computation, phase = pending.pop()
            if computation in ops:
                continue
            body = self.module.computations[computation]
            found = self._ops(body, phase)
            if phase in ("backward", "recompute"):
                # XLA merges computations that are equal, and their metadata are then those of the first: the loop of an
                # attention that is made again says that it is the forward pass's
                found = [dataclasses.replace(op, phase=phase) if op.phase == "forward" else op for op in found]
            ops[computation] = tuple(found)
            numbered = sorted((int(i.rest.partition(")")[0]), i.name) for i in body if i.opcode == "parameter")
            parameters[computation] = tuple(name for _, name in numbered)
            root = self.module.root(computation)
            roots[computation] = root.name if root else ""
            pending += [(b, op.phase) for op in ops[computation] for b in op.bodies]
        return Schedule(self.module.entry, ops, parameters, roots, self.devices, tuple(self.work.notes))

    def _ops(self, body: list[Instruction], phase: Phase) -> list[Op]:
        ops = []
        for i in body:
            phase = phase_of(self.module, i, phase, self.differentiated)
            try:
                op = self._op(i, phase)
            except (IndexError, KeyError, ValueError) as error:
                raise UserError(
                    f"the instruction {i.name!r} ({i.opcode}) in {i.computation!r} lacks something that its cost needs "
                    f"({type(error).__name__}): the HLO is damaged, or of a version of XLA that is not known here"
                ) from None
            if op is not None:
                ops.append(op)
        return ops

    def _op(self, i: Instruction, phase: Phase) -> Op | None:
        opcode = i.opcode
        if opcode == "parameter" or opcode == "constant":
            return None
        if opcode == "tuple":
            return Op(i.name, opcode, "tuple", phase, i.operands)
        if opcode == "get-tuple-element":
            return Op(i.name, opcode, "element", phase, i.operands, index=i.tuple_index or 0)
        if opcode.endswith("-done"):
            return Op(i.name, opcode, "done", phase, i.operands)
        if opcode.endswith("-update") or opcode in ("opt-barrier", "optimization-barrier", "bitcast"):
            return Op(i.name, opcode, "pass", phase, i.operands)
        if opcode == "while":
            trips = self.module.trip_count(i)
            return Op(i.name, opcode, "loop", phase, i.operands, bodies=tuple(called(i, "body")), trips=trips)
        if opcode == "call":
            return Op(i.name, opcode, "call", phase, i.operands, bodies=tuple(called(i)))
        if opcode == "conditional":
            return Op(i.name, opcode, "branch", phase, i.operands, bodies=tuple(called(i)))
        if opcode in FREE:
            return None
        return self._working(i, phase)

    def _working(self, i: Instruction, phase: Phase) -> Op | None:
        is_start = i.opcode.endswith("-start") or i.opcode in ("send", "recv")
        work = self.work.work(i)
        if work is None and not is_start:
            return None
        role = "start" if is_start and '"is_sync":true' not in i.rest else "run"
        transfer = self.work.transfers.get((i.computation, i.name))
        thread = re.search(r'async_execution_thread="(\w+)"', i.rest)
        name = transfer.name if transfer is not None and transfer.name != UNNAMED else self._tensor(i, work)
        return Op(
            i.name, i.opcode, role, phase, i.operands, work or Work("memory"),
            thread=thread[1] if thread and thread[1] != "main" else "", name=name,
            layer_window=transfer.window if transfer else None,
        )  # fmt: skip

    def _tensor(self, i: Instruction, work: Work | None) -> str:
        """What a transfer moves: the argument of the step that it is, else the operation that it is for."""
        if work is not None and work.kind == "unknown":
            return target_of(i)
        if work is None or work.kind not in ("collective", "d2h", "h2d", "h2h"):
            return ""
        wrapped = self.work.wrapped(i)
        if argument := parameter_name(self.module, i):
            return argument
        return short_name(i.op_name or (wrapped.op_name if wrapped else "")) or i.name


def short_name(op_name: str) -> str:
    """The end of an `op_name`, of loops and maps nothing; of one that XLA merged of several, `a/(b/c:d/e)`, the first's."""
    merged = re.fullmatch(r"(?:.*?/)?\((.+)\)", op_name)
    # colons are in the names of forebay's own scopes, too
    first = (
        re.split(r"(?<!layer)(?<!save)(?<!load)(?<!gradient)(?<!update)(?<!stack):", merged[1])[0]
        if merged
        else op_name
    )
    parts = [p for p in first.split("/") if p and p not in ("while", "body", "shard_map", "eval_jaxpr")]
    return "/".join(parts[-2:]) + (" and others" if merged else "")
