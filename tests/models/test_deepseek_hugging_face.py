"""DeepSeek-V3 directories in and out; the references were computed by transformers (`fixtures/make_deepseek_logits.py`)."""

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
    edit_config,
    edit_tensors,
    error_of,
    logits_by_transformers,
    parts,
    random_weights,
    relative_error,
)
from safetensors.numpy import load_file

from forebay.models.deepseek import PRESETS, DeepSeekConfig, Yarn, hugging_face, model

FIXTURES = Path(__file__).parent / "fixtures"
YARN, PLAIN = FIXTURES / "deepseek-yarn", FIXTURES / "deepseek-plain"

# the sizes in the script that made the fixture
YARN_CONFIG = DeepSeekConfig(
    vocab=64, embed=32, layers=3, dense_layers=1, heads=4, query_lora=24, kv_lora=16, nope_dim=12, rope_dim=8,
    value_dim=10, mlp=48, moe_mlp=24, experts=16, experts_per_token=4, expert_groups=4, groups_per_token=2,
    route_scale=2.5, mtp=False, yarn=Yarn(8.0, 32, 4.0, 1.0, 0.7, 1.0),
)  # fmt: skip


def config_of(directory):
    """transformers writes into `config.json` that there is a prediction layer, and saves none."""
    return dataclasses.replace(hugging_face.config_from_hf(directory), mtp=False)


def logits(weights, config, tokens):
    return np.asarray(model.logits(weights, jnp.asarray(tokens), parts=parts(model, config), dtype=jnp.float32))


@pytest.fixture
def copy(tmp_path):
    """A copy of a fixture to damage."""
    return lambda source=YARN: Path(shutil.copytree(source, tmp_path / "model"))


# --- equal to transformers --------------------------------------------------------------------------


@pytest.mark.parametrize("directory", [YARN, PLAIN], ids=["yarn", "plain"])
def test_logits_and_choices_equal_those_of_transformers(directory, monkeypatch):
    reference = np.load(directory / "reference.npz")
    config, weights = config_of(directory), hugging_face.load(directory)
    chosen = []
    choose = model.choose_experts

    def noted(*args, **kwargs):
        experts_BSk = choose(*args, **kwargs)
        chosen.append(experts_BSk.reshape(-1, config.experts_per_token))
        return experts_BSk

    def layer_by_layer(block, x, layers, *constants, stack):
        del stack
        for n in range(len(jax.tree.leaves(layers)[0])):
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


def test_the_references_see_what_a_configuration_can_get_wrong():
    reference = np.load(YARN / "reference.npz")
    assert config_of(YARN) == YARN_CONFIG
    weights = hugging_face.load(YARN)
    yarn = Yarn(8.0, 32, 4.0, 1.0, 1.0, 1.0)  # the fixture's mscale is 0.7
    for wrong in ({"yarn": yarn}, {"groups_per_token": 4}):
        config = dataclasses.replace(YARN_CONFIG, **wrong)
        assert relative_error(logits(weights, config, reference["tokens"]), reference["logits"]) > 1e-3, wrong


@pytest.mark.parametrize("directory", [YARN, PLAIN], ids=["yarn", "plain"])
def test_saving_gives_the_tensors_that_transformers_wrote(directory, tmp_path):
    config = config_of(directory)
    hugging_face.save(hugging_face.load(directory), config, tmp_path / "out", dtype=jnp.float32)
    ours, theirs = (load_file(d / "model.safetensors") for d in (tmp_path / "out", directory))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_transformers_computes_the_same_from_what_we_save(tmp_path):
    weights = random_weights(model, YARN_CONFIG)
    tokens = np.random.default_rng(0).integers(YARN_CONFIG.vocab, size=(2, 40)).astype(np.int32)
    hugging_face.save(weights, YARN_CONFIG, tmp_path / "m", dtype=jnp.float32, max_shard_bytes=100_000)
    theirs = logits_by_transformers("DeepseekV3ForCausalLM", tmp_path / "m", tokens, tmp_path)
    assert relative_error(logits(weights, YARN_CONFIG, tokens), theirs) < 1e-4


# --- in and out -------------------------------------------------------------------------------------


def test_all_weights_come_back_bit_equal_with_the_prediction_layer(tmp_path):
    config = dataclasses.replace(YARN_CONFIG, mtp=True)
    weights = random_weights(model, config)
    hugging_face.save(weights, config, tmp_path / "m", dtype=jnp.float32)
    assert hugging_face.config_from_hf(tmp_path / "m") == config
    assert_bit_equal(hugging_face.load(tmp_path / "m"), weights)
    # a model without that layer passes it over, as transformers does
    without = hugging_face.load(tmp_path / "m", YARN_CONFIG)
    assert_bit_equal(without, dataclasses.replace(weights, mtp=None))
    # the published files repeat embedding and head in it
    repeated = {
        f"model.layers.3.{n}.weight": np.zeros((64, 32), np.float32) for n in ("embed_tokens", "shared_head.head")
    }
    edit_tensors(tmp_path / "m", lambda tensors: tensors.update(repeated))
    assert_bit_equal(hugging_face.load(tmp_path / "m"), weights)


