"""The pieces of the DeepSeek-V3 model against arithmetic done by hand or written down independently."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import batch, parts, quick_jit, random_weights

from forebay.errors import UserError
from forebay.graph.residuals import residuals
from forebay.hardware import get_hardware
from forebay.models.deepseek import PRESETS, DeepSeek, DeepSeekConfig, Yarn, model
from forebay.models.registry import get_model
from forebay.offload.policy import apply
from forebay.ops.moe import RoutedExperts
from forebay.planner.placement import parse_placement
from forebay.sharding import single_device
from forebay.train.config import ProgramConfig
from forebay.train.planning import cost_program, program_graph
from forebay.train.program import make_program

SMALL = DeepSeekConfig(
    vocab=32, embed=16, layers=3, dense_layers=1, heads=2, query_lora=8, kv_lora=8, nope_dim=6, rope_dim=4, value_dim=6,
    mlp=24, moe_mlp=8, experts=8, experts_per_token=3, expert_groups=4, groups_per_token=2, route_scale=2.0,
    capacity_factor=8.0,
)  # fmt: skip
MAIN = dataclasses.replace(SMALL, mtp=False)
SIZES = {f.name: getattr(SMALL, f.name) for f in dataclasses.fields(SMALL) if f.name not in ("family", "yarn")}

# --- sizes and counts -------------------------------------------------------------------------------


def test_parameter_counts_are_the_published_ones():
    # huggingface.co/deepseek-ai/DeepSeek-V3: 671B of the main model, 14B of the prediction module with its copies of
    # embedding and head; huggingface.co/moonshotai/Moonlight-16B-A3B: 16B
    v3 = PRESETS["deepseek-v3"]
    main = model.parameter_count(dataclasses.replace(v3, mtp=False))
    assert round(main / 1e9) == 671
    copies = 2 * v3.vocab * v3.embed
    assert round((model.parameter_count(v3) - main + copies) / 1e9) == 13  # 13.46: the report rounds up
    assert round(model.parameter_count(PRESETS["moonlight-16b"]) / 1e9) == 16
    assert PRESETS["deepseek-v3"].stacks == {"dense_layers": 3, "moe_layers": 58, "mtp": 1}


def test_parameter_count_by_hand():
    attention = 16 * 8 + 8 + 8 * 2 * 10 + 16 * (8 + 4) + 8 + 8 * 2 * (6 + 6) + 2 * 6 * 16
    experts = 16 * 8 + 8 + 3 * 16 * 8 * 8 + 3 * 16 * 8
    moe = attention + experts + 2 * 16
    mtp = moe + 2 * 16 * 16 + 3 * 16
    assert model.parameter_count(SMALL) == attention + 3 * 16 * 24 + 2 * 16 + 2 * moe + mtp + 2 * 32 * 16 + 16


def test_flops_are_those_maxtext_counts():
    # MaxText's report for a sequence of 4096: 250.4 GFLOP per token (forward x 3, causal half, no recompute, no
    # multi-token prediction)
    main = dataclasses.replace(PRESETS["deepseek-v3"], mtp=False)
    assert model.flops_per_token(main, 4096) == pytest.approx(250.4e9, rel=0.01)


def test_flops_by_hand():
    # multiply-adds of one token forward; over a sequence of 3 a token sees 2 keys on average
    attention = 16 * 8 + 8 * 2 * 10 + 16 * 12 + 8 * 2 * 12 + 2 * 6 * 16 + 2 * (10 + 6) * 2
    moe = 16 * 8 + 3 * 16 * 8 * (3 + 1)
    total = 3 * attention + 3 * 16 * 24 + 2 * moe + attention + moe + 2 * 16 * 16 + 2 * 16 * 32
    assert model.flops_per_token(SMALL, 3) == 3 * 2 * total


@pytest.mark.parametrize(
    "sizes",
    [
        {"dense_layers": 3}, {"rope_dim": 5}, {"experts": 6}, {"groups_per_token": 5}, {"experts_per_token": 5},
        {"capacity_factor": 0.5},
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_each_other_are_refused(sizes):
    with pytest.raises(UserError, match=next(iter(sizes))):
        dataclasses.replace(SMALL, **sizes)


def test_experts_that_the_axis_does_not_divide_are_refused():
    config = ProgramConfig(model="deepseek-tiny", sizes={"experts": 12}, mesh="expert=8", batch=8, placement="full")
    with pytest.raises(UserError, match=r"its experts dimension of 12 is not divisible by expert=8"):
        make_program(config, jax.devices()[:8])


# --- rotary embeddings ------------------------------------------------------------------------------


def yarn_frequency(index, dim, base, yarn):
    """One frequency as the YaRN paper and DeepSeek's code have it: by interpolation within a range of indices."""
    frequency = base ** (-2 * index / dim)

    def bound(turns):
        return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / 2 / math.log(base)

    low, high = max(0, math.floor(bound(yarn.beta_fast))), min(dim - 1, math.ceil(bound(yarn.beta_slow)))
    if index <= low:
        return frequency
    if index >= high:
        return frequency / yarn.factor
    share = (index - low) / (high - low)
    return frequency * (1 - share) + frequency / yarn.factor * share


