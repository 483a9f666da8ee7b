"""What must hold of the copies of a compiled step, whatever the compiler did to its loops.

Compilers that pipeline loops over host buffers have produced programs with silently wrong gradients; a
buffer that is not written and read once a layer shows in these counts. Numbers are another matter: only
a run on the device proves them.
"""

from collections import Counter
from collections.abc import Iterable

from forebay.units import format_bytes
from forebay.xla.buffers import Assignment
from forebay.xla.hlo import arrays_of
from forebay.xla.windows import GRADIENT, UPDATE, WEIGHT, BufferScopes, Transfer

type HostBuffers = dict[tuple[str, str], Counter[int]]
"""By stack and name: the sizes of the buffers in bytes, without padding, and how many there are of each."""


def host_buffers(assignment: Assignment, scopes: BufferScopes) -> HostBuffers:
    """The buffers in host memory in which the layer scan keeps residuals; `scopes` as of `windows.buffer_scopes`."""
    found: HostBuffers = {}
    for allocation in assignment.allocations:
        if not allocation.on_host:
            continue
        seen = set()  # a buffer has many values, one after another or in the states of loops
        for value in allocation.values:
            scope = scopes.get((value.name, value.index))
            if scope and (value.offset, value.num_bytes) not in seen:
                seen.add((value.offset, value.num_bytes))
                found.setdefault(scope, Counter())[arrays_of(value.shape)[0].num_bytes] += 1
    return found


def violations(transfers: Iterable[Transfer], buffers: HostBuffers) -> list[str]:
    """One sentence for each tensor of which not every byte of its buffer is written once and read once.

    With microbatches, each of them does. Copies of whole buffers are not counted (a compiler may copy a
    buffer to change its layout). Of a tensor whose buffer is not found, as much is written as read.
    """
    transfers = list(transfers)
    tensors = [*buffers, *((t.stack, t.name) for t in transfers if t.stack)]
    # weights are read twice and gradients by the update, whose loops fetch one slice more than there are
    tensors = [(s, n) for s, n in tensors if s != UPDATE and not n.startswith((WEIGHT, GRADIENT))]
    found = []
    for stack, name in dict.fromkeys(tensors):
        sizes = buffers.get((stack, name), Counter())
        moved: Counter[str] = Counter()
        for t in transfers:
            if (t.stack, t.name) == (stack, name) and t.num_bytes not in sizes:
                moved[t.direction] += t.num_bytes * t.count
        size = sum(num_bytes * count for num_bytes, count in sizes.items())
        out, back = moved["d2h"], moved["h2d"]
        if out != back or (size and (out % size or not out)):
            found.append(
                f"{name} ({stack}): {format_bytes(size)} in host memory, of which {format_bytes(out)} are written and "
                f"{format_bytes(back)} read in a step"
            )
    return found
