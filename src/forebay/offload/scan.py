"""The scan over layers that applies a plan.

`jax.lax.scan` over `jax.checkpoint` would do, but for three things:

- A plan gives ranges of layers different placements. Splitting the stack for that would copy every
  weight and every gradient; here each range is a loop over indices into the one stack, and the
  gradients are written into one buffer in place.
- The compiled program should say which tensor a copy belongs to. Residuals are stored and fetched
  under a scope that carries their name (`save:<stack>:<name>`, `load:<stack>:<name>`), which XLA
  keeps in every instruction that comes of it.
- The backward pass is written out, so that it can be arranged for the transfers.

Differentiation in reverse mode only.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from forebay.errors import UserError, unknown
from forebay.graph.residuals import Residual, carried_names, input_names, residuals
from forebay.graph.stacks import STACK_SCOPE
from forebay.offload.optimizer import leaf_name
from forebay.offload.policy import apply
from forebay.offload.stream import on_host
from forebay.planner.placement import EVERYTHING, Placement
from forebay.planner.plan import Plan
from forebay.xla.windows import WEIGHT

UNNAMED = "unnamed"
LAYER_INPUT = "layer_input"


def scan_layers(
    block: Callable[..., Any],
    plan: Plan | Sequence[Placement] | None,
    x: Any,
    layers: Any,
    *constants: Any,
    stack: str = "layers",
) -> Any:
    """`block(layer, x, *constants)` for each layer in turn, `x` being the result of the one before.

    Args:
        block: a function of one layer's weights, the carry and the constants, returning a carry of the
            same structure, shapes and dtypes. Arrays that it closes over are as good as constants.
        plan: a plan, or placements of one stack that cover its layers in order. None keeps every residual
            on the device, in a plain `jax.lax.scan`, for `forebay.plan` and `forebay.apply` to find.
        x: the carry, a pytree of arrays.
        layers: a pytree of arrays whose leading dimension is the number of layers.
        constants: pytrees of arrays that every layer uses.
        stack: which stack of the plan these layers are.

    Returns:
        The carry after the last layer. Value and gradients do not depend on the placements.

    Raises:
        UserError: a block whose result differs from its carry in structure, shape or dtype; leaves of
            `layers` with different leading dimensions; placements that do not cover them, or that place
            a tensor which the block does not name.
    """
    if plan is None:
        _check_carry(block, x, layers, constants)
        with jax.named_scope(f"{STACK_SCOPE}{stack}"):
            return jax.lax.scan(lambda x, layer: (block(layer, x, *constants), None), x, layers)[0]
    placements = plan.for_stack(stack) if isinstance(plan, Plan) else tuple(plan)
    count = _layer_count(layers)
    edges = [0, *(edge for p in placements for edge in p.layers), count]
    if not placements or edges[::2] != edges[1::2]:  # each range starts where the one before ends
        covered = ", ".join(f"{p.layers[0]}:{p.layers[1]}" for p in placements) or "nothing"
        raise UserError(f"the placements cover layers {covered} and the stack has {count}: cover 0:{count}")
    _check_carry(block, x, layers, constants)
    # arrays that the block closes over become constants, so that they may be differentiated too
    block, closed_over = jax.closure_convert(block, _one_layer_of(layers), x, *constants)
    constants = (*constants, *closed_over)
    _check_names(block, placements, x, layers, constants)
    ranges = [_Range(block, p, n) for n, p in enumerate(placements)]
    # The leaves of `constants` by which any trace of `forward` is differentiated. A jitted caller is traced
    # once and may be differentiated several times, by other arguments each time, in any order before the
    # backward passes are traced; so this only grows. A gradient too many is dropped.
    differentiated: set[int] = set()

    @jax.custom_vjp
    def run(layers: Any, x: Any, constants: tuple[Any, ...]) -> Any:
        for r in ranges:
            x = r.primal(layers, x, constants)
        return x

    def forward(layers: Any, x: Any, constants: tuple[Any, ...]) -> tuple[Any, Any]:
        primals = jax.tree.leaves(constants, is_leaf=_is_custom_primal)
        differentiated.update(i for i, c in enumerate(primals) if c.perturbed)
        layers, x, constants = (
            jax.tree.map(lambda p: p.value, t, is_leaf=_is_custom_primal) for t in (layers, x, constants)
        )
        start, stored = x, []
        for r in ranges:
            x, kept = r.forward(layers, x, constants)
            stored.append(kept)
        return x, (layers, jax.tree.map(_Aval.of, start), constants, stored)

    def backward(results: Any, dx: Any) -> tuple[Any, Any, Any]:
        layers, start, constants, stored = results
        wanted = [i in differentiated and _is_inexact(c) for i, c in enumerate(jax.tree.leaves(constants))]
        dx = [_instantiate(d) for d in _only_inexact(start, dx)]
        dlayers = [_room_for_gradient(w, n) for n, w in enumerate(_only_inexact(layers, layers))]
        dconstants = [jnp.zeros_like(c) for c, w in zip(jax.tree.leaves(constants), wanted, strict=True) if w]
        for r, kept in zip(reversed(ranges), reversed(stored), strict=True):
            dx, dlayers, dconstants = r.backward(layers, constants, kept, wanted, (dx, dlayers, dconstants))
        by_leaf = iter(dconstants)
        dconstants = jax.tree.unflatten(jax.tree.structure(constants), [next(by_leaf) if w else None for w in wanted])
        return _fill(layers, dlayers, _no_cotangent), _fill(start, dx, _no_cotangent), dconstants

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(layers, x, constants)


class _Range:
    """The layers of one placement. `forward` traces the block; `backward` rebuilds its VJPs from that."""

    def __init__(self, block: Callable[..., Any], placement: Placement, number: int):
        self.block = block
        self.number = number
        self.checkpointed = apply(block, placement)
        self.stack = placement.stack
        self.first, past_last = placement.layers
        self.count = past_last - self.first
        self.offloads = bool(placement.names("host"))
        # of the block's VJP, known once `forward` is traced
        self.carry: Any = None
        self.vjp_tree: Any = None
        self.sources: list[_Source] = []
        self.stored_names: list[str] = []

    @property
    def indices(self) -> jax.Array:
        return self.first + jnp.arange(self.count, dtype=jnp.int32)

    def primal(self, layers: Any, x: Any, constants: tuple[Any, ...]) -> Any:
        return jax.lax.scan(lambda x, i: (self.block(_take(layers, i, self.stack), x, *constants), None), x, self.indices)[0]

    def forward(self, layers: Any, x: Any, constants: tuple[Any, ...]) -> tuple[Any, list[jax.Array]]:
        layer = _one_layer_of(layers)
        self.carry = jax.tree.map(_Aval.of, x)
        stored_avals = jax.make_jaxpr(lambda *a: self._one_layer(*a)[1])(layer, x, constants).out_avals
        origins = residuals(self.checkpointed, layer, x, *constants)
        inputs = input_names(self.block, layer, x, *constants)
        self.stored_names = [
            _name(origin, inputs) for origin, s in zip(origins, self.sources, strict=True) if s.kind == "stored"
        ]
        first = self.number * len(stored_avals)
        buffers = [_buffer(self.count, aval, first + n) for n, aval in enumerate(stored_avals)]

        def body(k: jax.Array, carry: Any) -> Any:
            x, buffers = carry
            y, stored = self._one_layer(_take(layers, self.first + k, self.stack), x, constants)
            written = []
            for buffer, value, name in zip(buffers, stored, self.stored_names, strict=True):
                with jax.named_scope(f"save:{self.stack}:{name}"):
                    written.append(_write(buffer, value, k))
            return y, written

        return self._loop(body, (x, buffers), layers)

    def backward(
        self, layers: Any, constants: tuple[Any, ...], stored: list[jax.Array], wanted: list[bool], cotangents: Any
    ) -> Any:
        def body(k: jax.Array, carry: Any) -> Any:
            dx, dlayers, dconstants = carry
            k = self.count - 1 - k
            i = self.first + k
            values = []
            for buffer, name in zip(stored, self.stored_names, strict=True):
                with jax.named_scope(f"load:{self.stack}:{name}"):
                    values.append(_read(buffer, k))
            layer = _take(layers, i, self.stack)
            vjp = jax.tree.unflatten(self.vjp_tree, self._sources_to_leaves(layer, constants, values))
            with jax.named_scope(f"layer:{self.stack}"):
                dlayer, dx, *dconst = vjp(_fill(self.carry, dx, _zero_cotangent))
            dconst = [d for d, w in zip(jax.tree.leaves(dconst), wanted, strict=True) if w]
            with jax.named_scope(f"gradient:{self.stack}"):
                dlayers = [
                    _write(total, d.astype(total.dtype), i)
                    for total, d in zip(dlayers, _only_inexact(layer, dlayer), strict=True)
                ]
            dconstants = [total + d for total, d in zip(dconstants, dconst, strict=True)]
            return _only_inexact(self.carry, dx), dlayers, dconstants

        return self._loop(body, cotangents, layers)

    def _loop(self, body: Callable[[jax.Array, Any], Any], carry: Any, layers: Any) -> Any:
        """`carry = body(k, carry)` for each layer, k counting from 0.

        With `lax.scan`, k is read from an array, and XLA only pipelines copies whose position is the loop's
        own counter. `lax.while_loop` counts itself, but it cannot be differentiated again.
        """
        if not self.offloads and not any(on_host(w) for w in jax.tree.leaves(layers)):
            counter = jnp.arange(self.count, dtype=jnp.int32)
            return jax.lax.scan(lambda carry, k: (body(k, carry), None), carry, counter)[0]
        start = (jnp.int32(0), carry)
        return jax.lax.while_loop(lambda s: s[0] < self.count, lambda s: (s[0] + 1, body(*s)), start)[1]

    def _one_layer(self, layer: Any, x: Any, constants: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """The block's result and what its backward pass needs that is neither weight nor constant."""
        with jax.named_scope(f"layer:{self.stack}"):
            y, vjp = jax.vjp(self.checkpointed, layer, x, *constants)
        leaves, self.vjp_tree = jax.tree.flatten(vjp)
        self.sources, stored = [], []
        for leaf in leaves:
            source = _find(leaf, "layer", layer) or _find(leaf, "constant", constants)
            if source is None and not isinstance(leaf, Tracer):
                source = _Source("literal", value=leaf)
            if source is None:
                source = _Source("stored", len(stored))
                stored.append(leaf)
            self.sources.append(source)
        return y, stored

    def _sources_to_leaves(self, layer: Any, constants: tuple[Any, ...], stored: list[Any]) -> list[Any]:
        pools = {"layer": jax.tree.leaves(layer), "constant": jax.tree.leaves(constants), "stored": stored}
        return [s.value if s.kind == "literal" else pools[s.kind][s.index] for s in self.sources]


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where the backward pass finds one leaf of a layer's VJP."""

    kind: Literal["layer", "constant", "stored", "literal"]
    index: int = 0
    value: Any = None


