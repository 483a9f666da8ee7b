"""Searching what surrounds a plan: the batch, the mesh, the number of microbatches.

Every point is planned under the cost model, which takes a second or two; the best are compiled, best
first, until one fits.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from forebay.errors import UserError
from forebay.hardware import Hardware
from forebay.pipeline import device_budget, host_budget
from forebay.planner.search import InfeasibleError, search
from forebay.train.config import ProgramConfig
from forebay.train.planning import cost_program, planned_program, silent
from forebay.train.program import Program, make_program
from forebay.xla.topology import compile_only_devices

MESH_AXES_SEARCHED = ("data", "fsdp", "tensor")
ACCUMULATE_SEARCHED = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Point:
    """One configuration under the cost model; bytes per device. `error` says why there is no plan for it."""

    mesh: str
    batch: int
    accumulate: int
    step_s: float | None = None
    device_bytes: float | None = None
    host_bytes: float | None = None
    error: str | None = None

    def to_row(self) -> dict[str, Any]:
        """The row of a table."""
        parts = [f"mesh {self.mesh}, batch {self.batch}"]
        parts += [f"{self.accumulate} microbatches"] if self.accumulate > 1 else []
        return {
            "name": ", ".join(parts), "step_time_s": self.step_s, "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes, "fits": True, "compiled": False, "mesh": self.mesh, "batch": self.batch,
            "accumulate": self.accumulate,
        }  # fmt: skip

    @property
    def seconds_per_sequence(self) -> float:
        return math.inf if self.step_s is None else self.step_s / self.batch


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The program planned, compiled and found to fit, and everything that was looked at."""

    program: Program
    points: tuple[Point, ...]

    def table(self) -> list[dict[str, Any]]:
        """What was considered, the plan first: the presets beside it, and the configurations where there were several."""
        plan, batch = self.program.plan, self.program.config.batch
        predicted = plan.predicted or {}
        numbers = {k: predicted[k] for k in ("step_time_s", "device_bytes", "host_bytes")}
        rows = [{"name": "this plan", **numbers, "fits": True, "compiled": plan.verified, "batch": batch}]
        rows += [{**a, "compiled": False, "batch": batch} for a in plan.alternatives]
        rows += [p.to_row() for p in self.points if p.step_s is not None]
        return rows


def search_around(
    config: ProgramConfig,
    hardware: Hardware,
    count: int,
    *,
    hbm: str | None,
    host: str | None,
    memory_fraction: float | None,
    variants: int,
    max_compiles: int,
    time_limit_s: float,
    max_batch: bool,
    searches: Sequence[str],
    progress: Callable[[str], None] = silent,
) -> Outcome:
    """Plans `config`, varied as asked, and compiles the best.

    Args:
        config: the training step.
        hardware: the machine.
        count: how many devices.
        hbm, host, memory_fraction, variants, max_compiles, time_limit_s: see `planned_program`.
        max_batch: the largest batch per device that fits is looked for.
        searches: "mesh" tries the meshes of `MESH_AXES_SEARCHED` that divide the devices, "accumulate"
            the numbers of microbatches that divide the batch.
        progress: is called with a line whenever something takes long.

    Raises:
        InfeasibleError: nothing fits.
        UserError: anything wrong in the configuration.
    """
    devices = compile_only_devices(hardware, count)
    budget, on_host = device_budget(hardware, hbm, memory_fraction), host_budget(hardware, host)
    make_program(dataclasses.replace(config, plan="auto"), devices)  # what is wrong in it is wrong everywhere

    def estimate(candidate: ProgramConfig) -> Point:
        mesh = candidate.mesh or f"fsdp={len(devices)}"
        point = Point(mesh, candidate.batch, candidate.accumulate)
        try:
            costed = cost_program(make_program(candidate, devices), hardware, budget, on_host)
            found = search(costed, None, variants=variants, time_limit_s=time_limit_s)
        except UserError as error:
            return dataclasses.replace(point, error=str(error))
        p = found.predicted
        return dataclasses.replace(point, step_s=p.step_s, device_bytes=p.device_bytes, host_bytes=p.host_bytes)

    def compiled(candidate: ProgramConfig) -> Program:
        return planned_program(
            candidate, devices, hardware, hbm=hbm, host=host, memory_fraction=memory_fraction, variants=variants,
            max_compiles=max_compiles, time_limit_s=time_limit_s, progress=progress,
        )  # fmt: skip

    if max_batch:
        config, points = _largest_batch(config, len(devices), estimate, progress)
        return _first_that_fits(_smaller(config, len(devices)), compiled, points)
    candidates = list(_varied(config, len(devices), searches))
    if len(candidates) == 1:
        return Outcome(compiled(config), ())
    points = []
    for k, candidate in enumerate(candidates):
        progress(f"planning configuration {k + 1} of {len(candidates)}")
        points.append(estimate(candidate))
    order = sorted(range(len(points)), key=lambda k: points[k].seconds_per_sequence)
    good = [candidates[k] for k in order if points[k].error is None]
    if not good:
        raise InfeasibleError(f"none of the {len(points)} configurations fits; of the first: {points[0].error}")
    return _first_that_fits(iter(good[:5]), compiled, points)


