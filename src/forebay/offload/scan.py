"""The scan over layers that applies a plan.

`jax.lax.scan` over `jax.checkpoint` would do, but for three things:

- A plan gives ranges of layers different placements. Splitting the stack for that would copy every
  weight and every gradient; here each range is a loop over indices into the one stack, and the
  gradients are written into one buffer in place.
- The compiled program should say which tensor a copy belongs to. Residuals are stored and fetched
  under a scope that carries their name (`save:<stack>:<name>`, `load:<stack>:<name>`), which XLA
  keeps in every instruction that comes of it.
- The backward pass is written out, so that it can be arranged for the transfers.

A layer's copies run while another layer computes: what a layer stores is carried, on the device, to the next iteration,
which sends it to the host; and an iteration of the backward pass fetches what the next one needs. So a copy starts
with an iteration and ends with it, whatever the compiler knows of pipelining. What the last layer stores never
leaves: the backward pass begins with it.

Differentiation in reverse mode only.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax.core import Tracer
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata

from forebay.errors import UserError, unknown
from forebay.graph.residuals import Residual, carried_names, input_names, residuals, vjp_by
from forebay.graph.stacks import STACK_SCOPE
from forebay.offload.host_buffers import host_buffer
from forebay.offload.optimizer import leaf_name
from forebay.offload.policy import apply
from forebay.offload.stream import on_host
from forebay.planner.placement import EVERYTHING, Placement
from forebay.planner.plan import Plan
from forebay.xla.copies import WEIGHT

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
        plan: a plan, or placements of one stack that cover its layers in order; those of a single layer move nothing to
            the host (`Placement.in_loop`). None keeps every residual
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
    if isinstance(plan, Plan) and plan.placements and not placements:
        raise unknown("layer stack", stack, dict.fromkeys(p.stack for p in plan.placements))
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
    owner = f"{stack} {_calls_before(stack)}"
    ranges = [_Range(block, p.in_loop, owner) for p in placements]
    # A jitted caller is traced once and may be differentiated several times, by other arguments each time, in
    # any order before the backward passes are traced. So what a forward trace found is kept here, one entry a
    # trace, and its residuals say which entry is theirs.
    traces: list[_Trace] = []

    @jax.custom_vjp
    def run(layers: Any, x: Any, constants: tuple[Any, ...]) -> Any:
        for r in ranges:
            x = r.primal(layers, x, constants)
        return x

    def forward(layers: Any, x: Any, constants: tuple[Any, ...]) -> tuple[Any, Any]:
        wanted = _Wanted.of(layers, x, constants)
        args = jax.tree.map(lambda p: p.value, (layers, x, constants), is_leaf=_is_custom_primal)
        kept = [r.kept(*args, wanted=wanted) for r in ranges]
        # jax wants residuals of one structure from every trace: that of the one that stores most
        everything = _Wanted.everything(*args)
        full = kept if wanted == everything else [r.kept(*args, wanted=everything) for r in ranges]
        most = _residuals(full)
        if _residuals(kept) > most:
            wanted, kept = everything, full
        layers, x, constants = args
        start, stored, vjps = jax.tree.map(_Aval.of, x), [], []
        for r, values in zip(ranges, kept, strict=True):
            x, left, vjp = r.forward(
                layers, x, constants, wanted, values, _buffers(r.count, values, owner, len(stored))
            )
            stored += left
            vjps.append(vjp)
        traces.append(_Trace(start, wanted, tuple(vjps)))
        absent = [np.zeros(0, np.int8)] * (most - len(stored))
        return x, (layers, constants, [*stored, *absent], _label(len(traces) - 1))

    def backward(results: Any, dx: Any) -> tuple[Any, Any, Any]:
        layers, constants, stored, label = results
        trace = traces[_labelled(label)]
        wanted, stored = trace.wanted, iter(stored)
        kept = [list(itertools.islice(stored, vjp.stored)) for vjp in trace.vjps]
        dx = [_instantiate(d) for d in _only(wanted.carry, dx)]
        dlayers = [_room_for_gradient(w, owner, n) for n, w in enumerate(_only(wanted.layers, layers))]
        dconstants = [jnp.zeros_like(c) for c in _only(wanted.constants, constants)]
        for r, vjp, values in zip(reversed(ranges), reversed(trace.vjps), reversed(kept), strict=True):
            dx, dlayers, dconstants = r.backward(layers, constants, values, vjp, (dx, dlayers, dconstants))
        return (
            _fill(layers, wanted.layers, dlayers, _no_cotangent),
            _fill(trace.start, wanted.carry, dx, _no_cotangent),
            _fill(constants, wanted.constants, dconstants, _no_cotangent),
        )

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(layers, x, constants)


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which leaves of a layer, of the carry and of the constants a VJP is taken by.

    Of layers and constants those that somebody differentiates: by others a gradient would be thrown away, after
    its residuals had been stored. Of the carry every floating-point leaf, for layers hand on what they change.
    """

    layers: tuple[bool, ...]
    carry: tuple[bool, ...]
    constants: tuple[bool, ...]

    @classmethod
    def of(cls, layers: Any, x: Any, constants: Any) -> "_Wanted":
        """From the arguments of a custom VJP's forward rule under symbolic zeros."""
        primals = [jax.tree.leaves(t, is_leaf=_is_custom_primal) for t in (layers, x, constants)]
        perturbed = [tuple(_is_inexact(p.value) and p.perturbed for p in leaves) for leaves in primals]
        return cls(perturbed[0], tuple(_is_inexact(p.value) for p in primals[1]), perturbed[2])

    @classmethod
    def everything(cls, layers: Any, x: Any, constants: Any) -> "_Wanted":
        return cls(*(tuple(_is_inexact(v) for v in jax.tree.leaves(t)) for t in (layers, x, constants)))

    @property
    def flat(self) -> tuple[bool, ...]:
        return (*self.layers, *self.carry, *self.constants)


