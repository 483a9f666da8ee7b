"""Mixtral and Qwen3-MoE directories in and out; the references were computed by transformers
(`fixtures/make_moe_logits.py`)."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import (
    assert_bit_equal,
    assert_same_file,
    edit_config,
    error_of,
    logits_by_transformers,
    parts,
    quick_jit,
    random_weights,
    relative_error,
)
from safetensors.numpy import load_file, save_file

from forebay.models.moe import PRESETS, MoeConfig, hugging_face, model
from forebay.models.stacked import plain_scan

FIXTURES = Path(__file__).parent / "fixtures"
QWEN, MIXTRAL = FIXTURES / "moe-qwen3", FIXTURES / "moe-mixtral"
BOTH = pytest.mark.parametrize("directory", [QWEN, MIXTRAL], ids=["qwen3", "mixtral"])

# the sizes in the script that made the fixtures
CONFIGS = {
    QWEN: MoeConfig(
        vocab=64, embed=32, layers=2, heads=4, kv_heads=2, head_dim=12, moe_mlp=24, experts=8, experts_per_token=3,
        qk_norm=True, rope_theta=1000.0, balance_factor=0.1,
    ),
    MIXTRAL: MoeConfig(
        vocab=64, embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, moe_mlp=40, experts=4, experts_per_token=2,
        qk_norm=False, rope_theta=5000.0, norm_eps=1e-5, balance_factor=0.1,
    ),
}  # fmt: skip


def logits(weights, config, tokens):
    return np.asarray(model.logits(weights, jnp.asarray(tokens), parts=parts(model, config), dtype=jnp.float32))


@pytest.fixture
def copy(tmp_path):
    """A copy of a fixture to change."""
    return lambda source: Path(shutil.copytree(source, tmp_path / "model"))


# --- equal to transformers --------------------------------------------------------------------------


@BOTH
def test_logits_and_choices_equal_those_of_transformers(directory, monkeypatch):
    reference = np.load(directory / "reference.npz")
    config, weights = hugging_face.config_from_hf(directory), hugging_face.load(directory)
    assert config == CONFIGS[directory]
    chosen = []
    choose = model.choose_experts

    def noted(*args, **kwargs):
        experts_BSk = choose(*args, **kwargs)
        chosen.append(experts_BSk.reshape(-1, config.experts_per_token))
        return experts_BSk

    def layer_by_layer(block, x, layers, *constants, stack):
        del stack
        for n in range(config.layers):
            x = block(jax.tree.map(lambda w, n=n: w[n], layers), x, *constants)
        return x

    monkeypatch.setattr(model, "choose_experts", noted)
    monkeypatch.setattr(model, "plain_scan", layer_by_layer)
    tokens = jnp.asarray(reference["tokens"])

    @jax.jit
    def run(weights):
        return model.logits(weights, tokens, parts=parts(model, config), dtype=jnp.float32), chosen

    found, chosen = run(weights)
    np.testing.assert_array_equal(np.sort(np.asarray(chosen), axis=-1), reference["experts"])
    assert relative_error(found, reference["logits"]) < 1e-4


@BOTH
def test_the_loss_and_the_routers_gradients_equal_those_of_transformers(directory):
    reference = np.load(directory / "reference.npz")
    config, weights = CONFIGS[directory], hugging_face.load(directory)
    tokens = jnp.asarray(reference["tokens"])
    # the last token of a sequence has none after it
    targets = jnp.concatenate([tokens[:, 1:], jnp.full_like(tokens[:, :1], -1)], axis=1)

    def loss(weights):
        return model.loss(
            weights, {"inputs": tokens, "targets": targets}, parts=parts(model, config), chunking="tokens",
            scan_layers=plain_scan, dtype=jnp.float32,
        )  # fmt: skip

    @quick_jit
    def run(weights) -> Any:
        alone = jax.grad(lambda w: loss(w)[1].cross_entropy)(weights)
        (total, aux), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        return total, aux.balance_loss, *(jnp.swapaxes(g.moe_layers.mlp.router_DE, 1, 2) for g in (gradients, alone))

    total, balance, routers_LED, alone_LED = run(weights)
    assert float(balance) == pytest.approx(float(reference["aux_loss"]), rel=1e-5)
    assert float(total) == pytest.approx(float(reference["loss"]), rel=1e-5)
    assert relative_error(routers_LED, reference["router_gradients"]) < 1e-4
    # the cross entropy alone has other gradients: the comparison sees those of the balance loss
    assert relative_error(alone_LED, reference["router_gradients"]) > 1e-2


@pytest.mark.parametrize(
    ("directory", "wrong"),
    [
        (QWEN, {"normalise_weights": False}), (QWEN, {"rope_theta": 5000.0}), (QWEN, {"norm_eps": 1e-2}),
        (MIXTRAL, {"normalise_weights": False}), (MIXTRAL, {"experts_per_token": 1}),
    ],
)  # fmt: skip
def test_the_references_see_what_a_configuration_can_get_wrong(directory, wrong):
    reference = np.load(directory / "reference.npz")
    config = dataclasses.replace(CONFIGS[directory], **wrong)
    found = logits(hugging_face.load(directory), config, reference["tokens"])
    assert relative_error(found, reference["logits"]) > 1e-3


@BOTH
def test_saving_gives_the_tensors_that_transformers_wrote(directory, tmp_path):
    hugging_face.save(hugging_face.load(directory), CONFIGS[directory], tmp_path / "out", dtype=jnp.float32)
    assert_same_file(tmp_path / "out", directory)


@BOTH
def test_transformers_computes_the_same_from_what_we_save(directory, tmp_path):
    config = dataclasses.replace(CONFIGS[directory], rope_theta=300.0)
    weights = random_weights(model, config)
    tokens = np.random.default_rng(0).integers(config.vocab, size=(2, 40)).astype(np.int32)
    hugging_face.save(weights, config, tmp_path / "m", dtype=jnp.float32, max_shard_bytes=100_000)
    name = "Qwen3MoeForCausalLM" if config.qk_norm else "MixtralForCausalLM"
    theirs = logits_by_transformers(name, tmp_path / "m", tokens, tmp_path)
    assert relative_error(logits(weights, config, tokens), theirs) < 1e-4


# --- in and out -------------------------------------------------------------------------------------


@BOTH
def test_all_weights_come_back_bit_equal(directory, tmp_path):
    config = dataclasses.replace(CONFIGS[directory], balance_factor=0.0)
    weights = random_weights(model, config)
    hugging_face.save(weights, config, tmp_path / "m", dtype=jnp.float32, max_shard_bytes=50_000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    assert hugging_face.config_from_hf(tmp_path / "m") == config
    assert_bit_equal(hugging_face.load(tmp_path / "m"), weights)
    # how to train may differ
    other = dataclasses.replace(config, balance_factor=0.5, capacity_factor=2.0)
    assert_bit_equal(hugging_face.load(tmp_path / "m", other), weights)


def test_each_device_reads_its_experts(sharding_of):
    sharding = sharding_of("fsdp=2,expert=4")
    loaded = hugging_face.load(QWEN, shardings=sharding.tree(model.logical_axes(CONFIGS[QWEN])))
    assert loaded.moe_layers.mlp.gate_DEF.addressable_shards[0].data.shape == (2, 16, 2, 24)
    assert_bit_equal(loaded, hugging_face.load(QWEN))


def test_fp8_weights_are_multiplied_by_their_blocks_scales(copy):
    """As in Qwen/Qwen3-30B-A3B-FP8: projections of attention and experts, not the router."""
    directory = copy(QWEN)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"  # [24, 32] in blocks of 16 x 8
    scale = np.random.default_rng(0).uniform(0.5, 2.0, (2, 4)).astype(np.float32)
    tensors[name] = tensors[name].astype(jnp.float8_e4m3fn)
    tensors[name + "_scale_inv"] = scale
    save_file(tensors, directory / "model.safetensors")
    edit_config(directory, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8]})
    expected = tensors[name].astype(np.float32) * np.repeat(np.repeat(scale, 16, 0)[:24], 8, 1)
    loaded = hugging_face.load(directory)
    np.testing.assert_array_equal(loaded.moe_layers.mlp.up_DEF[1, :, 3].T, expected)


# --- configuration and what does not fit ------------------------------------------------------------

# huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json and mistralai/Mixtral-8x7B-v0.1, what this model reads of them
PUBLISHED = {
    "qwen3-30b-a3b": {
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3-235b-a22b": {
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 12288, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 1536,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 94, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "mixtral-8x22b": {
        "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 16384, "model_type": "mixtral",
        "num_attention_heads": 48, "num_experts_per_tok": 2, "num_hidden_layers": 56, "num_key_value_heads": 8,
        "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000, "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configuration_is_the_preset(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert hugging_face.config_from_hf(tmp_path) == PRESETS[name]


@pytest.mark.parametrize(
    ("directory", "key", "value"),
    [
        (QWEN, "model_type", "qwen2_moe"), (QWEN, "decoder_sparse_step", 2), (QWEN, "mlp_only_layers", [0]),
        (QWEN, "use_sliding_window", True), (QWEN, "attention_bias", True), (QWEN, "tie_word_embeddings", True),
        (QWEN, "hidden_act", "gelu"), (QWEN, "moe_intermediate_size", None), (QWEN, "num_local_experts", 0),
        (QWEN, "router_aux_loss_coef", -1), (QWEN, "rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        (MIXTRAL, "sliding_window", 4096), (MIXTRAL, "router_jitter_noise", 0.1), (MIXTRAL, "head_dim", 7),
        (MIXTRAL, "num_experts_per_tok", 5), (MIXTRAL, "quantization_config", {"quant_method": "awq"}),
    ],
)  # fmt: skip
def test_a_configuration_that_this_model_cannot_represent_is_refused(copy, directory, key, value):
    directory = copy(directory)
    edit_config(directory, **{key: value})
    message = error_of(hugging_face.load, directory)
    other = {"rope_parameters": "rope_type", "num_experts_per_tok": "experts_per_token=5"}
    assert str(other.get(key, key)) in message


def test_weights_of_another_model_are_refused(copy):
    message = error_of(hugging_face.load, QWEN, dataclasses.replace(CONFIGS[QWEN], experts=32))
    assert "experts=8" in message and "experts=32" in message
    assert "qk_norm=False" in error_of(hugging_face.load, MIXTRAL, dataclasses.replace(CONFIGS[MIXTRAL], qk_norm=True))
    directory = copy(MIXTRAL)  # without a configuration the tensors tell
    (directory / "config.json").unlink()
    more = dataclasses.replace(CONFIGS[MIXTRAL], experts=5)
    assert "6 of" in error_of(hugging_face.load, directory, more)  # 2 layers, 1 expert, 3 matrices
    fewer = dataclasses.replace(CONFIGS[MIXTRAL], experts=3)
    assert "6 tensors that the model has not" in error_of(hugging_face.load, directory, fewer)


def test_what_neither_model_is_cannot_be_saved(tmp_path):
    config = dataclasses.replace(CONFIGS[MIXTRAL], normalise_weights=False)
    assert "normalise_weights" in error_of(hugging_face.save, random_weights(model, config), config, tmp_path / "m")
    assert not (tmp_path / "m").exists()
