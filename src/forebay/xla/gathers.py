"""The order of dimensions in which layers store to the host on a TPU: row-major, or the compiler's own.

Row-major order lets a copy to the host run on while the next layer is worked on (`forebay.offload.scan`), and in some
programs costs copies from the host what it gains. Which it will be only the schedule says, so both are compiled where
the first leaves copies exposed that the step waits for.
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


MANY_TENSORS = 4
"""So many that layers store, and the compiler's own order is tried first: of the whole steps in benchmarks/overlap it then
hid all that it could, and row-major order where query, key and value alone move."""
WAITS = 2e-3
"""The share of a step from which on it is said to wait for copies."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """What decides between two compiles of a step.

    Attributes:
        row_major: whether stores were put in row-major order.
        wrong: whether its copies cannot be right.
        fits: whether the compiler accepted it and it takes no more device memory than it may.
        exposed_bytes: of copies in loops; see `forebay.xla.exposure.exposed_bytes`.
        step_s: by its timeline, None where it has none.
        waits_s: of it the seconds waiting for copies between device and host.
    """

    row_major: bool
    wrong: bool
    fits: bool
    exposed_bytes: float
    step_s: float | None = None
    waits_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the other order is worth a compile."""
        waits = self.step_s is None or self.waits_s is None or self.waits_s > WAITS * self.step_s
        return self.wrong or not self.fits or (self.exposed_bytes > 0 and waits)


def better(trials: Iterable[Trial]) -> Trial:
    """One that is right, and then fits, if any is and does; of these the one with fewest exposed bytes, of equals the
    faster by timeline, and the first."""
    return min(trials, key=lambda t: (t.wrong, not t.fits, t.exposed_bytes, math.inf if t.step_s is None else t.step_s))


@dataclasses.dataclass(frozen=True)
class Ordered:
    """The compile that was kept, whether its stores are in row-major order, and a line where there were two compiles and
    the second was kept."""

    compiled: "CompiledStep"
    row_major: bool
    note: str | None


def compile_ordered(
    compile_as: Callable[[bool, Path | None], "CompiledStep"],
    *,
    tensors: int,
    simulate: Callable[["CompiledStep"], tuple[float, float] | None],
    budget_bytes: float = math.inf,
    save_hlo: Path | None = None,
) -> Ordered:
    """Compiles a step with its stores in one order, where that leaves anything to be wished for also in the other, and
    keeps the better.

    Args:
        compile_as: compiles the step with row-major stores or without, and writes its HLO text to a file.
        tensors: how many a layer stores; see `MANY_TENSORS`.
        simulate: a compiled step's time by its timeline, and of it the wait for copies between device and host, in
            seconds; None where it has none.
        budget_bytes: the device memory that the step may take.
        save_hlo: where to write the HLO text of the one that is kept.
    """
    tried: list[tuple[Trial, CompiledStep, Path | None]] = []
    for row_major in orders(tensors):
        file = None if save_hlo is None else save_hlo.with_name(f"{save_hlo.name}.{row_major}")
        compiled = compile_as(row_major, file)
        fits = compiled.refused is None and compiled.device.total <= budget_bytes
        step_s, waits_s = simulate(compiled) or (None, None)
        wrong = bool(compiled.violations)
        trial = Trial(row_major, wrong, fits, exposed_bytes(compiled.transfers), step_s, waits_s)
        tried.append((trial, compiled, file))
        if not trial.is_open:
            break
    best = better(t for t, _, _ in tried)
    for trial, _, file in tried:
        if save_hlo is not None and file is not None:
            file.replace(save_hlo) if trial is best else file.unlink()
    compiled = next(c for t, c, _ in tried if t is best)
    first = tried[0][0]
    return Ordered(compiled, best.row_major, None if best is first else _note(first, best))


def orders(tensors: int) -> tuple[bool, bool]:
    """Whether stores are in row-major order in the first compile, and in the second, where layers store so many tensors."""
    return (False, True) if tensors >= MANY_TENSORS else (True, False)


def _note(other: Trial, kept: Trial) -> str:
    names = {True: "row-major order", False: "the compiler's own order of dimensions"}
    if other.wrong and not kept.wrong:
        why = f"in {names[other.row_major]} copies would be wrong"
    elif not other.fits and kept.fits:
        why = f"in {names[other.row_major]} the step does not fit"
    else:
        why = (
            f"{format_bytes(kept.exposed_bytes)} of copies in loops are exposed, in the other "
            f"{format_bytes(other.exposed_bytes)}"
        )
        if kept.step_s is not None and other.step_s is not None:
            why += (
                f"; a step takes {format_seconds(kept.step_s)} by timeline, in the other {format_seconds(other.step_s)}"
            )
    return f"layers store to the host in {names[kept.row_major]}: {why}"
