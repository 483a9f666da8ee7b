"""A compiled step's memory: as JSON (schema `forebay.compile/1`) and as a table on the terminal."""

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.hardware import Hardware
from forebay.report.console import make_console
from forebay.units import GiB, MiB, format_bytes, format_count
from forebay.xla.compile import SCHEMA, Bytes, CompiledStep
from forebay.xla.exposure import MemoryLimit, boundary_exposed_bytes, explain, layer_bytes
from forebay.xla.flags import flag_values
from forebay.xla.options import HOST_COUNTED, MEMORY_LIMIT, memory_limit_bytes
from forebay.xla.windows import HIDDEN_WINDOW


def compile_json(
    compiled: CompiledStep,
    program: Any,
    hardware: Hardware,
    memory_fraction: float | None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `forebay compile --json` prints. Bytes are per device.

    `fits` is whether the compiler accepted the program, its device bytes are within `hbm_bytes` (the
    memory that XLA may use, not all there is) and its host bytes within the host's. `exposed` is a line on
    the copies in loops that are not hidden, or null; `options` are the compiler's, for telling why.
    `boundary_exposed_bytes` are those of copies outside of loops; `layer_offloaded_bytes` are of one layer, one way.
    """
    hbm_bytes = hardware.usable_hbm_bytes(memory_fraction)
    host_capacity = hardware.host.memory_bytes_per_device
    mesh = {axis: size for axis, size in program.sharding.mesh.shape.items() if size > 1}
    fits_host = compiled.host.total <= host_capacity
    return {
        "schema": SCHEMA,
        "model": program.model.name,
        "parameters": program.model.parameter_count,
        "hardware": hardware.name,
        "devices": program.sharding.mesh.size,
        "mesh": mesh,
        "batch": program.config.batch,
        "seq": program.config.seq,
        "accumulate": program.config.accumulate,
        "dtype": program.config.dtype,
        "placements": program.plan.to_json()["placements"],
        "attention": program.kernel.name,
        "hbm_bytes": hbm_bytes,
        "hbm_total_bytes": hardware.hbm_bytes,
        "host_capacity_bytes": host_capacity,
        "fits": compiled.refused is None and compiled.device.total <= hbm_bytes and fits_host,
        "fits_host": fits_host,
        "refused": compiled.refused,
        "device_bytes": _bytes_json(compiled.device),
        "host_bytes": {k: v for k, v in _bytes_json(compiled.host).items() if k not in ("output", "aliased")},
        "peak": [{"name": r.name, "kind": r.kind, "bytes": r.num_bytes} for r in compiled.peak_rows("device")],
        "host_peak": [{"name": r.name, "kind": r.kind, "bytes": r.num_bytes} for r in compiled.peak_rows("host")],
        "transfers": [
            {
                "name": t.name, "stack": t.stack, "direction": t.direction, "where": t.where, "bytes": t.num_bytes,
                "count": t.count, "window": t.window,
            }
            for t in compiled.transfers
        ],
        "exposed": explain(compiled.transfers, _memory_limit(compiled, hardware, options or {}), compiled.remat.count),
        "boundary_exposed_bytes": boundary_exposed_bytes(compiled.transfers),
        "layer_offloaded_bytes": layer_bytes(compiled.transfers),
        "violations": list(compiled.violations),
        "host_copy_bytes": compiled.host_copy_bytes,
        "remat_clones": compiled.remat.count,
        "remat_flops": compiled.remat.flops,
        "remat_collectives": compiled.remat.collectives,
        "lower_time_s": compiled.lower_time_s,
        "compile_time_s": compiled.compile_time_s,
        "versions": dict(compiled.versions),
        "notes": program.notes(),
    }  # fmt: skip


def _memory_limit(compiled: CompiledStep, hardware: Hardware, options: Mapping[str, Any]) -> MemoryLimit | None:
    percent = options.get(MEMORY_LIMIT) or flag_values(hardware.platform, os.environ).get(MEMORY_LIMIT)
    if percent is None:
        return None
    limit = memory_limit_bytes(hardware.hbm_bytes, compiled.device.arguments, int(percent))
    temporaries = compiled.device.temporaries - compiled.added_bytes
    return MemoryLimit(limit, temporaries + HOST_COUNTED * compiled.host.temporaries)


def print_compiled(report: Mapping[str, Any], console: Console | None = None) -> None:
    """The table of `compile_json`'s result."""
    console = console or make_console()
    mesh = ",".join(f"{axis}={size}" for axis, size in report["mesh"].items()) or "one device"
    console.print(
        f"[bold]{report['model']}[/bold] ({format_count(report['parameters'])} parameters) on "
        f"{report['devices']} x {report['hardware']} ({mesh}), batch {report['batch']} x {report['seq']}"
        + (f" in {report['accumulate']} microbatches" if report["accumulate"] > 1 else ""),
        highlight=False,
    )
    for placement in report["placements"]:
        console.print(f"  {describe_placement(placement)}", highlight=False, style="dim")
    console.print()
    console.print(_peak_table(report["peak"], "HBM at the peak, per device", report["device_bytes"]["total"]))
    device = report["device_bytes"]
    console.print(
        f"arguments {format_bytes(device['arguments'])}, temporaries {format_bytes(device['temporaries'])}, "
        f"output {format_bytes(device['output'])} of which {format_bytes(device['aliased'])} aliased",
        style="dim", highlight=False,
    )  # fmt: skip
    if report["host_peak"]:
        console.print()
        console.print(_peak_table(report["host_peak"], "Host memory, per device", report["host_bytes"]["total"]))
    if report["transfers"]:
        console.print()
        console.print(_transfer_table(report["transfers"]))
        console.print(_boundary(report), style="dim", highlight=False)
    console.print()
    for violation in report["violations"]:
        console.print(f"the copies cannot be right: {violation}", style="bold red", highlight=False)
    if report["host_copy_bytes"]:
        console.print(
            f"the step copies {format_bytes(report['host_copy_bytes'])} from host memory to host memory",
            style="yellow", highlight=False,
        )  # fmt: skip
    if report["remat_clones"]:
        console.print(
            f"the compiler recomputes {report['remat_clones']} instructions of its own accord (.remat): "
            f"{report['remat_flops'] / 1e12:.2f} TFLOP and {report['remat_collectives']} collectives a step",
            style="yellow", highlight=False,
        )  # fmt: skip
    for note in report["notes"]:
        console.print(f"note: {note}", style="yellow", highlight=False)
    _print_verdict(report, console)


def describe_placement(placement: Mapping[str, Any]) -> str:
    """One range of a plan in one line."""
    first, past_last = placement["layers"]
    by_where: dict[str, list[str]] = {}
    for name, where in placement["tensors"].items():
        by_where.setdefault(where, []).append("everything" if name == "*" else name)
    parts = [f"{where}: {', '.join(names)}" for where, names in by_where.items()]
    return f"{placement['stack']} {first}:{past_last}  " + (
        "; ".join(parts) or "everything recomputed from the layer's input"
    )


def _peak_table(rows: Any, title: str, total: int) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=True)
    table.add_column("kind", style="cyan")
    table.add_column("what")
    unit, size = ("GiB", GiB) if total >= GiB else ("MiB", MiB)
    table.add_column(unit, justify="right")
    table.add_column("", justify="left")
    small = [r for r in rows if r["bytes"] < 0.005 * size]
    for row in rows:
        if row["bytes"] >= 0.005 * size:
            bar = Text("█" * round(30 * row["bytes"] / total), style="blue")
            table.add_row(row["kind"], row["name"], f"{row['bytes'] / size:,.2f}", bar)
    if small:
        table.add_row("other", f"{len(small)} smaller", f"{sum(r['bytes'] for r in small) / size:,.2f}", "")
    table.add_section()
    table.add_row("", "total", f"{total / size:,.2f}", "", style="bold")
    return table


