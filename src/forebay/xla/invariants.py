"""What must hold of the copies of a compiled step, whatever the compiler did to its loops.

Compilers that pipeline loops over host buffers have produced programs with silently wrong gradients
(openxla/xla#39302, #41348, #46231, #47218). What went wrong in them shows in the compiled program:

- a loop that runs another number of times than noted: copies whose places were worked out for the noted number;
- a place that was worked out and is not the one that the program's own index says;
- a place that is read before it is written, written twice, or read in another order than the layers' reversed;
- a buffer that is read for what it was filled with, when the compiler has only allocated it;
- bytes that are not written once and read once a layer;
- memory of the host in the hands of an operation that computes.

Numbers are another matter: only a run on the device proves them (`train.parity`).
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from forebay.units import format_bytes
from forebay.xla.buffers import Assignment
from forebay.xla.copies import GRADIENT, UPDATE, WEIGHT, BufferScopes, host_copies
from forebay.xla.follow import Follower, Step, Value
from forebay.xla.hlo import HOST_MEMORY_SPACE, Instruction, Module, arrays_of
from forebay.xla.windows import Transfer

_SLICES = ("dynamic-slice", "dynamic-update-slice")
_WORKED_OUT = re.compile(r'"dynamic_slice_config":\{((?:[^{}]|\{[^{}]*\})*)\}')
"""Where XLA for GPUs has worked out that a slice is; the copy goes by this and not by its index. See `_WorkedOut`."""

_HANDS_ON = (
    "tuple", "get-tuple-element", "while", "call", "conditional", "parameter", "bitcast", "copy", "opt-barrier",
    "optimization-barrier", *_SLICES, "slice", "reshape", "transpose", "constant",
)  # fmt: skip
"""Operations that move memory or hand it on."""

_ALLOCATED = 'custom_call_target="AllocateBuffer"'
_ON_HOST_CPU = '_xla_compute_type="host"'

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
    buffer to change its layout). Of a tensor whose buffer is not found, as much is written as read. Of stacks whose weights
    come from the host, the place that is written first may be left unread: nothing of use is there, and the layer that
    would read it is outside of the loop, where the compiler sees that (`forebay.offload.scan`).
    """
    transfers = list(transfers)
    streamed = {t.stack for t in transfers if t.name.startswith(WEIGHT)}
    tensors = [*buffers, *((t.stack, t.name) for t in transfers if t.stack)]
    # weights are read twice and gradients by the update, whose loops fetch one slice more than there are
    tensors = [(s, n) for s, n in tensors if s != UPDATE and not n.startswith((WEIGHT, GRADIENT))]
    found = []
    for stack, name in dict.fromkeys(tensors):
        sizes = buffers.get((stack, name), Counter())
        moved: Counter[str] = Counter()
        layer = 0
        for t in transfers:
            if (t.stack, t.name) == (stack, name) and t.num_bytes not in sizes:
                moved[t.direction] += t.num_bytes * t.count
                layer = max(layer, t.num_bytes)
        size = sum(num_bytes * count for num_bytes, count in sizes.items())
        out, back = moved["d2h"], moved["h2d"]
        unread = layer * sizes.total() * (out // size) if size and stack in streamed else 0
        if back not in (out, out - unread) or (size and (out % size or not out)):
            found.append(
                f"{name} ({stack}): {format_bytes(size)} in host memory, of which {format_bytes(out)} are written and "
                f"{format_bytes(back)} read in a step"
            )
    return found


def wrong_places(module: Module) -> list[str]:
    """One sentence for each loop that is miscounted and each tensor with a slice that goes to the wrong place.

    Slices within the device's memory too, where the compiler has worked out their places. A slice whose index
    cannot be followed (it comes of something else than loops' counters) is passed over.
    """
    copies = {copy.start: copy for copy in host_copies(module)}
    streamed = {copy.stack for copy in copies.values() if copy.name.startswith(WEIGHT)}
    on_device = {i for i in module.instructions() if i not in copies and _has_worked_out_place(module, i)}
    at_once: Counter[tuple[Instruction, str, str]] = Counter()
    for copy in copies.values():
        at_once[copy.buffer, copy.direction, copy.start.computation] += 1
    buffers: dict[Instruction, _Buffer] = {}
    unfilled: dict[Instruction, _Unfilled] = {}
    found: dict[str, str] = {}
    follower = Follower(module, lambda i: i in copies or i in on_device)
    for step in follower.steps():
        copy = copies.get(step.instruction)
        tensor = f"{copy.name} ({copy.stack})" if copy and copy.stack else step.instruction.name
        sliced = _slice_of(module, step)
        if sliced is None:  # a copy of the whole buffer
            continue
        place, bytes_moved, wrong = sliced
        if copy is not None and copy.stack == "" and _ALLOCATED in copy.buffer.rest:
            held = unfilled.setdefault(copy.buffer, _Unfilled())
            if complaint := held.write(bytes_moved) if copy.direction == "d2h" else held.read(bytes_moved):
                found.setdefault(tensor, f"{tensor}: {complaint}")
        if wrong:
            found.setdefault(tensor, f"{tensor}: {wrong}")
        if copy is None or copy.stack in ("", UPDATE) or copy.buffer.opcode == "parameter":
            continue  # not residuals of layers: they may be there before the step and stay after it
        most = max(n for (buffer, *_), n in at_once.items() if buffer == copy.buffer)
        buffer = buffers.setdefault(copy.buffer, _Buffer(tensor, most, copy.stack in streamed))
        if complaint := buffer.write(place) if copy.direction == "d2h" else buffer.read(place):
            found.setdefault(tensor, f"{tensor}: {complaint}")
    for buffer in buffers.values():
        if (place := buffer.unread()) is not None:
            found.setdefault(buffer.tensor, f"{buffer.tensor}: layer {place} is written and never read")
    miscounts = [
        f"the loop {m.loop.name} runs {m.counted} times and is noted to run {m.noted} times" for m in follower.miscounts
    ]
    return miscounts + list(found.values())


def _has_worked_out_place(module: Module, i: Instruction) -> bool:
    if i.opcode.removesuffix("-start") not in ("fusion", "async", *_SLICES):
        return False
    inside = module.computations.get(i.called("calls") or "", [i])
    return any(_WorkedOut.of(j) for j in inside if j.opcode in _SLICES) and _only_moves(module, i)


class _Buffer:
    """The places of one host buffer that hold a layer's value, in the order in which they were written.

    Backward passes take the layers in reverse, so what is read is the last that was written; `at_once` copies
    of one iteration may be in any order. `first_is_spare`: nothing of use is in the place that is written first, and it
    need not be read; see `violations`.
    """

    def __init__(self, tensor: str, at_once: int, first_is_spare: bool):
        self.tensor = tensor
        self.at_once = at_once
        self.first_is_spare = first_is_spare
        self.full: list[int] = []
        self.first: int | None = None
        self.lost = False
        """Whether a place was not known: nothing can be said from then on."""

    def write(self, place: int | None) -> str | None:
        if place is None or self.lost:
            self.lost = True
            return None
        self.first = place if self.first is None else self.first
        again = place in self.full
        self.full.append(place)
        return f"layer {place} is written again before it is read" if again else None

    def read(self, place: int | None) -> str | None:
        if place is None or self.lost:
            self.lost = True
            return None
        if place not in self.full:
            return f"layer {place} is read and not written"
        late = len(self.full) - 1 - self.full.index(place)
        self.full.remove(place)
        return f"layer {place} is read {late} layers before its turn" if late >= self.at_once else None

    def unread(self) -> int | None:
        """A place that is written and never read, if one is."""
        if self.lost:
            return None
        spare = {self.first} if self.first_is_spare else set()
        return next((place for place in self.full if place not in spare), None)


class _Unfilled:
    """The bytes that have been written of a host buffer that the compiler only allocates, whatever it was filled with."""

    def __init__(self):
        self.written: set[range] = set()
        self.lost = False
        """Whether it was not known where something was written: nothing can be said from then on."""

    def write(self, moved: range | None) -> None:
        if moved is None:
            self.lost = True
        else:
            self.written.add(moved)

    def read(self, moved: range | None) -> str | None:
        if moved is None or self.lost or any(moved.start in w for w in self.written):
            return None
        return (
            "reads host memory before anything is written there, and XLA only allocates such a buffer, whatever it was filled "
            "with: have the program write it first"
        )


@dataclasses.dataclass(frozen=True)
class _WorkedOut:
    """Bytes from the start of a buffer to a slice, and how many further with each iteration of the loop that is
    `loop` loops out; None is no loop."""

    loop: int | None
    offset: int
    stride: int

    @classmethod
    @functools.lru_cache(maxsize=1 << 12)  # each is asked for in every iteration
    def of(cls, sliced: Instruction) -> "_WorkedOut | None":
        found = _WORKED_OUT.search(sliced.rest)
        if found is None:
            return None
        # from jax 0.12 on the figures are those of "linear", and those beside it are 0
        numbers = found[1].partition('"linear":')[2] or found[1]
        loop = re.search(r'"loop_index":"(\d+)"', found[1])
        offset, stride = (re.search(rf'"byte_{what}":"(-?\d+)"', numbers) for what in ("offset", "stride"))
        return cls(int(loop[1]) if loop else None, int(offset[1]) if offset else 0, int(stride[1]) if stride else 0)

    def byte(self, iterations: tuple[int, ...]) -> int:
        """The byte in an iteration, which may be outside of the buffer: XLA does not keep it within, as it does an index
        (`xla/backends/gpu/runtime/dynamic_slice_fusion_v2_thunk.cc`)."""
        iteration = iterations[self.loop] if self.loop is not None and self.loop < len(iterations) else 0
        return self.offset + self.stride * iteration


def _slice_of(module: Module, step: Step) -> tuple[int | None, range | None, str | None] | None:
    """The place, along the first dimension, of the slice that a copy reads or writes, its bytes as if they were in one piece,
    and what is wrong with those that the compiler worked out for it. None where it is no slice."""
    start = step.instruction
    target = start.called("calls")
    inside = module.computations.get(target or "", [start])
    sliced = next((i for i in inside if i.opcode.removesuffix("-start") in _SLICES), None)
    if sliced is None:
        return None
    value = step.inside(target) if target else step.value
    operands = module.operands(sliced)
    first = 1 if sliced.opcode.startswith("dynamic-slice") else 2
    indices = [value(o) for o in operands[first:]]
    buffer = operands[0].shape
    moved = arrays_of(sliced.shape if first == 1 else operands[1].shape)[0]
    offset = _byte_offset(buffer, moved.dims, indices)
    worked_out = _WorkedOut.of(sliced)
    wrong = None
    if worked_out and offset is not None:
        goes_to = worked_out.byte(step.iterations)
        if goes_to != offset:
            inside_loop = f" (iteration {step.iterations[0]})" if step.iterations else ""
            wrong = f"the copy {start.name} goes to byte {goes_to} of its buffer where the program says {offset}{inside_loop}"
    place = indices[0] if indices and isinstance(indices[0], int) else None
    return place, None if offset is None else range(offset, offset + moved.num_bytes), wrong


def _byte_offset(buffer: str, sizes: tuple[int, ...], indices: list[Value]) -> int | None:
    """Bytes from the start of a buffer, whose shape is given as text, to a slice of some sizes; None if unknown."""
    array = arrays_of(buffer)[0]
    minor_to_major = _minor_to_major(buffer)
    if not array.dims or len(minor_to_major) != len(array.dims):
        return None
    stride = array.num_bytes
    for dim in array.dims:
        stride //= dim
    offset = 0
    for dim in minor_to_major:
        index = indices[dim]
        if not isinstance(index, int):
            return None
        offset += stride * max(0, min(index, array.dims[dim] - sizes[dim]))  # XLA keeps slices within their arrays
        stride *= array.dims[dim]
    return offset


@functools.lru_cache(maxsize=1 << 12)
def _minor_to_major(shape: str) -> tuple[int, ...]:
    """The order of dimensions of an array's layout; () where there is none that names each once."""
    order = re.search(r"\{([\d,]*)", shape)
    found = tuple(int(d) for d in order[1].split(",") if d) if order else ()
    return found if sorted(found) == list(range(len(found))) else ()


def computes_on_host_memory(module: Module) -> list[str]:
    """One sentence for each operation of the device that takes host memory for more than moving it."""
    return [
        f"{i.name} computes on {operand.name}, which is in host memory"
        for computation in module.executions
        for i in module.computations.get(computation, ())
        if not _only_moves(module, i)
        for operand in module.operands(i)
        if _is_host_array(operand)
    ]


def _only_moves(module: Module, i: Instruction) -> bool:
    if i.opcode.endswith(("-done", "-update")) or _ON_HOST_CPU in i.rest:
        return True
    opcode = i.opcode.removesuffix("-start")
    if opcode in ("fusion", "async"):
        return all(
            _only_moves(module, j) or _is_integer(j) for j in module.computations.get(i.called("calls") or "", ())
        )
    return opcode in _HANDS_ON


def _is_host_array(i: Instruction) -> bool:
    arrays = arrays_of(i.shape)
    return not i.shape.startswith("(") and bool(arrays) and arrays[0].memory_space == HOST_MEMORY_SPACE


def _is_integer(i: Instruction) -> bool:
    """Whether it is part of working out a position."""
    return bool(re.match(r"(pred|[su]\d+)\[\]", i.shape))


def all_violations(module: Module, transfers: Iterable[Transfer], buffers: HostBuffers) -> Iterator[str]:
    """All that is wrong with the copies between device and host of a compiled step, one sentence each."""
    yield from wrong_places(module)
    yield from violations(transfers, buffers)
    yield from computes_on_host_memory(module)


def explain_violations(found: Sequence[str]) -> str:
    """One line on what `all_violations` found."""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"this build of XLA has compiled a step that computes wrong numbers: {found[0]}{more}; use another version of jax, "
        f"or offload nothing (for example placement=minimal)"
    )
