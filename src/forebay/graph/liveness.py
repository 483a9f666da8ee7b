"""How much memory a flat program needs at once, were it run in its own order."""

from forebay.graph.costs import Analysis, analyse, is_collective, roots
from forebay.graph.flat import Scan, jaxpr_of
from forebay.graph.partition import whole


def peak_bytes(analysis: Analysis, *, prefetch: bool = True) -> int:
    """The most bytes on one device that are live at once, arguments not counted.

    Values that fusion keeps out of memory have no size; a view has none of its own. What an operation
    gathers lives from the operation before it (`prefetch`: the collective runs beside that) to its end,
    and as long as a later operation uses the same value.
    """
    flat = analysis.flat
    root = roots(flat)
    given = set(flat.inputs)
    last: dict[int, int] = {}
    source: dict[int, set[int]] = {}
    for i, op in enumerate(flat.ops):
        used: set[int] = set()
        for v in op.inputs:
            if v is not None:
                # what is fused into this operation reads its own sources here
                used |= source.get(root.get(v, v), {root.get(v, v)})
        for v in used:
            last[v] = i
        for o in op.outputs:
            if o not in analysis.materialised and o not in root:
                source[o] = used
    end = len(flat.ops)
    for o in flat.outputs:
        if o is not None:
            for v in source.get(root.get(o, o), {root.get(o, o)}):
                last[v] = end
    changes: dict[int, int] = {}

    def live(start: int, stop: int, size: int) -> None:
        changes[start] = changes.get(start, 0) + size
        changes[stop + 1] = changes.get(stop + 1, 0) - size

    whole_until: dict[int, tuple[int, int, int]] = {}
    for i, (op, cost) in enumerate(zip(flat.ops, analysis.costs, strict=True)):
        for o in op.outputs:
            if o in analysis.materialised and o not in root and o not in given:
                live(i, last.get(o, i), analysis.num_bytes[o])
        if cost.gathered_bytes:
            weight = next((v for v in op.inputs if v in analysis.from_weights), None)
            key = root.get(weight, weight) if weight is not None else -i - 1
            first = whole_until.get(key, (max(0, i - 1) if prefetch else i, i, 0))[0]
            whole_until[key] = (first, i, cost.gathered_bytes)
        live(i, i, cost.scratch_bytes)
        if op.primitive in ("scan", "while", "cond") and cost.kind != "attention":
            live(i, i, _inner_peak(analysis, i))
        if any(c.kind == "reduce_scatter" for c in cost.collectives) and not is_collective(op):
            # the partial sums are whole until they are scattered
            live(i, i + 1, sum(int(analysis.num_bytes[o]) for o in op.outputs))
    for first, stop, size in whole_until.values():
        live(first, stop, size)
    total = best = 0
    for moment in sorted(changes):
        total += changes[moment]
        best = max(best, total)
    return best


def _inner_peak(analysis: Analysis, position: int) -> int:
    op = analysis.flat.ops[position]
    params = op.eqn.params
    body = {"scan": lambda: Scan.of(op.eqn).body, "while": lambda: params["body_jaxpr"]}.get(
        op.primitive, lambda: params["branches"][-1]
    )()
    shapes = [len(getattr(v.aval, "shape", ())) for v in jaxpr_of(body).invars]
    local = all(analysis.flat.values[o].local for o in op.outputs)
    return peak_bytes(analyse(body, [whole(r) for r in shapes], {}, local=local))
