"""The order of dimensions in which layers store to the host on a TPU: row-major, or the compiler's own.

Row-major order lets a copy to the host run on while the next layer is worked on (`forebay.offload.scan`), and in some
programs costs copies from the host what it gains. Which it will be only the schedule says, so both are compiled where
the first leaves copies exposed.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.units import format_bytes, format_seconds
from forebay.xla.exposure import exposed_bytes

if TYPE_CHECKING:
    from forebay.xla.compile import CompiledStep


@dataclasses.dataclass(frozen=True)
class Trial:
    """What decides between two compiles of a step.

    Attributes:
        row_major: whether stores were put in row-major order.
        wrong: whether its copies cannot be right.
        fits: whether the compiler accepted it and it takes no more device memory than it may.
        exposed_bytes: of copies in loops; see `forebay.xla.exposure.exposed_bytes`.
        step_s: by its timeline, None where it has none.
    """

    row_major: bool
    wrong: bool
    fits: bool
    exposed_bytes: float
    step_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the other order is worth a compile."""
        return self.wrong or not self.fits or self.exposed_bytes > 0


def better(trials: Iterable[Trial]) -> Trial:
    """One that is right, and then fits, if any is and does; of these the one with fewest exposed bytes, of equals the
    faster by timeline, and the first."""
    return min(trials, key=lambda t: (t.wrong, not t.fits, t.exposed_bytes, math.inf if t.step_s is None else t.step_s))


@dataclasses.dataclass(frozen=True)
class Ordered:
    """The compile that was kept, whether its stores are in row-major order, and a line where that took two compiles
    and they are not."""

    compiled: "CompiledStep"
    row_major: bool
    note: str | None


def compile_ordered(
    compile_as: Callable[[bool, Path | None], "CompiledStep"],
    *,
    step_s: Callable[["CompiledStep"], float | None],
    budget_bytes: float = math.inf,
    save_hlo: Path | None = None,
) -> Ordered:
    """Compiles a step with row-major stores, where that leaves anything to be wished for also without, and keeps the
    better.

    Args:
        compile_as: compiles the step with row-major stores or without, and writes its HLO text to a file.
        step_s: the step time by timeline of a compiled step, in seconds.
        budget_bytes: the device memory that the step may take.
        save_hlo: where to write the HLO text of the one that is kept.
    """
    tried: list[tuple[Trial, CompiledStep, Path | None]] = []
    for row_major in (True, False):
        file = None if save_hlo is None else save_hlo.with_name(f"{save_hlo.name}.{row_major}")
        compiled = compile_as(row_major, file)
        fits = compiled.refused is None and compiled.device.total <= budget_bytes
        trial = Trial(row_major, bool(compiled.violations), fits, exposed_bytes(compiled.transfers))
        tried.append((trial, compiled, file))
        if not trial.is_open:
            break
    if len(tried) > 1:
        tried = [(dataclasses.replace(t, step_s=step_s(c)), c, file) for t, c, file in tried]
    best = better(t for t, _, _ in tried)
    for trial, _, file in tried:
        if save_hlo is not None and file is not None:
            file.replace(save_hlo) if trial is best else file.unlink()
    compiled = next(c for t, c, _ in tried if t is best)
    return Ordered(compiled, best.row_major, None if best.row_major else _note(tried[0][0], best))


def _note(row_major: Trial, kept: Trial) -> str:
    if row_major.wrong and not kept.wrong:
        why = "in row-major order copies would be wrong"
    elif not row_major.fits and kept.fits:
        why = "in row-major order the step does not fit"
    else:
        why = f"{format_bytes(kept.exposed_bytes)} of copies in loops are exposed, row-major {format_bytes(row_major.exposed_bytes)}"
        if kept.step_s is not None and row_major.step_s is not None:
            why += f"; a step takes {format_seconds(kept.step_s)} by timeline, row-major {format_seconds(row_major.step_s)}"
    return f"layers store to the host in the compiler's own order of dimensions: {why}"
