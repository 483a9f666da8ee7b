"""A plan on the terminal: what goes where and why, what else was considered, how two plans differ."""

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.report.console import make_console
from forebay.units import GiB, MiB, format_bytes, format_seconds

_STYLES = {"device": "blue", "host": "green", "recompute": "yellow"}


def print_plan(plan: Any, outcome: Any, console: Console | None = None) -> None:
    """The plan of a search: tensors by placement, prediction and compile, what was considered."""
    console = console or make_console()
    data = plan.to_json()
    program = outcome.program
    mesh = ",".join(f"{a}={n}" for a, n in data["mesh"].items()) or "one device"
    console.print(
        f"[bold]{data['model']['name']}[/bold] on {data['devices']} x {data['hardware']} ({mesh}), batch {data['batch']} x "
        f"{data['seq']}" + (f" in {program.config.accumulate} microbatches" if program.config.accumulate > 1 else ""),
        highlight=False,
    )
    console.print()
    print_tensors(data, console)
    console.print()
    print_considered(outcome.table(), console)
    console.print()
    for note in [*data["notes"], *program.notes()]:
        console.print(f"note: {note}", style="yellow", highlight=False)
    for line in summary(data):
        console.print(line, highlight=False)


def print_tensors(data: Mapping[str, Any], console: Console) -> None:
    """One table per range of layers."""
    for placement in data["placements"]:
        first, past_last = placement["layers"]
        rows = [r for r in data["reasons"] if r["stack"] == placement["stack"] and r["layers"] == placement["layers"]]
        everything = "*" in placement["tensors"]
        title = f"{placement['stack']} {first}:{past_last}" + (", nothing recomputed" if everything else "")
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("tensor", style="cyan")
        table.add_column("MiB a layer", justify="right")
        table.add_column("where")
        table.add_column("instead: device", justify="right")
        table.add_column("host", justify="right")
        table.add_column("recompute", justify="right")
        for row in rows:
            table.add_row(
                row["tensor"],
                f"{row['bytes'] / 2**20:,.1f}",
                Text(row["where"], style=_STYLES[row["where"]]),
                *(_alternative(row, where, data["predicted"]) for where in ("device", "host", "recompute")),
            )
        console.print(table)
    if data["reasons"]:
        console.print(
            "instead: change of the step time and of device memory were this tensor alone placed so; * does not fit, - cannot be",
            style="dim", highlight=False,
        )  # fmt: skip


def _alternative(row: Mapping[str, Any], where: str, predicted: Mapping[str, Any]) -> str:
    found = next((a for a in row["alternatives"] if a["where"] == where), None)
    if found is None:
        return "" if where == row["where"] else "-"
    milliseconds = 1e3 * (found["step_time_s"] - predicted["step_time_s"])
    change = found["device_bytes"] - predicted["device_bytes"]
    memory = f"{change / GiB:+,.2f} GiB" if predicted["device_bytes"] >= GiB else f"{change / MiB:+,.2f} MiB"
    return f"{milliseconds:+,.1f} ms {memory}{'' if found['fits'] else '*'}"


