"""What keeping a value of a layer for the backward pass moves in HBM, beside what computing it moves.

A stack of kept values is one array over all layers. On GPUs every value is written into it by a kernel of its own,
which reads the value, or where that stays inside of a fused kernel as much as it is computed from; on TPUs the kernel
that makes it is taken to write it there as a second result, as it does with the largest. In the backward pass, what can
be fused with the slice reads the stack in place of what it would have read or computed; a kernel that cannot gets a
copy of the slice. A value that goes to the host is copied by the link from where it is, and comes to where it is read:
of these, only those that would have stayed inside a kernel move more. So it is in compiled schedules of Llama 3.1 8B
for H200 and v5p (docs/planner.md).
"""

import dataclasses

from forebay.graph.block import BlockGraph
from forebay.graph.costs import VIEWS, Analysis, fusible, roots


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes of HBM traffic of one layer, in its forward and its backward pass."""

    forward: int
    backward: int


@dataclasses.dataclass(frozen=True)
class Keeping:
    """What a value moves more where it is kept on the device, and where on the host."""

    device: Moved
    host: Moved


def keeping(block: BlockGraph, platform: str) -> tuple[Keeping, ...]:
    """For each value of the layer's forward pass, what keeping it moves; `platform` is "tpu", "cuda" or "cpu".

    What a CPU's compiler makes of it was not looked at: there it is nothing, and all is kept.
    """
    forward = block.forward
    if platform == "cpu":
        return (Keeping(Moved(0, 0), Moved(0, 0)),) * len(forward.num_bytes)
    root = roots(forward.flat)
    leaves: dict[int, list[int]] = {}
    for value, leaf in zip(block.residuals, block.backward.flat.inputs, strict=False):  # cotangents follow
        if value is not None:
            leaves.setdefault(value, []).append(leaf)
    in_forward, in_backward = _copied_for(forward), _copied_for(block.backward)
    found = []
    for value, size in enumerate(forward.num_bytes):
        apart = root.get(value, value) not in forward.written
        copied = any(leaf in in_backward for leaf in leaves[value]) if value in leaves else value in in_forward
        store = size if platform == "tpu" else 2 * size
        load = 2 * size if copied else size if apart else 0
        host = Moved(store, size) if apart else Moved(0, 0)
        found.append(Keeping(Moved(store, load), host))
    return tuple(found)


def _copied_for(analysis: Analysis) -> frozenset[int]:
    """Values that something which cannot be fused reads, as they are or as a view."""
    root = roots(analysis.flat)
    read = {
        root.get(v, v) for op in analysis.flat.ops if op.primitive not in VIEWS and not fusible(op)
        for v in op.inputs if v is not None
    }  # fmt: skip
    return frozenset(v for v in range(len(analysis.flat.values)) if root.get(v, v) in read)
