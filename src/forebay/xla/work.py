"""What one instruction asks of the machine: arithmetic, bytes of device memory, bytes over a link, a collective."""

import dataclasses
import re
from typing import Literal

from forebay.xla.copies import copies_within_host, direction
from forebay.xla.flops import FlopCounter, called, is_attention
from forebay.xla.groups import Groups, groups_of
from forebay.xla.hlo import Instruction, Module
from forebay.xla.opcodes import COLLECTIVES, FREE, KNOWN, base
from forebay.xla.traffic import TrafficCounter, outputs
from forebay.xla.windows import transfers_by_instruction

type Kind = Literal["matmul", "attention", "memory", "copy", "d2h", "h2d", "h2h", "collective", "host", "unknown"]

_NO_WORK_CALLS = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "Sharding",
    "xla.sdy.FuncResultSharding",
    "PinToDevice",
)
_KNOWN_CALLS = ("__cublas$", "__cudnn$", "__triton", "__cub$", "GatherScatterIndicesBitpacked", "TopK", "HostExecute")


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


class WorkReader:
    """Reads the work of a module's instructions.

    Attributes:
        transfers: the copies between device and host, by computation and name of what starts them.
        notes: what was assumed, as keys.
    """

    def __init__(self, module: Module, platform: str, devices: int):
        self.module = module
        self.devices = devices
        self.flops = FlopCounter(module)
        self.traffic = TrafficCounter(module, platform)
        self.transfers = transfers_by_instruction(module)
        self.host_copies = copies_within_host(module)
        self.notes: dict[str, None] = {}

    def work(self, i: Instruction) -> Work | None:
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
        inner = self.wrapped(i)
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
        target = target_of(i)
        if target in _NO_WORK_CALLS:
            return None
        work = self._compute(i)
        if work.flops or target.startswith(_KNOWN_CALLS):
            return dataclasses.replace(work, kind="host") if target == "HostExecute" else work
        return dataclasses.replace(work, kind="unknown")

    def wrapped(self, i: Instruction) -> Instruction | None:
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
        parts = [w for x in inside if (w := self.work(x)) is not None]
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


def target_of(i: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', i.rest)
    return found[1] if found else ""
