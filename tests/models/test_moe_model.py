"""The pieces of the Mixtral and Qwen3-MoE model against arithmetic done by hand or written down independently."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import batch, parts, quick_jit, random_weights

from forebay.errors import UserError
from forebay.graph.residuals import residuals
from forebay.hardware import get_hardware
from forebay.models.moe import PRESETS, Moe, MoeConfig, model
from forebay.models.registry import get_model, model_names
from forebay.models.stacked import plain_scan
from forebay.offload.policy import apply
from forebay.ops.moe.routing import load_balancing_loss
from forebay.planner.placement import parse_placement
from forebay.sharding import single_device
from forebay.train.config import ProgramConfig
from forebay.train.planning import cost_program
from forebay.train.program import make_program

SMALL = MoeConfig(
    vocab=32, embed=16, layers=2, heads=4, kv_heads=2, head_dim=6, moe_mlp=8, experts=8, experts_per_token=3,
    qk_norm=True, rope_theta=100.0, balance_factor=0.1, capacity_factor=8.0,
)  # fmt: skip
SIZES = {f.name: getattr(SMALL, f.name) for f in dataclasses.fields(SMALL) if f.name != "family"}

# --- sizes and counts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    # huggingface.co/Qwen/Qwen3-30B-A3B: 30.5B, 3.3B activated; Qwen3-235B-A22B: 235B, 22B; Mixtral: 46.7B, 12.9B
    # (arXiv:2401.04088) and 141B, 39B (mistral.ai/news/mixtral-8x22b)
    ("name", "published", "activated"),
    [
        ("qwen3-30b-a3b", 30.5e9, 3.3e9), ("qwen3-235b-a22b", 235e9, 22e9), ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("mixtral-8x22b", 141e9, 39e9),
    ],
)  # fmt: skip
def test_parameter_counts_are_the_published_ones(name, published, activated):
    config = PRESETS[name]
    assert model.parameter_count(config) == pytest.approx(published, rel=0.003)
    # of a sequence of 1 two for each multiply-add, three times; the embedding is looked up
    used = model.flops_per_token(config, 1) / 6 + config.vocab * config.embed
    assert used == pytest.approx(activated, rel=0.02)


def test_parameter_count_by_hand():
    attention = 2 * 16 * 4 * 6 + 2 * 16 * 2 * 6 + 2 * 6
    layer = attention + 16 * 8 + 3 * 16 * 8 * 8 + 2 * 16
    assert model.parameter_count(SMALL) == 2 * layer + 2 * 32 * 16 + 16
    without_norms = dataclasses.replace(SMALL, qk_norm=False)
    assert model.parameter_count(without_norms) == model.parameter_count(SMALL) - 2 * 2 * 6


def test_flops_by_hand():
    # multiply-adds of one token forward; over a sequence of 3 a token sees 2 keys on average
    attention = 2 * 16 * 4 * 6 + 2 * 16 * 2 * 6 + 2 * 4 * 6 * 2
    assert model.flops_per_token(SMALL, 3) == 3 * 2 * (2 * (attention + 16 * 8 + 3 * 3 * 16 * 8) + 16 * 32)


@pytest.mark.parametrize(
    "sizes", [{"kv_heads": 3}, {"head_dim": 7}, {"experts_per_token": 9}, {"capacity_factor": 0.5}]
)
def test_sizes_that_do_not_fit_each_other_are_refused(sizes):
    with pytest.raises(UserError, match=next(iter(sizes))) as caught:
        get_model("qwen3-moe-tiny", SIZES | sizes)
    assert "\n" not in str(caught.value)


def test_experts_that_the_axis_does_not_divide_are_refused():
    config = ProgramConfig(model="qwen3-moe-tiny", sizes={"experts": 12}, mesh="expert=8", batch=8, placement="full")
    with pytest.raises(UserError, match=r"its experts dimension of 12 is not divisible by expert=8"):
        make_program(config, jax.devices()[:8])


def test_every_preset_is_registered():
    assert set(PRESETS) <= set(model_names())


# --- attention and routing --------------------------------------------------------------------------


def test_norms_of_queries_and_keys_make_their_lengths_not_matter():
    tokens = np.arange(12)[None]
    run = quick_jit(
        lambda w, c: model.logits(w, jnp.asarray(tokens), parts=parts(model, c), dtype=jnp.float32), static_argnums=1
    )

    def longer(weights) -> Any:
        attention = weights.moe_layers.attention
        attention = dataclasses.replace(attention, query_DHK=3 * attention.query_DHK, key_DGK=3 * attention.key_DGK)
        return dataclasses.replace(weights, moe_layers=dataclasses.replace(weights.moe_layers, attention=attention))

    normed = dataclasses.replace(SMALL, norm_eps=1e-12)
    weights = random_weights(model, normed)
    np.testing.assert_allclose(run(longer(weights), normed), run(weights, normed), atol=1e-4)
    plain = dataclasses.replace(normed, qk_norm=False)
    weights = random_weights(model, plain)
    assert np.abs(run(longer(weights), plain) - run(weights, plain)).max() > 1e-2


def test_normalised_probabilities_are_the_softmax_of_the_chosen_logits():
    """Mixtral's router as its paper has it: the softmax of the top two logits (arXiv:2401.04088, section 2.1)."""
    config = dataclasses.replace(SMALL, experts_per_token=2)
    weights = jax.tree.map(lambda w: w[0], random_weights(model, config).moe_layers.mlp)
    h_BSD = jax.random.normal(jax.random.key(0), (2, 5, 16))
    found, _ = model.expert_mlp(weights, h_BSD, parts=parts(model, config))
    expected = np.zeros((2, 5, 16))
    scores = np.asarray(h_BSD @ weights.router_DE, np.float64)
    for where in np.ndindex(2, 5):
        x, best = np.asarray(h_BSD[where], np.float64), np.argsort(-scores[where])[:2]
        share = np.exp(scores[where][best]) / np.exp(scores[where][best]).sum()
        for e, s in zip(best, share, strict=True):
            gate, up = (x @ np.asarray(w[:, e], np.float64) for w in (weights.gate_DEF, weights.up_DEF))
            expected[where] += s * (gate / (1 + np.exp(-gate)) * up) @ np.asarray(weights.down_DEF[:, e]).T
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_balance_loss_by_hand():
    def loss(load, probability, k, by_layer=False):
        return load_balancing_loss(load, probability, experts_per_token=k, by_layer=by_layer)

    even = jnp.ones((3, 4))
    assert float(loss(even, even / 4, 2)) == float(loss(even, even / 4, 2, by_layer=True)) == 2  # what is perfect: k
    # all tokens on one of two experts, with probability 3/4: twice 1 * 3/4
    one = jnp.asarray([[2.0, 0.0]])
    assert float(loss(one, jnp.asarray([[0.75, 0.25]]), 1)) == 1.5
    # a second layer that has them all on the other makes up for it, unless each layer counts alone
    both, probabilities = jnp.asarray([[2.0, 0.0], [0.0, 2.0]]), jnp.asarray([[0.75, 0.25], [0.25, 0.75]])
    assert float(loss(both, probabilities, 1)) == 1
    assert float(loss(both, probabilities, 1, by_layer=True)) == 1.5
    assert not np.any(jax.grad(loss)(both, probabilities, 1))


