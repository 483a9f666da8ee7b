"""From what happened in a simulation to the `Timeline`: sums per step, intervals to draw."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from forebay.hardware import Hardware
from forebay.timeline.engine import COMPUTE
from forebay.timeline.simulate import Event, Run
from forebay.timeline.timeline import Exposed, Gap, Span, Timeline
from forebay.xla.schedule import PHASES, Op, Schedule

_DRAWN_DEPTH = 1
"""Loops within this many others are drawn as one interval, where nothing is under way beside them."""


def summarise(run: Run, schedule: Schedule, hardware: Hardware, model_flops: float | None = None) -> Timeline:
    """The timeline of a simulated step.

    Args:
        model_flops: FLOPs of the model per device and step; by default those of the program less what it
            computes again.
    """
    compute: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    flops: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    collective: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    waiting: dict[str, float] = defaultdict(float)
    lanes: dict[str, float] = defaultdict(float)
    kinds: dict[str, float] = defaultdict(float)
    unknown: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for e in run.events:
        seconds, op = e.count * e.seconds, e.op
        if e.kind == "wait":
            waiting[kind_of(op, e.lane)] += seconds
            continue
        if e.kind == "window" or op.work is None:
            continue
        lanes[e.lane] += seconds
        flops[op.phase] += e.count * op.work.flops
        if e.kind == "work":
            compute[op.phase] += seconds
            kinds[op.work.kind] += seconds
        if op.work.kind == "collective":
            collective[op.phase] += seconds
        if op.work.kind == "unknown":
            entry = unknown[f"{op.opcode} {op.name}".strip()]
            entry[0] += e.count
            entry[1] += seconds
    again = flops["recompute"] + flops["compiler_remat"]
    assumptions = [*run.notes, *schedule.notes]
    if model_flops is None:
        model_flops = sum(flops.values()) - again
        assumptions.append("the model's FLOPs are those of the program that it does not compute again")
    rate = model_flops / run.seconds if run.seconds else 0.0
    return Timeline(
        step_time_s=run.seconds,
        tflops_per_device=rate / 1e12,
        mfu=rate / hardware.flops_per_s["bf16"],
        compute_s=compute,
        exposed=tuple(_exposed(run.events)),
        source="simulated",
        hardware=hardware.name,
        devices=schedule.devices,
        waiting_s=dict(waiting),
        collective_s=collective,
        lanes=dict(lanes),
        kinds=dict(kinds),
        model_flops=model_flops,
        hardware_flops=sum(flops.values()),
        spans=tuple(_spans(run.events)),
        gaps=tuple(Gap(s.loop, s.start, s.end, s.iterations) for s in run.skipped if s.depth <= _DRAWN_DEPTH),
        unknown=tuple({"opcode": o, "count": n, "time_s": s} for o, (n, s) in unknown.items()),
        unknown_share=sum(s for _, s in unknown.values()) / run.seconds if run.seconds else 0.0,
        assumptions=tuple(assumptions),
    )


def kind_of(op: Op, lane: str) -> str:
    """What a transfer is to a reader: d2h, h2d, collective; else its lane."""
    kind = op.work.kind if op.work else ""
    return kind if kind in ("d2h", "h2d", "collective") else "host" if kind in ("h2h", "host") else lane


@dataclasses.dataclass
class _Sum:
    op: Op
    lane: str
    count: float = 0.0
    time_s: float = 0.0
    exposed_s: float = 0.0
    windows: float = 0.0
    covered: float = 0.0
    window_s: float = 0.0
    work_s: float = 0.0
    layer_window: float | None = None


def _exposed(events: Iterable[Event]) -> list[Exposed]:
    sums: dict[tuple[str, str, str, str, float], _Sum] = {}
    for e in events:
        if e.kind == "work" or e.op.work is None:
            continue
        key = (_name(e.op), kind_of(e.op, e.lane), e.op.opcode, e.op.phase, num_bytes(e.op))
        s = sums.setdefault(key, _Sum(e.op, e.lane))
        if e.kind == "wait":
            s.exposed_s += e.count * e.seconds
        elif e.kind == "transfer":
            s.lane = e.lane
            s.count += e.count
            s.time_s += e.count * e.seconds
            if e.op.layer_window is not None:
                s.layer_window = min(e.op.layer_window, 1.0 if s.layer_window is None else s.layer_window)
        else:
            s.windows += e.count
            s.window_s += e.count * e.seconds
            s.work_s += e.count * e.alone
    found = [
        Exposed(
            name=name, kind=kind, num_bytes=int(size), time_s=s.time_s, exposed_s=s.exposed_s,
            window=_share(s.work_s, s.time_s), count=s.count, window_s=s.window_s / max(s.windows, 1.0),
            work_s=s.work_s / max(s.windows, 1.0), layer_window=s.layer_window, phase=phase, opcode=opcode, lane=s.lane,
        )
        for (name, kind, opcode, phase, size), s in sums.items()
    ]  # fmt: skip
    return sorted(found, key=lambda e: (-e.exposed_s, -e.time_s, e.name))


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 1.0


def _name(op: Op) -> str:
    return op.name or op.instruction


def num_bytes(op: Op) -> float:
    """What an op moves: over a link, in a collective, or in device memory."""
    assert op.work is not None
    if op.work.collective is not None:
        return op.work.collective.num_bytes
    return op.work.link_bytes or op.work.hbm_bytes


def _spans(events: Iterable[Event]) -> Iterable[Span]:
    """Work in loops inside loops is drawn as one interval for each stretch without a start, a done or a wait."""
    inner: list[Event] = []
    for e in events:
        if e.kind == "work" and e.depth > _DRAWN_DEPTH and (not inner or inner[-1].loop == e.loop):
            inner.append(e)
            continue
        if inner:
            yield _together(inner)
            inner = [e] if e.kind == "work" and e.depth > _DRAWN_DEPTH else []
            if inner:
                continue
        if e.kind != "window" and (e.kind == "transfer" or e.seconds > 0):
            yield _span(e)
    if inner:
        yield _together(inner)


def _together(events: list[Event]) -> Span:
    first, last = events[0], events[-1]
    longest = max(events, key=lambda e: e.count * e.seconds)
    return dataclasses.replace(
        _span(longest), name=first.loop, opcode="while", start_s=first.start,
        seconds=last.start + last.seconds - first.start, count=min(e.count for e in events),
        num_bytes=sum(e.count * num_bytes(e.op) for e in events) / min(e.count for e in events),
        flops=sum(e.count * e.op.work.flops for e in events if e.op.work) / min(e.count for e in events),
        iteration=first.iteration,
    )  # fmt: skip


def _span(e: Event) -> Span:
    op = e.op
    return Span(
        lane=COMPUTE if e.kind == "wait" else e.lane, kind=e.kind, name=op.instruction, opcode=op.opcode,
        start_s=e.start, seconds=e.seconds, count=e.count, num_bytes=num_bytes(op), flops=op.work.flops if op.work else 0.0, phase=op.phase,
        tensor=op.name, loop=e.loop, iteration=e.iteration,
    )  # fmt: skip
