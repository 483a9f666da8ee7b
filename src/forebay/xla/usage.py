"""Device memory over the schedule: how many bytes are in use as each instruction runs."""

from collections.abc import Mapping

import numpy as np

from forebay.xla.buffers import Allocation, Assignment


def usage(assignment: Assignment, memory_space: int = 0, scratch: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bytes in use in a memory as each instruction of the schedule runs, by its name.

    Arguments and results count from start to end, temporaries while a value in them is live; bytes that several
    values share count once. The most of it and the gaps between buffers then are what the memory table adds up to.
    Of what is in a loop it is one iteration. `scratch` is `CompiledStep.scratch`, in use while its instruction runs.
    """
    here = [a for a in assignment.allocations if a.memory_space == memory_space]
    always = sum(a.num_bytes for a in here if a.kind in ("parameter", "output"))
    used = np.full(len(assignment.sequence), always, np.int64)
    for allocation in here:
        if allocation.kind == "temporary":
            used += _live_bytes(allocation, len(used))
    found = dict(zip(assignment.sequence, used.tolist(), strict=True))
    return found | {name: found[name] + size for name, size in (scratch or {}).items() if name in found}


def _live_bytes(allocation: Allocation, length: int) -> np.ndarray:
    """Distinct bytes of an allocation that are live at each position of the schedule."""
    values = [(v, v.live) for v in allocation.values if v.live and v.num_bytes]
    edges = np.unique([p for v, _ in values for p in (v.offset, v.offset + v.num_bytes)])
    sizes = np.diff(edges)
    owners = np.zeros(len(sizes), np.int32)
    changes: list[list[tuple[int, int, int]]] = [[] for _ in range(length + 1)]
    for v, (first, last) in values:
        low, high = np.searchsorted(edges, (v.offset, v.offset + v.num_bytes))
        changes[min(first, length)].append((int(low), int(high), 1))
        changes[min(last + 1, length)].append((int(low), int(high), -1))
    live, total = np.zeros(length, np.int64), 0
    for position in range(length):
        for low, high, by in changes[position]:
            owners[low:high] += by
        if changes[position]:
            total = int(sizes[owners > 0].sum())
        live[position] = total
    return live
