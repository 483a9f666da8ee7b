"""The parts of the report that are text and tables. They say all there is to read without a script."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forebay.report.html.markup import Markup, el, join
from forebay.report.plan import pareto_front, placed
from forebay.timeline import Exposed, Timeline
from forebay.units import GiB, MiB, format_bytes, format_count, format_seconds

_WAITS = 10
PHASES = {
    "forward": "forward", "backward": "backward", "recompute": "recompute", "optimizer": "optimizer",
    "compiler_remat": "recomputed by the compiler",
}  # fmt: skip
_KINDS = {"d2h": "D2H", "h2d": "H2D"}


def headline(timeline: Timeline, compiled: Mapping[str, Any] | None) -> Markup:
    """The numbers that the report is opened for."""
    share = timeline.exposed_s / timeline.step_time_s if timeline.step_time_s else 0.0
    cards = [
        card("Step time", format_seconds(timeline.step_time_s), f"on {timeline.devices} x {timeline.hardware}"),
        card("Model TFLOP/s per device", f"{timeline.tflops_per_device:,.0f}", "recompute not counted"),
        card("MFU", f"{timeline.mfu:.1%}", "of the peak in bfloat16"),
        card("Exposed", format_seconds(timeline.exposed_s), f"{share:.1%} of the step waits", "exposed"),
    ]
    if compiled is not None:
        hbm = compiled.get("hbm_bytes")
        total = compiled["device_bytes"]["total"]
        note = "per device" if hbm is None else f"of {format_bytes(hbm)} usable"
        cards.append(card("HBM at the peak", format_bytes(total), note, None if total <= (hbm or total) else "over"))
    return el("div", *cards, class_="cards")


def card(name: str, value: str, note: str, style: str | None = None) -> Markup:
    """One number of the headline."""
    inside = (el("div", name, class_="name"), el("div", value, class_="value"), el("div", note, class_="note"))
    return el("div", *inside, class_=f"card {style}" if style else "card")


def parts_of(timeline: Timeline) -> list[tuple[str, str, float]]:
    """What the step is made of: name, style, seconds; compute by part first, then waits, the longest first."""
    parts = [(PHASES.get(p, p), p.replace("_", "-"), s) for p, s in timeline.compute_s.items()]
    parts += [
        (f"exposed: {_KINDS.get(kind, kind)}", "exposed", s)
        for kind, s in sorted(timeline.waiting_s.items(), key=lambda item: -item[1])
    ]
    return [p for p in parts if p[2] > 0]


def bar(parts: Sequence[tuple[str, str, float]], style: str | None = None) -> Markup:
    """Parts in the proportions of their seconds."""
    whole = sum(seconds for *_, seconds in parts) or 1.0
    spans = [
        el(
            "span",
            class_=f"fill-{style}",
            style=f"flex-grow:{seconds / whole:.6f}",
            title=f"{name}: {seconds / whole:.1%}",
        )
        for name, style, seconds in parts
    ]
    label = ", ".join(f"{name} {seconds / whole:.1%}" for name, _, seconds in parts)
    return el("div", *spans, class_="bar", role="img", aria_label=label, style=style)


def composition(timeline: Timeline) -> Markup:
    """What the step is made of: a bar, and its parts in words."""
    parts = parts_of(timeline)
    whole = sum(seconds for *_, seconds in parts) or 1.0
    items = [
        el(
            "li",
            el("i", class_=f"fill-{style}"), el("span", name), el("b", format_seconds(seconds)),
            el("span", f"{seconds / whole:.1%}", class_="dim"),
        )
        for name, style, seconds in parts
    ]  # fmt: skip
    return join(bar(parts), el("ul", *items, class_="parts"))


def waits(timeline: Timeline) -> Markup:
    """What the step waits for most."""
    exposed = [(n, e) for n, e in enumerate(timeline.exposed) if e.exposed_s > 0]
    if not exposed:
        return el("p", "The step waits for nothing.")
    others = exposed[_WAITS:]
    rest = None
    if others:
        seconds = format_seconds(sum(e.exposed_s for _, e in others))
        rest = el("p", f"and {len(others)} more, {seconds} together", class_="dim")
    return join(_transfers(exposed[:_WAITS], timeline.step_time_s, "waits"), rest)


def transfers(timeline: Timeline) -> Markup:
    """All copies and collectives."""
    if not timeline.exposed:
        return el("p", "Nothing is copied or communicated beside the computation.")
    return _transfers(list(enumerate(timeline.exposed)), timeline.step_time_s, "transfers")


def kind_of_transfer(e: Exposed) -> str:
    """The direction of a copy, what a collective does."""
    return e.opcode.removesuffix("-start") if e.kind == "collective" else _KINDS.get(e.kind, e.kind)


def _transfers(rows: Sequence[tuple[int, Exposed]], step_time_s: float, name: str) -> Markup:
    heads = [
        ("what", ""), ("kind", ""), ("part", ""), ("times", "n"), ("each", "n"), ("takes", "n"), ("exposed", "n"),
        ("of the step", "n"), ("window", "n"),
    ]  # fmt: skip
    body = []
    for number, e in rows:
        kind = kind_of_transfer(e)
        share = e.exposed_s / step_time_s if step_time_s else 0.0
        exposed = el(
            "td", format_seconds(e.exposed_s) if e.exposed_s else "-", data_v=e.exposed_s,
            class_="n red" if e.exposed_s else "n dim",
        )  # fmt: skip
        cells = (
            el("td", el("code", e.name)),
            el("td", kind),
            el("td", PHASES.get(e.phase, e.phase)),
            el("td", f"{e.count:,.0f}", data_v=e.count, class_="n"),
            el("td", format_bytes(e.num_bytes), data_v=e.num_bytes, class_="n"),
            el("td", format_seconds(e.time_s), data_v=e.time_s, class_="n"),
            exposed,
            el("td", f"{share:.1%}" if e.exposed_s else "-", data_v=share, class_="n" if e.exposed_s else "n dim"),
            el("td", f"{e.window:.0%}", data_v=e.window, class_="n"),
        )
        body.append(el("tr", *cells, data_row=number))
    return table(name, heads, body, id=name, class_="sortable")


def table(label: str, heads: Iterable[tuple[str, str]], body: Iterable[Markup], **attributes: Any) -> Markup:
    """A table that scrolls within itself. Heads are texts and classes; `label` is read aloud."""
    head = el("tr", *(el("th", text, class_=style or None, scope="col") for text, style in heads))
    made = el("table", el("thead", head), el("tbody", *body), **attributes)
    return el("div", made, class_="scroll", tabindex="0", role="group", aria_label=label)


def memory(compiled: Mapping[str, Any]) -> Markup:
    """What the memory holds at the peak, on the device and on the host."""
    total = compiled["device_bytes"]["total"]
    parts = [_peak(compiled["peak"], "HBM at the peak, per device", total)]
    if compiled.get("host_peak"):
        parts.append(_peak(compiled["host_peak"], "Host memory, per device", compiled["host_bytes"]["total"]))
    hbm = compiled.get("hbm_bytes")
    verdict = None
    if hbm is not None:
        text = "fits" if compiled.get("fits") else "does not fit"
        of = f": {format_bytes(total)} of the {format_bytes(hbm)} that XLA may use"
        verdict = el("p", el("b", text, class_="good" if compiled.get("fits") else "bad"), of)
    return join(verdict, el("div", *parts, class_="columns"))


def _peak(rows: Sequence[Mapping[str, Any]], title: str, total: int) -> Markup:
    unit, size = ("GiB", GiB) if total >= GiB else ("MiB", MiB)
    shown = [r for r in rows if r["bytes"] >= 0.005 * size]
    small = [r for r in rows if r["bytes"] < 0.005 * size]
    lines = [(r["kind"], r["name"], r["bytes"]) for r in shown]
    lines += [("other", f"{len(small)} smaller", sum(r["bytes"] for r in small))] if small else []
    body = [
        el(
            "tr", el("td", kind, class_="dim"), el("td", name), el("td", f"{size_ / size:,.2f}", class_="n"),
            el("td", el("i", style=f"width:{100 * size_ / (total or 1):.2f}%"), class_="meter"),
        )
        for kind, name, size_ in lines
    ]  # fmt: skip
    body.append(
        el("tr", el("td"), el("td", "total"), el("td", f"{total / size:,.2f}", class_="n"), el("td"), class_="total")
    )
    heads = [("kind", ""), ("what", ""), (unit, "n"), ("", "wide")]
    return el("div", el("h3", title), table(title, heads, body))


def plan_tables(plan: Mapping[str, Any]) -> Markup:
    """For each stack its tensors, and where they go in each range of layers."""
    parts = []
    for stack in dict.fromkeys(p["stack"] for p in plan["placements"]):
        ranges = sorted((p for p in plan["placements"] if p["stack"] == stack), key=lambda p: p["layers"])
        sizes = {r["tensor"]: r["bytes"] for r in plan["reasons"] if r["stack"] == stack}
        tensors = list(dict.fromkeys([*sizes, *(t for p in ranges for t in p["tensors"] if t != "*")]))
        layers = [f"{p['layers'][0]}:{p['layers'][1]}" for p in ranges]
        heads = [("tensor", ""), *([("MiB a layer", "n")] if sizes else []), *((f"layers {n}", "") for n in layers)]
        body = []
        for tensor in tensors:
            size = el("td", f"{sizes[tensor] / MiB:,.1f}" if tensor in sizes else "-", class_="n") if sizes else None
            places = (placed(p["tensors"], tensor) for p in ranges)
            body.append(el("tr", el("td", el("code", tensor)), size, *(el("td", _place(w)) for w in places)))
        if not tensors:
            everything = any("*" in p["tensors"] for p in ranges)
            text = (
                "everything is kept on the device" if everything else "everything is recomputed from the layer's input"
            )
            body.append(el("tr", el("td", text, colspan=len(heads))))
        parts.append(el("div", el("h3", stack), table(stack, heads, body)))
    numbers = _plan_numbers(plan)
    return join(el("p", numbers, class_="dim") if numbers else None, el("div", *parts, class_="columns"))


def _place(where: str) -> Markup:
    return el("span", where, class_=f"place place-{where}" if where in ("device", "host", "recompute") else "place")


def _plan_numbers(plan: Mapping[str, Any]) -> str:
    made_for = [
        f"{plan['devices']} x {plan['hardware']}" if plan["devices"] and plan["hardware"] else plan["hardware"],
        f"batch {plan['batch']} x {plan['seq']}" if plan["batch"] and plan["seq"] else None,
        ",".join(f"{axis}={n}" for axis, n in plan["mesh"].items()),
        f"{plan['optimizer']['host_fraction']:.0%} of the optimizer state on the host"
        if plan["optimizer"]["host_fraction"] else None,
        f"{plan['parameters']['host_fraction']:.0%} of the layers' weights on the host"
        if plan["parameters"]["host_fraction"] else None,
        "compiled and fits" if plan["verified"] else None,
    ]  # fmt: skip
    return ", ".join(text for text in made_for if text)


def candidates(plan: Mapping[str, Any]) -> Markup:
    """What the planner considered beside the plan."""
    predicted = plan["predicted"]
    numbers = {key: predicted[key] for key in ("step_time_s", "device_bytes", "host_bytes")}
    rows = [{"name": "this plan", "fits": True, **numbers}, *plan["alternatives"]]
    rows = [{"batch": plan["batch"] or 1, **r} for r in rows]
    front = pareto_front(rows)
    best = predicted["step_time_s"]
    body = []
    for n, r in enumerate(rows):
        remarks = [] if r["fits"] else ["does not fit"]
        remarks += ["Pareto front"] if n in front else []
        cells = (
            el("td", r["name"]),
            el("td", format_seconds(r["step_time_s"]), data_v=r["step_time_s"], class_="n"),
            el("td", f"{r['step_time_s'] / best - 1:+.1%}" if n and best else "", data_v=r["step_time_s"], class_="n"),
            el("td", f"{r['device_bytes'] / GiB:,.2f}", data_v=r["device_bytes"], class_="n"),
            el("td", f"{r['host_bytes'] / GiB:,.2f}", data_v=r["host_bytes"], class_="n"),
            el("td", ", ".join(remarks)),
        )
        body.append(el("tr", *cells, class_="chosen" if n == 0 else None if r["fits"] else "dim"))
    heads = [
        ("", ""), ("a step, the planner's", "n"), ("to the plan", "n"), ("device GiB", "n"), ("host GiB", "n"), ("", ""),
    ]  # fmt: skip
    return table("candidates", heads, body, id="candidates", class_="sortable")


def basis(timeline: Timeline, compiled: Mapping[str, Any] | None, plan: Mapping[str, Any] | None) -> Markup:
    """What the numbers rest on."""
    notes = [*timeline.assumptions, *((plan or {}).get("notes") or ()), *((compiled or {}).get("notes") or ())]
    if timeline.unknown:
        names = ", ".join(f"{u['opcode']} ({u['count']:,.0f} times)" for u in timeline.unknown)
        notes.append(f"unknown operations, costed by their bytes, {timeline.unknown_share:.1%} of the step: {names}")
    facts = [
        ("source", timeline.source),
        ("machine", f"{timeline.devices} x {timeline.hardware}"),
        ("model FLOPs", f"{timeline.model_flops / 1e12:,.1f} TFLOP a step and device"),
        ("FLOPs computed", f"{timeline.hardware_flops / 1e12:,.1f} TFLOP a step and device"),
    ]
    if compiled and compiled.get("parameters"):
        facts.insert(1, ("model", f"{compiled['model']}, {format_count(compiled['parameters'])} parameters"))
    facts += [(f"{lane} lane busy", format_seconds(s)) for lane, s in timeline.lanes.items() if s]
    facts += [(name, version) for name, version in ((compiled or {}).get("versions") or {}).items()]
    terms = el("dl", *(el("div", el("dt", k), el("dd", v)) for k, v in facts), class_="facts")
    return join(terms, el("ul", *(el("li", n) for n in dict.fromkeys(notes))) if notes else None)
