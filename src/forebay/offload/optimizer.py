"""An optimizer's update where state, weights or gradients live in host memory.

Any optax optimizer whose update of an element depends on that element alone (AdamW, SGD, Lion, ...), which
`check_elementwise` verifies. Clipping by the global norm is not of that kind and is done here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from forebay.errors import UserError
from forebay.offload.host_buffers import host_buffer
from forebay.offload.stream import SLICE_BYTES, Cut, cut, on_host, stream


def streamed_update(
    optimizer: optax.GradientTransformation,
    gradients: Any,
    state: Any,
    weights: Any,
    *,
    clip_norm: float = 0.0,
    shardings: Any = None,
    copies: Any = None,
    checked: bool = False,
    slice_bytes: int = SLICE_BYTES,
) -> tuple[Any, Any, Any, jax.Array]:
    """One update of `weights`, each array staying in the memory in which it is.

    A weight of which any array (gradient, weight, moments) is in host memory is updated in slices that come in
    and go out one after another (`forebay.offload.stream`); all others at once, as optax does.

    Args:
        optimizer: an elementwise optax optimizer.
        gradients: a tree like `weights`.
        state: the optimizer's state for `weights`.
        weights: a tree of arrays.
        clip_norm: gradients are scaled down to this global norm; 0 does not clip.
        shardings: a tree of shardings like `weights`, where these are split over devices.
        copies: a tree like `weights` in another dtype, rewritten with the new weights; None for none.
        checked: whether the optimizer is known to be elementwise; otherwise `check_elementwise` is asked.
        slice_bytes: the most that a slice of one array takes on a device.

    Returns:
        The new weights, state and copies, and the gradients' global norm before clipping.

    Raises:
        UserError: something is in host memory, and the optimizer is not elementwise.
    """
    norm = global_norm(gradients, shardings, slice_bytes)

    def update(gradients: Any, state: Any, weights: Any) -> tuple[Any, Any]:
        if clip_norm > 0:  # as optax.clip_by_global_norm
            gradients = jax.tree.map(
                lambda g: jnp.where(norm < clip_norm, g, g / norm.astype(g.dtype) * clip_norm), gradients
            )
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    leaves, treedef = jax.tree.flatten(weights)
    split = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    g, c = jax.tree.leaves(gradients), [None] * len(leaves) if copies is None else jax.tree.leaves(copies)
    moments = _State(optimizer, state, treedef)
    arrays: list[dict[str, Any]] = [
        {"gradient": g[i], "weight": w, **moments.of(i)} | ({} if c[i] is None else {"copy": c[i]})
        for i, w in enumerate(leaves)
    ]
    streamed = [any(on_host(x) for x in a.values()) for a in arrays]
    if any(streamed) and not checked:
        with jax.ensure_compile_time_eval():
            check_elementwise(optimizer, jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), weights))

    def at(updated: list[dict[str, Any] | None]) -> tuple[list[dict[str, Any]], Any]:
        """The update of the weights that are given; the others have no elements."""
        none = jnp.zeros((0,), jnp.float32)
        given = [a or dict.fromkeys(arrays[i], none) for i, a in enumerate(updated)]
        tree = functools.partial(jax.tree.unflatten, treedef)
        new, new_state = update(
            tree([a["gradient"] for a in given]), moments.replaced(given), tree([a["weight"] for a in given])
        )
        after = _State(optimizer, new_state, treedef)
        results = [{"weight": w, **after.of(i)} for i, w in enumerate(jax.tree.leaves(new))]
        for result, copy in zip(results, c, strict=True):
            if copy is not None:
                result["copy"] = result["weight"].astype(copy.dtype)
        return results, new_state

    results, new_state = at([None if s else a for s, a in zip(streamed, arrays, strict=True)])
    after = None
    for i, (path, w) in enumerate(jax.tree.leaves_with_path(weights)):
        if streamed[i]:
            results[i] = after = stream(
                lambda parts, i=i: at([dict(parts) if n == i else None for n in range(len(leaves))])[0][i],
                arrays[i],
                _cut(w, split[i], slice_bytes),
                [name for name in arrays[i] if name != "gradient"],
                leaf_name(path),
                after,
            )
    unflatten = functools.partial(jax.tree.unflatten, treedef)
    new_state = _State(optimizer, new_state, treedef).replaced(results)
    new_copies = None if copies is None else unflatten([r["copy"] for r in results])
    return unflatten([r["weight"] for r in results]), new_state, new_copies, norm


def no_sums(weights: Any, hosted: Any) -> Any:
    """For `add_streamed`, sums of nothing, float32: zeros on the device, and room in host memory where `hosted` says so."""
    leaves, treedef = jax.tree.flatten(weights)
    return jax.tree.unflatten(treedef, [
        host_buffer(w.shape, jnp.float32, "sums", n) if h else jnp.zeros(w.shape, jnp.float32)
        for n, (w, h) in enumerate(zip(leaves, jax.tree.leaves(hosted), strict=True))
    ])  # fmt: skip


def add_streamed(
    sums: Any,
    parts: Any,
    scale: float,
    shardings: Any = None,
    slice_bytes: int = SLICE_BYTES,
    *,
    first: jax.Array | bool = False,
) -> Any:
    """`sums + scale * parts`, array by array, each sum staying in the memory in which it is.

    With `first`, which may be traced, `sums` are those of `no_sums`: what is in host memory then may be anything and is
    not looked at.
    """
    leaves = jax.tree.leaves_with_path(sums)
    split = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)

    def add(arrays: Any, sums_on_host: bool) -> Any:
        total = arrays["sum"]
        before = jnp.where(first, jnp.zeros_like(total), total) if sums_on_host else total
        return {"sum": before + scale * arrays["part"].astype(total.dtype)}

    added, after = [], None
    for (path, total), part, sharding in zip(leaves, jax.tree.leaves(parts), split, strict=True):
        arrays = {"sum": total, "part": part}
        if on_host(total) or on_host(part):
            work = functools.partial(add, sums_on_host=on_host(total))
            after = stream(work, arrays, _cut(total, sharding, slice_bytes), ["sum"], leaf_name(path), after)
            added.append(after["sum"])
        else:
            added.append(add(arrays, sums_on_host=False)["sum"])
    return jax.tree.unflatten(jax.tree.structure(sums), added)


def global_norm(tree: Any, shardings: Any = None, slice_bytes: int = SLICE_BYTES) -> jax.Array:
    """The root of the sum of squares of all elements, float32; arrays in host memory come in by slices."""
    leaves = jax.tree.leaves_with_path(tree)
    split = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    total = sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for _, x in leaves if not on_host(x))
    for (path, x), sharding in zip(leaves, split, strict=True):
        if on_host(x):
            x, total = jax.lax.optimization_barrier((x, total))  # one array after another: see `stream`
            total = total + _sum_of_squares(x, _cut(x, sharding, slice_bytes), leaf_name(path))
    return jnp.sqrt(jnp.asarray(total, jnp.float32))


def _sum_of_squares(x: jax.Array, how: Cut, scope: str) -> jax.Array:
    size = x.shape[how.axis] // how.count

    def take(k: Any) -> jax.Array:
        with jax.named_scope(f"update:{scope}"):
            part = jax.lax.dynamic_slice_in_dim(x, k * size, size, how.axis, allow_negative_indices=False)
            return jax.device_put(part, jax.memory.Space.Device)

    def body(state: Any) -> Any:
        k, total, part = state
        following = take(jnp.minimum(k + 1, how.count - 1))
        return k + 1, total + jnp.sum(jnp.square(part.astype(jnp.float32))), following

    return jax.lax.while_loop(lambda s: s[0] < how.count, body, (jnp.int32(0), jnp.float32(0), take(0)))[1]


def _cut(x: jax.Array, sharding: Any, slice_bytes: int) -> Cut:
    return cut(x.shape, 4, sharding, slice_bytes)  # moments are float32, whatever the weight is


_NOBODY = -1


class _State:
    """An optimizer's state as the arrays that belong to each weight, and the rest."""

    def __init__(self, optimizer: optax.GradientTransformation, state: Any, treedef: Any):
        self._state = state
        numbers = jax.tree.unflatten(treedef, list(range(treedef.num_leaves)))
        owners = optax.tree.map_params(
            optimizer, lambda _, n: n, state, numbers, transform_non_params=lambda _: _NOBODY
        )
        self._leaves, self._treedef = jax.tree.flatten(state)
        self._owners = jax.tree.leaves(owners)

    def of(self, weight: int) -> dict[str, Any]:
        """The arrays of one weight, by their place in the state."""
        return {
            f"state.{n}": x
            for n, (x, owner) in enumerate(zip(self._leaves, self._owners, strict=True))
            if owner == weight
        }

    def replaced(self, by_weight: list[dict[str, Any]]) -> Any:
        """The state with other arrays for the weights."""
        leaves = [
            x if owner == _NOBODY else by_weight[owner][f"state.{n}"]
            for n, (x, owner) in enumerate(zip(self._leaves, self._owners, strict=True))
        ]
        return jax.tree.unflatten(self._treedef, leaves)


