"""The text of `results.md`, from the rows of `run.py` and `speed.py`."""

from collections.abc import Sequence
from typing import Any

_POINTS = 3.0
"""How far from the reported gain a prediction may be, in percentage points."""


def table(
    cases: Sequence[Any],
    rows: list[dict[str, Any]],
    speed: Sequence[dict[str, Any]],
    deepseek: Sequence[dict[str, Any]],
) -> str:
    """Everything that was compared, what was assumed, and what does not come out."""
    made = {(r["case"], r["placement"], r["same_options"]): r for r in rows}
    lines = [
        "# Timelines against published results", "",
        "Compiled only, nothing was run on a device. Command: `.venv/bin/python benchmarks/timeline/run.py`; versions: "
        + (", ".join(f"{k} {v}" for k, v in rows[0]["versions"].items() if k != "forebay") if rows else "none") + ".",
        "Efficiencies are the defaults of `forebay.timeline.Efficiency` ([docs/timeline.md](../../docs/timeline.md)), from",
        "data sheets and kernel benchmarks; none was chosen by a row of this table. Of the configurations one was changed after",
        "its first result, because its step did not fit the machine (70B on H200, see there). A gain is how much more a step",
        "does in the same time: (time with recompute) / (time with offload) - 1.", "",
        "| published result | reported | predicted, both sides with the same compiler options | difference in points | predicted, each "
        "side as forebay compiles it | sign | within 3 points |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for case in cases:
        gains = {same: _gain(case, made, same) for same in ("same", "own")}
        gain = gains["same"]
        if gain is None:
            lines.append(f"| {case.title} | {_percent(case.reported - 1)} | not run | | | | |")
            continue
        off = 100 * (gain - (case.reported - 1))
        lines.append(
            f"| {case.title} | {_percent(case.reported - 1)} | {_percent(gains['same'])} | {off:+.1f} | "
            f"{_percent(gains['own'])} | {'right' if gain > 0 else 'wrong'} | {'yes' if abs(off) <= _POINTS else 'no'} |"
        )
    lines += _deepseek(deepseek)
    lines += [
        "",
        "## What the steps consist of", "",
        "Seconds. `same`: both sides with the same options; `own`: each side as forebay compiles it.", "",
        "| case | placement | options | step | forward | backward | recompute | compiler's recompute | optimizer | waits for "
        "collectives | waits for copies | TFLOP/s per device | TFLOP executed | device GiB | host GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for case in cases:
        for placement in (case.before, case.after):
            for same in ("same", "own"):
                if (row := made.get((case.name, placement, same))) is not None:
                    lines.append(_row(row))
    lines += ["", "## What does not come out", ""]
    lines += [f"- **{c.title}.** {c.remark}." for c in cases if c.remark]
    if deepseek:
        lines.append(
            "- **DeepSeek-V3 671B.** Under the published flags XLA's own rematerialisation takes most of what offloading spares; as "
            "forebay compiles both sides +13 % are left, and most of what was reported stays unexplained at one batch. Between the "
            "two batches of the next row it does not ([docs/deepseek.md](../../docs/deepseek.md)). Its parts, compiled in five "
            "ways, are in [deepseek.md](deepseek.md)."
        )
    lines += ["", "## What is public, and what was assumed", ""]
    lines += [f"- **{c.title}.** Public: {c.known}. Assumed: {c.assumed}." for c in cases]
    if speed:
        lines += [
            "",
            "## Speed",
            "",
            "`benchmarks/timeline/speed.py`, from the file to the timeline in one process.",
            "",
        ]
        lines += [
            f"- {s['what']}: {s['mib']:.1f} MiB of HLO, {s['cpu_s']:.1f} s of one CPU core, peak memory {s['peak_mib']:.0f} MiB"
            for s in speed
        ]
    return "\n".join(lines) + "\n"


def _deepseek(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows of DeepSeek-V3, whose parts are in `deepseek.md`."""
    step = {r["cell"]: r["step_time_s"] for r in rows}
    published = ("maxtext:full", "maxtext:recipe")
    title = "DeepSeek-V3 671B, 128 GB200: offload, latency hiding and pipelining against full recompute, same batch"
    if not {*published, "profiled:full", "profiled:recipe"} <= set(step):
        return [f"| {title} | +57.0 % | not run | | | | |"]
    same = step[published[0]] / step[published[1]] - 1
    own = step["profiled:full"] / step["profiled:recipe"] - 1
    sign = "right" if same > 0 else "wrong"
    return [
        f"| {title} ([parts](deepseek.md)) | +57.0 % | {_percent(same)} | {100 * same - 57:+.1f} | {_percent(own)} | {sign} | no |",
        "| DeepSeek-V3 671B: the largest global batch without and with offload | 256 / 1024 | memory, not time: "
        "[benchmarks/deepseek](../deepseek/results.md) | | | | |",
    ]


def _gain(case: Any, made: dict[tuple[str, str, str], dict[str, Any]], same: str) -> float | None:
    sides = [made.get((case.name, placement, same)) for placement in (case.before, case.after)]
    if sides[0] is None or sides[1] is None:
        return None
    return sides[0]["step_time_s"] / sides[1]["step_time_s"] - 1


def _percent(gain: float | None) -> str:
    return "" if gain is None else f"{100 * gain:+.1f} %"


def _row(r: dict[str, Any]) -> str:
    compute, waits = r["compute_s"], r["waiting_s"]
    copies = waits.get("d2h", 0) + waits.get("h2d", 0)
    seconds = [
        r["step_time_s"], compute["forward"], compute["backward"], compute["recompute"], compute["compiler_remat"],
        compute["optimizer"], waits.get("collective", 0), copies,
    ]  # fmt: skip
    cells = [r["case"], r["placement"], r["same_options"], *(f"{s:.3f}" for s in seconds)]
    cells += [f"{r['tflops_per_device']:.0f}", f"{r['hardware_flops'] / 1e12:,.0f}"]
    cells += [f"{r['device_bytes'] / 2**30:.1f}", f"{r['host_bytes'] / 2**30:.1f}"]
    return "| " + " | ".join(cells) + " |"