def test_yarn_keeps_blends_and_stretches():
    config = PRESETS["deepseek-v3"]
    plain = model.rope_frequencies(dataclasses.replace(config, yarn=None))
    np.testing.assert_allclose(plain[[0, 16]], [1, 0.01], rtol=1e-6)
    expected = np.array([yarn_frequency(i, 64, 10_000.0, config.yarn) for i in range(32)])
    ratios = expected / plain
    assert ratios[0] == 1 and ratios[-1] == pytest.approx(1 / 40)
    assert np.any((ratios < 0.99) & (ratios > 0.03))
    np.testing.assert_allclose(model.rope_frequencies(config), expected, rtol=1e-5)


def test_yarn_raises_the_temperature():
    # DeepSeek-V3: (0.1 ln 40 + 1)^2 over the root of 192; equal mscales leave cosines and sines alone
    config = PRESETS["deepseek-v3"]
    assert model.softmax_scale(config) == pytest.approx((0.1 * math.log(40) + 1) ** 2 / 192**0.5)
    assert float(model.rope_tables(config, 1)[0][0, 0]) == 1
    unequal = dataclasses.replace(config, yarn=Yarn(mscale=0.5))
    factor = (0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    assert float(model.rope_tables(unequal, 1)[0][0, 0]) == pytest.approx(factor)


def test_rope_turns_neighbouring_pairs():
    x = jnp.asarray([1.0, 0.0, 0.0, 2.0])
    cos, sin = jnp.cos(jnp.asarray([0.5, 0.1])), jnp.sin(jnp.asarray([0.5, 0.1]))
    expected = [math.cos(0.5), -2 * math.sin(0.1), math.sin(0.5), 2 * math.cos(0.1)]
    np.testing.assert_allclose(model.apply_rope(x, cos, sin), expected, rtol=1e-6)


# --- the loss ---------------------------------------------------------------------------------------


def cross_entropy(hidden, head, targets):
    scores = np.asarray(hidden @ head, np.float64)
    nats = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return nats[targets >= 0].mean()


def test_the_loss_is_its_three_parts():
    weights, b = random_weights(model, SMALL), batch(SMALL)
    norm = functools.partial(model.rms_norm, eps=SMALL.norm_eps)
    targets = np.asarray(b["targets"])

    @quick_jit
    def pieces(weights):
        total, aux = model.loss(
            weights, b, parts=parts(model, SMALL), chunking="tokens", scan_layers=model.plain_scan, dtype=jnp.float32
        )
        hidden, table = model.hidden_states(
            weights, b["inputs"], parts=parts(model, SMALL), scan_layers=model.plain_scan, dtype=jnp.float32
        )
        # one more layer over the embedding of the next token and the hidden state, joined
        mtp = jax.tree.map(lambda w: w[0], weights.mtp)
        joined = [norm(weights.embedding_VD[b["targets"]], mtp.token_norm_D), norm(hidden, mtp.hidden_norm_D)]
        joined = jnp.concatenate(joined, -1) @ mtp.proj_D2D.swapaxes(0, 1).reshape(32, 16)
        rope = model.rope_tables(SMALL, 12)
        after, stats = model.decoder_layer(mtp.layer, joined, rope, parts=parts(model, SMALL))
        return total, aux, norm(hidden, weights.final_norm_D), norm(after, mtp.final_norm_D), table, stats

    total, aux, hidden, after, table, stats = jax.device_get(pieces(weights))
    main = cross_entropy(hidden, weights.head_DV, targets)
    after_next = np.concatenate([targets[:, 1:], np.full((2, 1), -1)], axis=1)
    second = cross_entropy(after, weights.head_DV, after_next)
    balance = table.balance.sum() + stats.balance
    assert float(aux.cross_entropy) == pytest.approx(main, rel=1e-5)
    assert float(aux.mtp_cross_entropy) == pytest.approx(second, rel=1e-5)
    assert float(total) == pytest.approx(main + 0.3 * second + 1e-4 * balance, rel=1e-5)
    np.testing.assert_allclose(aux.load, [*table.load_E, stats.load_E])
    np.testing.assert_allclose(aux.load.mean(-1), 1, rtol=1e-6)


@functools.cache
def gradient_under(placement, mesh="fsdp=1"):
    """What the model (without the prediction layer) tells and its gradients, under a placement, on a mesh."""
    devices = math.prod(int(p.partition("=")[2]) for p in mesh.split(","))
    config = ProgramConfig(
        model="deepseek-tiny", sizes=SIZES | {"mtp": False}, mesh=mesh, batch=4, seq=12, dtype="float32",
        placement=placement,
    )  # fmt: skip
    program = make_program(config, jax.devices()[:devices])
    weights = jax.device_put(random_weights(model, MAIN), program.state_shardings.weights)
    data = jax.device_put(batch(SMALL, sequences=4), program.batch_shardings)
    return jax.device_get(quick_jit(program.aux_and_gradients)(weights, data))


def assert_same(actual, expected, tolerance):
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - e).max() <= tolerance * max(np.abs(e).max(), 1e-6), jax.tree_util.keystr(path)