def test_a_later_token_changes_nothing_before_it():
    weights = random_weights(model, SMALL)
    tokens = np.arange(16)[None] % SMALL.vocab
    changed = tokens.copy()
    changed[0, 9] = 31
    run = quick_jit(lambda t: model.logits(weights, t, parts=parts(model, SMALL), dtype=jnp.float32))
    before, after = (np.asarray(run(jnp.asarray(t, jnp.int32)))[0] for t in (tokens, changed))
    np.testing.assert_array_equal(before[:9], after[:9])
    assert np.all(np.abs(before - after).max(axis=-1)[9:] > 1e-5)


# --- training ---------------------------------------------------------------------------------------


@functools.cache
def gradient_under(placement, mesh="fsdp=1"):
    """What the model tells and its gradients, under a placement, on a mesh."""
    devices = math.prod(int(p.partition("=")[2]) for p in mesh.split(","))
    config = ProgramConfig(
        model="qwen3-moe-tiny", sizes=SIZES, mesh=mesh, batch=4, seq=12, dtype="float32", placement=placement
    )
    program = make_program(config, jax.devices()[:devices])
    weights = jax.device_put(random_weights(model, SMALL), program.state_shardings.weights)
    data = jax.device_put(batch(SMALL, sequences=4), program.batch_shardings)
    return jax.device_get(quick_jit(program.aux_and_gradients)(weights, data))