def _name(origin: Residual, inputs: tuple[str, ...]) -> str:
    """The name of a stored residual; one that is an argument of the block is its input, weights being found."""
    if origin.argument is not None:
        return inputs[0] if inputs else LAYER_INPUT
    return origin.name or UNNAMED


def _find(leaf: Any, kind: Literal["layer", "constant"], tree: Any) -> _Source | None:
    return next((_Source(kind, i) for i, known in enumerate(jax.tree.leaves(tree)) if known is leaf), None)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Aval:
    """A shape and dtype that passes through jax's transformations as a constant."""

    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, x: Any) -> "_Aval":
        return cls(tuple(x.shape), x.dtype)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _only_inexact(like: Any, tree: Any) -> list[Any]:
    """The leaves of `tree` where `like`, of the same structure, is of a differentiable dtype."""
    kept = jax.tree.leaves(like, is_leaf=_is_aval)
    return [
        leaf for leaf, k in zip(jax.tree.leaves(tree, is_leaf=_is_symbolic_zero), kept, strict=True) if _is_inexact(k)
    ]


def _fill(like: Any, inexact: list[Any], other: Callable[[Any], Any]) -> Any:
    """The inverse of `_only_inexact`; `other` makes the leaves that are not differentiable."""
    values = iter(inexact)
    return jax.tree.map(lambda leaf: next(values) if _is_inexact(leaf) else other(leaf), like, is_leaf=_is_aval)


