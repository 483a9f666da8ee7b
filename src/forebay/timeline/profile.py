"""What XLA's scheduler does not know: a profile with the cost model's times, and a second compile under it.

XLA's scheduler for GPUs takes most kernels for equally short and all collectives for equally long. A profile
(PGLE, `tensorflow.profiler.ProfiledInstructionsProto`) tells it times by the names of instructions; those of a
compiled step are the names that the scheduler found, because what comes after it renames next to nothing.
`docs/overlap.md` says what that does, and why copies between device and host are not given their own times.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from forebay.hardware import Hardware
from forebay.timeline.build import timeline
from forebay.timeline.costs import CostModel, Efficiency
from forebay.timeline.timeline import Timeline
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
) -> Profiled:
    """Compiles a step again with a profile of its own times, and keeps what its timeline says is faster.

    The second is kept only if nothing else is the worse for it: the copies in it are right and hidden as before, it has
    no more `.remat` clones, and it fits if the first does.

    Args:
        compiled: the step, compiled for `devices` of `hardware` under `options`.
        usable_bytes: the device memory that a program may use.
        compile_again: compiles the same program under other options.
    """
    if compiled.refused is not None:
        return Profiled(compiled, options, 0.0, None, False, "no profile was tried: the compiler refused the step")

    def simulated(step: "CompiledStep") -> Timeline:
        return timeline(step.module, hardware, devices=devices)

    first = simulated(compiled)
    before = first.step_time_s

    def keep_first(why: str, after: float | None = None) -> Profiled:
        return Profiled(compiled, options, before, after, False, why)

    if first.exposed_s < WORTH * before:
        return keep_first("no profile was tried: the step waits for next to nothing")
    again = with_profile(options, hardware.platform, costs_us(compiled.module, hardware, devices))
    if again is None:
        return keep_first(
            "no profile was tried: this compiler takes none, or has one of your own that cannot be added to"
        )
    second = compile_again(again)
    if (worse := _worse(compiled, second, usable_bytes)) is not None:
        return keep_first(f"the profile of the timeline's times was dropped: with it {worse}")
    after = simulated(second).step_time_s
    if after > (1 - WORTH) * before:
        return keep_first(
            f"the profile of the timeline's times was dropped: {format_seconds(after)} a step with it, "
            f"{format_seconds(before)} without", after,
        )  # fmt: skip
    note = (
        f"scheduled with the timeline's times: {format_seconds(after)} a step, {after / before - 1:+.1%} against "
        f"{format_seconds(before)} without"
    )
    return Profiled(second, again, before, after, True, note)


def _worse(first: "CompiledStep", second: "CompiledStep", usable_bytes: int) -> str | None:
    """What speaks against the second whatever its time."""
    if second.refused is not None:
        return "the compiler refuses the step for lack of memory"
    if len(second.violations) > len(first.violations):
        return "copies between device and host are wrong"
    if second.device.total > max(usable_bytes, first.device.total):
        return "the step does not fit"
    if second.remat.count > first.remat.count:
        return f"the compiler recomputes, {second.remat.count} clones for {first.remat.count}"
    if len(exposed(second.transfers)) > len(exposed(first.transfers)):
        return "copies in loops are less hidden"
    return None