def assert_same(actual, expected, tolerance):
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - e).max() <= tolerance * max(np.abs(e).max(), 1e-6), jax.tree_util.keystr(path)


def test_gradients_are_finite_and_reach_every_weight():
    _, gradients = gradient_under("none")
    for path, g in jax.tree.leaves_with_path(gradients):
        assert np.all(np.isfinite(g)) and np.abs(g).max() > 0, jax.tree_util.keystr(path)


def test_experts_on_several_devices_train_alike():
    # the balance loss is of all tokens, wherever they are
    assert_same(gradient_under("none", "fsdp=2,expert=2"), gradient_under("none"), 1e-4)


def test_a_placement_changes_no_number():
    offloaded = "moe_mlpwi_0=host,moe_mlpwi_1=host,context=host,query_proj=device,moe_dispatched=device"
    assert_same(gradient_under(offloaded), gradient_under("none"), 1e-5)


def test_the_loss_falls():
    small = Moe("small", SMALL)
    weights, data = small.init(jax.random.key(0), jnp.float32), batch(SMALL, sequences=4)
    optimizer = optax.adam(1e-2)

    def loss(weights):
        return model.loss(
            weights, data, parts=parts(model, SMALL), chunking="tokens", scan_layers=plain_scan, dtype=jnp.float32
        )

    @quick_jit
    def train(weights):
        def step(carry, _):
            weights, state = carry
            (total, aux), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
            updates, state = optimizer.update(gradients, state)
            return (optax.apply_updates(weights, updates), state), (total, small.metrics(aux))

        return jax.lax.scan(step, (weights, optimizer.init(weights)), length=20)[1]

    totals, metrics = jax.device_get(train(weights))
    assert totals[0] == pytest.approx(math.log(32) + 0.1 * 3, rel=0.02)  # nothing learnt, experts nearly even
    assert totals[-1] < totals[0] - 0.5
    np.testing.assert_allclose(totals, metrics["loss"] + 0.1 * metrics["moe_balance_loss"], rtol=1e-5)
    assert set(metrics) == {"loss", "moe_balance_loss", "moe_max_violation", "moe_worst_violation", "moe_overflow"}
    assert not np.any(metrics["moe_overflow"]) and np.all(
        metrics["moe_worst_violation"] >= metrics["moe_max_violation"]
    )


def test_new_weights_have_the_scales_they_promise():
    config = dataclasses.replace(PRESETS["qwen3-moe-tiny"], layers=8)
    weights = jax.jit(lambda key: model.init(key, config))(jax.random.key(0))
    assert jax.tree.map(lambda w: w.shape, weights) == model.shapes(config)
    assert np.all(np.asarray(weights.moe_layers.attention.query_norm_K) == 1)
    for drawn in (weights.embedding_VD, weights.moe_layers.mlp.up_DEF, weights.moe_layers.attention.query_DHK):
        assert np.std(drawn) == pytest.approx(0.02, rel=0.03)
    for back in (weights.moe_layers.mlp.down_DEF, weights.moe_layers.attention.out_DHK):
        assert np.std(back) == pytest.approx(0.02 / 4, rel=0.03)  # sqrt(2 * 8 layers) = 4


