"""Which copies of a compiled step are not hidden, and which of the conditions for it does not hold."""

import dataclasses
from collections.abc import Sequence

from forebay.xla.windows import HIDDEN_WINDOW, Transfer


@dataclasses.dataclass(frozen=True)
class MemoryLimit:
    """XLA's limit on a step's temporaries and what it counts against it, in bytes; see `xla.options`."""

    limit_bytes: int
    counted_bytes: int

    @property
    def reached(self) -> bool:
        """Within 5 % of the limit: the scheduler keeps some distance."""
        return self.counted_bytes > 0.95 * self.limit_bytes


def exposed(transfers: Sequence[Transfer]) -> list[Transfer]:
    """The copies in loops over layers whose window is less than `HIDDEN_WINDOW`, the most bytes first."""
    found = [t for t in transfers if t.where == "loop" and t.window < HIDDEN_WINDOW]
    return sorted(found, key=lambda t: -t.num_bytes * t.count * (1 - t.window))


def exposed_bytes(transfers: Sequence[Transfer]) -> float:
    """Bytes that a step on one device copies in `exposed` loops, each copy's by what its window lacks of one."""
    return sum(t.num_bytes * t.count * (1 - t.window) for t in exposed(transfers))


def boundary_exposed_bytes(transfers: Sequence[Transfer]) -> int:
    """Bytes that a step on one device copies outside of loops over layers without a layer's work to hide behind.

    These are of the layers next to the boundary between forward and backward pass, whose copies the compiler has
    taken out of the loops: each copy's bytes times what its window lacks of one.
    """
    return round(sum(t.exposed_bytes for t in transfers if t.where == "boundary"))


def layer_bytes(transfers: Sequence[Transfer]) -> int:
    """Bytes of one layer that go to the host: one copy of each tensor, in the stack with the most."""
    found: dict[str, dict[str, int]] = {}
    for t in transfers:
        if t.direction == "d2h" and t.where != "update" and t.stack:
            found.setdefault(t.stack, {})[t.name] = t.num_bytes
    return max((sum(tensors.values()) for tensors in found.values()), default=0)


def explain(transfers: Sequence[Transfer], limit: MemoryLimit | None, remat_clones: int) -> str | None:
    """One line on the copies that are exposed: which is worst, and why. None when all are hidden."""
    found = exposed(transfers)
    if not found:
        return None
    worst = found[0]
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    arrow = "to the host" if worst.direction == "d2h" else "from the host"
    return (
        f"the copy of {worst.name!r} ({worst.stack}) {arrow} has {100 * worst.window:.0f} % of a layer's work to hide "
        f"behind{others}: {_reason(limit, remat_clones)}"
    )


def _reason(limit: MemoryLimit | None, remat_clones: int) -> str:
    if remat_clones or (limit and limit.reached):
        return "the memory limit of XLA's scheduler is reached, and it gives up overlap first: keep less on the device"
    return (
        "the scheduler starts it late or ends it early: what is moved may have to be exchanged between devices first, or the "
        "loop needs it in the layer that moves it, which forebay.scan_layers and forebay.apply arrange otherwise"
    )