def _first_that_fits(
    candidates: Iterator[ProgramConfig], compiled: Callable[[ProgramConfig], Program], points: Sequence[Point]
) -> Outcome:
    last: InfeasibleError | None = None
    for candidate in candidates:
        try:
            return Outcome(compiled(candidate), tuple(points))
        except InfeasibleError as error:
            last = error
    raise last or InfeasibleError("nothing fits: use more devices")


def _largest_batch(
    config: ProgramConfig, devices: int, estimate: Callable[[ProgramConfig], Point], progress: Callable[[str], None]
) -> tuple[ProgramConfig, list[Point]]:
    """Doubling, then halving the step: the largest number of sequences per device that the model says fits."""
    points: list[Point] = []

    def fits(per_device: int) -> bool:
        batch = per_device * devices * config.accumulate
        progress(f"planning batch {batch} ({per_device} per device)")
        points.append(estimate(dataclasses.replace(config, batch=batch)))
        return points[-1].error is None

    if not fits(1):
        raise InfeasibleError(f"not even one sequence per device fits: {points[-1].error}")
    low, high = 1, 2
    while fits(high) and high < 2**16:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return dataclasses.replace(config, batch=low * devices * config.accumulate), points


def _smaller(config: ProgramConfig, devices: int) -> Iterator[ProgramConfig]:
    """The configuration, then some with less and less per device: for when compiling says no."""
    per_device = config.batch // (devices * config.accumulate)
    while per_device > 0:
        yield dataclasses.replace(config, batch=per_device * devices * config.accumulate)
        per_device = min(per_device - 1, per_device * 7 // 8)


def _varied(config: ProgramConfig, devices: int, searches: Sequence[str]) -> Iterator[ProgramConfig]:
    meshes = list(_meshes(devices)) if "mesh" in searches else [config.mesh]
    counts = (
        [a for a in ACCUMULATE_SEARCHED if config.batch % a == 0] if "accumulate" in searches else [config.accumulate]
    )
    for mesh in meshes:
        for accumulate in counts:
            yield dataclasses.replace(config, mesh=mesh, accumulate=accumulate)


def _meshes(devices: int) -> Iterator[str]:
    """All ways to write the number of devices as a product over the axes; tensor within eight neighbours."""
    for tensor in (t for t in range(1, 9) if devices % t == 0):
        for fsdp in (f for f in range(1, devices // tensor + 1) if (devices // tensor) % f == 0):
            sizes = {"data": devices // tensor // fsdp, "fsdp": fsdp, "tensor": tensor}
            yield ",".join(f"{a}={n}" for a, n in sizes.items() if n > 1) or "fsdp=1"
