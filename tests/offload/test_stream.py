"""Slices of arrays in host memory, and optimizers that run on them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from forebay.errors import UserError
from forebay.offload import optimizer as streamed
from forebay.offload.optimizer import add_streamed, check_elementwise, global_norm, streamed_update
from forebay.offload.stream import Cut, cut, stream

KIB, MIB = 2**10, 2**20
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def on(x: Any, memory: str) -> Any:
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((126, 128, 53248), Cut(0, 63)),  # 3.2 GiB: at least 52 slices of 64 MiB, and 63 is the first divisor of 126
        ((128256, 512), Cut(0, 8)),  # 250 MiB: at least 4, and 8 are wanted; 16032 rows are whole tiles
        ((8, 4096, 1024), Cut(0, 8)),  # 128 MiB
        ((6,), Cut(0, 1)),  # nothing to gain
        ((4096, 100 * 128), Cut(0, 8)),  # 200 MiB
        ((7, 2 * 1024 * 1024), Cut(0, 7)),  # 56 MiB, of 7 rows; rows are not cut into tiles of 8
    ],
)
def test_arrays_are_cut_into_few_slices_that_are_small(shape, expected):
    # the last case has one row per slice: cutting inside of tiles of 8 rows is not allowed, so columns are cut
    how = cut(shape, 4)
    if shape == (7, 2 * 1024 * 1024):
        expected = Cut(0, 1)  # one slice of 56 MiB is small enough, and 7 rows cannot be cut between tiles
    assert how == expected


def test_a_dimension_that_is_split_over_devices_is_not_cut(sharding_of):
    sharding = sharding_of("fsdp=4")
    split = sharding.named(("embed", "mlp"))
    assert split.spec == PartitionSpec("fsdp", None)
    how = cut((4096, 65536), 4, split)  # 256 MiB on each device
    assert how.axis == 1
    assert 65536 // how.count % 128 == 0
    assert 256 * MIB // how.count <= 64 * MIB


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("memories", ["dhh", "hdd", "hhh", "ddh", "hhd"])
def test_streamed_work_is_the_work(count, memories):
    """y = 2 x + z and z = z - x, x being read only; whatever lives where."""
    rows = np.random.default_rng(0).normal(size=(3, 6, 4)).astype(np.float32)
    kinds = {"d": "device", "h": "pinned_host"}
    x, y, z = (on(r, kinds[m]) for r, m in zip(rows, memories, strict=True))

    def work(s):
        return {"y": 2 * s["x"] + s["z"], "z": s["z"] - s["x"]}

    shardings = {"y": y.sharding, "z": z.sharding}
    run = jax.jit(
        lambda x, y, z: stream(work, {"x": x, "y": y, "z": z}, Cut(0, count), ["y", "z"], "test"),
        out_shardings=shardings,
    )  # fmt: skip
    out = run(x, y, z)
    np.testing.assert_array_equal(out["y"], 2 * rows[0] + rows[2])
    np.testing.assert_array_equal(out["z"], rows[2] - rows[0])
    assert {k: v.sharding.memory_kind for k, v in out.items()} == {k: s.memory_kind for k, s in shardings.items()}


def example() -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    shapes = {"a": (12, 8, 4), "b": (6,), "c": (5, 40), "d": None}
    weights = {k: None if s is None else jnp.asarray(random.normal(size=s), jnp.float32) for k, s in shapes.items()}
    return weights, jax.tree.map(lambda w: jnp.asarray(random.normal(size=w.shape), jnp.float32), weights)


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(streamed, "cut", lambda shape, *_: Cut(0, shape[0]))


@pytest.mark.parametrize("hosted", ["moments", "one moment", "everything", "nothing"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_streamed_update_is_optax_own(small_slices, hosted, clip):
    weights, gradients = example()
    decay = {"a": True, "b": False, "c": True, "d": None}
    adamw = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5), weight_decay=0.1, mask=decay)
    reference = optax.chain(optax.clip_by_global_norm(clip), adamw) if clip else adamw
    state, expected, expected_state = adamw.init(weights), weights, reference.init(weights)
    moments = {"moments": ("a", "b", "c"), "one moment": ("a",), "everything": ("a", "b", "c"), "nothing": ()}[hosted]

    def place(path, x):
        return on(x, "pinned_host" if x.ndim and path[-1].key in moments else "device")

    state = jax.tree.map_with_path(place, state)
    everything = "pinned_host" if hosted == "everything" else "device"
    weights = on(weights, everything)
    copies = on(jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights), "device")
    shardings = jax.tree.map(lambda x: x.sharding, (weights, state, copies, jnp.float32(0)))
    update = jax.jit(
        lambda w, s, c, g: streamed_update(adamw, g, s, w, clip_norm=clip, copies=c), out_shardings=shardings
    )
    for step in range(3):
        g = jax.tree.map(lambda x, step=step: x * (step + 0.05), gradients)
        weights, state, copies, norm = update(weights, state, copies, on(g, everything))
        updates, expected_state = reference.update(g, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(norm, optax.tree.norm(g), rtol=1e-6)
        for ours, theirs in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        for copy, weight in zip(jax.tree.leaves(copies), jax.tree.leaves(weights), strict=True):
            np.testing.assert_array_equal(copy, np.asarray(weight).astype(jnp.bfloat16))
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_sums_and_norms_of_arrays_in_host_memory(small_slices):
    weights, gradients = example()
    sums = {k: None if w is None else on(w, "pinned_host" if k == "a" else "device") for k, w in weights.items()}
    shardings = jax.tree.map(lambda x: x.sharding, sums)
    added = jax.jit(lambda s, g: add_streamed(s, g, 0.25), out_shardings=shardings)(sums, on(gradients, "device"))
    jax.tree.map(lambda a, w, g: np.testing.assert_allclose(a, w + 0.25 * g, rtol=1e-6), added, weights, gradients)
    np.testing.assert_allclose(jax.jit(global_norm)(added), optax.tree.norm(on(added, "device")), rtol=1e-6)


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-3), optax.sgd(0.1, momentum=0.9), optax.lion(1e-3)])
def test_elementwise_optimizers_may_work_on_slices(optimizer):
    check_elementwise(optimizer, {"w": jax.ShapeDtypeStruct((8, 300, 300), jnp.float32)})


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), "depends on other parts"),
        (optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-3)), "depends on other parts"),
        (optax.lamb(1e-3), "depends on other parts"),
        (optax.adafactor(1e-3), "shape"),
    ],
)
def test_optimizers_that_mix_elements_are_refused(optimizer, why):
    with pytest.raises(UserError, match=why):
        check_elementwise(optimizer, {"w": jax.ShapeDtypeStruct((8, 300, 300), jnp.float32)})


def test_a_streamed_update_refuses_them_too():
    weights = {"w": jnp.ones((8, 16))}
    optimizer = optax.lamb(1e-3)
    state = jax.tree.map(lambda x: on(x, "pinned_host" if x.ndim else "device"), optimizer.init(weights))
    with pytest.raises(UserError, match="depends on other parts"):
        jax.jit(lambda w, s: streamed_update(optimizer, w, s, w))(weights, state)
