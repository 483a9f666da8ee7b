"""A timeline on the terminal: what a step is made of, what it waits for, how two differ."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.timeline import Exposed, Timeline
from forebay.timeline.diff import Change
from forebay.units import format_bytes, format_seconds

_WAITS = 10


def print_timeline(timeline: Timeline, console: Console) -> None:
    """The step, its parts, and the ten things that it waits for most."""
    console.print(
        f"[bold]{format_seconds(timeline.step_time_s)}[/bold] a step on {timeline.devices} x {timeline.hardware} "
        f"({timeline.source}): {timeline.tflops_per_device:,.0f} model TFLOP/s per device, MFU {timeline.mfu:.1%}",
        highlight=False,
    )
    console.print()
    console.print(_parts(timeline))
    console.print()
    waits = [e for e in timeline.exposed if e.exposed_s > 0]
    if waits:
        console.print(_waits(waits[:_WAITS], timeline.step_time_s))
        if others := waits[_WAITS:]:
            console.print(
                f"and {len(others)} more, {format_seconds(sum(e.exposed_s for e in others))} together", highlight=False
            )
    else:
        console.print("the step waits for nothing", highlight=False)
    if timeline.unknown:
        console.print()
        names = ", ".join(f"{u['opcode']} ({u['count']:,.0f} times)" for u in timeline.unknown)
        console.print(
            f"unknown operations, costed by their bytes, {timeline.unknown_share:.1%} of the step: {names}",
            style="yellow", highlight=False, markup=False,
        )  # fmt: skip
    for assumption in timeline.assumptions:
        console.print(f"note: {assumption}", style="yellow", highlight=False, markup=False)


def _parts(timeline: Timeline) -> Table:
    table = Table(box=None, pad_edge=False, title="the step", title_justify="left", title_style="bold")
    table.add_column("", style="cyan")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    rows = [(f"compute: {phase.replace('_', ' ')}", s) for phase, s in timeline.compute_s.items()]
    rows += [(f"waiting: {kind}", s) for kind, s in timeline.waiting_s.items()]
    for name, seconds in rows:
        if seconds:
            style = "red" if name.startswith("waiting") else ""
            table.add_row(name, format_seconds(seconds), f"{seconds / timeline.step_time_s:.1%}", style=style)
    return table


def _waits(waits: Sequence[Exposed], step_time_s: float) -> Table:
    table = Table(box=None, pad_edge=False, title="what it waits for most", title_justify="left", title_style="bold")
    table.add_column("what", style="cyan", overflow="fold")
    table.add_column("kind")
    table.add_column("part")
    table.add_column("times", justify="right")
    table.add_column("each", justify="right")
    table.add_column("takes", justify="right")
    table.add_column("exposed", justify="right", style="red")
    table.add_column("of the step", justify="right")
    table.add_column("window", justify="right")
    for e in waits:
        kind = e.opcode.removesuffix("-start") if e.kind == "collective" else e.kind.upper()
        table.add_row(
            Text(e.name), kind, e.phase.replace("_", " "), f"{e.count:,.0f}", format_bytes(e.num_bytes),
            format_seconds(e.time_s), format_seconds(e.exposed_s), f"{e.exposed_s / step_time_s:.1%}", f"{e.window:.0%}",
        )  # fmt: skip
    return table


def print_diff(changes: Sequence[Change], names: tuple[str, str], console: Console) -> None:
    """What changed, the exposed tensors that changed most."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", style="cyan", overflow="fold")
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    table.add_column("change", justify="right")
    exposed = [c for c in changes if c.group == "exposed"]
    for c in [c for c in changes if c.group != "exposed"] + exposed[:_WAITS]:
        if not (c.before_s or c.after_s):
            continue
        label = c.name.replace("_", " ") if c.group == "step" else f"{c.group}: {c.name.replace('_', ' ')}"
        label = f"{c.group}: {c.name}" if c.group == "exposed" else label
        sign = "+" if c.change_s >= 0 else "-"
        style = "red" if c.change_s > 0 else "green" if c.change_s < 0 else ""
        share = f" ({c.change_s / c.before_s:+.1%})" if c.before_s else ""
        table.add_row(
            Text(label), format_seconds(c.before_s), format_seconds(c.after_s),
            Text(f"{sign}{format_seconds(abs(c.change_s))}{share}", style=style),
        )  # fmt: skip
    console.print(table)
    if len(exposed) > _WAITS:
        console.print(f"and {len(exposed) - _WAITS} more exposed transfers that changed", highlight=False)
