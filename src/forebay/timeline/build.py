"""From a compiled step to its timeline."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.errors import UserError
from forebay.hardware import Hardware, get_hardware
from forebay.timeline.costs import CostModel, Efficiency
from forebay.timeline.simulate import simulate
from forebay.timeline.summary import summarise
from forebay.timeline.timeline import Timeline
from forebay.xla.hlo import Module
from forebay.xla.load import load_module, module_of
from forebay.xla.schedule import read_schedule


def timeline(
    program: Any,
    hardware: str | Hardware,
    *,
    devices: int | None = None,
    efficiency: Efficiency | None = None,
    trip_counts: int | Mapping[str, int] | None = None,
    model_flops: float | None = None,
) -> Timeline:
    """When everything in a compiled step runs, and what it waits for; simulated, nothing is run.

    Args:
        program: a file of scheduled HLO text, a dump directory, the text itself, or what
            `jax.jit(...).lower(...).compile()` returns.
        hardware: a machine, or the name of one that `forebay hardware` lists.
        devices: how many run it; by default what the module says.
        efficiency: what is reached of the machine's rates; by default `Efficiency()`.
        trip_counts: how often loops run that do not say, by the name of their `while`; a number is for all.
        model_flops: FLOPs of the model per device and step, for `mfu`; by default those of the program less
            what it computes again.

    Raises:
        UserError: not a scheduled module, or an unknown machine.

    Example:
        `timeline("step.hlo", "gb200").step_time_s`
    """
    machine = hardware if isinstance(hardware, Hardware) else get_hardware(hardware)
    if machine.platform == "cpu":
        raise UserError("a CPU has no lanes to simulate: name a machine that forebay hardware lists")
    if devices is not None and devices < 1:
        raise UserError(f"devices={devices} must be at least 1")
    schedule = read_schedule(_module(program), machine.platform, devices)
    given = {"": trip_counts} if isinstance(trip_counts, int) else dict(trip_counts or {})
    if any(n < 0 for n in given.values()):
        raise UserError(f"trip counts {given} must not be negative")
    costs = CostModel(machine, schedule.devices, efficiency or Efficiency())
    return summarise(simulate(schedule, costs, given), schedule, machine, model_flops)


def _module(program: Any) -> Module:
    if isinstance(program, Module):
        return program
    if hasattr(program, "as_text"):
        return module_of(program.as_text(), "the compiled step")
    if isinstance(program, str) and ("\n" in program or program.lstrip().startswith("HloModule")):
        return module_of(program)
    return load_module(Path(program))
