"""`forebay compile`: the training step, compiled for machines that are not there."""

import dataclasses
import json
import sys
import warnings
from pathlib import Path

from forebay.errors import EXIT_DOES_NOT_FIT, EXIT_NOT_HIDDEN, EXIT_OK, UserError
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
    """Compiles, prints, and returns 0 when the step fits its memory, 4 when it does not, and 5 when it fits but
    copies that its plan asks for are not hidden behind the layers' work (told for GPUs only)."""
    from forebay.hardware import get_hardware

    hardware = get_hardware(config.hardware)
    if config.save_hlo is not None and not Path(config.save_hlo).resolve().parent.is_dir():
        raise UserError(f"save_hlo={config.save_hlo!r}: its directory does not exist: make it first")

    from forebay.report.memory import compile_json, print_compiled
    from forebay.train.program import make_program
    from forebay.xla.compile import compile_hidden
    from forebay.xla.estimate import argument_bytes, offloaded_bytes
    from forebay.xla.options import compiler_options, memory_limit_percent
    from forebay.xla.topology import compile_only_devices

    program = make_program(config, compile_only_devices(hardware, config.devices))
    step, args = program.jit_step(), (program.abstract_state, program.abstract_batch)
    limit_percent = None
    if program.plan.offloads and hardware.platform == "cuda":
        limit_percent = memory_limit_percent(
            hardware.hbm_bytes,
            hardware.usable_hbm_bytes(config.memory_fraction),
            argument_bytes(args, (program.state_shardings, program.batch_shardings)),
            offloaded_bytes(step.trace(*args).jaxpr, config.devices),
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = compiler_options(
            hardware.platform, deviceless=True, offloads=program.plan.offloads, memory_limit_percent=limit_percent
        )
    compiled, options = compile_hidden(
        step,
        args,
        options,
        judged=hardware.platform == "cuda",
        weight_shapes=program.local_weight_shapes(),
        save_hlo=None if config.save_hlo is None else Path(config.save_hlo),
    )
    report = compile_json(compiled, program, hardware, config.memory_fraction, options)
    report["notes"] += [str(w.message) for w in caught]
    if config.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print_compiled(report)
    if not report["fits"]:
        return EXIT_DOES_NOT_FIT
    if report["exposed"] and hardware.platform == "cuda":
        print(f"forebay: {report['exposed']}", file=sys.stderr)
        return EXIT_NOT_HIDDEN
    return EXIT_OK
