"""`forebay plan`: the fastest placements that fit the memory there is, proved by the compiler."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from forebay.cli.parse import check_file
from forebay.errors import EXIT_OK, UserError, unknown
from forebay.train.config import ProgramConfig
from forebay.train.run_config import TrainConfig

SEARCHES = ("mesh", "accumulate")


@dataclasses.dataclass(frozen=True)
class PlanConfig(ProgramConfig):
    """The training step, the machines, and the memory to plan for.

    Attributes:
        hardware: the machine, as listed by forebay hardware.
        devices: how many devices.
        hbm: device memory to plan for, as in 170GiB; by default what XLA may use there.
        host: host memory per device to plan for; by default 80 % of what there is.
        memory_fraction: the share of HBM that XLA may use, where hbm is not given.
        max_batch: find the largest batch per device that fits; batch is then where the search starts.
        search: what to vary besides the placement: mesh, accumulate, or mesh,accumulate.
        variants: the most ranges of layers with placements of their own, per stack.
        max_compiles: the most plans to compile.
        time_limit_s: seconds that each run of the solver may take.
        output: a file for the plan (-o for short).
        plot: a PNG file for step time against device memory.
        json: print the plan as JSON (schema forebay.plan/1) instead of tables.
    """

    hardware: str = "h200"
    devices: int = 8
    hbm: str | None = None
    host: str | None = None
    memory_fraction: float | None = None
    max_batch: bool = False
    search: str = ""
    variants: int = 2
    max_compiles: int = 5
    time_limit_s: float = 20.0
    output: str | None = None
    plot: str | None = None
    json: bool = False


Config = PlanConfig
ALSO = (TrainConfig,)
SHORT = {"-o": "--output"}


def run(config: PlanConfig) -> int:
    """Plans, prints, and returns 0 when the plan was compiled and fits, 4 when nothing fits."""
    _check(config)
    from forebay.hardware import get_hardware
    from forebay.report.console import make_console
    from forebay.report.plan import print_plan
    from forebay.train.search import search_around

    hardware = get_hardware(config.hardware)
    console = make_console()
    errors = make_console(stderr=True)
    with errors.status("tracing the model") as status:

        def progress(text: str) -> None:
            status.update(text)
            if not errors.is_terminal:
                print(text, file=sys.stderr)

        outcome = search_around(
            config, hardware, config.devices, hbm=config.hbm, host=config.host, memory_fraction=config.memory_fraction,
            variants=config.variants, max_compiles=config.max_compiles, time_limit_s=config.time_limit_s,
            max_batch=config.max_batch,
            searches=_searches(config), progress=progress,
        )  # fmt: skip
    plan = outcome.program.plan
    if config.output is not None:
        plan.save(config.output)
    if config.plot is not None:
        from forebay.report.plots import pareto

        pareto(outcome.table(), Path(config.plot))
    if config.json:
        json.dump(plan.to_json() | {"considered": outcome.table()}, sys.stdout, indent=2)
        print()
    else:
        print_plan(plan, outcome, console)
        if config.output is not None:
            console.print(f"written to {config.output}", highlight=False)
    return EXIT_OK


def diff(argv: Sequence[str]) -> int:
    """`forebay plan diff A B`: what differs between two plan files."""
    from forebay.planner.plan import Plan
    from forebay.report.plan import print_diff

    files = [a for a in argv if a != "--json"]
    if len(files) != 2 or any(a.startswith("-") for a in files):
        raise UserError("forebay plan diff needs two plan files: forebay plan diff A.json B.json [--json]")
    before, after = (Plan.load(f) for f in files)
    print_diff(before, after, as_json="--json" in argv)
    return EXIT_OK


SUBVERBS = {"diff": diff}


def _searches(config: PlanConfig) -> tuple[str, ...]:
    chosen = tuple(s.strip() for s in config.search.split(",") if s.strip())
    for one in chosen:
        if one not in SEARCHES:
            raise unknown("search", one, SEARCHES)
    return chosen


def _check(config: PlanConfig) -> None:
    if config.placement or config.plan != "auto":
        raise UserError(
            "forebay plan chooses the placement itself: leave out --placement and --plan, or use forebay compile to prove one"
        )
    for name, least in (("variants", 1), ("max_compiles", 1)):
        if getattr(config, name) < least:
            raise UserError(f"{name}={getattr(config, name)} must be at least {least}")
    if not config.time_limit_s > 0:
        raise UserError(f"time_limit_s={config.time_limit_s} must be more than 0")
    _searches(config)
    for name in ("output", "plot"):
        file = getattr(config, name)
        if file is not None:
            check_file(name, file)
