"""`forebay compile`: the training step, compiled for machines that are not there."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from forebay.cli.parse import check_file
from forebay.errors import EXIT_DOES_NOT_FIT, EXIT_NOT_HIDDEN, EXIT_OK, EXIT_WRONG_NUMBERS
from forebay.train.config import ProgramConfig
from forebay.train.run_config import TrainConfig


@dataclasses.dataclass(frozen=True)
class CompileConfig(ProgramConfig):
    """The training step, and the machines to compile it for.

    Attributes:
        hardware: the machine, as listed by forebay hardware.
        devices: how many devices.
        memory_fraction: the share of HBM that XLA may use; by default what is usual on that machine.
        json: print JSON (schema forebay.compile/1) instead of a table.
        save_hlo: a file for the optimised, scheduled HLO text.
    """

    hardware: str = "h200"
    devices: int = 8
    memory_fraction: float | None = None
    json: bool = False
    save_hlo: str | None = None


Config = CompileConfig
ALSO = (TrainConfig,)  # a run's config.yaml may be given


def run(config: CompileConfig) -> int:
    """Compiles, prints, and returns 0 when the step fits its memory, 3 when what was compiled cannot compute the
    right numbers, 4 when it does not fit, and 5 when it fits but copies that its plan asks for are not hidden behind
    the layers' work (told for GPUs only)."""
    from forebay.hardware import get_hardware

    hardware = get_hardware(config.hardware)
    if config.save_hlo is not None:
        check_file("save_hlo", config.save_hlo)

    from forebay.report.memory import compile_json, print_compiled
    from forebay.train.planning import compile_program, planned_program
    from forebay.xla.invariants import explain_violations
    from forebay.xla.topology import compile_only_devices

    devices = compile_only_devices(hardware, config.devices)
    program = planned_program(config, devices, hardware, memory_fraction=config.memory_fraction)
    if config.is_planned and config.save_hlo is None and program.plan.compiled is not None:
        report: Any = dict(program.plan.compiled)  # planning has compiled it
    else:
        done = compile_program(
            program, hardware, deviceless=True, memory_fraction=config.memory_fraction,
            save_hlo=None if config.save_hlo is None else Path(config.save_hlo),
        )  # fmt: skip
        report = compile_json(done.compiled, program, hardware, config.memory_fraction, done.options)
        report["notes"] += done.notes
    if config.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print_compiled(report)
    if report["violations"]:
        print(f"forebay: {explain_violations(report['violations'])}", file=sys.stderr)
        return EXIT_WRONG_NUMBERS
    if not report["fits"]:
        return EXIT_DOES_NOT_FIT
    if report["exposed"] and hardware.platform == "cuda":
        print(f"forebay: {report['exposed']}", file=sys.stderr)
        return EXIT_NOT_HIDDEN
    return EXIT_OK
