"""Machines on the terminal: all of them in one table, or one with the source of every figure."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console
from rich.table import Table

from forebay.hardware import DEFAULT_MEMORY_FRACTION, Hardware
from forebay.units import format_gib

_WIDTH_WITHOUT_TERMINAL = 160
"""Into a file or a pipe nothing is wrapped."""


def print_hardware_table(machines: Iterable[Hardware], console: Console | None = None) -> None:
    """One row a machine. Memory in GiB, links and bandwidths in GB/s per direction, arithmetic in dense TFLOP/s."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("machine", style="cyan", no_wrap=True)
    for heading in ("HBM\nGiB", "HBM\nGB/s", "bf16\nTFLOP/s", "fp8\nTFLOP/s", "tf32\nTFLOP/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("host link", no_wrap=True)
    for heading in ("D2H\nGB/s", "H2D\nGB/s", "host\nGiB", "per\nhost"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fabric", no_wrap=True)
    for heading in ("joins", "GB/s", "network\nGB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for machine in machines:
        link, fabric = machine.host_link, machine.interconnect
        table.add_row(
            machine.name,
            f"{machine.hbm_bytes / 2**30:,.1f}",
            _giga(machine.hbm_bytes_per_s),
            *(_tera(machine.flops_per_s.get(kind)) for kind in ("bf16", "fp8", "tf32")),
            link.name,
            _giga(link.d2h_bytes_per_s) + ("" if _measured(machine, "d2h") else "*"),
            _giga(link.h2d_bytes_per_s) + ("" if _measured(machine, "h2d") else "*"),
            f"{machine.host.memory_bytes_per_device / 2**30:,.0f}",
            f"{machine.host.devices}",
            fabric.name,
            f"{fabric.domain_devices:,}",
            _giga(fabric.domain_bytes_per_s),
            _giga(fabric.network_bytes_per_s),
        )
    console = _console(console)
    console.print(table)
    console.print(
        "\nPer device (a GPU; a TPU chip; half a TPU7x chip), links per direction. * nominal, not measured."
        "\nforebay hardware --name MACHINE shows where each figure comes from.",
        style="dim",
        highlight=False,
    )


def print_hardware_details(machine: Hardware, console: Console | None = None) -> None:
    """Every figure of one machine beside its source."""
    console = _console(console)
    console.print(f"[bold cyan]{machine.name}[/]  {machine.title}\n", highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("source", style="dim", overflow="fold")
    for path, value in figures(machine):
        source = machine.source(path) or ""
        table.add_row(path, _value(path, value), f"[yellow]{source}[/]" if source.startswith("unverified") else source)
    console.print(table)
    usable = format_gib(machine.usable_hbm_bytes())
    reason = (
        f"{DEFAULT_MEMORY_FRACTION} of HBM, as with XLA_PYTHON_CLIENT_MEM_FRACTION=.9"
        if machine.tpu is None
        else "what the compiler counts as available"
    )
    per_device = format_gib(machine.host.memory_bytes_per_device)
    console.print(f"\nUsable HBM {usable} ({reason}); host memory {per_device} per device.", highlight=False)


def figures(machine: Hardware) -> Iterator[tuple[str, object]]:
    """The dotted path and the value of everything that has a source: numbers and lists, not names."""
    skipped = {"name", "title", "platform", "sources"}
    for key, value in dataclasses.asdict(machine).items():
        if key in skipped or value is None:
            continue
        items = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, figure in items:
            if figure is not None and not isinstance(figure, str):
                yield (f"{key}.{name}" if name else key), figure


def _measured(machine: Hardware, direction: str) -> bool:
    return any(getattr(machine.host_link, f"{direction}_{how}_bytes_per_s") for how in ("measured", "all_active"))


def _console(console: Console | None) -> Console:
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_WITHOUT_TERMINAL)
    return console


def _value(path: str, value: object) -> str:
    if isinstance(value, tuple):
        return ("." if path == "cuda.compute_capability" else "x").join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    assert isinstance(value, int | float), "figures are numbers"
    if path.endswith("bytes_per_s"):
        return f"{_giga(value)} GB/s"
    if path.startswith("flops_per_s"):
        return f"{_tera(value)} TFLOP/s"
    if path.endswith(("shared_memory_per_core_bytes", "optin_bytes")):
        return f"{value / 2**10:g} KiB"
    if path == "cuda.l2_cache_bytes":
        return f"{value / 2**20:,.1f} MiB"
    if path.endswith("_bytes"):
        return format_gib(value)
    return f"{value:,g} GHz" if path.endswith("_ghz") else f"{value:,}"


def _giga(value: float) -> str:
    return f"{value / 1e9:,.4g}" if value < 1e12 else f"{value / 1e9:,.0f}"


def _tera(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e12:,.0f}"
