"""A scheduled module as what a machine does, in order: the form in which the timeline reads a program.

Each instruction that takes time or hands on something that is under way becomes an `Op` with its work:
arithmetic, bytes of device memory, bytes over a link. What part of the training step it belongs to is read
from the scopes that jax leaves in the metadata.
"""

import dataclasses
import re
from typing import Literal

from forebay.errors import UserError
from forebay.xla.flops import FlopCounter, called, is_attention
from forebay.xla.groups import Groups, groups_of
from forebay.xla.hlo import Instruction, Module
from forebay.xla.opcodes import COLLECTIVES, FREE, KNOWN, base
from forebay.xla.origins import parameter_name
from forebay.xla.remat import is_clone
from forebay.xla.traffic import TrafficCounter, outputs
from forebay.xla.windows import UNNAMED, copies_within_host, direction, transfers_by_instruction

type Phase = Literal["forward", "backward", "recompute", "optimizer", "compiler_remat"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer", "compiler_remat")

type Kind = Literal["matmul", "attention", "memory", "copy", "d2h", "h2d", "h2h", "collective", "host", "unknown"]

_NO_WORK_CALLS = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "Sharding",
    "xla.sdy.FuncResultSharding",
    "PinToDevice",
)
_KNOWN_CALLS = ("__cublas$", "__cudnn$", "__triton", "__cub$", "GatherScatterIndicesBitpacked", "TopK", "HostExecute")
_ASYNC = ("-start", "-update", "-done")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: `num_bytes` is what its formula needs, per device: of an all-gather the gathered whole, of
    all others what a device puts in."""

    opcode: str
    num_bytes: int
    groups: Groups


@dataclasses.dataclass(frozen=True)
class Work:
    """What one instruction asks of the machine, per device.

    Attributes:
        kind: which efficiency applies.
        flops: of matrix products, attention and convolutions.
        dtype: of what is multiplied, in HLO's words; empty without FLOPs.
        backward: whether it is the gradient kernel of fused attention.
        hbm_bytes: read and written in device memory, where it runs on the compute units.
        link_bytes: between device and host.
    """

    kind: Kind
    flops: float = 0.0
    dtype: str = ""
    backward: bool = False
    hbm_bytes: float = 0.0
    link_bytes: int = 0
    collective: Collective | None = None


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
        self.flops = FlopCounter(module)
        self.traffic = TrafficCounter(module, platform)
        self.transfers = transfers_by_instruction(module)
        self.host_copies = copies_within_host(module)
        self.notes: dict[str, None] = {}
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
        return Schedule(self.module.entry, ops, parameters, roots, self.devices, tuple(self.notes))

    def _ops(self, body: list[Instruction], phase: Phase) -> list[Op]:
        ops = []
        for i in body:
            phase = self._phase(i, phase)
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
        work = self._work(i)
        if work is None and not is_start:
            return None
        role = "start" if is_start and '"is_sync":true' not in i.rest else "run"
        transfer = self.transfers.get((i.computation, i.name))
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
            return _target(i)
        if work is None or work.kind not in ("collective", "d2h", "h2d", "h2h"):
            return ""
        wrapped = self._wrapped(i)
        if argument := parameter_name(self.module, i):
            return argument
        op_name = i.op_name or (wrapped.op_name if wrapped else "")
        parts = [p for p in op_name.split("/") if p and p not in ("while", "body", "shard_map", "eval_jaxpr")]
        return "/".join(parts[-2:]) or i.name

    def _work(self, i: Instruction) -> Work | None:
        """None where nothing is done."""
        transfer = self.transfers.get((i.computation, i.name))
        if transfer is not None:
            return Work("d2h" if transfer.direction == "d2h" else "h2d", link_bytes=transfer.num_bytes)
        if (copied := self.host_copies.get((i.computation, i.name))) is not None:
            return Work("h2h", link_bytes=copied)
        if i.opcode.endswith("-start") and any(a.on_host for a in i.arrays):
            # its end is not in the same computation, or it has none
            towards, moved = direction(list(outputs(i)), [a for o in self.module.operands(i) for a in o.arrays])
            if towards and moved:
                return Work(towards, link_bytes=max(a.num_bytes for a in moved))
        if i.opcode in ("send", "recv") and "is_host_transfer=true" in i.rest:
            moved = sum(a.num_bytes for a in i.arrays if a.dims)
            return Work("d2h" if i.opcode == "send" else "h2d", link_bytes=moved)
        inner = self._wrapped(i)
        if inner is not None and base(inner.opcode) in COLLECTIVES:
            return self._collective(inner, i)
        if base(i.opcode) in COLLECTIVES or i.opcode in ("send", "recv"):
            return self._collective(i, i)
        if base(i.opcode) == "custom-call":
            return self._custom_call(i)
        if base(i.opcode) not in KNOWN and i.opcode not in KNOWN:
            return Work("unknown", hbm_bytes=self.traffic.instruction(i))
        if i.opcode in ("async-start", "call-start"):
            return self._wrapped_work(i)
        return self._compute(i)

    def _compute(self, i: Instruction) -> Work:
        flops, products = self.flops.instruction(i), tuple(self.flops.products(i))
        traffic = self.traffic.instruction(i)
        if not products:
            is_copy = base(i.opcode) == "copy"
            return Work("copy" if is_copy else "memory", hbm_bytes=traffic)
        attention = any(map(is_attention, products))
        largest = max(products, key=self.flops.instruction)
        backward = attention and (
            "Backward" in largest.rest or ("_fwd" not in largest.name and "splash" in largest.name)
        )
        kind: Kind = "attention" if attention else "matmul"
        return Work(kind, flops, self.flops.operand_dtype(largest), backward, traffic)

    def _custom_call(self, i: Instruction) -> Work | None:
        target = _target(i)
        if target in _NO_WORK_CALLS:
            return None
        work = self._compute(i)
        if work.flops or target.startswith(_KNOWN_CALLS):
            return dataclasses.replace(work, kind="host") if target == "HostExecute" else work
        return dataclasses.replace(work, kind="unknown")

    def _wrapped(self, i: Instruction) -> Instruction | None:
        """The one instruction that an asynchronous start wraps."""
        if i.opcode not in ("async-start", "call-start"):
            return None
        inside = [
            x for name in called(i) for x in self.module.computations.get(name, ()) if x.opcode not in FREE
        ]  # fmt: skip
        return inside[0] if len(inside) == 1 else None

    def _wrapped_work(self, i: Instruction) -> Work:
        """The work of the computation that an asynchronous start runs, as one kernel."""
        inside = [x for name in called(i) for x in self.module.computations.get(name, ()) if x.opcode not in FREE]
        parts = [w for x in inside if (w := self._work(x)) is not None]
        flops = sum(w.flops for w in parts)
        dtype = max(parts, key=lambda w: w.flops).dtype if flops else ""
        return Work("matmul" if flops else "memory", flops, dtype, hbm_bytes=sum(w.hbm_bytes for w in parts))

    def _collective(self, i: Instruction, start: Instruction) -> Work:
        groups = groups_of(i.rest, self.devices)
        if groups is None:
            self.notes["some collectives' groups are in a form that is not known: all devices were taken"] = None
            groups = Groups((tuple(range(self.devices)),))
        operands = self.module.operands(start)
        put_in = sum(a.num_bytes for o in operands for a in o.arrays)
        if base(i.opcode) == "ragged-all-to-all":
            # rows from one buffer to another, of which the experts' has room for more than there are in balance
            put_in = min(sum(a.num_bytes for a in o.arrays) for o in operands[:2])
        opcode = "collective-permute" if i.opcode in ("send", "recv") else base(i.opcode)
        size = put_in * groups.size if opcode == "all-gather" else put_in
        return Work("collective", collective=Collective(opcode, size, groups))

    def _phase(self, i: Instruction, before: Phase) -> Phase:
        """The part of the step; where the metadata do not say, that of the instruction before."""
        if is_clone(i.name):
            return "compiler_remat"
        scope = i.op_name
        if not scope and (inside := i.called("calls")):
            scope = next((x.op_name for x in self.module.computations.get(inside, ()) if x.op_name), "")
        if "/" not in scope:
            return "forward" if before == "compiler_remat" else before
        if "optimizer/" in f"{scope}/":
            return "optimizer"
        if "rematted_computation" in scope:
            return "recompute"
        if "transpose(" in scope or "/accumulate/" in f"{scope}/":
            return "backward"
        if "jvp(" in scope or not self.differentiated:
            return "forward"
        # of a differentiated function everything is in one of the two scopes; the rest of the step is the update
        return "optimizer" if scope.startswith(("jit(", "pjit(")) else before


def _target(i: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', i.rest)
    return found[1] if found else ""
