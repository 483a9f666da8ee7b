"""What must hold of the copies of a compiled step, whatever the compiler did to its loops.

Compilers that pipeline loops over host buffers have produced programs with silently wrong gradients; a
buffer that is not written and read once a layer shows in these counts. Numbers are another matter: only
a run on the device proves them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from forebay.units import format_bytes
from forebay.xla.buffers import Assignment
from forebay.xla.hlo import arrays_of
from forebay.xla.windows import Transfer

type HostBuffers = dict[tuple[str, str], Counter[int]]
"""By stack and name: the sizes of the buffers in bytes, without padding, and how many there are of each."""


def host_buffers(assignment: Assignment, scopes: Mapping[str, tuple[str, str]]) -> HostBuffers:
    """The buffers in host memory in which the layer scan keeps residuals; `scopes` as of `windows.buffer_scopes`."""
    found: HostBuffers = {}
    for allocation in assignment.allocations:
        if not allocation.on_host:
            continue
        seen = set()
        for value in allocation.values:
            scope = scopes.get(value.name)
            if scope and (value.offset, value.num_bytes) not in seen:
                seen.add((value.offset, value.num_bytes))
                found.setdefault(scope, Counter())[arrays_of(value.shape)[0].num_bytes] += 1
    return found


def violations(transfers: Iterable[Transfer], buffers: HostBuffers) -> list[str]:
    """One sentence for each buffer of which not every byte is written once and read once.

    With microbatches, each of them does. Copies of whole buffers are not counted (a compiler may copy a
    buffer to change its layout).
    """
    moved: dict[tuple[str, str], Counter[str]] = {tensor: Counter() for tensor in buffers}
    for t in transfers:
        if (tensor := (t.stack, t.name)) in buffers and t.num_bytes not in buffers[tensor]:
            moved[tensor][t.direction] += t.num_bytes * t.count
    found = []
    for (stack, name), by_direction in moved.items():
        size = sum(num_bytes * count for num_bytes, count in buffers[stack, name].items())
        out, back = by_direction["d2h"], by_direction["h2d"]
        if out != back or out % size or not out:
            found.append(
                f"{name} ({stack}): {format_bytes(size)} in host memory, of which {format_bytes(out)} are written and "
                f"{format_bytes(back)} read in a step"
            )
    return found
