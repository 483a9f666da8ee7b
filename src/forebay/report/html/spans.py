"""What the timeline's drawing needs, in columns so that thousands of spans stay small. Times are whole nanoseconds."""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forebay.timeline import Exposed, Span, Timeline

_LANES = {
    "compute": "Compute", "d2h": "To the host (D2H)", "h2d": "From the host (H2D)",
    "interconnect": "Collectives, within a domain", "network": "Collectives, across domains",
    "copy": "Copies on the device", "async": "Other kernels, asynchronous", "host": "Host", "sparsecore": "SparseCore",
}  # fmt: skip
_TEXTS = ("kind", "name", "opcode", "phase", "tensor", "loop")


def drawing(timeline: Timeline, usage: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Spans, lanes, gaps and the sums of transfers, as the page's script reads them.

    `spans` has a column for each property; texts are numbers into `texts`. `of` is, for a wait, the transfer that
    is waited for (a number of a span, -1 where it was not drawn), and `row` the line of `rows`, which are those of
    `timeline.exposed` in order. With `usage`, bytes in use by instruction in the order of the schedule
    (`forebay.xla.usage`), `memory` is the curve over time.
    """
    spans = sorted(timeline.spans, key=lambda s: s.start_s)
    lanes = sorted({s.lane for s in spans}, key=_lane_order)
    number = {lane: n for n, lane in enumerate(lanes)}
    texts = _Texts()
    columns: dict[str, list[Any]] = {key: [texts[getattr(s, key)] for s in spans] for key in _TEXTS}
    of = _waited_for(spans)
    row_of = {_key(e): n for n, e in enumerate(timeline.exposed)}
    columns |= {
        "lane": [number[s.lane] for s in spans],
        "start": [_ns(s.start_s) for s in spans],
        "end": [_ns(s.start_s + s.seconds) for s in spans],
        "count": [round(s.count, 3) for s in spans],
        "bytes": [round(s.num_bytes) for s in spans],
        "flops": [round(s.flops) for s in spans],
        "iteration": [s.iteration for s in spans],
        "of": of,
        "row": [-1 if s.kind == "work" else row_of.get(_span_key(s), -1) for s in spans],
    }
    return {
        "step": _ns(timeline.step_time_s),
        "lanes": [{"name": lane, "label": _LANES.get(lane, lane)} for lane in lanes],
        "texts": texts.found,
        "spans": columns,
        "gaps": [
            [_ns(g.start_s), _ns(g.end_s), g.iterations, g.loop]
            for g in sorted(timeline.gaps, key=lambda g: g.start_s)
            if g.end_s > g.start_s
        ],
        "rows": [
            [_ns(e.time_s), _ns(e.exposed_s), round(e.count, 3), round(e.window, 4), _ns(e.window_s)]
            for e in timeline.exposed
        ],
        "memory": memory_curve(spans, usage) if usage else None,
    }


def memory_curve(spans: Iterable[Span], usage: Mapping[str, int]) -> dict[str, list[int]] | None:
    """Steps of the bytes in use: from each `time` on `bytes`, the most since what the compute stream did before."""
    order = {name: n for n, name in enumerate(usage)}
    sizes = list(usage.values())
    times, found, before = [], [], -1
    for s in spans:
        if s.kind != "work" or s.name not in order:
            continue
        here = order[s.name]
        since = before + 1 if before < here else here  # an iteration's first follows on the last of the one before
        size, before = max(sizes[since : here + 1]), here
        if not found or size != found[-1]:
            times.append(_ns(s.start_s) if found else 0)
            found.append(size)
    return {"time": times, "bytes": found} if found else None


class _Texts:
    """Texts by number, each once."""

    def __init__(self):
        self.found: list[str] = []
        self._numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.found)
            self.found.append(text)
        return self._numbers[text]


def _lane_order(lane: str) -> tuple[int, str]:
    known = list(_LANES)
    return (known.index(lane) if lane in known else len(known), lane)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _key(e: Exposed) -> tuple[str, str, str, int]:
    return (e.name, e.opcode, e.phase, e.num_bytes)


def _span_key(s: Span) -> tuple[str, str, str, int]:
    return (s.tensor or s.name, s.opcode, s.phase, int(s.num_bytes))


def _waited_for(spans: Sequence[Span]) -> list[int]:
    """For each wait the transfer of its instruction that runs then."""
    transfers: dict[str, list[int]] = defaultdict(list)
    for n, s in enumerate(spans):
        if s.kind == "transfer":
            transfers[s.name].append(n)
    return [_running(s, transfers.get(s.name, ()), spans) if s.kind == "wait" else -1 for s in spans]


def _running(wait: Span, candidates: Iterable[int], spans: Sequence[Span]) -> int:
    numbers = list(candidates)
    middle = wait.start_s + wait.seconds / 2
    at = bisect.bisect_right(numbers, middle, key=lambda n: spans[n].start_s) - 1
    if at < 0 or middle > spans[numbers[at]].start_s + spans[numbers[at]].seconds:
        return -1
    return numbers[at]
