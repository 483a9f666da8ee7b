"""The pieces of the Llama model against arithmetic done by hand or written down independently."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import random_weights

from forebay.errors import UserError
from forebay.models.llama import PRESETS, LlamaConfig, RopeScaling, model
from forebay.models.rope import apply_rope, rope_frequencies, rope_tables
from forebay.sharding import single_device

SMALL = LlamaConfig(vocab=32, embed=24, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=40, rope_theta=100.0)


def logits(weights, config, tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    return np.asarray(model.logits(weights, tokens, config=config, sharding=single_device(), dtype=jnp.float32))


def plain_scan(block, x, layers, *constants, stack):
    assert stack == "layers"
    return jax.lax.scan(lambda x, layer: (block(layer, x, *constants), None), x, layers)[0]


# --- sizes and counts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    # the sizes on the model cards of the published weights (huggingface.co/meta-llama/Llama-3.1-*)
    ("name", "published"),
    [("llama3.1-8b", 8.03e9), ("llama3.1-70b", 70.55e9), ("llama3.1-405b", 405.85e9)],
)
def test_parameter_counts_are_the_published_ones(name, published):
    assert round(model.parameter_count(PRESETS[name]) / 1e7) == round(published / 1e7)


def test_parameter_count_by_hand():
    # per layer: q and out 24*32, k and v 24*16, gate, up and down 24*40, two norms of 24
    layer = 2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 40 + 2 * 24
    assert model.parameter_count(SMALL) == 2 * layer + 24 + 2 * 32 * 24
    tied = dataclasses.replace(SMALL, tied_embeddings=True)
    assert model.parameter_count(tied) == 2 * layer + 24 + 32 * 24


def test_flops_of_405b_are_those_maxtext_counts():
    # MaxText's report for a sequence of 8192: 2524 GFLOP per token (forward x 3, causal half, no recompute)
    assert model.flops_per_token(PRESETS["llama3.1-405b"], 8192) == pytest.approx(2524e9, rel=0.01)


def test_flops_by_hand():
    # multiply-adds of one token forward; over a sequence of 3 a token sees 2 keys on average
    layer = 2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 40 + 2 * 4 * 8 * 2
    assert model.flops_per_token(SMALL, 3) == 3 * 2 * (2 * layer + 24 * 32)


@pytest.mark.parametrize(("sizes", "named"), [({"kv_heads": 3}, "kv_heads=3"), ({"head_dim": 7}, "head_dim=7")])
def test_sizes_that_do_not_fit_each_other_are_refused(sizes, named):
    with pytest.raises(UserError, match=named):
        dataclasses.replace(SMALL, **sizes)


def test_init_has_the_shapes_and_scales_it_promises():
    config = dataclasses.replace(SMALL, vocab=512, embed=128, layers=8, mlp=384)
    weights = model.init(jax.random.key(0), config)
    assert jax.tree.map(lambda w: w.shape, weights) == model.shapes(config)
    assert np.all(np.asarray(weights.layers.mlp_norm_D) == 1)
    assert np.std(weights.layers.up_DF) == pytest.approx(0.02, rel=0.02)
    assert np.std(weights.layers.down_DF) == pytest.approx(0.02 / 4, rel=0.02)  # sqrt(2 * 8 layers) = 4
    assert model.init(jax.random.key(0), dataclasses.replace(config, tied_embeddings=True)).head_DV is None


# --- norm and rotary embeddings ---------------------------------------------------------------------


def test_rms_norm_by_hand():
    # the mean square of (3, 4) is 12.5
    x, scale = jnp.asarray([[3.0, 4.0]]), jnp.asarray([1.0, 2.0])
    expected = [[3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]]
    np.testing.assert_allclose(model.rms_norm(x, scale, 0.0), expected, rtol=1e-6)
    np.testing.assert_allclose(model.rms_norm(x, scale, 3.5), [[0.75, 2.0]], rtol=1e-6)  # sqrt(12.5 + 3.5) = 4


def test_rms_norm_computes_in_float32_and_returns_the_type_it_got():
    x = jnp.full((4096,), 300.0, jnp.float16)  # 300 squared overflows float16
    normed = model.rms_norm(x, jnp.ones(4096, jnp.float16), 1e-5)
    assert normed.dtype == jnp.float16
    np.testing.assert_allclose(normed, 1.0)


def scaled_frequency(frequency, s):
    """Llama 3.1's rule case by case, by wavelength, as transformers documents it."""
    wavelength = 2 * math.pi / frequency
    if wavelength < s.original_max_position_embeddings / s.high_freq_factor:
        return frequency
    if wavelength > s.original_max_position_embeddings / s.low_freq_factor:
        return frequency / s.factor
    smooth = s.original_max_position_embeddings / wavelength - s.low_freq_factor
    smooth /= s.high_freq_factor - s.low_freq_factor
    return (1 - smooth) * frequency / s.factor + smooth * frequency