def _no_cotangent(leaf: Any) -> None:
    return None


def _zero_cotangent(leaf: Any) -> np.ndarray:
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _is_aval(x: Any) -> bool:
    return isinstance(x, _Aval)


def _is_symbolic_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _is_custom_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _instantiate(cotangent: Any) -> Any:
    return jnp.zeros(cotangent.shape, cotangent.dtype) if _is_symbolic_zero(cotangent) else cotangent


def _room_for_gradient(w: jax.Array, number: int) -> jax.Array:
    """In the memory of `w`; for the number, see `_buffer`."""
    if on_host(w):
        return jax.device_put(jnp.full(w.shape, number, w.dtype), jax.memory.Space.Host)
    return jnp.zeros_like(w)


def _take(layers: Any, i: jax.Array, stack: str) -> Any:
    """The weights of layer `i`, on the device."""

    def one(path: Any, w: jax.Array) -> jax.Array:
        if not on_host(w):
            return _read(w, i)
        with jax.named_scope(f"load:{stack}:{WEIGHT}{leaf_name(path)}"):
            return jax.device_put(_read(w, i), jax.memory.Space.Device)

    return jax.tree.map_with_path(one, layers)


def _one_layer_of(layers: Any) -> Any:
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), layers)


def _read(stack: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False, allow_negative_indices=False)


