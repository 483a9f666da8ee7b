"""What XLA's scheduler does not know: a profile with the cost model's times, and a second compile under it.

XLA's scheduler for GPUs takes most kernels for equally short and all collectives for equally long. A profile
(PGLE, `tensorflow.profiler.ProfiledInstructionsProto`) tells it times by the names of instructions; those of a
compiled step are the names that the scheduler found, because what comes after it renames next to nothing.
`docs/overlap.md` says what that does, and why copies between device and host are not given their own times.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from forebay.errors import UserError
from forebay.hardware import Hardware
from forebay.timeline.build import timeline
from forebay.timeline.costs import CostModel, Efficiency
from forebay.units import format_seconds
from forebay.xla.exposure import exposed
from forebay.xla.hlo import Module
from forebay.xla.options import with_profile
from forebay.xla.schedule import Op, Schedule, read_schedule

if TYPE_CHECKING:
    from forebay.xla.compile import CompiledStep

WORTH = 0.002
"""The share of the step that a profile must save, or at least promise to save, to be used: less is below what the
timeline can tell."""

_COPIES = ("d2h", "h2d", "h2h")


def costs_us(
    module: Module,
    hardware: Hardware,
    devices: int,
    efficiency: Efficiency | None = None,
) -> dict[str, float]:
    """Microseconds of a compiled step's kernels, collectives and loops alone on the machine, by instruction.

    Of a collective it is from start to done, under the name of its start. Copies between device and host are left out.
    """
    schedule = read_schedule(module, hardware.platform, devices)
    alone = _Alone(schedule, CostModel(hardware, devices, efficiency or Efficiency()))
    found = {op.instruction: 1e6 * alone(op) for ops in schedule.ops.values() for op in ops if not _is_copy(op)}
    return {name: us for name, us in found.items() if us > 0}


def _is_copy(op: Op) -> bool:
    return op.work is not None and op.work.kind in _COPIES


class _Alone:
    """Seconds that an op takes with nothing beside it; of a loop all iterations, of a conditional the dearest branch."""

    def __init__(self, schedule: Schedule, costs: CostModel):
        self.schedule, self.costs = schedule, costs
        self._bodies: dict[str, float] = {}

    def __call__(self, op: Op) -> float:
        if op.role in ("run", "start"):
            return 0.0 if op.work is None else self.costs.cost(op.work, op.thread).seconds
        bodies = [self._body(name) for name in op.bodies]
        return (op.trips or 1) * sum(bodies) if op.role == "loop" else max(bodies, default=0.0)

    def _body(self, name: str) -> float:
        if name not in self._bodies:
            self._bodies[name] = sum(self(op) for op in self.schedule.ops[name] if not _is_copy(op))
        return self._bodies[name]


@dataclasses.dataclass(frozen=True)
class Profiled:
    """What became of a second compile.

    Attributes:
        compiled, options: the step that is kept, and the options that it was compiled with.
        before_s, after_s: step times by timeline; the second is None where there was no second compile.
        kept: whether the second was kept.
        note: the same in a line.
    """

    compiled: "CompiledStep"
    options: Mapping[str, Any]
    before_s: float
    after_s: float | None
    kept: bool
    note: str


def profiled(
    compiled: "CompiledStep",
    options: Mapping[str, Any],
    hardware: Hardware,
    devices: int,
    usable_bytes: int,
    compile_again: Callable[[Mapping[str, Any]], "CompiledStep"],
    agreed: Callable[[Callable[[], str]], str] = lambda make: make(),
) -> Profiled:
    """Compiles a step again with a profile of its own times, and keeps what its timeline says is faster.

    The second is kept only if nothing else is the worse for it: the copies in it are right and hidden as before, it has
    no more `.remat` clones, and it fits. It is not tried where the first does not fit, and where something goes wrong with it
    the first is kept.

    Args:
        compiled: the step, compiled for `devices` of `hardware` under `options`.
        usable_bytes: the device memory that a program may use.
        compile_again: compiles the same program under other options.
        agreed: of a text that each process of a run makes, the one that all go by: processes that schedule their
            collectives differently wait for each other for ever.

    Raises:
        UserError: the second compile fails here, and not in the process that all go by.
    """
    first = json.loads(agreed(lambda: json.dumps(_first_look(compiled, hardware, devices, usable_bytes))))
    before = first["step_s"]

    def keep_first(why: str, after: float | None = None) -> Profiled:
        return Profiled(compiled, options, before, after, False, why)

    if first["why"]:
        return keep_first(f"no profile was tried: {first['why']}")
    again = with_profile(options, hardware.platform, first["costs_us"])
    if again is None:
        return keep_first(
            "no profile was tried: this compiler takes none, or has one of your own that cannot be added to"
        )
    second, failure = None, None
    try:
        second = compile_again(again)
    except UserError as error:
        failure = error
    last = json.loads(
        agreed(lambda: json.dumps(_second_look(compiled, second, failure, before, hardware, devices, usable_bytes)))
    )
    after = last["step_s"]
    if last["why"]:
        return keep_first(f"the profile of the timeline's times was dropped: {last['why']}", after)
    if second is None:
        assert failure is not None
        raise failure
    note = (
        f"scheduled with the timeline's times: {format_seconds(after)} a step, {after / before - 1:+.1%} against "
        f"{format_seconds(before)} without"
    )
    return Profiled(second, again, before, after, True, note)


def _first_look(compiled: "CompiledStep", hardware: Hardware, devices: int, usable_bytes: int) -> dict[str, Any]:
    """A step's time and its kernels', or why no profile is worth a compile."""
    if compiled.refused is not None or compiled.device.total > usable_bytes:
        return {"why": "the step does not fit", "step_s": 0.0}
    try:
        made = timeline(compiled.module, hardware, devices=devices)
        costs = costs_us(compiled.module, hardware, devices)
    except UserError as error:
        return {"why": str(error), "step_s": 0.0}
    waits = made.exposed_s >= WORTH * made.step_time_s
    why = None if waits else "the step waits for next to nothing"
    return {"why": why, "step_s": made.step_time_s, "costs_us": costs}


def _second_look(
    compiled: "CompiledStep",
    second: "CompiledStep | None",
    failure: UserError | None,
    before_s: float,
    hardware: Hardware,
    devices: int,
    usable_bytes: int,
) -> dict[str, Any]:
    """The second compile's time, or why it is dropped."""
    if second is None:
        return {"why": f"with it {failure}", "step_s": None}
    if (worse := _worse(compiled, second, usable_bytes)) is not None:
        return {"why": f"with it {worse}", "step_s": None}
    after = timeline(second.module, hardware, devices=devices).step_time_s
    slower = f"{format_seconds(after)} a step with it, {format_seconds(before_s)} without"
    return {"why": None if after <= (1 - WORTH) * before_s else slower, "step_s": after}


def _worse(first: "CompiledStep", second: "CompiledStep", usable_bytes: int) -> str | None:
    """What speaks against the second whatever its time."""
    if second.refused is not None:
        return "the compiler refuses the step for lack of memory"
    if len(second.violations) > len(first.violations):
        return "copies between device and host are wrong"
    if second.device.total > usable_bytes:
        return "the step does not fit"
    if second.remat.count > first.remat.count:
        return f"the compiler recomputes, {second.remat.count} clones for {first.remat.count}"
    if len(exposed(second.transfers)) > len(exposed(first.transfers)):
        return "copies in loops are less hidden"
    return None
