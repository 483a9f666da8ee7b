"""What a training run shows while it goes: a live line on a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class TrainingDisplay:
    """Context manager around the steps of a run; `update` takes each step's record."""

    def __init__(self, console: Console, steps: int, done: int, plain_every_s: float = 5.0):
        self._console = console
        self._plain_every_s = plain_every_s
        self._last_plain = 0.0
        self._steps = steps
        self._validation: float | None = None
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TimeRemainingColumn(), console=console
        )
        self._task = self._progress.add_task("training", total=steps, completed=done)
        self._live = Live(self._screen({}), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "TrainingDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, record: dict[str, Any]) -> None:
        if record.get("validation_loss") is not None:
            self._validation = record["validation_loss"]
        if self._console.is_terminal:
            self._progress.update(self._task, completed=record["step"])
            self._live.update(self._screen(record))
            return
        now = time.monotonic()
        validated = record.get("validation_loss") is not None
        if validated or record["step"] == self._steps or now - self._last_plain >= self._plain_every_s:
            self._last_plain = now
            self._console.print(
                "  ".join(f"{k} {v}" for k, v in self._figures(record) if v), highlight=False, soft_wrap=True
            )

    def _figures(self, record: dict[str, Any]) -> list[tuple[str, str]]:
        def number(key: str, form: str) -> str:
            return "" if record.get(key) is None else format(record[key], form)

        peak = record.get("device_peak_bytes")
        return [
            ("step", f"{record.get('step', 0)}/{self._steps}"),
            ("loss", number("loss", ".3f")),
            ("validation", "" if self._validation is None else f"{self._validation:.3f}"),
            ("grad norm", number("grad_norm", ".2f")),
            ("tokens/s", number("tokens_per_s", ",.0f")),
            ("TFLOP/s per device", number("model_tflops_per_device", ",.3g")),
            ("MFU", number("mfu", ".1%")),
            ("HBM peak", "" if peak is None else f"{peak / 2**30:.1f} GiB"),
        ]

    def _screen(self, record: dict[str, Any]) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row(self._progress)
        figures = Table.grid(padding=(0, 2))
        row = [f"[dim]{k}[/dim] {v}" for k, v in self._figures(record)[1:] if v]
        if row:
            figures.add_row(*row)
        table.add_row(figures)
        return table