def test_norms_are_not_decayed():
    decayed = jax.tree.leaves_with_path(get_model("qwen3-moe-tiny").decayed())
    kept = {path[-1].name for path, value in decayed if not value}
    assert kept == {"attention_norm_D", "query_norm_K", "key_norm_K", "mlp_norm_D", "final_norm_D"}


def test_training_stops_where_too_many_rows_found_no_room():
    small = Moe("small", SMALL)
    assert small.refusal({"moe_overflow": 0.01}) is None
    reason = small.refusal({"moe_overflow": 0.034})
    assert reason is not None and "3.4%" in reason and "capacity_factor above 8.0" in reason and "\n" not in reason


# --- planning ---------------------------------------------------------------------------------------


def test_the_names_that_a_plan_places():
    config = ProgramConfig(
        model="qwen3-moe-tiny", sizes=SIZES, mesh="fsdp=2,expert=4", batch=8, seq=16, placement="full"
    )
    program = make_program(config, jax.devices()[:8])
    costed = cost_program(program, get_hardware("gb200"), 2**40, 2**40)
    assert set(costed.problem.stack("moe_layers").names) == {
        "decoder_layer_input", "query_proj", "key_proj", "value_proj", "context", "out_proj",
        "moe_x_sorted", "moe_dispatched", "moe_mlpwi_0", "moe_mlpwi_1",
    }  # fmt: skip


@pytest.mark.parametrize("qk_norm", [True, False])
def test_kept_projections_spare_their_products(qk_norm, equations):
    """With `query_proj` and its like kept, the backward pass makes queries, keys and values by no product."""
    config = dataclasses.replace(SMALL, qk_norm=qk_norm)
    example = Moe("small", config).example_blocks(2, 12, jnp.float32, single_device(), "blockwise")["moe_layers"]

    def projections(text):
        placement = parse_placement(text, config.stacks, {"moe_layers": ("query_proj", "key_proj", "value_proj")})[0]
        block = apply(example.block, placement)

        def gradient(layer, x, *constants):
            return jax.grad(lambda layer, x: block(layer, x, *constants)[0].sum(), argnums=(0, 1), allow_int=True)(
                layer, x
            )

        dots = [
            e
            for e in equations(gradient, example.layer, example.x, *example.constants)
            if e.primitive.name == "dot_general"
        ]
        heads = {(2, 12, 4, 6), (2, 12, 2, 6)}
        return sum(e.outvars[0].aval.shape in heads for e in dots)

    kept = "full,query_proj=device,key_proj=device,value_proj=device"
    assert projections("full") == projections(kept) + 3


def test_choices_are_kept_whatever_the_plan():
    """Routing made again could differ, and kept rows would then not go with rows that are made again."""
    example = Moe("small", SMALL).example_blocks(2, 12, jnp.float32, single_device(), "blockwise")["moe_layers"]
    placement = parse_placement("full", SMALL.stacks, {"moe_layers": ("decoder_layer_input",)})[0]
    kept = residuals(apply(example.block, placement), example.layer, example.x, *example.constants)
    assert [r.shape for r in kept if r.name == "moe_routing_maps"] == [(2, 12, 3)]


def test_a_small_model_of_the_same_kind(sharding_of):
    sharding = sharding_of("expert=4,tensor=2")
    sizes = get_model("qwen3-30b-a3b").small_sizes({"moe_layers": 3}, sharding)
    config = get_model("qwen3-30b-a3b", sizes).config
    assert (config.layers, config.head_dim, config.heads // config.kv_heads, config.qk_norm) == (3, 128, 8, True)
    assert config.experts == 8 and config.experts_per_token == 8 and config.kv_heads == 2
    assert model.parameter_count(config) < 2e7