@dataclasses.dataclass(frozen=True)
class _LayerVjp:
    """The VJP of one layer of a range, without its arrays: how the backward pass puts it together again.

    `names` are those of the residuals that are stored, in the order of the buffers, and `sent` says which of them go to
    the host behind the layer.
    """

    tree: Any
    sources: tuple["_Source", ...]
    names: tuple[str, ...]
    sent: tuple[bool, ...]
    wanted: _Wanted
    carry: Any

    @property
    def stored(self) -> int:
        """A buffer of each residual, and the last layer's values of those that are sent."""
        return len(self.names) + sum(self.sent)

    def rebuild(self, layer: Any, constants: tuple[Any, ...], stored: list[Any]) -> Callable[[Any], Any]:
        pools = {"layer": jax.tree.leaves(layer), "constant": jax.tree.leaves(constants), "stored": stored}
        leaves = [s.value if s.kind == "literal" else pools[s.kind][s.index] for s in self.sources]
        return jax.tree.unflatten(self.tree, leaves)


@dataclasses.dataclass(frozen=True)
class _Trace:
    """What one trace of the forward pass found: the carry before the first layer, and the VJPs of the ranges."""

    start: Any
    wanted: _Wanted
    vjps: tuple[_LayerVjp, ...]


class _Range:
    """The layers of one placement. `forward` traces the block; `backward` rebuilds its VJPs from that."""

    def __init__(self, block: Callable[..., Any], placement: Placement, owner: str):
        self.block = block
        self.owner = owner
        # kept on the device by its layer, and sent from there by the next
        self.checkpointed = apply(block, placement.on_device)
        self.hosted = frozenset(placement.names("host"))
        self.stack = placement.stack
        self.first, past_last = placement.layers
        self.count = past_last - self.first
        # a loop of two layers is unrolled, and libtpu 0.0.50.1 aborts on stores that then differ in order; up to two
        # there is no next layer that needs the place before it is free either way
        self.row_major = self.count > 2

    @property
    def indices(self) -> jax.Array:
        return self.first + jnp.arange(self.count, dtype=jnp.int32)

    def primal(self, layers: Any, x: Any, constants: tuple[Any, ...]) -> Any:
        def one(x: Any, i: jax.Array) -> tuple[Any, None]:
            return self.block(_take(layers, i, _fetch(layers, i, self.stack)), x, *constants), None

        return jax.lax.scan(one, x, self.indices)[0]

    def kept(self, layers: Any, x: Any, constants: tuple[Any, ...], wanted: _Wanted) -> list["_Kept"]:
        """What a layer stores for its backward pass."""
        layer, sources = _one_layer_of(layers), []

        def one_layer(*args: Any) -> list[Any]:
            _, stored, _, found = self._one_layer(*args, wanted=wanted)
            sources.extend(found)
            return stored

        avals = jax.make_jaxpr(one_layer)(layer, x, constants).out_avals
        names = self._names(sources, layer, x, constants, wanted)
        return [_Kept(a, n, n in self.hosted and not _is_host(a)) for a, n in zip(avals, names, strict=True)]

    def _names(
        self, sources: Sequence["_Source"], layer: Any, x: Any, constants: tuple[Any, ...], wanted: _Wanted
    ) -> tuple[str, ...]:
        """The names of what a layer stores, in order."""
        origins = residuals(self.checkpointed, layer, x, *constants, wanted=wanted.flat)
        inputs = input_names(self.block, layer, x, *constants)
        return tuple(_name(o, inputs) for o, s in zip(origins, sources, strict=True) if s.kind == "stored")

    def forward(
        self,
        layers: Any,
        x: Any,
        constants: tuple[Any, ...],
        wanted: _Wanted,
        kept: list["_Kept"],
        buffers: list[jax.Array],
    ) -> tuple[Any, list[jax.Array], _LayerVjp]:
        """The carry after the last layer, the filled buffers with what the last layer stores to the host, and the VJP
        that reads them.

        What layer k stores goes to place k + 1 of a buffer in host memory. So its place 0 is written nothing
        of use, before the first layer, and read once, after the last of the backward pass.
        """
        carry, vjps = jax.tree.map(_Aval.of, x), []  # of the one trace of the loop's body
        names, sent = tuple(v.name for v in kept), tuple(v.sent for v in kept)

        def body(k: jax.Array, state: Any, layer: Any) -> Any:
            x, buffers, late = state
            y, stored, tree, sources = self._one_layer(layer, x, constants, wanted)
            vjps.append(_LayerVjp(tree, sources, names, sent, wanted, carry))
            following, written = iter(late), []
            for buffer, value, name, s in zip(buffers, stored, names, sent, strict=True):
                with jax.named_scope(f"save:{self.stack}:{name}"):
                    written.append(self._write(buffer, next(following) if s else value, k))
            return y, written, [v for v, s in zip(stored, sent, strict=True) if s]

        nothing = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in kept if v.sent]
        x, buffers, late = self._loop(body, (x, buffers, nothing), layers, lambda k: self.first + k)
        return x, [*buffers, *late], vjps[-1]

    def backward(
        self, layers: Any, constants: tuple[Any, ...], stored: list[jax.Array], vjp: _LayerVjp, cotangents: Any
    ) -> Any:
        wanted = vjp.wanted
        order = self.first + jnp.arange(self.count - 1, -1, -1, dtype=jnp.int32)
        hosted = [on_host(total) for total in cotangents[1]]
        buffers, late_values = stored[: len(vjp.names)], stored[len(vjp.names) :]

        def write(dlayers: list[Any], late: list[Any], k: Any) -> list[Any]:
            """`dlayers` with the gradients of the layer whose turn was `k`, where these go to host memory.

            They go while the next layer is worked on, and to a place that is read from an array: of places that
            fall with the loop's counter XLA (jax 0.12.0.1) takes a copy that it moves to the next iteration to
            rise with it, and writes layers over one another.
            """
            following = iter(late)
            place = _read(order, jnp.maximum(k, 0))
            with jax.named_scope(f"gradient:{self.stack}"):
                return [
                    self._write(t, next(following), place) if h else t for t, h in zip(dlayers, hosted, strict=True)
                ]

        def body(k: jax.Array, state: Any, layer: Any) -> Any:
            dx, dlayers, dconstants, late, fetched = state
            dlayers = write(dlayers, late, k - 1)  # first nothing, to a place that is written again
            k = self.count - 1 - k
            i = self.first + k
            values, following, here = [], [], iter(fetched)
            for buffer, name, s in zip(buffers, vjp.names, vjp.sent, strict=True):
                with jax.named_scope(f"load:{self.stack}:{name}"):
                    values.append(next(here) if s else _read(buffer, k))
                    if s:  # of the layer before, whose values are one place further on
                        following.append(_to_device(_read(buffer, k)))
            pull = vjp.rebuild(layer, constants, values)
            with jax.named_scope(f"layer:{self.stack}"):
                found = iter(pull(_fill(vjp.carry, wanted.carry, dx, _zero_cotangent)))
            dlayer, dx, dconst = (list(itertools.islice(found, sum(w))) for w in dataclasses.astuple(wanted))
            with jax.named_scope(f"gradient:{self.stack}"):
                dlayer = [d.astype(total.dtype) for total, d in zip(dlayers, dlayer, strict=True)]
                dlayers = [
                    total if h else self._write(total, d, i)
                    for total, d, h in zip(dlayers, dlayer, hosted, strict=True)
                ]
            dconstants = [total + d for total, d in zip(dconstants, dconst, strict=True)]
            return dx, dlayers, dconstants, [d for d, h in zip(dlayer, hosted, strict=True) if h], following

        nothing = [jnp.zeros(t.shape[1:], t.dtype) for t, h in zip(cotangents[1], hosted, strict=True) if h]
        state = (*cotangents, nothing, late_values)
        dx, dlayers, dconstants, late, _ = self._loop(body, state, layers, lambda k: self.first + self.count - 1 - k)
        return dx, write(dlayers, late, self.count - 1), dconstants

    def _loop(
        self, body: Callable[[jax.Array, Any, Any], Any], carry: Any, layers: Any, index: Callable[[Any], Any]
    ) -> Any:
        """`carry = body(k, carry, weights of layer index(k))` for each layer, k counting from 0.

        Weights that are in host memory are fetched while the layer before has its turn, so that the last layer, which
        has none to fetch for, is outside of the loop: it would fetch from beyond the stack.

        With `lax.scan`, k is read from an array, and XLA knows the place of a copy only where that is the loop's
        own counter. `lax.while_loop` counts itself, but it cannot be differentiated again.

        Loops that are alike must not get one body from XLA's computation-deduplicator: where it pipelines host copies,
        it changes the body under one of them and aborts (jax 0.12.0.1). A note on the counter makes each its own.
        """
        streamed = any(on_host(w) for w in jax.tree.leaves(layers))
        if not streamed and not self.hosted:
            counter = jnp.arange(self.count, dtype=jnp.int32)
            return jax.lax.scan(lambda c, k: (body(k, c, _take(layers, index(k))), None), carry, counter)[0]
        rounds = self.count - streamed

        def step(state: Any) -> Any:
            k, carry, fetched = state
            with set_xla_metadata(forebay_scan=f"{self.owner} {self.first}"):
                following = k + 1
            fetch = _fetch(layers, index(following), self.stack) if streamed else []
            return following, body(k, carry, _take(layers, index(k), fetched)), fetch

        fetched = _fetch(layers, index(jnp.int32(0)), self.stack)
        k, carry, fetched = jax.lax.while_loop(lambda s: s[0] < rounds, step, (jnp.int32(0), carry, fetched))
        return body(k, carry, _take(layers, index(k), fetched)) if streamed else carry

    def _write(self, stack: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return _write(stack, value, i, self.row_major)

    def _one_layer(
        self, layer: Any, x: Any, constants: tuple[Any, ...], wanted: _Wanted
    ) -> tuple[Any, list[Any], Any, tuple["_Source", ...]]:
        """The block's result, what its backward pass needs that is neither weight nor constant, and the
        structure of its VJP with the source of each of its leaves."""
        with jax.named_scope(f"layer:{self.stack}"):
            y, vjp = vjp_by(self.checkpointed, (layer, x, *constants), wanted.flat)
        leaves, tree = jax.tree.flatten(vjp)
        sources, stored = [], []
        for leaf in leaves:
            source = _find(leaf, "layer", layer) or _find(leaf, "constant", constants)
            if source is None and not isinstance(leaf, Tracer):
                source = _Source("literal", value=leaf)
            if source is None:
                source = _Source("stored", len(stored))
                stored.append(leaf)
            sources.append(source)
        return y, stored, tree, tuple(sources)


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A value that a layer stores, and whether it is sent to the host behind the layer. What is in host memory already,
    as the buffers of a scan within the block are, is not sent."""

    aval: Any
    name: str
    sent: bool


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where the backward pass finds one leaf of a layer's VJP."""

    kind: Literal["layer", "constant", "stored", "literal"]
    index: int = 0
    value: Any = None


def _label(number: int) -> np.ndarray:
    """A number as a residual. It is in the shape, which a trace knows; `vmap`, loops and `shard_map` keep it."""
    return np.zeros((0, number), np.int8)


def _labelled(label: Any) -> int:
    return label.shape[1]


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


def _only(wanted: Sequence[bool], tree: Any) -> list[Any]:
    """The leaves of `tree` that are wanted."""
    return [leaf for leaf, w in zip(jax.tree.leaves(tree, is_leaf=_is_symbolic_zero), wanted, strict=True) if w]


def _fill(like: Any, wanted: Sequence[bool], values: list[Any], other: Callable[[Any], Any]) -> Any:
    """The inverse of `_only`, with the structure of `like`; `other` makes the leaves that are not wanted."""
    leaves, tree = jax.tree.flatten(like, is_leaf=_is_aval)
    found = iter(values)
    return jax.tree.unflatten(tree, [next(found) if w else other(v) for v, w in zip(leaves, wanted, strict=True)])


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


def _room_for_gradient(w: jax.Array, owner: str, number: int) -> jax.Array:
    """In the memory of `w`, for the gradient of the owner's weight of this number."""
    return host_buffer(w.shape, w.dtype, f"gradient:{owner}", number) if on_host(w) else jnp.zeros_like(w)


def _take(layers: Any, i: Any, fetched: Sequence[jax.Array] = ()) -> Any:
    """The weights of layer `i`; those that are in host memory are the fetched ones, in order."""
    following = iter(fetched)
    return jax.tree.map(lambda w: next(following) if on_host(w) else _read(w, i), layers)


def _fetch(layers: Any, i: Any, stack: str) -> list[jax.Array]:
    """On the device, the weights of layer `i` that are in host memory."""
    fetched = []
    for path, w in jax.tree.leaves_with_path(layers):
        if on_host(w):
            with jax.named_scope(f"load:{stack}:{WEIGHT}{leaf_name(path)}"):
                fetched.append(_to_device(_read(w, i)))
    return fetched


def _to_device(value: jax.Array) -> jax.Array:
    return jax.device_put(value, jax.memory.Space.Device)


def _one_layer_of(layers: Any) -> Any:
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), layers)