def test_experts_on_several_devices_train_alike():
    # the other axes are compared layer by layer in tests/ops/test_moe.py
    assert_same(gradient_under("none", "fsdp=2,expert=2"), gradient_under("none"), 1e-4)


def test_a_placement_changes_no_number():
    offloaded = (
        "moe_layers:moe_mlpwi_0=host,moe_mlpwi_1=host,context=host,mla_q=device,moe_dispatched=device;"
        "dense_layers:minimal"
    )
    assert_same(gradient_under(offloaded), gradient_under("none"), 1e-5)


def test_routers_are_moved_by_the_load_and_by_no_gradient():
    aux, gradients = gradient_under("none")
    assert not np.any(gradients.moe_layers.mlp.router_bias_E)
    assert np.all(np.abs(gradients.moe_layers.mlp.router_DE).max((1, 2)) > 0)
    weights = random_weights(model, SMALL)
    load = np.concatenate([aux.load, [[0, 0, 0, 1, 1, 2, 2, 2]]])  # the prediction layer's last
    after: Any = DeepSeek("small", SMALL).after_update(weights, aux._replace(load=load))
    change = np.concatenate(
        [a.mlp.router_bias_E - b.mlp.router_bias_E for a, b in
         ((after.moe_layers, weights.moe_layers), (after.mtp.layer, weights.mtp.layer))]
    )  # fmt: skip
    np.testing.assert_allclose(change, SMALL.bias_speed * np.sign(1 - load), atol=1e-7)
    assert 0 < np.count_nonzero(change > 0) < change.size


def test_new_weights_have_the_scales_they_promise():
    config = dataclasses.replace(PRESETS["deepseek-tiny"], layers=8, dense_layers=3)
    weights = jax.jit(lambda key: model.init(key, config))(jax.random.key(0))
    assert jax.tree.map(lambda w: w.shape, weights) == model.shapes(config)
    assert np.all(np.asarray(weights.moe_layers.mlp_norm_D) == 1)
    assert not np.any(weights.moe_layers.mlp.router_bias_E)
    for drawn in (weights.embedding_VD, weights.moe_layers.mlp.up_DEF, weights.dense_layers.attention.query_b_QHK):
        assert np.std(drawn) == pytest.approx(0.02, rel=0.03)
    for back in (weights.mtp.layer.mlp.down_DEF, weights.dense_layers.attention.out_DHW):
        assert np.std(back) == pytest.approx(0.02 / 4, rel=0.03)  # sqrt(2 * 8 layers) = 4
    drawn = [np.asarray(w).ravel()[:1000] for w in jax.tree.leaves(weights) if np.std(w) > 0]
    assert len({d.tobytes() for d in drawn}) == len(drawn)  # none twice