def print_considered(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Step time against device memory; what is on the Pareto front is marked."""
    several = len({row["batch"] for row in rows}) > 1
    table = Table(title="Considered", title_justify="left", title_style="bold", box=None, pad_edge=False)
    unit, size = ("GiB", GiB) if rows[0]["device_bytes"] >= GiB else ("MiB", MiB)
    table.add_column("")
    for heading in ("a sequence" if several else "a step", f"device {unit}", f"host {unit}"):
        table.add_column(heading, justify="right")
    table.add_column("")
    front = pareto_front(rows)
    for k, row in enumerate(rows):
        remarks = ["compiled"] if row["compiled"] else []
        remarks += [] if row["fits"] else ["does not fit"]
        remarks += ["Pareto"] if k in front else []
        table.add_row(
            row["name"],
            format_seconds(row["step_time_s"] / (row["batch"] if several else 1)),
            f"{row['device_bytes'] / size:,.2f}", f"{row['host_bytes'] / size:,.2f}",
            ", ".join(remarks), style="bold" if k == 0 else "" if row["fits"] else "dim",
        )  # fmt: skip
    console.print(table)


def pareto_front(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """The rows that no other beats in step time per sequence and device memory both."""

    def better(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
        mine, other = ((r["step_time_s"] / r["batch"], r["device_bytes"]) for r in (a, b))
        return mine != other and all(x <= y for x, y in zip(mine, other, strict=True))

    return {k for k, row in enumerate(rows) if not any(better(other, row) for other in rows)}


def summary(data: Mapping[str, Any]) -> list[str]:
    """The plan's numbers in a few lines."""
    p = data["predicted"]
    exposed = p["exposed_s"]["d2h"] + p["exposed_s"]["h2d"]
    lines = [
        f"predicted step: {format_seconds(p['step_time_s'])}, of which recomputing {format_seconds(p['recompute_s'])} and "
        f"waiting for the host {format_seconds(exposed)} (a model of the machine, not a measurement)"
    ]
    if (step_s := p.get("timeline_step_time_s")) is not None:
        lines.append(f"the compiled step's timeline: {format_seconds(step_s)} (simulated, see forebay timeline)")
    lines += _state_lines(p.get("state") or {})
    price = p.get("seconds_saved_by_one_more_gib")
    if price is not None:
        lines.append(f"one more GiB of device memory would save {format_seconds(price)} a step")
    of = f"{format_bytes(p['device_bytes'])} of {format_bytes(p['device_budget_bytes'])}"
    host = f"host {format_bytes(p['host_bytes'])} of {format_bytes(p['host_budget_bytes'])}"
    if data["verified"]:
        compiles = f"{p['compiles']} compile{'s' if p['compiles'] != 1 else ''}"
        lines.append(
            f"[bold green]compiled and fits[/bold green]: {of}, {host}, fullest in {p['fullest_at']}; {compiles}"
        )
    else:
        lines.append(f"[bold yellow]not verified[/bold yellow]: estimated {of}, {host}, fullest in {p['fullest_at']}")
    return lines


def _state_lines(state: Mapping[str, int]) -> list[str]:
    """What of the training state is in host memory."""
    parts = []
    if moved := state.get("optimizer_host_bytes"):
        parts.append(f"{format_bytes(moved)} of {format_bytes(state['optimizer_bytes'])} of optimizer state")
    if moved := state.get("weights_host_bytes"):
        parts.append(f"{format_bytes(moved)} of weights")
    if moved := state.get("gradients_host_bytes"):
        parts.append(f"{format_bytes(moved)} of gradients")
    return [f"in host memory between steps: {', '.join(parts)}"] if parts else []


def explain(data: Mapping[str, Any]) -> str:
    """The plan in plain lines of text."""
    lines = []
    for row in data["reasons"]:
        text = (
            f"{row['stack']} {row['layers'][0]}:{row['layers'][1]} {row['tensor']} ({row['bytes'] / 2**20:.1f} MiB a layer): "
            f"{row['where']}"
        )
        others = [
            f"{a['where']} would be {_alternative(row, a['where'], data['predicted'])}" for a in row["alternatives"]
        ]
        lines.append(text + (f"; {', '.join(others)}" if others else ""))
    if not lines:
        for placement in data["placements"]:
            first, past_last = placement["layers"]
            placed = ", ".join(f"{n}={w}" for n, w in placement["tensors"].items()) or "everything recomputed"
            lines.append(f"{placement['stack']} {first}:{past_last} {placed}")
    if data["predicted"]:
        lines += [Text.from_markup(line).plain for line in summary(data)]
    return "\n".join([*lines, *(f"note: {n}" for n in data["notes"])])


def print_diff(before: Any, after: Any, *, as_json: bool) -> None:
    """What differs between two plans: for each tensor the layers whose placement changed, and the predictions."""
    changes = placement_changes(before, after)
    numbers = {
        key: [(plan.predicted or {}).get(key) for plan in (before, after)]
        for key in ("step_time_s", "device_bytes", "host_bytes", "recompute_s")
    }
    settings = {
        key: [getattr(before, key), getattr(after, key)]
        for key in (
            "hardware",
            "devices",
            "mesh",
            "batch",
            "seq",
            "optimizer_host_fraction",
            "parameters_host_fraction",
        )
        if getattr(before, key) != getattr(after, key)
    }
    if as_json:
        json.dump({"settings": settings, "predicted": numbers, "placements": changes}, sys.stdout, indent=2)
        print()
        return
    console = make_console()
    if before.model and after.model and before.model.fingerprint != after.model.fingerprint:
        console.print(f"[yellow]different models: {before.model.name} and {after.model.name}[/yellow]", highlight=False)
    for key, (a, b) in settings.items():
        console.print(f"{key}: {a} -> {b}", highlight=False)
    for key, (a, b) in numbers.items():
        if a is not None and b is not None:
            shown = (
                (format_bytes(a), format_bytes(b)) if key.endswith("bytes") else (format_seconds(a), format_seconds(b))
            )
            console.print(f"{key}: {shown[0]} -> {shown[1]}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("stack", "layers", "tensor", "before", "after"):
        table.add_column(heading)
    for c in changes:
        table.add_row(c["stack"], f"{c['layers'][0]}:{c['layers'][1]}", c["tensor"], c["before"], c["after"])
    console.print(table if changes else "the placements are the same")


def placement_changes(before: Any, after: Any) -> list[dict[str, Any]]:
    """Runs of layers in which a tensor is placed differently."""
    found = []
    stacks = dict.fromkeys(p.stack for plan in (before, after) for p in plan.placements)
    for stack in stacks:
        ranges = [plan.for_stack(stack) for plan in (before, after)]
        tensors = dict.fromkeys(t for rs in ranges for p in rs for t in p.tensors)
        edges = sorted({e for rs in ranges for p in rs for e in p.layers})
        for tensor in tensors:
            for first, past_last in itertools.pairwise(edges):
                old, new = (_where(rs, first, tensor) for rs in ranges)
                if old == new:
                    continue
                change = {"stack": stack, "layers": [first, past_last], "tensor": tensor, "before": old, "after": new}
                if found and found[-1] | {"layers": [found[-1]["layers"][1], past_last]} == change:
                    found[-1]["layers"][1] = past_last
                    continue
                found.append(change)
    return found


def _where(ranges: Sequence[Any], layer: int, tensor: str) -> str:
    placement = next((p for p in ranges if p.layers[0] <= layer < p.layers[1]), None)
    return "-" if placement is None else placed(placement.tensors, tensor)


def placed(tensors: Mapping[str, str], tensor: str) -> str:
    """Where a tensor is under a placement's `tensors`: those that are not named are recomputed, unless * says otherwise."""
    return tensors.get(tensor, "device" if "*" in tensors else "recompute")