def _read(stack: jax.Array, i: jax.Array) -> jax.Array:
    if on_host(stack):
        return _host_reader(0)(stack, i)
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False, allow_negative_indices=False)


def _write(stack: jax.Array, value: jax.Array, i: jax.Array, row_major: bool = True) -> jax.Array:
    if on_host(stack):
        # told twice that a value goes to the host, XLA copies it there, and from there into the stack
        moved = value if on_host(value) else jax.device_put(value, jax.memory.Space.Host)
        return _host_writer(0, row_major)(stack, moved, i)
    return jax.lax.dynamic_update_index_in_dim(stack, value, i, 0, allow_negative_indices=False)


# Under `vmap` jax makes gather and scatter of these, whose indices would have to lie in the memory of the stack.
# The position is a loop's counter, which is not batched.


@functools.cache
def _host_reader(axis: int) -> Callable[..., Any]:
    """Reads the value at a position along an axis."""

    @jax.custom_batching.custom_vmap
    def read(stack: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(stack, i, axis, keepdims=False, allow_negative_indices=False)

    @read.def_vmap
    def batched(size: int, are_batched: Sequence[bool], stack: jax.Array, i: jax.Array) -> tuple[Any, bool]:
        return _host_reader(axis + 1 if are_batched[0] else axis)(stack, i), are_batched[0]

    return read


@functools.cache
def _host_writer(axis: int, row_major: bool) -> Callable[..., Any]:
    """Writes a value at a position along an axis, on TPUs in row-major order if that is asked for."""

    @jax.custom_batching.custom_vmap
    def write(stack: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        if row_major:
            value = jax.lax.platform_dependent(value, tpu=_in_row_major, default=lambda value: value)
        return jax.lax.dynamic_update_index_in_dim(stack, value, i, axis, allow_negative_indices=False)

    @write.def_vmap
    def batched(
        size: int, are_batched: Sequence[bool], stack: jax.Array, value: jax.Array, i: jax.Array
    ) -> tuple[Any, bool]:
        stack, value = (
            x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_batched in zip((stack, value), are_batched[:2], strict=True)
        )
        return _host_writer(axis + 1, row_major)(stack, value, i), True

    return write


def _in_row_major(value: jax.Array) -> jax.Array:
    """`value` with its last dimension innermost and its first outermost, which is a copy on the device where it is not.

    A TPU's compiler carries what a layer stores to the next iteration and sends it from there. Without a copy the layer
    after it makes its own value in the same place, so that the transfer must be over by then: in a tenth of a layer
    for the projections of attention, which the compiler lays out with heads outside of tokens. Where the last but
    one dimension does not fill tiles of 8, this layout would be padded, and is left to the compiler.
    """
    if value.ndim < 2 or value.shape[-2] % 8:
        return value
    return with_layout_constraint(value, Layout(major_to_minor=tuple(range(value.ndim))))


def _is_host(aval: Any) -> bool:
    return aval.memory_space == jax.memory.Space.Host


def _buffers(length: int, kept: Sequence[_Kept], owner: str, first: int) -> list[jax.Array]:
    """Room for `length` of each value, in the memory where it goes: the owner's buffers from number `first` on."""

    def buffer(number: int, value: _Kept) -> jax.Array:
        shape, dtype = (length, *value.aval.shape), value.aval.dtype
        if value.sent or _is_host(value.aval):
            return host_buffer(shape, dtype, owner, number)
        return jnp.zeros(shape, dtype)

    return [buffer(number, value) for number, value in enumerate(kept, first)]


def _residuals(kept: Sequence[Sequence[_Kept]]) -> int:
    """How many residuals the ranges leave together; see `_LayerVjp.stored`."""
    return sum(1 + v.sent for values in kept for v in values)


_scans: tuple[Any, collections.Counter[str]] = (None, collections.Counter())
"""The trace of the last `scan_layers`, and how often it has scanned each stack."""


def _calls_before(stack: str) -> int:
    """How often the current trace has scanned a stack of this name. The same program gets the same numbers."""
    global _scans
    trace = core.get_opaque_trace_state()
    if _scans[0] != trace:
        _scans = trace, collections.Counter()
    _scans[1][stack] += 1
    return _scans[1][stack] - 1


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
