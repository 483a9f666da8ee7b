"""What each operation of a flat program costs on one device: arithmetic, HBM traffic, collectives.

Conventions: two floating-point operations to a multiply-add. Elementwise operations and reductions are
fused with their neighbours, as XLA does: a value is written to HBM only if something that cannot be
fused makes or needs it. Attention kernels (a loop or a Pallas kernel with a softmax inside, or cuDNN's)
move their arguments and results and keep the scores on the chip. Collective bytes are those that one
device receives: `(n - 1) / n` of the gathered, scattered or exchanged array, twice that for an
all-reduce (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce").
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from forebay.graph.flat import FREE, Flat, Op, Scan, flatten, jaxpr_of
from forebay.graph.partition import Spec, local_shape, partition, whole
from forebay.xla.fused_attention import gradient_workspace_bytes

Kind = Literal["free", "elementwise", "matmul", "attention", "collective", "other"]

_ALIASES = ("convert_element_type", "reshape", "transpose", "broadcast_in_dim", "split", "slice", "iota")
_REDUCE = ("psum", "psum2", "psum_invariant", "pmax", "pmin")
_COLLECTIVES = (*_REDUCE, "all_gather", "reduce_scatter", "psum_scatter", "all_to_all", "ragged_all_to_all", "ppermute")
_KERNELS = ("pallas_call", "tpu_custom_call", "custom_call", "ffi_call")
_RNG = ("random_bits", "threefry2x32", "random_unwrap", "random_wrap", "random_split", "rng_bit_generator")
# Threefry makes 64 bits from some 100 integer operations (Salmon et al. 2011): about the time in which HBM moves 8 times as much.
_RNG_TRAFFIC = 8
_INDEXED = ("dynamic_slice", "gather", "slice", "squeeze")
_WRITTEN_IN_PLACE = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter_add": 2}
"""The position of the part that is written."""
_SCRATCH_OF = (9, 0)
"""The GPU whose fused attention is meant; Ampere's takes more, which a compile tells."""
VIEWS = (*FREE, "reshape")
"""Operations whose result is the same bytes."""
_UNFUSED = ("sort", "gather", "scatter", "scatter-add", "scatter_add", "cumsum", "dynamic_update_slice", "top_k")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: what one device receives, over which mesh axes. `of_weight`: it gathers a weight
    or scatters a weight's gradient, which the backward pass does once whatever is recomputed."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
    num_bytes: float
    axes: tuple[str, ...]
    of_weight: bool = False


@dataclasses.dataclass(frozen=True)
class Cost:
    """What an operation costs on one device. `gathered_bytes` is what it needs whole that is stored in
    parts; `dtype` that of a matrix product's operands; `kernels` what an attention in blocks, a loop in plain JAX, is
    compiled to where no fused kernel stands for it: those of all its iterations, the scores going through HBM;
    `scratch_bytes` what a kernel has of memory for itself while it runs."""

    kind: Kind = "free"
    flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: tuple[Collective, ...] = ()
    gathered_bytes: int = 0
    dtype: str = "bfloat16"
    kernels: tuple["Cost", ...] = ()
    scratch_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Analysis:
    """A flat program with everything known about its values and operations, per device."""

    flat: Flat
    specs: tuple[Spec, ...]
    num_bytes: tuple[int, ...]
    costs: tuple[Cost, ...]
    materialised: frozenset[int]
    written: frozenset[int]
    """Of these the ones that `costs` takes to be written: without results that nothing reads before the backward pass."""
    from_weights: frozenset[int]
    """Weights, and what converting, naming or reshaping makes of them."""


