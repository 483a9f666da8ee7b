"""`forebay timeline`: when everything in a compiled step runs, and what the step waits for."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.parse import check_file
from forebay.errors import EXIT_OK, UserError
from forebay.timeline import Timeline
from forebay.train.config import AUTO, ProgramConfig
from forebay.train.run_config import TrainConfig

if TYPE_CHECKING:
    from forebay.planner.plan import Plan


@dataclasses.dataclass(frozen=True)
class TimelineConfig(ProgramConfig):
    """The training step, or a compiled one, and the machines.

    Attributes:
        hlo: a file of scheduled HLO text, a dump directory, or a saved timeline, instead of a model.
        hardware: the machine, as listed by forebay hardware.
        devices: how many devices; with hlo, by default what the module says.
        memory_fraction: the share of HBM that XLA may use; by default what is usual on that machine.
        trip_count: how often loops run that do not say: a number for all, or while=number,while=number by name.
        json: print JSON (schema forebay.timeline/1) instead of tables.
        html: a file for a report that opens in any browser and loads nothing.
        perfetto: a file for a trace that ui.perfetto.dev opens.
        save_hlo: a file for the HLO text of the step that was compiled.
        output: a file for the timeline as JSON (-o for short).
    """

    hlo: str | None = None
    hardware: str = "h200"
    devices: int | None = None
    memory_fraction: float | None = None
    trip_count: str = ""
    json: bool = False
    html: str | None = None
    perfetto: str | None = None
    save_hlo: str | None = None
    output: str | None = None


Config = TimelineConfig
ALSO = (TrainConfig,)
SHORT = {"-o": "--output"}


def run(config: TimelineConfig) -> int:
    """Simulates, prints, and returns 0."""
    from forebay.hardware import get_hardware
    from forebay.planner.plan import Plan
    from forebay.report.console import make_console
    from forebay.report.html import check_report_file, render
    from forebay.report.timeline import print_timeline
    from forebay.timeline.perfetto import trace

    hardware = get_hardware(config.hardware)
    if config.hlo is not None and config.save_hlo is not None:
        raise UserError("save_hlo is for a step that is compiled, and hlo is one already: leave one of them out")
    places: dict[Path, str] = {}
    for flag in ("html", "perfetto", "save_hlo", "output"):
        if (file := getattr(config, flag)) is not None:
            check_file(flag, file)
            other = places.setdefault(Path(file).resolve(), flag)
            if other != flag:
                raise UserError(f"{other} and {flag} are the same file, {file!r}: give each its own")
    if config.html is not None:
        check_report_file("html", config.html)
    trips = parse_trip_count(config.trip_count)
    if config.hlo is not None:
        from forebay.timeline.build import timeline

        plan = None if config.plan == AUTO else Plan.load(config.plan)
        if _is_json(Path(config.hlo)):
            made = Timeline.load(config.hlo)
        else:
            made = timeline(config.hlo, hardware, devices=config.devices, trip_counts=trips)
        step = Step(made, Path(config.hlo).name, plan)
    else:
        step = _compiled(config, trips)
        made = step.timeline
    if config.output is not None:
        made.save(config.output)
    if config.perfetto is not None:
        Path(config.perfetto).write_text(json.dumps(trace(made)))
    if config.html is not None:
        plan = None if step.plan is None else step.plan.to_json()
        Path(config.html).write_text(
            render(made, title=step.title, compiled=step.compiled, plan=plan, usage=step.usage), encoding="utf-8"
        )
    if config.json:
        json.dump(made.to_json(), sys.stdout)
        print()
    else:
        console = make_console()
        print_timeline(made, console)
        for file in (config.output, config.html, config.perfetto):
            if file is not None:
                console.print(f"written to {file}", highlight=False)
    return EXIT_OK


@dataclasses.dataclass(frozen=True)
class Step:
    """A step's timeline and what a report says beside it.

    Attributes:
        title: the model's name, or the file's.
        plan: that it was compiled under, None where it was given as HLO and without one.
        compiled: as `forebay compile --json` has it; None where the step was given as HLO.
        usage: bytes of device memory in use as each instruction runs; likewise.
    """

    timeline: Timeline
    title: str
    plan: "Plan | None"
    compiled: Mapping[str, Any] | None = None
    usage: Mapping[str, int] | None = None


def _compiled(config: TimelineConfig, trips: dict[str, int]) -> Step:
    """The step that the configuration describes, compiled for machines that are not there."""
    from forebay.hardware import get_hardware
    from forebay.report.memory import compile_json
    from forebay.timeline.build import timeline
    from forebay.train.planning import compile_program, planned_program
    from forebay.xla.topology import compile_only_devices
    from forebay.xla.usage import usage

    hardware = get_hardware(config.hardware)
    devices = compile_only_devices(hardware, config.devices or 8)
    program = planned_program(config, devices, hardware, memory_fraction=config.memory_fraction)
    with tempfile.TemporaryDirectory(prefix="forebay-timeline-") as folder:
        hlo = Path(folder) / "step.hlo" if config.save_hlo is None else Path(config.save_hlo)
        done = compile_program(program, hardware, deviceless=True, memory_fraction=config.memory_fraction, save_hlo=hlo)
        made = timeline(
            hlo, hardware, devices=len(devices), trip_counts=trips, model_flops=program.flops_per_step / len(devices),
        )  # fmt: skip
    notes = [*made.assumptions, *program.notes(), *done.notes]
    if done.compiled.refused:
        notes.append(f"the compiler refused the step for lack of memory: {done.compiled.refused}")
    made = dataclasses.replace(made, assumptions=tuple(dict.fromkeys(notes)))
    report = compile_json(done.compiled, program, hardware, config.memory_fraction, done.options)
    return Step(
        made, program.model.name, program.plan, report, usage(done.compiled.assignment, scratch=done.compiled.scratch)
    )


def diff(argv: Sequence[str]) -> int:
    """`forebay timeline --diff A B`: what changed between two timelines, as files of JSON or HLO."""
    from forebay.report.console import make_console
    from forebay.report.html import check_report_file, render_diff
    from forebay.report.timeline import print_diff
    from forebay.timeline.diff import diff as compare
    from forebay.timeline.diff import diff_json

    given, files, rest = {"hardware": "h200", "html": ""}, [], list(argv)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and name in given and (equals or rest):
            given[name] = value if equals else rest.pop(0)
        elif argument != "--json":
            files.append(argument)
    if len(files) != 2 or any(f.startswith("-") for f in files):
        raise UserError(
            "forebay timeline --diff needs two files, timelines or HLO: --diff A.json B.json [--json] [--html FILE]"
        )
    if html := given["html"]:
        check_file("html", html)
        check_report_file("html", html)
    before, after = (_load(f, given["hardware"]) for f in files)
    if html:
        Path(html).write_text(render_diff(before, after, names=_names(files[0], files[1])), encoding="utf-8")
    if "--json" in argv:
        json.dump(diff_json(before, after), sys.stdout, indent=2)
        print()
    else:
        console = make_console()
        print_diff(compare(before, after), (files[0], files[1]), console)
        if html:
            console.print(f"written to {html}", highlight=False)
    return EXIT_OK


def _names(before: str, after: str) -> tuple[str, str]:
    """The files' names, or where these are the same their paths."""
    names = (Path(before).name, Path(after).name)
    return (before, after) if names[0] == names[1] else names


def _load(file: str, hardware: str) -> Timeline:
    """A timeline file, or the timeline of HLO text."""
    path = Path(file)
    if _is_json(path):
        return Timeline.load(path)
    from forebay.timeline.build import timeline

    return timeline(path, hardware)


def _is_json(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[:200].lstrip()[:1] == b"{"


SUBVERBS = {"--diff": diff}


def parse_trip_count(text: str) -> dict[str, int]:
    """`12` as {"": 12}, `while.1=12,while.2=3` as it says.

    Raises:
        UserError: anything else.
    """
    counts = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, number = part.rpartition("=")
        if not number.isdecimal() or (equals and not name):
            raise UserError(
                f"trip_count={text!r}: write a number, or the names of loops with numbers: while.1=12,while.2=3"
            )
        counts[name.removeprefix("%")] = int(number)
    return counts
