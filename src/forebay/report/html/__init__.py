"""The report: one HTML file with everything in it, that loads nothing."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from forebay.errors import UserError
from forebay.report.html import diff, sections
from forebay.report.html.markup import Markup, el, fill, join, script_json
from forebay.report.html.spans import drawing
from forebay.timeline import Timeline

_SOURCES = ("simulated from the compiled program under a cost model, not measured", "measured")
_MARK = '<meta name="generator" content="forebay">'


def render(
    timeline: Timeline,
    *,
    title: str,
    compiled: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    usage: Mapping[str, int] | None = None,
) -> str:
    """The report of a step.

    Args:
        timeline: of the step.
        title: what was run, such as a model's name or a file's.
        compiled: what `forebay compile --json` says of it, for its memory (schema `forebay.compile/1`).
        plan: the content of a plan file (schema `forebay.plan/1`).
        usage: bytes of device memory in use as each instruction runs, in the order of the schedule
            (`forebay.xla.usage`); with it memory is drawn over time.

    Raises:
        UserError: the plan lacks something.

    Example:
        `Path("report.html").write_text(render(Timeline.load("step.json"), title="the step"))`
    """
    try:
        placed = sections.plan_tables(plan) if plan and plan["placements"] else None
        considered = sections.candidates(plan) if plan and plan["predicted"] and plan["alternatives"] else None
    except (KeyError, TypeError) as error:
        raise UserError(f"the plan is damaged ({type(error).__name__}: {error}): make it again") from None
    measured = timeline.source == "measured"
    parts = {
        "title": join(title),
        "mark": _MARK,
        "machine": join(f"{timeline.devices} x {timeline.hardware}"),
        "source": join(_SOURCES[measured]),
        "badge": join(timeline.source),
        "headline": sections.headline(timeline, compiled),
        "composition": sections.composition(timeline),
        "waits": sections.waits(timeline),
        "transfers": sections.transfers(timeline),
        "count": join(f"{len(timeline.exposed):,}"),
        "memory": _section("memory", "Memory", sections.memory(compiled)) if compiled else "",
        "plan": _section("plan", "The plan", placed) if placed else "",
        "candidates": _section("considered", "Considered beside the plan", considered) if considered else "",
        "basis": sections.basis(timeline, compiled, plan),
        "data": script_json(drawing(timeline, usage)),
        "style": _file("report.css"),
        "timeline_script": _file("timeline.js"),
        "tables_script": _file("tables.js"),
    }  # fmt: skip
    return fill(_file("report.html"), parts)


def render_diff(before: Timeline, after: Timeline, *, names: tuple[str, str]) -> str:
    """The report of two timelines.

    Args:
        before, after: the steps.
        names: what they are, such as two files' names.

    Example:
        `Path("diff.html").write_text(render_diff(before, after, names=("before", "after")))`
    """
    transfers, count = diff.transfers(before, after)
    kinds = [_SOURCES[t.source == "measured"] for t in (before, after)]
    each = [join(el("code", name), ": ", kind, ". ") for name, kind in zip(names, kinds, strict=True)]
    sources = join(f"Both {kinds[0]}.") if kinds[0] == kinds[1] else join(*each)
    parts = {
        "mark": _MARK,
        "before": join(names[0]),
        "after": join(names[1]),
        "sources": join("One training step, per device. ", sources),
        "headline": diff.headline(before, after),
        "bars": diff.bars(before, after, names),
        "parts": diff.parts(before, after),
        "transfers": transfers,
        "count": join(f"{count:,}"),
        "basis": diff.basis(before, after, names),
        "style": _file("report.css"),
        "tables_script": _file("tables.js"),
    }
    return fill(_file("diff.html"), parts)


def check_report_file(flag: str, path: str) -> None:
    """Raises `UserError` where there is a file at `path` that is no report: a report may be made again."""
    file = Path(path)
    if file.is_file() and _MARK.encode() not in file.read_bytes()[:1000]:
        raise UserError(f"{flag}={path!r} exists and is no report of forebay: choose another name, or remove it")


def _section(name: str, heading: str, content: Markup) -> Markup:
    return el("section", el("h2", heading), content, id=name)


def _file(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
