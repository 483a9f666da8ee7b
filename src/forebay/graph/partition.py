"""How the values of a flat program are split over the mesh, as XLA's partitioner will most likely decide.

A specification is a tuple with one entry for each dimension: the mesh axes that split it, most
significant first. What is known (arguments, sharding constraints, the edges of `shard_map`) is carried
forward through the operations; where two operands disagree the one that is no weight wins, then the
first, and the other is gathered.
A value about which nothing is known counts as whole on every device, which overestimates it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from forebay.graph.flat import Array, Flat, Op, Scan, flatten, jaxpr_of

Spec = tuple[tuple[str, ...], ...]

_SAME_SIZE = (
    "slice", "dynamic_slice", "pad", "rev", "cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", "sort", "split",
    "concatenate", "dynamic_update_slice", "select_and_scatter_add",
)  # fmt: skip


def spec_of(sharding: Any, rank: int) -> Spec:
    """The specification of a `NamedSharding` or `PartitionSpec` for an array of `rank` dimensions; any other
    sharding, as of an array on one device, splits nothing."""
    spec = sharding if isinstance(sharding, PartitionSpec) else getattr(sharding, "spec", None)
    parts = tuple(spec or ())
    entries = [((p,) if isinstance(p, str) else tuple(p) if isinstance(p, tuple | list) else ()) for p in parts[:rank]]
    return tuple(entries) + ((),) * (rank - len(entries))


def whole(rank: int) -> Spec:
    return ((),) * rank


def parts(spec: Spec, axis_sizes: Mapping[str, int]) -> int:
    """Into how many parts an array of this specification is split."""
    return math.prod(axis_sizes.get(a, 1) for axes in spec for a in axes)


def local_shape(array: Array, spec: Spec, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape on one device; XLA pads what does not divide."""
    if array.local:
        return array.shape
    return tuple(
        -(-d // math.prod(axis_sizes.get(a, 1) for a in axes)) for d, axes in zip(array.shape, spec, strict=True)
    )


def partition(
    flat: Flat, inputs: Sequence[Spec], axis_sizes: Mapping[str, int], weights: Collection[int] = ()
) -> list[Spec]:
    """A specification for each value of `flat`, given those of its inputs. `weights` are numbers of values."""
    specs: list[Spec] = [whole(len(v.shape)) for v in flat.values]
    for number, spec in zip(flat.inputs, inputs, strict=True):
        specs[number] = _only_large(spec, axis_sizes)
    for op in flat.ops:
        for number, spec in zip(op.outputs, _results(op, flat, specs, axis_sizes, weights), strict=True):
            if not flat.values[number].local:
                specs[number] = _only_large(_once(spec), axis_sizes)
    filled = {
        op.outputs[0] for op in flat.ops if op.primitive in ("broadcast_in_dim", "iota") and _is_filling(op, flat)
    }
    for op in flat.ops:  # a constant is made in the parts in which it is used
        for number in op.inputs:
            if number in filled and flat.values[number].shape == flat.values[op.outputs[0]].shape:
                specs[number] = specs[op.outputs[0]]
    return specs


def _is_filling(op: Op, flat: Flat) -> bool:
    return all(i is None or not flat.values[i].shape for i in op.inputs)


def _results(
    op: Op, flat: Flat, specs: list[Spec], axis_sizes: Mapping[str, int], weights: Collection[int]
) -> list[Spec]:
    arrays = [flat.values[o] for o in op.outputs]
    shapes = [a.shape for a in arrays]
    operands = [(flat.values[i].shape, specs[i]) for i in op.inputs if i is not None]
    params = op.eqn.params
    name = op.primitive
    if all(a.local for a in arrays):
        return [whole(len(s)) for s in shapes]
    if name == "leave":
        return [spec_of(params["out_specs"][op.position], len(shapes[0]))]
    if name in ("sharding_constraint", "reshard"):
        sharding = params.get("sharding", params.get("dst_sharding"))
        given = spec_of(sharding, len(shapes[0]))
        open_dims = params.get("unconstrained_dims", ())
        before = operands[0][1] if operands else whole(len(shapes[0]))
        return [tuple(b if d in open_dims else g for d, (g, b) in enumerate(zip(given, before, strict=True)))]
    if name == "scan":
        return _scan(op, flat, specs, axis_sizes)
    if name == "cond":
        body = jaxpr_of(params["branches"][-1])
        return _of_body(body, [_spec(i, specs) for i in op.inputs[1:]], axis_sizes)
    if name == "while":
        skip = params["cond_nconsts"] + params["body_nconsts"]
        return [_spec(i, specs) or whole(len(s)) for i, s in zip(op.inputs[skip:], shapes, strict=True)]
    if not operands:
        return [whole(len(s)) for s in shapes]
    if name == "dot_general":
        return [_dot(op, operands, weight_first=op.inputs[0] in weights)]
    if name == "broadcast_in_dim":
        return [_broadcast(params["broadcast_dimensions"], operands[0], shapes[0])]
    if name == "transpose":
        return [tuple(operands[0][1][d] for d in params["permutation"])]
    if name == "reshape":
        return [_reshape(*operands[0], shapes[0], axis_sizes)]
    if name in ("squeeze", "expand_dims"):
        return [_reshape(*operands[0], s, axis_sizes) for s in shapes]
    if name == "gather":
        return [_gather(params, operands, shapes[0])]
    if "axes" in params and len(shapes[0]) < len(operands[0][0]):  # reductions
        kept = [s for d, s in enumerate(operands[0][1]) if d not in params["axes"]]
        return [tuple(kept)] * len(shapes)
    if name.startswith("scatter") and "dimension_numbers" in params:
        return [_scatter(params["dimension_numbers"], operands, shapes[0])]
    if name in _SAME_SIZE:
        return [_same_size(operands, s) for s in shapes]
    return [_elementwise(operands, s) for s in shapes]


def _spec(number: int | None, specs: list[Spec]) -> Spec:
    return () if number is None else specs[number]


def _of_body(body: Any, inputs: Sequence[Spec], axis_sizes: Mapping[str, int]) -> list[Spec]:
    flat = flatten(body)
    padded = [s or whole(len(flat.values[n].shape)) for n, s in zip(flat.inputs, inputs, strict=True)]
    specs = partition(flat, padded, axis_sizes)
    return [_spec(o, specs) if o is not None else () for o in flat.outputs]


def _scan(op: Op, flat: Flat, specs: list[Spec], axis_sizes: Mapping[str, int]) -> list[Spec]:
    scan = Scan.of(op.eqn)
    given = [_spec(i, specs) for i in op.inputs]
    fixed = scan.constants + scan.carry
    inner = given[:fixed] + [s[1:] for s in given[fixed:]]
    results = _of_body(jaxpr_of(scan.body), inner, axis_sizes)
    shapes = [flat.values[o].shape for o in op.outputs]
    carry = [
        _elementwise([(shape, s or whole(len(shape))), (shape, r or whole(len(shape)))], shape)
        for shape, s, r in zip(shapes, given[scan.constants : fixed], results[: scan.carry], strict=False)
    ]
    return carry + [
        ((), *(r or whole(len(s) - 1))) for r, s in zip(results[scan.carry :], shapes[scan.carry :], strict=True)
    ]


def _dot(op: Op, operands: list[tuple[tuple[int, ...], Spec]], *, weight_first: bool) -> Spec:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = op.eqn.params["dimension_numbers"]
    lhs, rhs = (operands * 2)[:2]
    batch = [lhs[1][a] or rhs[1][b] for a, b in zip(lhs_batch, rhs_batch, strict=True)]
    left = [s for d, s in enumerate(lhs[1]) if d not in lhs_contract and d not in lhs_batch]
    right = [s for d, s in enumerate(rhs[1]) if d not in rhs_contract and d not in rhs_batch]
    if weight_first:
        used = {a for axes in right for a in axes}
        left = [tuple(a for a in axes if a not in used) for axes in left]
    return tuple(batch + left + right)


def _broadcast(dimensions: Sequence[int], operand: tuple[tuple[int, ...], Spec], shape: tuple[int, ...]) -> Spec:
    out: list[tuple[str, ...]] = [()] * len(shape)
    for d, at in enumerate(dimensions):
        if operand[0][d] == shape[at]:
            out[at] = operand[1][d]
    return tuple(out)


def _reshape(shape: tuple[int, ...], spec: Spec, new: tuple[int, ...], axis_sizes: Mapping[str, int]) -> Spec:
    """Dimensions are matched in groups of equal product; the first of a group carries the split of the first."""
    out: list[tuple[str, ...]] = [()] * len(new)
    i = j = 0
    while i < len(shape) and j < len(new):
        first_i, first_j, a, b = i, j, shape[i], new[j]
        while a != b:
            if a < b and i + 1 < len(shape):
                i += 1
                a *= shape[i]
            elif b < a and j + 1 < len(new):
                j += 1
                b *= new[j]
            else:
                return tuple(out)
        # leading ones of a group carry nothing
        while first_i < i and shape[first_i] == 1:
            first_i += 1
        while first_j < j and new[first_j] == 1:
            first_j += 1
        axes = spec[first_i]
        if new[first_j] % math.prod(axis_sizes.get(x, 1) for x in axes) == 0:
            out[first_j] = axes
        i, j = i + 1, j + 1
    return tuple(out)


def _gather(params: Mapping[str, Any], operands: list[tuple[tuple[int, ...], Spec]], shape: tuple[int, ...]) -> Spec:
    numbers = params["dimension_numbers"]
    table, indices = (operands * 2)[:2]
    dropped = (*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ()))
    kept = iter([d for d in range(len(table[0])) if d not in dropped])
    looked_up = iter(indices[1][:-1])
    out = []
    for d, size in enumerate(shape):
        if d in numbers.offset_dims:
            source = next(kept)
            out.append(table[1][source] if table[0][source] == size else ())
        else:
            out.append(next(looked_up, ()))
    return tuple(out)


