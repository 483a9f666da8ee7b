"""A timeline as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (Chromium documentation): complete events ("ph": "X") with times in microseconds.
"""

from typing import Any

from forebay.timeline.timeline import Timeline

_PROCESS = 1


def trace(timeline: Timeline) -> dict[str, Any]:
    """The trace: one thread for each lane, one for the iterations that were skipped."""
    lanes = ["compute", *sorted({s.lane for s in timeline.spans} - {"compute"})]
    number = {lane: n for n, lane in enumerate(lanes, start=1)}
    events: list[dict[str, Any]] = [_meta("process_name", 0, f"{timeline.hardware}, one of {timeline.devices} devices")]
    events += [_meta("thread_name", n, lane) for lane, n in number.items()]
    events += [{**_meta("thread_sort_index", n, ""), "args": {"sort_index": n}} for n in number.values()]
    for s in timeline.spans:
        name = f"wait: {s.tensor or s.name}" if s.kind == "wait" else s.tensor or s.name
        args = {
            "instruction": s.name, "opcode": s.opcode, "phase": s.phase, "bytes": s.num_bytes, "flops": s.flops,
            "times a step": s.count, "loop": s.loop, "iteration": s.iteration,
        }  # fmt: skip
        events.append(_complete(name, s.kind, number[s.lane], s.start_s, s.seconds, args))
    skipped = len(lanes) + 1
    if timeline.gaps:
        events.append(_meta("thread_name", skipped, "skipped iterations"))
    for g in timeline.gaps:
        args = {"iterations": g.iterations}
        events.append(
            _complete(f"{g.iterations} more of {g.loop}", "skipped", skipped, g.start_s, g.end_s - g.start_s, args)
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _complete(name: str, category: str, thread: int, start_s: float, seconds: float, args: Any) -> dict[str, Any]:
    return {
        "name": name, "cat": category, "ph": "X", "pid": _PROCESS, "tid": thread, "ts": start_s * 1e6,
        "dur": seconds * 1e6, "args": args,
    }  # fmt: skip