def test_training_stops_where_too_many_rows_found_no_room():
    deepseek = DeepSeek("small", SMALL)
    assert deepseek.refusal({"moe_overflow": 0.01}) is None
    reason = deepseek.refusal({"moe_overflow": 0.034})
    assert reason is not None and "3.4%" in reason and "capacity_factor" in reason and "\n" not in reason


def test_biases_and_norms_are_not_decayed():
    decayed = jax.tree.leaves_with_path(get_model("deepseek-tiny").decayed())
    kept = {path[-1].name for path, value in decayed if not value}
    assert kept == {
        "attention_norm_D", "query_norm_Q", "kv_norm_C", "mlp_norm_D", "router_bias_E", "token_norm_D", "hidden_norm_D",
        "final_norm_D",
    }  # fmt: skip


def test_choices_are_kept_whatever_the_plan():
    """Routing made again could differ, and kept rows would then not go with rows that are made again."""
    config = ProgramConfig(model="deepseek-tiny", sizes=SIZES, batch=2, seq=12, placement="full")
    program = make_program(config, jax.devices()[:1])
    example = program.model.example_blocks(2, 12, jnp.float32, single_device(), "blockwise")["moe_layers"]
    placement = parse_placement("full", program.model.stacks, {s: n.carried for s, n in program.names.items()})[1]
    kept = residuals(apply(example.block, placement), example.layer, example.x, *example.constants)
    assert [r.shape for r in kept if r.name == "moe_routing_maps"] == [(2, 12, 3)]
    with pytest.raises(UserError, match="moe_routing_maps=recompute"):
        make_program(dataclasses.replace(config, placement="full,moe_routing_maps=recompute"), jax.devices()[:1])


def test_the_planner_knows_the_exchange_of_tokens(monkeypatch):
    monkeypatch.setattr(RoutedExperts, "_ragged", True)  # as on GPUs and TPUs; nothing is run
    config = ProgramConfig(
        model="deepseek-tiny", sizes=SIZES | {"capacity_factor": 1.5}, mesh="fsdp=2,expert=4", batch=8, seq=16,
        placement="full",
    )  # fmt: skip
    graph = program_graph(make_program(config, jax.devices()[:8]))
    block = next(b for b in graph.blocks if b.stack.name == "moe_layers")

    def exchanged(positions):
        return sorted(
            c.num_bytes
            for i in positions
            for c in block.forward.costs[i].collectives
            if c.kind == "all_to_all" and c.axes == ("expert",)
        )

    # 16 tokens a device and 3 experts each: 48 rows of 16 bfloat16 values, room for 72 and of these 3 in 4 from elsewhere;
    # the float32 weights likewise; back come 48 rows
    there, weights, back = 72 * 16 * 2 * 3 / 4, 72 * 4 * 3 / 4, 48 * 16 * 2 * 3 / 4
    assert exchanged(block.forward_ops) == sorted([there, weights, back])
    assert exchanged(block.recomputed(set())[0]) == sorted([there, weights])
    assert exchanged(block.recomputed(set(block.named["moe_dispatched"]))[0]) == []
    assert (
        "moe_routing_maps"
        not in cost_program(make_program(config, jax.devices()[:8]), get_hardware("gb200"), 2**40, 2**40)
        .problem.stack("moe_layers")
        .names
    )


def test_a_later_token_changes_nothing_before_it():
    weights = random_weights(model, SMALL)
    tokens = np.arange(16)[None] % SMALL.vocab
    changed = tokens.copy()
    changed[0, 9] = 31
    run = quick_jit(lambda t: model.logits(weights, t, parts=parts(model, SMALL), dtype=jnp.float32))
    before, after = (np.asarray(run(jnp.asarray(t, jnp.int32)))[0] for t in (tokens, changed))
    np.testing.assert_array_equal(before[:9], after[:9])
    assert np.all(np.abs(before - after).max(axis=-1)[9:] > 1e-5)
