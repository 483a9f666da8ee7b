"""The `Timeline` of a step: when everything runs, and what the step waits for."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.errors import UserError

SCHEMA = "forebay.timeline/1"


@dataclasses.dataclass(frozen=True)
class Exposed:
    """All transfers of one tensor, or collectives of one kind, in a step: what they take and what is waited for.

    Attributes:
        name: the tensor, or what a collective is for.
        kind: "d2h", "h2d" or "collective"; "copy", "host" or "async" for what else goes on beside the computation.
        num_bytes: of one of them, per device.
        time_s, exposed_s: seconds of a step that they are under way, and in which nothing else can be done.
        window: the share of their time that the work between start and done can cover, 0 to 1, the mean over all.
        count: how many there are in a step.
        window_s, work_s: of one, the mean: from start to done, and the computation in between.
        layer_window: for copies between device and host: the share of a layer's FLOPs in the window, the
            least of all, as `forebay compile` reports it.
        phase, opcode, lane: the part of the step, the operation, and where it runs.
    """

    name: str
    kind: str
    num_bytes: int
    time_s: float
    exposed_s: float
    window: float
    count: float
    window_s: float
    work_s: float
    layer_window: float | None
    phase: str
    opcode: str
    lane: str


@dataclasses.dataclass(frozen=True)
class Span:
    """One interval on a lane. Times are the simulation's, in which most iterations of loops are skipped.

    Attributes:
        kind: "work", "transfer", or "wait" (of the compute lane, for the transfer of that name).
        count: how often it occurs in the step.
        loop, iteration: the loop around it, "" outside, and the iteration that was run.
    """

    lane: str
    kind: str
    name: str
    opcode: str
    start_s: float
    seconds: float
    count: float
    num_bytes: float
    flops: float
    phase: str
    tensor: str
    loop: str
    iteration: int


@dataclasses.dataclass(frozen=True)
class Gap:
    """Iterations of a loop that are like the one before and were not run."""

    loop: str
    start_s: float
    end_s: float
    iterations: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step of a training program on a machine, simulated or measured. Per device; seconds.

    Attributes:
        step_time_s: one step.
        tflops_per_device: model TFLOP/s; those of recomputing do not count.
        mfu: that over the machine's peak in bfloat16.
        compute_s: what the compute stream works, by part of the step: forward, backward, recompute,
            optimizer, and what the compiler recomputes of its own accord. With the waits it is the step.
        exposed: transfers and collectives, the most exposed first.
        source: "simulated" or "measured".
        hardware, devices: what it is for.
        waiting_s: what the compute stream waits, by kind.
        collective_s: seconds that collectives are under way, by part of the step.
        lanes: seconds that each lane works.
        kinds: seconds of the compute stream by kind of work.
        model_flops, hardware_flops: per device and step; without and with what is computed again.
        spans, gaps: the intervals that were simulated, for drawing.
        unknown: operations that are not known and were costed by their bytes: opcode, count, seconds.
        unknown_share: the share of the step that these make up.
        assumptions: what was assumed, in words.
    """

    step_time_s: float
    tflops_per_device: float
    mfu: float
    compute_s: Mapping[str, float]
    exposed: tuple[Exposed, ...]
    source: str
    hardware: str
    devices: int
    waiting_s: Mapping[str, float]
    collective_s: Mapping[str, float]
    lanes: Mapping[str, float]
    kinds: Mapping[str, float]
    model_flops: float
    hardware_flops: float
    spans: tuple[Span, ...] = ()
    gaps: tuple[Gap, ...] = ()
    unknown: tuple[Mapping[str, Any], ...] = ()
    unknown_share: float = 0.0
    assumptions: tuple[str, ...] = ()

    @property
    def exposed_s(self) -> float:
        """Seconds in which the compute stream waits."""
        return sum(self.waiting_s.values())

    def to_json(self) -> dict[str, Any]:
        """The content of a timeline file (schema `forebay.timeline/1`)."""
        data = dataclasses.asdict(self)
        for key in ("exposed", "spans"):
            data[key] = [_with_bytes(item) for item in data[key]]
        data["gaps"] = list(data["gaps"])
        data["unknown"] = [dict(item) for item in self.unknown]
        data["assumptions"] = list(self.assumptions)
        return {"schema": SCHEMA, **data}

    @classmethod
    def from_json(cls, data: Any, source: str = "the timeline") -> "Timeline":
        """The inverse of `to_json`.

        Raises:
            UserError: not a timeline, another version, or a missing or malformed key; names `source`.
        """
        if not isinstance(data, dict) or not str(data.get("schema", "")).startswith("forebay.timeline/"):
            raise UserError(
                f"{source} is not a timeline: it has no schema 'forebay.timeline/...': make one with forebay timeline --json"
            )
        if data["schema"] != SCHEMA:
            raise UserError(
                f"{source} has schema {data['schema']} and this version reads {SCHEMA}: make the timeline again"
            )
        try:
            known = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
            known["exposed"] = tuple(_read(Exposed, item) for item in data["exposed"])
            known["spans"] = tuple(_read(Span, item) for item in data.get("spans", ()))
            known["gaps"] = tuple(_read(Gap, item) for item in data.get("gaps", ()))
            known["unknown"] = tuple(data.get("unknown", ()))
            known["assumptions"] = tuple(data.get("assumptions", ()))
            timeline = cls(**known)
            for field in ("step_time_s", "tflops_per_device", "mfu"):
                float(getattr(timeline, field))
            return timeline
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{source} is damaged ({type(error).__name__}: {error}): make it again") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Timeline":
        """Reads a timeline file.

        Raises:
            UserError: the file is missing, is not JSON, or is not a timeline of this version.
        """
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise UserError(f"cannot read the timeline {str(path)!r}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"the timeline {str(path)!r} is not JSON ({error}): make it again") from None
        return cls.from_json(data, f"the timeline {str(path)!r}")


def _with_bytes(item: dict[str, Any]) -> dict[str, Any]:
    return {"bytes" if key == "num_bytes" else key: value for key, value in item.items()}


def _read(kind: Any, item: Mapping[str, Any]) -> Any:
    names = {"bytes" if f.name == "num_bytes" else f.name: f.name for f in dataclasses.fields(kind)}
    return kind(**{names[key]: value for key, value in item.items() if key in names})