def analyse(
    jaxpr: Any,
    inputs: Sequence[Spec],
    axis_sizes: Mapping[str, int],
    *,
    weights: Collection[int] = (),
    scattered: Collection[tuple[int, ...]] = (),
    local: bool = False,
    results: int | None = None,
    fused: Collection[int] = (),
) -> Analysis:
    """Specifications, bytes and costs of a jaxpr.

    Args:
        jaxpr: open or closed.
        inputs: how its inputs are split.
        axis_sizes: the mesh.
        weights: positions of inputs that are weights, for `Collective.of_weight`.
        scattered: shapes, sorted, whose partial sums are scattered rather than summed everywhere:
            those of the weights, where the program makes gradients.
        local: whether the jaxpr is of one device (inside a `shard_map`).
        results: how many outputs are written for what they are; the others are residuals, which cost nothing where
            they are not kept (`forebay.graph.kept` has what keeping them takes). None is all.
        fused: positions of inputs that are computed inside of what reads them, where that can be fused.
    """
    flat = flatten(jaxpr, local=local)
    from_weights = _derived(flat, {flat.inputs[k] for k in weights})
    specs = partition(flat, inputs, axis_sizes, from_weights)
    shapes = [local_shape(v, s, axis_sizes) for v, s in zip(flat.values, specs, strict=True)]
    num_bytes = tuple(math.prod(s) * getattr(v.dtype, "itemsize", 8) for s, v in zip(shapes, flat.values, strict=True))
    apart = {flat.inputs[k] for k in fused} | (
        {*flat.outputs[results:]} - {*flat.outputs[:results]} if results else set()
    )
    written = materialised(flat, apart)
    parts = frozenset(tuple(sorted(shapes[flat.inputs[k]])) for k in weights)
    view = _View(
        flat, specs, shapes, num_bytes, axis_sizes, from_weights, frozenset(scattered), parts, written, roots(flat)
    )
    costs = _summed_once(view, [_cost(op, view) for op in flat.ops])
    return Analysis(flat, tuple(specs), num_bytes, costs, materialised(flat), written, from_weights)


@dataclasses.dataclass(frozen=True)
class _View:
    flat: Flat
    specs: list[Spec]
    shapes: list[tuple[int, ...]]
    num_bytes: tuple[int, ...]
    axis_sizes: Mapping[str, int]
    from_weights: frozenset[int]
    scattered: frozenset[tuple[int, ...]]
    parts: frozenset[tuple[int, ...]]
    """The shapes, sorted, that weights have on one device."""
    materialised: frozenset[int]
    root: Mapping[int, int]

    def size(self, axes: Collection[str]) -> int:
        return math.prod(self.axis_sizes.get(a, 1) for a in axes)


def materialised(flat: Flat, apart: Collection[int | None] = ()) -> frozenset[int]:
    """The values that are written to memory: arguments and results but for those `apart`, and what an operation that
    cannot be fused makes or needs. A view of such a value (a name, a reshape) is not another one."""
    kept = {v for v in (*flat.inputs, *flat.outputs) if v is not None and v not in apart}
    for op in flat.ops:
        if not fusible(op):
            kept.update(op.outputs)
            kept.update(i for i in op.inputs if i is not None)
        elif op.primitive.startswith(("reduce", "arg")):
            kept.update(op.outputs)
    for value, root in roots(flat).items():
        if value in kept:
            kept.add(root)
            kept.discard(value)
    return frozenset(kept)


def roots(flat: Flat) -> dict[int, int]:
    """For each view of another value (a name, a reshape), the value that it is a view of."""
    found: dict[int, int] = {}
    for op in flat.ops:
        if op.primitive in VIEWS and op.inputs and op.inputs[0] is not None:
            found[op.outputs[0]] = found.get(op.inputs[0], op.inputs[0])
    return found


def fusible(op: Op) -> bool:
    """Whether XLA computes the operation inside a loop over elements, together with its neighbours."""
    name = op.primitive
    return not (
        name in ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "scan", "while", "cond")
        or name in _COLLECTIVES or name in _KERNELS or name in _UNFUSED or _is_attention_primitive(name)
    )  # fmt: skip


def is_collective(op: Op) -> bool:
    return op.primitive in _COLLECTIVES


def _derived(flat: Flat, sources: set[int]) -> frozenset[int]:
    """The sources and what converting, naming or reshaping makes of them."""
    found = set(sources)
    for op in flat.ops:
        if op.primitive in (*FREE, *_ALIASES) and op.inputs and op.inputs[0] in found:
            found.update(op.outputs)
    return frozenset(found)


def _cost(op: Op, view: _View) -> Cost:
    name = op.primitive
    if name == "sharding_constraint":
        moved = _resharded(op, view)
        return Cost("collective", collectives=moved) if moved else Cost()
    if name in FREE:
        return Cost()
    traffic = sum(view.num_bytes[o] for o in op.outputs if o in view.materialised)
    read = {view.root.get(i, i) for i in op.inputs if i is not None}
    traffic += sum(view.num_bytes[i] for i in read if i in view.materialised)
    elements = max((math.prod(view.shapes[o]) for o in op.outputs), default=0)
    if name == "dot_general":
        return _dot(op, view)
    if name in ("ragged_dot", "ragged_dot_general"):
        rows, inner = view.shapes[op.inputs[0] or 0][:2]
        return Cost("matmul", 2.0 * elements * inner, traffic) if rows else Cost()
    if name == "conv_general_dilated":
        kernel = view.shapes[op.inputs[1] or 0]
        out_channels = kernel[op.eqn.params["dimension_numbers"].rhs_spec[0]]
        return Cost("matmul", 2.0 * elements * math.prod(kernel) / max(out_channels, 1), traffic)
    if _is_attention_primitive(name):
        return Cost("attention", _attention_flops(op, view), traffic, scratch_bytes=_attention_scratch(op, view))
    if name in _COLLECTIVES:
        return Cost("collective", hbm_bytes=traffic, collectives=(_explicit(op, view),))
    if name in ("scan", "while", "cond"):
        return _loop(op, view, traffic)
    if name in _KERNELS:
        return _kernel(op, traffic)
    if name in _RNG:
        return Cost("other", hbm_bytes=_RNG_TRAFFIC * sum(view.num_bytes[o] for o in op.outputs))
    if name in _ALIASES and not any(o in view.materialised for o in op.outputs):
        return Cost()
    return Cost("elementwise", 0.0 if name in _ALIASES else float(elements), traffic)