def _transfer_table(transfers: Any) -> Table:
    """Windows are shares of a layer's matrix and attention FLOPs, in percent."""
    table = Table(
        title="Copies between device and host, per device and step", title_justify="left", title_style="bold", box=None,
        pad_edge=False,
    )  # fmt: skip
    table.add_column("tensor")
    table.add_column("direction", style="cyan")
    table.add_column("where")
    unit, size = ("GiB", GiB) if any(t["bytes"] * t["count"] >= GiB for t in transfers) else ("MiB", MiB)
    table.add_column(unit, justify="right")
    table.add_column("window", justify="right")
    for t in transfers:
        window = Text(f"{100 * t['window']:.0f} %", style="" if t["window"] >= HIDDEN_WINDOW else "red")
        moved = f"{t['bytes'] * t['count'] / size:,.2f}"
        table.add_row(f"{t['name']} ({t['stack']})", t["direction"].upper(), t["where"], moved, window)
    return table


def _boundary(report: Mapping[str, Any]) -> str:
    exposed, layer = report["boundary_exposed_bytes"], report["layer_offloaded_bytes"]
    if not exposed:
        return "between forward and backward pass no copy is exposed"
    layers = f", {exposed / layer:.1f} times what a layer sends out" if layer else ""
    return f"between forward and backward pass {format_bytes(exposed)} of copies a step are exposed, in both directions{layers}"


def _print_verdict(report: Mapping[str, Any], console: Console) -> None:
    total, hbm = report["device_bytes"]["total"], report["hbm_bytes"]
    seconds = f"compiled in {report['lower_time_s'] + report['compile_time_s']:.1f} s"
    machine = f"{report['hardware']} has {format_bytes(report['hbm_total_bytes'])}"
    line = f"{format_bytes(total)} of the {format_bytes(hbm)} that XLA may use ({machine})"
    host = ""
    if report["host_bytes"]["total"]:
        capacity = report["host_capacity_bytes"]
        of = f" of {format_bytes(capacity)}" if capacity else ""
        host = f"; host {format_bytes(report['host_bytes']['total'])}{of}"
    if report["fits"]:
        console.print(f"[bold green]fits[/bold green]: {line}{host}; {seconds}", highlight=False)
        return
    if not report["fits_host"]:
        why = "the host's memory does not suffice"
    elif report["refused"]:
        why = f"the compiler refused it ({report['refused']})"
    else:
        why = f"{format_bytes(total - hbm)} too much"
    console.print(f"[bold red]does not fit[/bold red]: {why}: {line}{host}; {seconds}", highlight=False)


def _bytes_json(b: Bytes) -> dict[str, int]:
    return {
        "arguments": b.arguments, "temporaries": b.temporaries, "output": b.output, "aliased": b.aliased,
        "total": b.total,
    }  # fmt: skip
