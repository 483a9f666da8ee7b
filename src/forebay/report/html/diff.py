"""The report of two timelines: both steps on one scale, and what changed from one to the other."""

import dataclasses
from collections.abc import Sequence

from forebay.report.html.markup import Markup, el, join
from forebay.report.html.sections import PHASES, bar, card, kind_of_transfer, parts_of, table
from forebay.timeline import Exposed, Timeline
from forebay.units import format_bytes, format_seconds

_SMALL = 1e-3
"""The share of the step from which a change has a colour."""
_NONE = 1e-9


def headline(before: Timeline, after: Timeline) -> Markup:
    """Step times, speed and waits of both."""
    faster = before.step_time_s / after.step_time_s - 1 if after.step_time_s else 0.0
    of = f"{format_seconds(before.step_time_s)} to {format_seconds(after.step_time_s)} a step"
    cards = (
        card("Steps in the same time", f"{faster:+.1%}", of),
        card(
            "Model TFLOP/s per device", f"{after.tflops_per_device:,.0f}",
            f"{before.tflops_per_device:,.0f} before; MFU {before.mfu:.1%} to {after.mfu:.1%}",
        ),
        card(
            "Exposed", format_seconds(after.exposed_s), f"{format_seconds(before.exposed_s)} before", "exposed"
        ),
        card("On", f"{after.devices} x {after.hardware}", _machine(before, after)),
    )  # fmt: skip
    return el("div", *cards, class_="cards")


def _machine(before: Timeline, after: Timeline) -> str:
    same = (before.hardware, before.devices) == (after.hardware, after.devices)
    return "both" if same else f"before: {before.devices} x {before.hardware}"


def bars(before: Timeline, after: Timeline, names: tuple[str, str]) -> Markup:
    """The two steps, one under the other, as long as they take."""
    longest = max(before.step_time_s, after.step_time_s) or 1.0
    sides = []
    for name, timeline in zip(names, (before, after), strict=True):
        drawn = bar(parts_of(timeline), f"width:{100 * timeline.step_time_s / longest:.3f}%")
        time = el("b", format_seconds(timeline.step_time_s))
        sides.append(el("div", el("div", el("code", name), " ", time), drawn, class_="side"))
    styles = dict.fromkeys((style, _short(name)) for t in (before, after) for name, style, _ in parts_of(t))
    legend = [el("li", el("i", class_=f"fill-{style}"), name) for style, name in styles]
    return join(*sides, el("ul", *legend, class_="legend"))


def _short(name: str) -> str:
    return "exposed: the step waits" if name.startswith("exposed") else name


def parts(before: Timeline, after: Timeline) -> Markup:
    """Compute and waits by part; they add up to the steps."""
    sides = [{name: (style, s) for name, style, s in parts_of(t)} for t in (before, after)]
    body = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        (style, _), (a, b) = sides[0].get(name) or sides[1][name], (side.get(name, ("", 0.0))[1] for side in sides)
        label = join(el("i", class_=f"swatch fill-{style}"), name)
        body.append(el("tr", el("td", label), *_changed(a, b, before.step_time_s)))
    step = _changed(before.step_time_s, after.step_time_s, before.step_time_s)
    body.append(el("tr", el("td", "step"), *step, class_="total"))
    heads = [("", ""), ("before", "n"), ("after", "n"), ("change", "n"), ("of the step before", "n")]
    return table("what changed", heads, body)


def _changed(a: float, b: float, step: float) -> tuple[Markup, ...]:
    change, share = b - a, (b - a) / step if step else 0.0
    style = "n dim" if abs(share) < _SMALL else "n bad" if change > 0 else "n good"
    text, percent = "-", "-"
    if abs(share) > _NONE:
        text = f"{'+' if change > 0 else '-'}{format_seconds(abs(change))}"
        percent = f"{share:+.2%}"
    cells = [el("td", format_seconds(s) if s else "-", data_v=s, class_="n") for s in (a, b)]
    return (*cells, el("td", text, data_v=change, class_=style), el("td", percent, data_v=change, class_="n"))


@dataclasses.dataclass
class _Sum:
    """All transfers of one name, kind and part of the step in a timeline."""

    count: float = 0.0
    num_bytes: float = 0.0
    time_s: float = 0.0
    exposed_s: float = 0.0
    covered_s: float = 0.0

    def add(self, e: Exposed) -> None:
        self.count += e.count
        self.num_bytes += e.count * e.num_bytes
        self.time_s += e.time_s
        self.exposed_s += e.exposed_s
        self.covered_s += e.window * e.time_s

    @property
    def window(self) -> float | None:
        return self.covered_s / self.time_s if self.time_s else None


def transfers(before: Timeline, after: Timeline) -> tuple[Markup, int]:
    """The table of copies and collectives of both, and how many rows it has."""
    found: dict[tuple[str, str, str], tuple[_Sum, _Sum]] = {}
    for side, timeline in enumerate((before, after)):
        for e in timeline.exposed:
            found.setdefault((e.name, kind_of_transfer(e), e.phase), (_Sum(), _Sum()))[side].add(e)
    if not found:
        return el("p", "Nothing is copied or communicated beside the computation in either."), 0
    order = sorted(
        found.items(), key=lambda item: (-abs(item[1][1].exposed_s - item[1][0].exposed_s), -item[1][1].time_s)
    )
    body = [_row(key, sums, before.step_time_s) for key, sums in order]
    heads = [
        ("what", ""), ("kind", ""), ("part", ""), ("exposed before", "n"), ("after", "n"), ("change", "n"),
        ("of the step before", "n"), ("window", "n"), ("times", "n"), ("bytes a step", "n"), ("takes", "n"),
    ]  # fmt: skip
    return table("transfers", heads, body, id="transfers", class_="sortable"), len(found)


def _row(key: tuple[str, str, str], sums: Sequence[_Sum], step: float) -> Markup:
    (name, kind, phase), (a, b) = key, sums

    def both(one: str, other: str, value: float) -> Markup:
        return el("td", one if one == other else f"{one} to {other}", data_v=value, class_="n")

    before, after = ("-" if s.window is None else f"{s.window:.0%}" for s in (a, b))
    return el(
        "tr", el("td", el("code", name)), el("td", kind), el("td", PHASES.get(phase, phase)),
        *_changed(a.exposed_s, b.exposed_s, step),
        both(before, after, b.window or 0.0),
        both(f"{a.count:,.0f}", f"{b.count:,.0f}", b.count),
        both(format_bytes(int(a.num_bytes)), format_bytes(int(b.num_bytes)), b.num_bytes),
        both(format_seconds(a.time_s), format_seconds(b.time_s), b.time_s),
    )  # fmt: skip


def basis(before: Timeline, after: Timeline, names: tuple[str, str]) -> Markup:
    """What was assumed of each, and where the two say different things."""
    notes = [dict.fromkeys(t.assumptions) for t in (before, after)]
    shared = [n for n in notes[0] if n in notes[1]]
    items = [el("li", n) for n in shared]
    for name, mine, other in zip(names, notes, reversed(notes), strict=True):
        items += [el("li", el("code", name), ": ", n) for n in mine if n not in other]
    return el("ul", *items) if items else el("p", "Nothing was assumed.")