def _dot(op: Op, view: _View) -> Cost:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = op.eqn.params["dimension_numbers"]
    lhs, rhs = (op.inputs * 2)[:2]
    if lhs is None or rhs is None:
        return Cost("elementwise", 0.0, float(sum(view.num_bytes[o] for o in op.outputs)))
    out = op.outputs[0]
    collectives: list[Collective] = []
    gathered = 0
    contracted = math.prod(view.shapes[lhs][d] for d in lhs_contract)
    bytes_of = {lhs: view.num_bytes[lhs], rhs: view.num_bytes[rhs]}
    if not view.flat.values[out].local:
        sums: set[str] = set()
        free = {
            number: {
                a for d, axes in enumerate(view.specs[number]) if d not in contract and d not in batch for a in axes
            }
            for number, contract, batch in ((lhs, lhs_contract, lhs_batch), (rhs, rhs_contract, rhs_batch))
        }
        batch_axes = {a for d in lhs_batch for a in view.specs[lhs][d]}
        inner = {
            lhs: {a for d in lhs_contract for a in view.specs[lhs][d]},
            rhs: {a for d in rhs_contract for a in view.specs[rhs][d]},
        }
        sums = inner[lhs] & inner[rhs]
        for number, other in ((lhs, rhs), (rhs, lhs)):
            for axis in inner[number] - inner[other]:
                if axis in free[other] | batch_axes:
                    gathered += _gather(number, axis, view, bytes_of, collectives)
                else:
                    sums.add(axis)  # the other operand is sliced, which costs nothing
        # an axis that splits both operands' own dimensions splits the result once: the other is gathered
        gathered_one = lhs if lhs in view.from_weights else rhs
        for axis in (free[lhs] | batch_axes) & free[rhs]:
            gathered += _gather(gathered_one, axis, view, bytes_of, collectives)
        contracted = math.prod(view.flat.values[lhs].shape[d] for d in lhs_contract) // view.size(sums)
        if sums:
            n = view.size(sums)
            scatter = tuple(sorted(view.flat.values[out].shape)) in view.scattered
            kind = "reduce_scatter" if scatter else "all_reduce"
            moved = view.num_bytes[out] * (n - 1) / n * (1 if scatter else 2)
            collectives.append(Collective(kind, moved, tuple(sorted(sums)), scatter))
    flops = 2.0 * math.prod(view.shapes[out]) * contracted
    traffic = float(sum(bytes_of.values()) + view.num_bytes[out])
    return Cost("matmul", flops, traffic, tuple(collectives), gathered, str(view.flat.values[lhs].dtype))


def _gather(number: int, axis: str, view: _View, bytes_of: dict[int, int], collectives: list[Collective]) -> int:
    n = view.axis_sizes.get(axis, 1)
    before = bytes_of[number]
    bytes_of[number] = before * n
    collectives.append(Collective("all_gather", before * (n - 1), (axis,), number in view.from_weights))
    return bytes_of[number] - (before if before != view.num_bytes[number] else 0)


def _resharded(op: Op, view: _View) -> tuple[Collective, ...]:
    source = op.inputs[0]
    if source is None or view.flat.values[source].local:
        return ()
    before, after = view.specs[source], view.specs[op.outputs[0]]
    gone = {a for axes in before for a in axes} - {a for axes in after for a in axes}
    moved = {a for b, c in zip(before, after, strict=True) for a in b if a not in c} - gone
    if not any(before):
        return ()
    collectives = []
    if gone:
        n = view.size(gone)
        collectives.append(Collective("all_gather", view.num_bytes[op.outputs[0]] * (n - 1) / n, tuple(sorted(gone))))
    if moved:
        n = view.size(moved)
        collectives.append(Collective("all_to_all", view.num_bytes[source] * (n - 1) / n, tuple(sorted(moved))))
    return tuple(collectives)