def leaf_name(path: Any) -> str:
    """A weight's place in its tree as one word: `layers.gate_DF`."""
    keys = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path]
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in ".".join(keys)) or "weights"


def check_elementwise(optimizer: optax.GradientTransformation, weights: Any) -> None:
    """Whether the optimizer may be run on slices of `weights` (arrays or their shapes).

    It is run on small arrays, whole and in two halves.

    Raises:
        UserError: the state is not shaped like the weights, or the results differ.
    """
    advice = "keep its state on the device; clipping by the global norm is given as clip_norm instead"
    state = jax.eval_shape(optimizer.init, jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), weights))
    treedef = jax.tree.structure(weights)
    belongs = _State(optimizer, state, treedef)
    for i, (path, w) in enumerate(jax.tree.leaves_with_path(weights)):
        if odd := [x for x in belongs.of(i).values() if x.shape != w.shape]:
            raise UserError(
                f"the optimizer keeps an array of shape {list(odd[0].shape)} for the weight {leaf_name(path)} of shape "
                f"{list(w.shape)}, so it cannot work on slices: {advice}"
            )
    random = np.random.default_rng(0)

    def normal(scale: float) -> Any:
        return jax.tree.map(
            lambda w: jnp.asarray(scale * random.normal(size=(4,) * max(1, len(w.shape))), w.dtype), weights
        )

    small = normal(1.0)
    # wherever a norm is clipped, there is a step below it that is not
    gradients = [normal(10.0**power) for power in range(-3, 4)]

    def halves(tree: Any, part: int) -> Any:
        return jax.tree.map(lambda x: x if x.ndim == 0 else x[2 * part : 2 * part + 2], tree)

    def updated(weights: Any, gradients: list[Any]) -> Any:
        state = optimizer.init(weights)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, weights)
            weights = optax.apply_updates(weights, updates)
        return weights

    whole = updated(small, gradients)
    for part in range(2):
        same = jax.tree.map(
            lambda a, b: bool(np.allclose(a, b, rtol=1e-4, atol=1e-7)),
            halves(whole, part), updated(halves(small, part), halves(gradients, part)),
        )  # fmt: skip
        for path, equal in jax.tree.leaves_with_path(same):
            if not equal:
                raise UserError(
                    f"the optimizer's update of one part of {leaf_name(path)} depends on other parts, so it cannot work on "
                    f"slices: {advice}"
                )
