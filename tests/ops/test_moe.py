"""Routed experts against loops over tokens and experts written down independently."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forebay.errors import UserError
from forebay.ops.moe import RoutedExperts, blockwise, exchange, grouped, routing, triton
from forebay.sharding import single_device

# --- routing ----------------------------------------------------------------------------------------


def chosen_by_hand(scores, bias, k, groups, groups_per_token):
    """One token's experts, as the report words it."""
    choice = scores + bias
    members = np.arange(len(scores)).reshape(groups, -1)
    worth = [np.sort(choice[m])[-2:].sum() for m in members]
    allowed = {e for g in np.argsort(worth)[-groups_per_token:] for e in members[g]}
    return set(sorted(allowed, key=lambda e: choice[e])[-k:])


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([(4, 2), (4, 1), (1, 1)]))
def test_the_experts_of_a_token_are_the_best_of_its_best_groups(seed, groups):
    rng = np.random.default_rng(seed)
    scores = rng.uniform(size=(2, 5, 16)).astype(np.float32)
    bias = rng.normal(scale=0.3, size=16).astype(np.float32)
    found = routing.choose_experts(
        jnp.asarray(scores), jnp.asarray(bias), experts_per_token=4, groups=groups[0], groups_per_token=groups[1]
    )
    found = np.asarray(found)
    for b, s in np.ndindex(2, 5):
        assert set(found[b, s]) == chosen_by_hand(scores[b, s], bias, 4, *groups)
    if groups[0] > 1:
        assert max(len(set(row // 4)) for row in found.reshape(-1, 4)) <= groups[1]


def test_the_bias_chooses_and_does_not_weigh():
    scores = jnp.asarray([[[0.9, 0.8, 0.5, 0.1]]])
    choose = functools.partial(routing.choose_experts, experts_per_token=2, groups=1, groups_per_token=1)
    experts = choose(scores, jnp.asarray([0.0, 0.0, 0.0, 1.0]))
    assert experts.tolist() == [[[3, 0]]]
    weights = routing.router_weights(scores, experts, normalise=True, route_scale=2.5)
    np.testing.assert_allclose(weights, [[[0.25, 2.25]]], rtol=1e-6)  # 2.5 * 0.1 / 1.0, 2.5 * 0.9 / 1.0
    weights = routing.router_weights(scores, experts, normalise=False, route_scale=2.0)
    np.testing.assert_allclose(weights, [[[0.2, 1.8]]], rtol=1e-6)
    gradient = jax.grad(
        lambda b: routing.router_weights(scores, choose(scores, b), normalise=True, route_scale=1).sum()
    )
    assert not np.any(gradient(jnp.zeros(4)))


def test_the_balance_loss_by_hand():
    # one sequence of two tokens and four experts, one expert a token: both choose expert 0
    scores = jnp.asarray([[[0.6, 0.2, 0.1, 0.1], [0.4, 0.2, 0.2, 0.2]]])
    tokens = routing.tokens_per_expert(jnp.asarray([[[0], [0]]]), 4)
    assert tokens.tolist() == [[2, 0, 0, 0]]
    # f = (4, 0, 0, 0), P_0 = (0.6 + 0.4) / 2
    assert float(routing.balance_loss(scores, tokens)) == pytest.approx(2.0)
    even = routing.tokens_per_expert(jnp.asarray([[[0, 1], [2, 3]]]), 4)
    assert float(routing.balance_loss(jnp.full((1, 2, 4), 0.3), even)) == pytest.approx(1.0)


def test_the_bias_moves_against_the_load():
    tokens = jnp.asarray([[3.0, 1.0, 0.0], [3.0, 1.0, 4.0]])
    load = routing.relative_load(tokens)
    np.testing.assert_allclose(load, [1.5, 0.5, 1.0])
    np.testing.assert_allclose(routing.adjusted_bias(jnp.zeros(3), load, 0.1), [-0.1, 0.1, 0.0], rtol=1e-6)


# --- exchange ---------------------------------------------------------------------------------------


def ragged_all_to_all(operands, outputs, tables):
    """`jax.lax.ragged_all_to_all` for all devices at once, as its documentation words it."""
    results = [o.copy() for o in outputs]
    devices = len(operands)
    for sender, (input_offsets, send_sizes, output_offsets, _) in enumerate(tables):
        per_device = len(input_offsets) // devices
        for i, (start, size, at) in enumerate(zip(input_offsets, send_sizes, output_offsets, strict=True)):
            results[i // per_device][at : at + size] = operands[sender][start : start + size]
    for receiver, (_, _, _, recv_sizes) in enumerate(tables):
        for i, size in enumerate(recv_sizes):
            sender, j = divmod(i, len(recv_sizes) // devices)
            assert size == tables[sender][1][receiver * (len(recv_sizes) // devices) + j]
    return results


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([6, 20, 40, 160]))
def test_rows_arrive_sorted_by_expert_then_sender_and_go_back(seed, capacity):
    devices, experts, n = 4, 8, 40
    rng = np.random.default_rng(seed)
    of = np.sort(rng.choice(experts, p=rng.dirichlet(np.ones(experts)), size=(devices, n)), axis=1)
    counts = np.stack([np.bincount(row, minlength=experts) for row in of]).astype(np.int32)
    rows = [np.asarray([[100 * d + i] for i in range(1, n + 1)], np.float32) for d in range(devices)]
    s = [jax.tree.map(np.asarray, exchange.slices(jnp.asarray(counts), jnp.int32(d), capacity)) for d in range(devices)]
    going = [(x.going_start, x.going_size, x.landing_start, x.coming_size) for x in s]
    buffers = ragged_all_to_all(rows, [np.zeros((capacity, 1), np.float32)] * devices, going)
    lost = 0
    for d in range(devices):
        mine = [e for e in range(experts) if e // 2 == d]
        expected = np.concatenate([rows[p][of[p] == e] for e in mine for p in range(devices)])
        lost += max(0, len(expected) - capacity)
        expected = expected[:capacity]
        np.testing.assert_array_equal(buffers[d][: len(expected)], expected)
        assert not np.any(buffers[d][len(expected) :])
        sizes = exchange.group_sizes(jnp.asarray(counts), jnp.int32(d), capacity)
        assert int(sizes.sum()) == len(expected)
    assert float(exchange.lost_rows(jnp.asarray(counts), capacity)) == lost
    coming = [(x.coming_start, x.coming_size, x.origin_start, x.going_size) for x in s]
    for d, back in enumerate(ragged_all_to_all(buffers, [np.zeros((n, 1), np.float32)] * devices, coming)):
        arrived = np.isin(rows[d], np.concatenate(buffers))
        np.testing.assert_array_equal(back, np.where(arrived, rows[d], 0))


def test_the_emulation_on_cpus_is_the_ragged_collective(sharding_of):
    sharding = sharding_of("expert=4")
    rng = np.random.default_rng(0)
    of = np.sort(rng.integers(8, size=(4, 24)), axis=1)
    counts = np.stack([np.bincount(row, minlength=8) for row in of]).astype(np.int32)
    rows = rng.normal(size=(4, 24, 3)).astype(np.float32)
    spec = jax.sharding.PartitionSpec("expert")

    def there_and_back(rows, counts):
        buffer = exchange.send(rows, counts, capacity=20, ragged=False)
        return buffer, exchange.send_back(buffer, counts, length=24, ragged=False)

    run = jax.shard_map(
        there_and_back,
        mesh=sharding.mesh,
        in_specs=(spec, jax.sharding.PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    buffers, back = (np.asarray(x) for x in jax.jit(run)(rows.reshape(-1, 3), counts))
    s = [jax.tree.map(np.asarray, exchange.slices(jnp.asarray(counts), jnp.int32(d), 20)) for d in range(4)]
    zeros = [np.zeros((20, 3), np.float32)] * 4
    expected = ragged_all_to_all(
        rows, zeros, [(x.going_start, x.going_size, x.landing_start, x.coming_size) for x in s]
    )
    np.testing.assert_array_equal(buffers.reshape(4, 20, 3), expected)
    zeros = [np.zeros((24, 3), np.float32)] * 4
    tables = [(x.coming_start, x.coming_size, x.origin_start, x.going_size) for x in s]
    np.testing.assert_array_equal(back.reshape(4, 24, 3), ragged_all_to_all(expected, zeros, tables))


# --- grouped products -------------------------------------------------------------------------------

SIZES = [(70, 0, 130, 56), (0, 0, 0, 256), (1, 1, 1, 1), (64, 64, 64, 64), (0, 0, 0, 0)]


@pytest.mark.parametrize("kernel", [blockwise, triton], ids=["blockwise", "triton"])
def test_grouped_products_are_those_of_each_group(kernel):
    rng = np.random.default_rng(0)
    M, D, F = 256, 128, 128
    x, h = rng.normal(size=(M, D)).astype(np.float32), rng.normal(size=(M, F)).astype(np.float32)
    w = rng.normal(size=(D, 4, F)).astype(np.float32)
    options = {"interpret": True} if kernel is triton else {}  # the kernel's arithmetic, without a GPU

    @jax.jit
    def products(sizes):
        return (
            kernel.into(x, w, sizes, **options), kernel.out_of(h, w, sizes, **options), kernel.outer(x, h, sizes, **options)
        )  # fmt: skip

    for sizes in SIZES if kernel is blockwise else SIZES[:2]:  # the interpreter is slow
        into, out_of, outer = products(jnp.asarray(sizes, jnp.int32))
        expected = np.zeros((D, 4, F))
        first = 0
        for group, size in enumerate(sizes):
            rows = slice(first, first + size)
            np.testing.assert_allclose(into[rows], x[rows] @ w[:, group], rtol=1e-4, atol=1e-3)
            np.testing.assert_allclose(out_of[rows], h[rows] @ w[:, group].T, rtol=1e-4, atol=1e-3)
            expected[:, group] = x[rows].T @ h[rows]
            first += size
        np.testing.assert_allclose(outer, expected, rtol=1e-4, atol=1e-3)
        if kernel is blockwise:
            assert not np.any(into[first:]) and not np.any(out_of[first:])


@hypothesis.given(st.lists(st.integers(0, 400), min_size=2, max_size=9), st.sampled_from([16, 64]))
def test_visits_cover_each_row_once_with_its_group(sizes, block):
    rows = sum(sizes) + 8
    group, start, stop = (np.asarray(v) for v in blockwise.visits(jnp.asarray(sizes, jnp.int32), rows, block))
    assert len(group) == rows // block + len(sizes)
    covered = np.full(rows, -1)
    for g, a, b in zip(group, start, stop, strict=True):
        assert b - a <= block and np.all(covered[a:b] == -1)
        covered[a:b] = g
    np.testing.assert_array_equal(covered, [*np.repeat(np.arange(len(sizes)), sizes), *[-1] * 8])


@pytest.mark.parametrize(("rows", "groups"), [(327_680, 32), (40_960, 32), (8192, 16)])
def test_blocks_add_little_arithmetic(rows, groups):
    block = blockwise.block_rows(rows, groups)
    assert (rows // block + groups) * block <= 1.13 * rows


def test_the_kernel_follows_platform_and_sizes():
    assert grouped.choose_kernel("auto", "cuda", embed=7168, mlp=2048) == "triton"
    assert grouped.choose_kernel("auto", "cuda", embed=100, mlp=2048) == "blockwise"
    assert grouped.choose_kernel("auto", "cpu", embed=7168, mlp=2048) == "blockwise"
    with pytest.raises(UserError, match="grouped=triton needs a GPU"):
        grouped.choose_kernel("triton", "cpu", embed=7168, mlp=2048)
    with pytest.raises(UserError, match="blokwise"):
        grouped.choose_kernel("blokwise", "cpu", embed=7168, mlp=2048)


# --- the whole --------------------------------------------------------------------------------------

B, S, D, E, F, K = 8, 12, 16, 8, 24, 3


def inputs(skew):
    """Tokens, their experts (popular ones first, the more the larger `skew`), weights, matrices."""
    rng = np.random.default_rng(0)
    popularity = rng.gumbel(size=(B, S, E)) - skew * np.arange(E)
    experts = np.argsort(-popularity, axis=-1)[..., :K].astype(np.int32)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)  # noqa: E731
    return draw(B, S, D), jnp.asarray(experts), draw(B, S, K), (draw(D, E, F), draw(D, E, F), draw(D, E, F))


def dense(x, experts, weights, matrices, room=None):
    """Every token through its experts one by one; `room[b, s, k]` tells the choices that count."""
    gate, up, down = matrices
    out = jnp.zeros_like(x)
    for e in range(E):
        hidden = jax.nn.silu(x @ gate[:, e]) * (x @ up[:, e])
        counts = (experts == e) if room is None else (experts == e) & room
        out += (hidden @ down[:, e].T) * jnp.where(counts, weights, 0).sum(-1, keepdims=True)
    return out


def layer(sharding, capacity_factor=8.0):
    return RoutedExperts(E, K, capacity_factor, "blockwise", sharding)


def value_and_gradients(function, x, weights, matrices):
    def scalar(x, weights, matrices):
        out = function(x, weights, matrices)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(scalar, (0, 1, 2), has_aux=True))(x, weights, matrices)
    return jax.device_get((out, gradients))


def assert_close(actual, expected):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), actual, expected)


@pytest.fixture(scope="module")
def reference():
    x, experts, weights, matrices = inputs(0.3)
    return value_and_gradients(lambda x, w, m: dense(x, experts, w, m), x, weights, matrices)


@pytest.mark.parametrize("mesh", ["fsdp=1", "expert=4", "data=2,fsdp=2,expert=2", "expert=2,sequence=2,tensor=2"])
def test_values_and_gradients_are_those_of_a_loop_over_experts(mesh, reference, sharding_of):
    x, experts, weights, matrices = inputs(0.3)
    routed = layer(sharding_of(mesh))
    found = value_and_gradients(lambda x, w, m: routed(x, experts, w, *m).out_BSD, x, weights, matrices)
    assert_close(found, reference)


def test_what_finds_no_room_counts_as_nothing_and_is_counted(sharding_of):
    x, experts, weights, matrices = inputs(2.0)
    routed = layer(sharding_of("expert=4"), capacity_factor=1.25)
    capacity = routed.capacity(B // 4 * S * K)
    assert capacity == 96  # 1.25 * 72 rows, and the next multiple of 8
    # rows as they are taken in: by expert, then by device (two sequences each), then in order
    choices = np.asarray(experts)
    room = np.zeros((B, S, K), bool)
    left = [capacity] * 4
    for e in range(E):
        for b, s, k in np.ndindex(B, S, K):
            if choices[b, s, k] == e and left[e // 2] > 0:
                room[b, s, k] = True
                left[e // 2] -= 1
    assert 0.2 < 1 - room.mean() < 0.8
    expected = value_and_gradients(lambda x, w, m: dense(x, experts, w, m, jnp.asarray(room)), x, weights, matrices)
    found = value_and_gradients(lambda x, w, m: routed(x, experts, w, *m).out_BSD, x, weights, matrices)
    assert_close(found, expected)
    assert float(jax.jit(lambda: routed(x, experts, weights, *matrices).overflow)()) == pytest.approx(1 - room.mean())


def test_a_buffer_is_no_larger_than_what_can_come(sharding_of):
    assert layer(single_device()).capacity(300) == 300
    # four devices with 100 tokens each, of which a device with two experts gets each at most twice
    assert layer(sharding_of("expert=4"), 100.0).capacity(300) == 4 * 100 * 2


def test_keeping_what_was_dispatched_spares_the_exchanges(sharding_of, equations, monkeypatch):
    monkeypatch.setattr(RoutedExperts, "_ragged", True)
    x, experts, weights, matrices = inputs(0.3)
    routed = layer(sharding_of("expert=4"))

    def exchanges(*kept):
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        block = jax.checkpoint(lambda *a: routed(a[0], experts, *a[1:]).out_BSD.sum(), policy=policy)
        gradient = jax.grad(block, tuple(range(5)))
        return sum(e.primitive.name == "ragged_all_to_all" for e in equations(gradient, x, weights, *matrices))

    # tokens and weights there, results back; the same in the backward pass; recomputed: tokens and weights
    assert exchanges() == 8
    assert exchanges("moe_dispatched") == 6
    assert exchanges("moe_mlpwi_0", "moe_mlpwi_1") == 8