def _explicit(op: Op, view: _View) -> Collective:
    params = op.eqn.params
    axes = params.get("axes", params.get("axis_name", ()))
    axes = tuple(str(a) for a in (axes if isinstance(axes, tuple | list) else (axes,)))
    n = view.size(axes)
    share = (n - 1) / n
    ins = sum(view.num_bytes[i] for i in op.inputs if i is not None)
    outs = sum(view.num_bytes[o] for o in op.outputs)
    if op.primitive in _REDUCE:
        return Collective("all_reduce", 2 * ins * share, axes)
    if op.primitive == "all_gather":
        weight = any(i in view.from_weights for i in op.inputs if i is not None)
        return Collective("all_gather", outs * share, axes, weight)
    if op.primitive in ("reduce_scatter", "psum_scatter"):
        gradient = all(tuple(sorted(view.shapes[o])) in view.parts for o in op.outputs)
        return Collective("reduce_scatter", ins * share, axes, gradient)
    if op.primitive == "ppermute":
        return Collective("permute", ins, axes)
    return Collective("all_to_all", outs * share, axes)


def _loop(op: Op, view: _View, traffic: float) -> Cost:
    params = op.eqn.params
    local = all(view.flat.values[o].local for o in op.outputs)
    if op.primitive == "scan":
        scan = Scan.of(op.eqn)
        fixed = scan.constants + scan.carry
        times, body, operands = scan.length, scan.body, list(op.inputs)
        given = [_given(i, view) for i in operands[:fixed]] + [_given(i, view)[1:] for i in operands[fixed:]]
    elif op.primitive == "while":
        times, body, operands = 1, params["body_jaxpr"], list(op.inputs[params["cond_nconsts"] :])
        given = [_given(i, view) for i in operands]
    else:
        times, body, operands = 1, params["branches"][-1], list(op.inputs[1:])
        given = [_given(i, view) for i in operands]
    shapes = [v.aval.shape for v in jaxpr_of(body).invars]
    given = [s if len(s) == len(shape) else whole(len(shape)) for s, shape in zip(given, shapes, strict=True)]
    inner = analyse(body, given, view.axis_sizes, local=local)
    total = sum_costs(inner.costs)
    collectives = tuple(dataclasses.replace(c, num_bytes=c.num_bytes * times) for c in total.collectives)
    matmul = sum(c.flops for c in inner.costs if c.kind in ("matmul", "attention")) * times
    if _is_softmax_loop(inner):
        return Cost("attention", matmul, traffic, collectives, kernels=_kernels(inner, times))
    kind: Kind = "matmul" if matmul > 0 else "other"
    return Cost(kind, matmul if matmul else total.flops * times, total.hbm_bytes * times, collectives)


def _summed_once(view: _View, costs: list[Cost]) -> tuple[Cost, ...]:
    """The costs, with one all-reduce for partial sums that are only added up: XLA reduces their sum (its pass
    all-reduce-reassociate)."""
    flat = view.flat
    uses = Counter(
        view.root.get(v, v) for op in flat.ops if op.primitive not in VIEWS for v in op.inputs if v is not None
    )
    uses.update(view.root.get(v, v) for v in flat.outputs if v is not None)
    partial: dict[int, int] = {}
    """For a sum over devices, the operation whose all-reduce makes it whole."""
    for i, op in enumerate(flat.ops):
        if op.primitive == "dot_general" and any(c.kind == "all_reduce" for c in costs[i].collectives):
            partial[op.outputs[0]] = i
        elif op.primitive in ("add", "add_any"):
            summed = [view.root.get(v, v) if v is not None else None for v in op.inputs]
            makers = [partial.get(v) if v is not None and uses[v] == 1 else None for v in summed]
            first, second = makers if len(makers) == 2 else (None, None)
            if first is None or second is None or _reduced(costs[first]) != _reduced(costs[second]):
                continue
            others = tuple(c for c in costs[first].collectives if c.kind != "all_reduce")
            costs[first] = dataclasses.replace(costs[first], collectives=others)
            partial[op.outputs[0]] = second
    return tuple(costs)


def _reduced(cost: Cost) -> list[tuple[float, tuple[str, ...]]]:
    return [(c.num_bytes, c.axes) for c in cost.collectives if c.kind == "all_reduce"]


def _given(number: int | None, view: _View) -> Spec:
    return () if number is None else view.specs[number]


