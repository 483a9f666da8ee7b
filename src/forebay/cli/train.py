"""`forebay train`: a training run on the devices there are."""

from pathlib import Path

from forebay.errors import EXIT_OK
from forebay.train.run_config import TrainConfig

Config = TrainConfig


def run(config: TrainConfig) -> int:
    """Trains, prints, and returns 0; 130 when it was interrupted and has kept a checkpoint.

    Raises:
        UserError: see `forebay.train.loop.train`.
        WrongNumbersError: offloading gives wrong gradients on these devices; see `forebay.train.parity`.
    """
    import jax

    from forebay.report.console import make_console
    from forebay.report.memory import describe_placement
    from forebay.train.loop import check_run_dir, train
    from forebay.train.parity import check_numbers, needs_check
    from forebay.train.planning import check_host_memory, planned_program, run_plan
    from forebay.units import format_count

    console = make_console()
    devices = jax.devices()
    check_run_dir(config)
    program = planned_program(run_plan(config), devices, progress=lambda text: console.print(text, style="dim"))

    console.print(
        f"[bold]{program.model.name}[/bold] ({format_count(program.model.parameter_count)} parameters) on "
        f"{len(devices)} {devices[0].device_kind} device{'s' if len(devices) > 1 else ''}, "
        f"batch {config.batch} x {config.seq}, {config.dtype}, attention {program.kernel.compiled}",
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
            f"{Path(config.run_dir) / 'config.yaml'} --run_dir {config.run_dir} --resume"
        )
        return 130
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