def _scatter(numbers: Any, operands: Sequence[tuple[tuple[int, ...], Spec]], shape: tuple[int, ...]) -> Spec:
    """Like the array that is written to, or, where nothing is known of it, like what is written."""
    target, updates = operands[0], operands[-1]
    missing = (*numbers.inserted_window_dims, *getattr(numbers, "operand_batching_dims", ()))
    windows = iter(numbers.update_window_dims)
    out = list(target[1])
    for d in range(len(shape)):
        if d not in missing:
            window = next(windows)
            if updates[0][window] == shape[d]:
                out[d] = out[d] or updates[1][window]
    return tuple(out)


def _same_size(operands: Sequence[tuple[tuple[int, ...], Spec]], shape: tuple[int, ...]) -> Spec:
    """Of the first operand of that rank, the dimensions whose size is unchanged."""
    for size, spec in operands:
        if len(size) == len(shape):
            return tuple(s if a == b else () for a, b, s in zip(size, shape, spec, strict=True))
    return whole(len(shape))


def _elementwise(operands: Sequence[tuple[tuple[int, ...], Spec]], shape: tuple[int, ...]) -> Spec:
    """For each dimension the split of the first operand of this shape that has one."""
    same = [spec for size, spec in operands if size == shape]
    return tuple(next((s[d] for s in same if s[d]), ()) for d in range(len(shape)))


def _once(spec: Spec) -> Spec:
    """A mesh axis splits one dimension: the first that asks for it."""
    used: set[str] = set()
    out = []
    for axes in spec:
        out.append(tuple(a for a in axes if a not in used))
        used.update(axes)
    return tuple(out)


def _only_large(spec: Spec, axis_sizes: Mapping[str, int]) -> Spec:
    return tuple(tuple(a for a in axes if axis_sizes.get(a, 1) > 1) for axes in spec)