@pytest.mark.parametrize("scaling", [RopeScaling(), RopeScaling(32.0, 1.0, 4.0, 8192), RopeScaling(4.0, 2.0, 3.0, 64)])
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 500_000.0), (64, 10_000.0)])
def test_rope_frequencies_follow_the_three_cases_of_llama_3_1(head_dim, theta, scaling):
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    expected = np.array([scaled_frequency(f, scaling) for f in plain])
    ratios = expected / plain
    assert ratios[0] == 1
    assert ratios[-1] == pytest.approx(1 / scaling.factor)
    assert np.any((ratios < 0.999) & (ratios > 1.001 / scaling.factor))  # all three cases occur
    frequencies = rope_frequencies(head_dim, theta, scaling)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)


def test_rope_frequencies_without_scaling():
    np.testing.assert_allclose(rope_frequencies(8, 10_000.0, None), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_rope_turns_the_two_halves_by_position_times_frequency():
    x_BSHK = jnp.broadcast_to(jnp.asarray([1.0, 2.0, 0.0, 0.0]), (1, 3, 1, 4))
    turned = apply_rope(x_BSHK, *rope_tables(rope_frequencies(4, 100.0), 3))[0, :, 0]
    for position in range(3):
        one, two = position * 1.0, position * 0.1
        expected = [math.cos(one), 2 * math.cos(two), math.sin(one), 2 * math.sin(two)]
        np.testing.assert_allclose(turned[position], expected, atol=1e-6)


# --- the whole model --------------------------------------------------------------------------------


def test_a_later_token_changes_nothing_before_it():
    weights = random_weights(model, SMALL)
    tokens = np.arange(16)[None] % SMALL.vocab
    changed = tokens.copy()
    changed[0, 9] = 31
    before, after = logits(weights, SMALL, tokens)[0], logits(weights, SMALL, changed)[0]
    np.testing.assert_array_equal(before[:9], after[:9])
    assert np.all(np.abs(before - after).max(axis=-1)[9:] > 1e-4)


def test_sequences_of_a_batch_do_not_see_each_other():
    weights = random_weights(model, SMALL)
    tokens = np.random.default_rng(0).integers(SMALL.vocab, size=(3, 8))
    together = logits(weights, SMALL, tokens)
    for row in range(3):
        np.testing.assert_allclose(logits(weights, SMALL, tokens[row : row + 1])[0], together[row], atol=1e-5)


def test_grouped_queries_are_as_many_heads_with_keys_and_values_repeated():
    weights = random_weights(model, SMALL)
    repeat = lambda w: jnp.repeat(w, 2, axis=2)  # noqa: E731
    layers = dataclasses.replace(
        weights.layers, key_DGK=repeat(weights.layers.key_DGK), value_DGK=repeat(weights.layers.value_DGK)
    )
    repeated = dataclasses.replace(weights, layers=layers)
    tokens = np.arange(12)[None]
    expected = logits(repeated, dataclasses.replace(SMALL, kv_heads=4), tokens)
    np.testing.assert_allclose(logits(weights, SMALL, tokens), expected, atol=1e-5)


def test_a_tied_head_is_the_embedding():
    weights = random_weights(model, SMALL)
    untied = dataclasses.replace(weights, head_DV=weights.embedding_VD.T)
    tied = dataclasses.replace(weights, head_DV=None)
    tokens = np.arange(12)[None]
    expected = logits(untied, SMALL, tokens)
    np.testing.assert_array_equal(logits(tied, dataclasses.replace(SMALL, tied_embeddings=True), tokens), expected)
    assert np.abs(expected).max() > 0.01


def test_the_loss_is_the_mean_cross_entropy_of_the_logits_where_targets_count():
    weights = random_weights(model, SMALL)
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(SMALL.vocab, size=(2, 2, 16))
    targets[0, 3:9] = -1
    loss = model.loss(
        weights, {"inputs": jnp.asarray(inputs, jnp.int32), "targets": jnp.asarray(targets, jnp.int32)},
        config=SMALL, sharding=single_device(), kernel="blockwise", chunking="tokens", scan_layers=plain_scan,
        dtype=jnp.float32,
    )  # fmt: skip
    scores = logits(weights, SMALL, inputs).astype(np.float64)
    nats = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, np.maximum(targets, 0)[..., None], -1)[..., 0]
    assert float(loss) == pytest.approx(nats[targets >= 0].mean(), rel=1e-5)
