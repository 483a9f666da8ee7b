"""What the peak of a compiled step is made of: rows with a name, a kind and bytes, that add up.

Names come from the scopes that forebay's scan, loss and optimizer put around what they do (XLA keeps
them as `op_name`), and from the argument names of the jitted step.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Collection
from typing import Literal, get_args

from forebay.xla.buffers import Allocation, Assignment, Held, peak
from forebay.xla.copies import BufferScopes
from forebay.xla.hlo import HOST_MEMORY_SPACE, Module, arrays_of

Kind = Literal["parameter", "optimizer", "gradient", "activation", "copy", "workspace", "logits", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)

ADDED_WORKSPACE = "cuDNN's own, not in this compile"

_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the memory table. `memory` is where the bytes are."""

    name: str
    kind: Kind
    num_bytes: int
    memory: Literal["device", "host"] = "device"


def memory_rows(
    assignment: Assignment,
    module: Module,
    weight_shapes: Collection[tuple[int, ...]],
    scopes: BufferScopes,
    added: int = 0,
) -> list[Row]:
    """The table, largest rows first within each kind, kinds in the order of `KINDS`.

    `scopes` name buffers in host memory, by instructions that hold them (`windows.buffer_scopes`).

    `weight_shapes` are the shapes that weights have on one device: float32 arrays of these shapes that
    the backward pass makes are gradients.

    `added` is `CompiledStep.added_bytes`.
    """
    totals: dict[tuple[str, Kind, str], int] = defaultdict(int)
    for allocation in assignment.allocations:
        memory = "host" if allocation.on_host else "device"
        if allocation.kind == "parameter":
            name, kind = _argument(allocation, module)
            totals[name, kind, memory] += allocation.num_bytes
        elif allocation.kind == "output":
            totals["outputs", "other", memory] += allocation.num_bytes
        elif allocation.kind == "temporary" and allocation.memory_space in (0, HOST_MEMORY_SPACE):
            held, unused = peak(assignment, allocation)
            for part in held:
                name, kind = _temporary(part, assignment, weight_shapes, memory, scopes)
                totals[name, kind, memory] += part.num_bytes
            totals["gaps between buffers", "other", memory] += unused
    totals[ADDED_WORKSPACE, "workspace", "device"] += added
    rows = [Row(name, kind, size, memory) for (name, kind, memory), size in totals.items() if size]  # type: ignore[arg-type]
    return sorted(rows, key=lambda r: (r.memory, KINDS.index(r.kind), -r.num_bytes))


def _argument(allocation: Allocation, module: Module) -> tuple[str, Kind]:
    parameter = module.parameter(module.entry, allocation.parameter or 0)
    path = parameter.op_name if parameter else ""
    if ".weights" in path or path.startswith("weights"):
        return "weights", "parameter"
    if ".optimizer" in path:
        moment = re.search(r"\.(mu|nu|trace)\b", path)
        return f"optimizer state ({moment[1]})" if moment else "optimizer state (counters)", "optimizer"
    return ("batch" if path.startswith("batch") else path or "arguments"), "other"


def _temporary(
    part: Held,
    assignment: Assignment,
    weight_shapes: Collection[tuple[int, ...]],
    memory: str,
    scopes: BufferScopes,
) -> tuple[str, Kind]:
    names = [m[1] for v in part.values if (m := _OP_NAME.search(assignment.origins.get(v.id, "")))]
    text = " ".join(names)
    if saved := re.search(r"\bsave:([^/:]+):([\w.\-]+)", text):
        return (f"{saved[2]} ({saved[1]}, {'offloaded' if memory == 'host' else 'saved'})"), "activation"
    if memory == "host" and (
        kept := next((scopes[v.name, v.index] for v in part.values if (v.name, v.index) in scopes), None)
    ):
        return f"{kept[1]} ({kept[0]}, offloaded)", "activation"
    if "gradient:" in text:
        return "gradients of the layers", "gradient"
    if loaded := re.search(r"\bload:([^/:]+):([\w.\-]+)", text):
        return f"{loaded[2]} ({loaded[1]}, being fetched)", "copy"
    first = names[0] if names else ""
    if "accumulate" in first and "layer:" not in first:
        return "gradient accumulator", "gradient"
    if "optimizer/" in text:
        return "optimizer update", "workspace"
    in_layer = "layer:" in text
    backward = "transpose(" in text
    arrays = [a for v in part.values for a in arrays_of(v.shape)[:1]]
    if any(a.dtype != "f32" and len(a.dims) > 1 and a.dims in weight_shapes for a in arrays):
        return "weights in the compute dtype", "workspace"
    if backward and not in_layer and any(a.dtype == "f32" and _squeeze(a.dims) in weight_shapes for a in arrays):
        return "gradients of embedding and head", "gradient"
    if "logits" in text:
        return "logits and head", "logits"
    if any("all-gather" in v.name for v in part.values):
        return "gathered weights", "workspace"
    if in_layer:
        return f"inside a layer ({'backward' if backward else 'forward'})", "workspace"
    return "other temporaries", "other"


def _squeeze(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d for d in dims if d != 1)