def _is_softmax_loop(inner: Analysis) -> bool:
    """Scores and values, head by head, with an exponential between: an attention in blocks. The loss's loop over
    chunks of the vocabulary has no heads."""
    products = [op for op in inner.flat.ops if op.primitive == "dot_general"]
    by_head = [op for op in products if op.eqn.params["dimension_numbers"][1][0]]
    return len(by_head) >= 2 and any(op.primitive == "exp" for op in inner.flat.ops)


def _kernels(inner: Analysis, times: int) -> tuple[Cost, ...]:
    """What XLA makes of a loop's body: its matrix products, and for each other value that is written to memory one
    fusion, which reads what it comes of. Of an array that is indexed only the part counts."""
    flat, written = inner.flat, inner.materialised
    made = {o: op for op in flat.ops for o in op.outputs}

    def reads(value: int | None, seen: set[int]) -> float:
        """Bytes from memory that `value` is computed of, each value of `seen` once."""
        if value is None or value in seen:
            return 0.0
        seen.add(value)
        op = made.get(value)
        if op is None or value in written or op.primitive in _INDEXED:
            return float(inner.num_bytes[value])
        return sum(reads(i, seen) for i in op.inputs)

    found = []
    for op, cost in zip(flat.ops, inner.costs, strict=True):
        if op.primitive in _INDEXED or not any(o in written for o in op.outputs) or cost.kind == "free":
            continue
        inputs, results = list(op.inputs), sum(inner.num_bytes[o] for o in op.outputs)
        if op.primitive in _WRITTEN_IN_PLACE:
            update = inputs[_WRITTEN_IN_PLACE[op.primitive]]
            inputs, results = [update], 0 if update is None else inner.num_bytes[update]
        seen: set[int] = set()
        moved = times * (results + sum(reads(i, seen) for i in inputs))
        kind: Kind = "matmul" if cost.kind == "matmul" else "elementwise"
        found.append(Cost(kind, times * cost.flops, moved, dtype=cost.dtype))
    return tuple(found)


def _kernel(op: Op, traffic: float) -> Cost:
    """A hand-written kernel says what it costs, or its body and grid do."""
    estimate = op.eqn.params.get("cost_estimate")
    body = jaxpr_of(op.eqn.params.get("jaxpr"))
    if estimate is not None:
        plain = body is not None and not _has_softmax(body)
        return Cost("matmul" if plain else "attention", float(estimate.flops), traffic)
    grid = getattr(op.eqn.params.get("grid_mapping"), "grid", ())
    if body is None:
        return Cost("other", 0.0, traffic)
    inner = analyse(body, [whole(len(getattr(v.aval, "shape", ()))) for v in body.invars], {}, local=True)
    times = math.prod(g for g in grid if isinstance(g, int))
    flops = sum(c.flops for c in inner.costs if c.kind in ("matmul", "attention")) * times
    return Cost("attention" if flops else "other", flops, traffic)


def _has_softmax(jaxpr: Any) -> bool:
    """Whether there is an exponential in a kernel's body, or in the loops and branches of it."""
    for eqn in jaxpr.eqns:
        inner = [jaxpr_of(p) for v in eqn.params.values() for p in (v if isinstance(v, tuple | list) else (v,))]
        if eqn.primitive.name.startswith("exp") or any(_has_softmax(j) for j in inner if j is not None):
            return True
    return False


def _is_attention_primitive(name: str) -> bool:
    return name.startswith("dot_product_attention")


def _is_gradient(name: str) -> bool:
    return "bwd" in name or "backward" in name


def _attention_flops(op: Op, view: _View) -> float:
    """Causal products of `[batch, sequence, heads, size]` queries, keys and values: one of the keys' size and one of the
    values' forward, three and two backward."""
    (B, S, H, K), (_, T, _, _), (*_, V) = (view.shapes[i or 0] for i in op.inputs[:3])
    return B * H * S * T * (3 * K + 2 * V if _is_gradient(op.primitive) else K + V)


def _attention_scratch(op: Op, view: _View) -> int:
    if not _is_gradient(op.primitive):
        return 0
    query, key, value = (view.shapes[i or 0] for i in op.inputs[:3])
    itemsize = view.flat.values[op.inputs[0] or 0].dtype.itemsize
    return gradient_workspace_bytes(query, key[2], value[3], itemsize, _SCRATCH_OF)


def sum_costs(costs: Sequence[Cost]) -> Cost:
    """The costs added up; the kind is that of the largest arithmetic."""
    main = max(costs, key=lambda c: c.flops, default=Cost())
    return Cost(
        main.kind, sum(c.flops for c in costs), sum(c.hbm_bytes for c in costs),
        tuple(x for c in costs for x in c.collectives), sum(c.gathered_bytes for c in costs),
    )  # fmt: skip
