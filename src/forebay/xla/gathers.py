"""How a TPU's step gathers the weights that its products need: before a product, or piece by piece within it.

Pieces that are permuted around a ring while those there are multiplied ("collective matmul") need more and smaller
kernels. But from 64 devices of a 3D torus on libtpu makes all-gathers of weights all-reduces of the whole matrix, for which
the step stands still, and copies to the host must be over before; there pieces can be much faster. Which it will be only
the schedule says, so both are compiled where the first leaves copies exposed that the step waits for.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import CompilerFailedError
from forebay.units import format_bytes, format_seconds
from forebay.xla.exposure import exposed_bytes

if TYPE_CHECKING:
    from forebay.xla.compile import CompiledStep


WAITS = 2e-3
"""The share of a step from which on it is said to wait for copies."""
_REDUCED_FROM = 64
"""Devices, of v5p and TPU7x. Seen of libtpu 0.0.50.1, whose pass `all_gather_decomposer` does it; 32 devices of a 3D
torus, and 64 to 256 of a 2D one (v5e, v6e), keep their all-gathers of matrices."""


def are_reduced(devices: Sequence[Any]) -> bool:
    """Whether libtpu makes all-gathers of weights over these devices all-reduces."""
    return devices[0].platform == "tpu" and len(devices) >= _REDUCED_FROM and any(d.coords[2] for d in devices)


@dataclasses.dataclass(frozen=True)
class Trial:
    """What decides between two compiles of a step.

    Attributes:
        in_pieces: whether products gather their weights in pieces.
        wrong: whether its copies cannot be right.
        fits: whether the compiler accepted it and it takes no more device memory than it may.
        exposed_bytes: of copies in loops; see `forebay.xla.exposure.exposed_bytes`.
        step_s: by its timeline, None where it has none.
        waits_s: of it the seconds waiting for copies between device and host.
    """

    in_pieces: bool
    wrong: bool
    fits: bool
    exposed_bytes: float
    step_s: float | None = None
    waits_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the other is worth a compile."""
        waits = self.step_s is None or self.waits_s is None or self.waits_s > WAITS * self.step_s
        return self.wrong or not self.fits or (self.exposed_bytes > 0 and waits)


def better(trials: Iterable[Trial]) -> Trial:
    """One that is right, and then fits, if any is and does; of these the fastest by timeline, or, where one has none, the
    one with fewest exposed bytes; of equals the first."""
    found = list(trials)
    timed = all(t.step_s is not None for t in found if t.fits)
    return min(found, key=lambda t: (t.wrong, not t.fits, t.step_s if timed and t.fits else t.exposed_bytes))


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The compile that was kept, whether its products gather their weights in pieces, and a line where that was tried after
    another compile and kept, or the compiler failed on it."""

    compiled: "CompiledStep"
    in_pieces: bool
    note: str | None


def compile_gathers(
    compile_as: Callable[[bool, Path | None], "CompiledStep"],
    *,
    simulate: Callable[["CompiledStep"], tuple[float, float] | None],
    budget_bytes: float = math.inf,
    save_hlo: Path | None = None,
) -> Gathered:
    """Compiles a step whose weights are gathered before their products, where that leaves anything to be wished for also
    one whose weights are gathered in pieces, and keeps the better.

    Args:
        compile_as: compiles the step with gathers in pieces or without, and writes its HLO text to a file.
        simulate: a compiled step's time by its timeline, and of it the wait for copies between device and host, in
            seconds; None where it has none.
        budget_bytes: the device memory that the step may take.
        save_hlo: where to write the HLO text of the one that is kept.
    """
    tried: list[tuple[Trial, CompiledStep, Path | None]] = []
    note = None
    for in_pieces in (False, True):
        file = None if save_hlo is None else save_hlo.with_name(f"{save_hlo.name}.{in_pieces}")
        try:
            compiled = compile_as(in_pieces, file)
        except CompilerFailedError as error:
            if not tried:
                raise
            note = f"weights were not gathered in pieces (collective matmul), which might hide more copies: {error}"
            break
        fits = compiled.refused is None and compiled.device.total <= budget_bytes
        step_s, waits_s = simulate(compiled) or (None, None)
        wrong = bool(compiled.violations)
        trial = Trial(in_pieces, wrong, fits, exposed_bytes(compiled.transfers), step_s, waits_s)
        tried.append((trial, compiled, file))
        if not trial.is_open:
            break
    best = better(t for t, _, _ in tried)
    for trial, _, file in tried:
        if save_hlo is not None and file is not None:
            file.replace(save_hlo) if trial is best else file.unlink()
    compiled = next(c for t, c, _ in tried if t is best)
    first = tried[0][0]
    return Gathered(compiled, best.in_pieces, note if best is first else _note(first, best))


def _note(other: Trial, kept: Trial) -> str:
    if other.wrong and not kept.wrong:
        why = "without, copies would be wrong"
    elif not other.fits and kept.fits:
        why = "without, the step does not fit"
    else:
        why = (
            f"{format_bytes(kept.exposed_bytes)} of copies in loops are exposed, without "
            f"{format_bytes(other.exposed_bytes)}"
        )
        if kept.step_s is not None and other.step_s is not None:
            why += f"; a step takes {format_seconds(kept.step_s)} by timeline, without {format_seconds(other.step_s)}"
    return f"weights are gathered in pieces (collective matmul): {why}"