def _write(stack: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
    if on_host(stack) and not on_host(value):
        value = jax.device_put(value, jax.memory.Space.Host)
    return jax.lax.dynamic_update_index_in_dim(stack, value, i, 0, allow_negative_indices=False)


def _buffer(length: int, aval: Any, number: int) -> jax.Array:
    """Room for `length` values like `aval`, in the same memory. XLA allocates it in host memory without a copy.

    Each buffer on the host is filled with a number of its own: buffers that look the same would be made one
    by common subexpression elimination and, host memory to host memory, copied apart again.
    """
    shape = (length, *aval.shape)
    if aval.memory_space == jax.memory.Space.Host:
        return jax.device_put(jnp.full(shape, number, aval.dtype), aval.memory_space)
    return jnp.zeros(shape, aval.dtype)


def _layer_count(layers: Any) -> int:
    counts = {w.shape[0] if w.ndim else 0 for w in jax.tree.leaves(layers)}
    if len(counts) != 1 or counts == {0}:
        raise UserError(
            f"the layers' arrays have leading dimensions {sorted(counts)}: stack them along one first dimension"
        )
    return counts.pop()


def _check_names(
    block: Callable[..., Any], placements: Sequence[Placement], x: Any, layers: Any, constants: tuple[Any, ...]
) -> None:
    carried = carried_names(block, _one_layer_of(layers), x, *constants)
    for placement in placements:
        for tensor in placement.tensors:
            if tensor != EVERYTHING and tensor not in carried:
                raise unknown(f"tensor (the block of {placement.stack!r} names none so)", tensor, carried)


def _check_carry(block: Callable[..., Any], x: Any, layers: Any, constants: tuple[Any, ...]) -> None:
    y = jax.eval_shape(block, _one_layer_of(layers), x, *constants)
    before, after = jax.tree.structure(x), jax.tree.structure(y)
    if before != after:
        raise UserError(f"the block returns {after} and its carry is {before}: return a carry of the same structure")
    for path, a, b in zip(jax.tree.leaves_with_path(x), jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            where = jax.tree_util.keystr(path[0]) or "the carry"
            raise UserError(
                f"the block turns {where} from {a.dtype}{list(a.shape)} into {b.dtype}{list(b.shape)}: "
                f"a layer must keep shape and dtype"
            )
