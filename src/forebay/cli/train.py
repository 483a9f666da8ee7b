"""`forebay train`: a training run on the devices there are."""

import dataclasses
import json
import math
import traceback
from pathlib import Path

from forebay.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from forebay.train.run_config import LaunchConfig, TrainConfig, to_yaml

Config = LaunchConfig


def run(config: LaunchConfig) -> int:
    """Trains, prints, and returns 0; 130 when it was interrupted and has kept a checkpoint.

    Raises:
        UserError: see `forebay.train.loop.train` and `forebay.train.processes`.
        WrongNumbersError: offloading gives wrong gradients on these devices; see `forebay.train.parity`.
    """
    from forebay.train.processes import check_processes, is_joined, join, leave, lost_process, use_cpu_devices

    devices = _cpu_devices(config)
    check_processes(
        processes=config.processes, devices=devices, mesh=config.mesh, coordinator=config.coordinator,
        process_id=config.process_id,
    )  # fmt: skip
    if config.processes > 1 and not config.coordinator:
        from forebay.train.launch import launch
        from forebay.train.loop import check_run_dir

        check_run_dir(config)
        return launch(to_yaml(config.run), config.processes, devices)
    if devices is not None:
        use_cpu_devices(devices // config.processes)
    if not config.coordinator:
        return _run(config.run)
    try:
        join(config.coordinator, config.processes, config.process_id)
        return _run(config.run)
    except BaseException as error:
        if not is_joined():
            raise
        known = error if isinstance(error, UserError) else lost_process(error)
        if isinstance(error, KeyboardInterrupt):
            leave(EXIT_INTERRUPTED, "interrupted")
        elif known is not None:
            leave(known.exit_code, str(known))
        traceback.print_exc()
        leave(EXIT_FAILED)


def _cpu_devices(config: LaunchConfig) -> int | None:
    """CPU devices of all processes together; None leaves jax the devices there are."""
    if config.devices is not None:
        return config.devices
    if config.processes == 1 or config.coordinator:
        return None
    sizes = [int(part.rpartition("=")[2]) for part in config.mesh.split(",") if part.rpartition("=")[2].isdecimal()]
    return math.prod(sizes) if sizes else config.processes


def _run(config: TrainConfig) -> int:
    """In one process of the run, or the only one."""
    import jax

    from forebay.agreement import from_first, is_first, together
    from forebay.planner.plan import Plan
    from forebay.report.console import make_console
    from forebay.report.memory import describe_placement
    from forebay.train.loop import check_run_dir, train
    from forebay.train.parity import check_numbers, needs_check
    from forebay.train.planning import check_host_memory, planned_program, run_plan
    from forebay.units import format_count

    console = make_console(quiet=not is_first())
    devices = jax.devices()
    together(lambda: check_run_dir(config))
    program = planned_program(run_plan(config), devices, progress=lambda text: console.print(text, style="dim"))
    if jax.process_count() > 1:
        # every process makes one, for compilers divide their work; a solver that runs out of time may end differently
        text = from_first(lambda: json.dumps(program.plan.to_json()))
        program = dataclasses.replace(program, plan=Plan.from_json(json.loads(text)))

    console.print(
        f"[bold]{program.model.name}[/bold] ({format_count(program.model.parameter_count)} parameters) on "
        f"{len(devices)} {devices[0].device_kind} device{'s' if len(devices) > 1 else ''}"
        f"{f' of {jax.process_count()} processes' if jax.process_count() > 1 else ''}, "
        f"batch {config.batch} x {config.seq}, {config.dtype}, attention {program.kernel.name}",
        highlight=False,
    )
    for placement in program.plan.to_json()["placements"]:
        console.print(f"  {describe_placement(placement)}", highlight=False, style="dim")
    for note in [*program.plan.notes, *program.notes()]:
        console.print(f"note: {note}", style="yellow", highlight=False)
    if devices[0].platform == "cpu" and program.offloads:
        console.print(
            "note: on the CPU host memory is device memory: offloading is exercised, nothing moves", style="yellow"
        )

    check_host_memory(program, devices)
    if needs_check(program):
        checked = check_numbers(program, progress=lambda text: console.print(text, style="dim"))
        console.print(
            f"gradients with and without offloading agree to {100 * checked.worst.relative:.2g} % on a small instance"
            + (" (compared before)" if checked.known else ""),
            style="dim", highlight=False,
        )  # fmt: skip
    result = train(config, program, console)

    if result.interrupted:
        console.print(
            f"interrupted after step {result.step}; continue with: forebay train --config "
            f"{Path(config.run_dir) / 'config.yaml'} --run_dir {config.run_dir} --resume",
            highlight=False,
        )
        return EXIT_INTERRUPTED
    if result.validation_loss is not None and result.unigram_entropy is not None:
        console.print(
            f"validation loss {result.validation_loss:.3f} nats per token; the unigram entropy of the same text is "
            f"{result.unigram_entropy:.3f}",
            highlight=False,
        )
    if result.sample is not None:
        console.print("\n[bold]a sampled continuation[/bold]")
        console.print(result.sample, markup=False, highlight=False, style="cyan")
        console.print()
    console.print(
        f"run directory: {Path(config.run_dir)} (first step after {result.time_to_first_step_s:.1f} s)", highlight=False
    )
    return EXIT_OK