def test_the_two_halves_of_the_prediction_layers_projection(tmp_path):
    config = dataclasses.replace(YARN_CONFIG, mtp=True)
    weights = random_weights(model, config)
    hugging_face.save(weights, config, tmp_path / "m", dtype=jnp.float32)
    stored = load_file(tmp_path / "m" / "model.safetensors")["model.layers.3.eh_proj.weight"]
    token, hidden = np.random.default_rng(1).normal(size=(2, 32)).astype(np.float32)
    ours = token @ weights.mtp.proj_D2D[0, :, 0] + hidden @ weights.mtp.proj_D2D[0, :, 1]
    # eh: the embedding's norm first, then the hidden state's
    np.testing.assert_allclose(stored @ np.concatenate([token, hidden]), ours, rtol=2e-5, atol=1e-5)


def test_each_device_reads_its_experts(sharding_of):
    sharding = sharding_of("fsdp=2,expert=4")
    loaded: Any = hugging_face.load(YARN, shardings=sharding.tree(model.logical_axes(YARN_CONFIG)))
    assert loaded.moe_layers.mlp.gate_DEF.addressable_shards[0].data.shape == (2, 16, 4, 24)
    assert_bit_equal(loaded, hugging_face.load(YARN))


# --- FP8 --------------------------------------------------------------------------------------------

UP = "model.layers.1.mlp.experts.3.up_proj.weight"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8]}


def quantised(tensors):
    """Projections of the layers in FP8 with one scale for 16 rows x 8 columns, and what they then stand for."""
    expected = {}
    for name in [n for n in tensors if "proj" in n and "layers" in n]:
        weight = tensors[name]
        blocks = tuple(-(-n // b) for n, b in zip(weight.shape, (16, 8), strict=True))
        scale = np.random.default_rng(len(name)).uniform(0.5, 2.0, blocks).astype(np.float32)
        tensors[name] = weight.astype(jnp.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scale
        of = np.zeros(weight.shape, np.float32)
        for i, j in np.ndindex(*weight.shape):
            of[i, j] = scale[i // 16, j // 8]
        expected[name] = tensors[name].astype(np.float32) * of
    return expected


def test_fp8_weights_are_multiplied_by_their_blocks_scales(copy, tmp_path):
    directory = copy()
    expected = {}
    edit_tensors(directory, lambda tensors: expected.update(quantised(tensors)))
    edit_config(directory, quantization_config=FP8)
    plain = tmp_path / "plain"
    shutil.copytree(YARN, plain)
    edit_tensors(plain, lambda tensors: tensors.update(expected))
    assert len(expected) == 3 * 5 + 3 + 2 * 3 * (16 + 1)  # attention, the dense MLP, the experts and the shared one
    assert_bit_equal(hugging_face.load(directory), hugging_face.load(plain))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.update({UP + "_scale_inv": np.ones((2, 3), np.float32)}), ["[2, 3]", "[2, 4]", "16 x 8"]),
        (lambda t: t.pop(UP + "_scale_inv"), [UP, "without"]),
        (lambda t: t.update({"lm_head.weight_scale_inv": np.ones((4, 4), np.float32)}), ["lm_head.weight_scale_inv"]),
    ],
)
def test_scales_that_do_not_go_with_their_weight(copy, change, named):
    directory = copy()
    edit_tensors(directory, lambda tensors: (quantised(tensors), change(tensors)))
    edit_config(directory, quantization_config=FP8)
    message = error_of(hugging_face.load, directory)
    assert all(n in message for n in named), message


def test_fp8_without_a_block_size_is_refused(copy):
    directory = copy()
    edit_config(directory, quantization_config={"quant_method": "fp8"})
    assert "weight_block_size" in error_of(hugging_face.load, directory)


# --- configuration and what does not fit ------------------------------------------------------------


def test_the_published_configuration_is_the_preset(tmp_path):
    # huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, what this model reads of it
    published = {
        "model_type": "deepseek_v3", "attention_bias": False, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
        "vocab_size": 129280,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert hugging_face.config_from_hf(tmp_path) == PRESETS["deepseek-v3"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "deepseek_v2"), ("scoring_func", "softmax"), ("num_key_value_heads", 2), ("hidden_act", "gelu"),
        ("rope_interleave", False), ("n_routed_experts", 0), ("first_k_dense_replace", 3),
    ],
)  # fmt: skip
def test_a_configuration_that_this_model_cannot_represent_is_refused(copy, key, value):
    directory = copy()
    edit_config(directory, **{key: value})
    message = error_of(hugging_face.config_from_hf, directory)
    assert key in message or "dense_layers=3" in message


def test_other_expert_counts_are_refused(copy):
    message = error_of(hugging_face.load, YARN, dataclasses.replace(YARN_CONFIG, experts=32))
    assert "experts=16" in message and "experts=32" in message
    directory = copy()  # without a configuration the tensors tell
    (directory / "config.json").unlink()
    more = dataclasses.replace(YARN_CONFIG, experts=20)
    assert "24 of" in error_of(hugging_face.load, directory, more)  # 2 layers, 4 experts, 3 matrices
    fewer = dataclasses.replace(YARN_CONFIG, experts=8)
    assert "48 tensors that the model has not" in error_of(hugging_face.load, directory, fewer)
