"""Hugging Face directories in and out; the references were computed by transformers (`fixtures/make_llama_logits.py`)."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import (
    assert_bit_equal,
    assert_same_file,
    edit_config,
    edit_tensors,
    error_of,
    logits_by_transformers,
    random_weights,
    relative_error,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import forebay.models.hugging_face
from forebay.errors import UserError
from forebay.models.llama import PRESETS, LlamaConfig, RopeScaling, hugging_face, model
from forebay.sharding import single_device

FIXTURES = Path(__file__).parent / "fixtures"
CASES = ("llama-scaled-rope", "llama-tied", "llama-wide-heads")
SCALED, TIED = FIXTURES / CASES[0], FIXTURES / CASES[1]

# `load` without a configuration finds these sizes (the ones in the script that made the fixtures)
SCALED_CONFIG = LlamaConfig(
    vocab=64, embed=64, layers=3, heads=4, kv_heads=2, head_dim=16, mlp=48, rope_theta=50_000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32),
)  # fmt: skip

QUERY_1 = "model.layers.1.self_attn.q_proj.weight"


def logits(weights, config, tokens):
    return model.logits(weights, jnp.asarray(tokens), config=config, sharding=single_device(), dtype=jnp.float32)


@pytest.fixture
def copy(tmp_path):
    """A copy of a fixture to damage."""

    def make(source=SCALED):
        return Path(shutil.copytree(source, tmp_path / "model"))

    return make


# --- equal to transformers --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case):
    reference = np.load(FIXTURES / case / "reference.npz")
    config = hugging_face.config_from_hf(FIXTURES / case)
    weights = hugging_face.load(FIXTURES / case)
    assert relative_error(logits(weights, config, reference["tokens"]), reference["logits"]) < 1e-4


def test_the_reference_is_long_enough_to_see_the_scaling_of_rope():
    reference = np.load(SCALED / "reference.npz")
    unscaled = dataclasses.replace(SCALED_CONFIG, rope_scaling=None)
    assert relative_error(logits(hugging_face.load(SCALED), unscaled, reference["tokens"]), reference["logits"]) > 0.1


@pytest.mark.parametrize("case", CASES)
def test_saving_gives_the_tensors_that_transformers_wrote(case, tmp_path):
    config = hugging_face.config_from_hf(FIXTURES / case)
    hugging_face.save(hugging_face.load(FIXTURES / case), config, tmp_path / "out", dtype=jnp.float32)
    assert_same_file(tmp_path / "out", FIXTURES / case)


@pytest.mark.parametrize(("case", "max_shard_bytes"), [(CASES[0], 20_000), (CASES[1], 5e9), (CASES[2], 5e9)])
def test_transformers_computes_the_same_from_what_we_save(case, max_shard_bytes, tmp_path):
    config = hugging_face.config_from_hf(FIXTURES / case)
    weights = random_weights(model, config)
    tokens = np.random.default_rng(0).integers(config.vocab, size=(2, 40)).astype(np.int32)
    hugging_face.save(weights, config, tmp_path / "out", dtype=jnp.float32, max_shard_bytes=max_shard_bytes)
    theirs = logits_by_transformers("LlamaForCausalLM", tmp_path / "out", tokens, tmp_path)
    assert relative_error(logits(weights, config, tokens), theirs) < 1e-4


def test_files_are_marked_as_transformers_4_demands(tmp_path):
    # it refuses files whose metadata do not name the framework; "pt" stands for PyTorch's layout
    hugging_face.save(hugging_face.load(TIED), hugging_face.config_from_hf(TIED), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


# --- round trips, types, placement ------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("max_shard_bytes", [5e9, 20_000])
def test_what_is_saved_loads_bit_equal(case, max_shard_bytes, tmp_path):
    config = hugging_face.config_from_hf(FIXTURES / case)
    weights = random_weights(model, config)
    hugging_face.save(weights, config, tmp_path / "out", dtype=jnp.float32, max_shard_bytes=max_shard_bytes)
    assert hugging_face.config_from_hf(tmp_path / "out") == config
    assert_bit_equal(hugging_face.load(tmp_path / "out", config), weights)


def test_shards_are_no_larger_than_asked_and_the_index_names_them_all(tmp_path):
    weights = random_weights(model, SCALED_CONFIG)
    # the largest tensor is 64 x 64 float32, 16384 bytes
    hugging_face.save(weights, SCALED_CONFIG, tmp_path / "out", dtype=jnp.float32, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 10
    assert files == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    held = {f: {n: t.nbytes for n, t in load_file(tmp_path / "out" / f).items()} for f in files}
    assert all(sum(sizes.values()) <= 20_000 for sizes in held.values())
    assert index["weight_map"] == {name: file for file, sizes in held.items() for name in sizes}
    assert index["metadata"]["total_size"] == 4 * model.parameter_count(SCALED_CONFIG)
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.name not in files) == [
        "config.json", "model.safetensors.index.json",
    ]  # fmt: skip


def test_a_tensor_larger_than_a_shard_has_a_file_of_its_own(tmp_path):
    weights = random_weights(model, SCALED_CONFIG)
    hugging_face.save(weights, SCALED_CONFIG, tmp_path / "out", max_shard_bytes=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3 + 9 * 3  # 3 outside the layers, 9 in each of 3
    assert_bit_equal(hugging_face.load(tmp_path / "out", dtype=jnp.bfloat16), to(jnp.bfloat16, weights))


def to(dtype, weights):
    return jax.tree.map(lambda w: w.astype(dtype), weights)


def test_bfloat16_is_what_is_saved_by_default_and_is_read_exactly(tmp_path):
    weights = random_weights(model, SCALED_CONFIG)
    hugging_face.save(weights, SCALED_CONFIG, tmp_path / "out")
    assert {t.dtype.name for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {"bfloat16"}
    rounded = to(jnp.bfloat16, weights)
    assert_bit_equal(hugging_face.load(tmp_path / "out", dtype=jnp.bfloat16), rounded)
    assert_bit_equal(hugging_face.load(tmp_path / "out"), to(jnp.float32, rounded))


def test_weights_are_loaded_into_the_shardings_given(sharding_of):
    shardings = sharding_of("fsdp=4,tensor=2").tree(model.logical_axes(SCALED_CONFIG))
    weights = hugging_face.load(SCALED, SCALED_CONFIG, shardings=shardings)
    assert_bit_equal(weights, hugging_face.load(SCALED))
    assert jax.tree.map(lambda w: w.sharding, weights) == shardings
    # embed over 4, heads over 2
    assert {s.data.shape for s in weights.layers.query_DHK.addressable_shards} == {(3, 16, 2, 16)}


def shardings_by_shape(mesh, spec, **kwargs):
    return jax.tree.map(
        lambda shape: NamedSharding(mesh, PartitionSpec(*spec(shape)), **kwargs),
        model.shapes(SCALED_CONFIG), is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip


def test_every_dimension_can_be_split_and_another_memory_hold_it():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))

    def every_even_dimension(shape):
        axes = iter(mesh.axis_names)
        return [next(axes) if size % 2 == 0 else None for size in shape]

    shardings = shardings_by_shape(mesh, every_even_dimension, memory_kind="pinned_host")
    weights = hugging_face.load(SCALED, shardings=shardings)
    assert_bit_equal(weights, hugging_face.load(SCALED))
    assert weights.layers.query_DHK.addressable_shards[0].data.shape == (3, 32, 2, 8)
    assert weights.layers.query_DHK.sharding.memory_kind == "pinned_host"


def test_layers_can_be_split():
    mesh = Mesh(np.asarray(jax.devices()[:3]), ("pipeline",))
    shardings = shardings_by_shape(mesh, lambda shape: ["pipeline" if shape[0] == 3 else None])
    weights = hugging_face.load(SCALED, shardings=shardings)
    assert_bit_equal(weights, hugging_face.load(SCALED))
    assert weights.layers.gate_DF.addressable_shards[0].data.shape == (1, 64, 48)


def test_sharded_weights_are_saved_whole(sharding_of, tmp_path):
    shardings = sharding_of("fsdp=4,tensor=2").tree(model.logical_axes(SCALED_CONFIG))
    weights = hugging_face.load(SCALED, shardings=shardings)
    hugging_face.save(weights, SCALED_CONFIG, tmp_path / "out", dtype=jnp.float32)
    assert_bit_equal(hugging_face.load(tmp_path / "out"), hugging_face.load(SCALED))


def test_rotary_frequencies_stored_by_early_conversions_are_passed_over(copy):
    directory = copy()
    edit_tensors(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, "f4")}))
    assert_bit_equal(hugging_face.load(directory), hugging_face.load(SCALED))


def test_a_tied_head_may_be_stored_too_if_it_is_the_embedding(copy):
    directory = copy(TIED)
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert_bit_equal(hugging_face.load(directory), hugging_face.load(TIED))
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    message = error_of(hugging_face.load, directory)
    assert "lm_head.weight" in message and "model.embed_tokens.weight" in message and "tied" in message


# --- configurations ---------------------------------------------------------------------------------

# Llama 3.1 8B's config.json as published, without what has no bearing on the arithmetic
PUBLISHED_8B = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture
def configured(tmp_path):
    """The configuration read from Llama 3.1 8B's config.json with some keys set (`...` takes one away)."""

    def read(**keys):
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_8B))
        edit_config(tmp_path, **keys)
        return hugging_face.config_from_hf(tmp_path)

    return read


def test_the_published_configuration_is_the_preset(configured):
    assert configured() == PRESETS["llama3.1-8b"]


def test_transformers_5_keeps_rope_in_one_object(configured):
    rope = PUBLISHED_8B["rope_scaling"] | {"rope_theta": 500000.0}
    assert configured(rope_theta=..., rope_scaling=..., rope_parameters=rope) == PRESETS["llama3.1-8b"]


def test_early_configurations_call_the_rope_type_type(configured):
    rope = {k: v for k, v in PUBLISHED_8B["rope_scaling"].items() if k != "rope_type"} | {"type": "llama3"}
    assert configured(rope_scaling=rope) == PRESETS["llama3.1-8b"]


@pytest.mark.parametrize("scaling", [..., None, {"rope_type": "default"}])
def test_without_scaling_there_is_none(configured, scaling):
    assert configured(rope_scaling=scaling).rope_scaling is None


def test_absent_keys_have_the_defaults_of_transformers(configured):
    absent = ("rope_theta", "rms_norm_eps", "num_key_value_heads", "tie_word_embeddings", "hidden_act", "mlp_bias")
    config = configured(**dict.fromkeys(absent, ...))
    assert (config.rope_theta, config.norm_eps, config.kv_heads, config.tied_embeddings) == (10_000.0, 1e-6, 32, False)


def test_head_dim_is_embed_over_heads_unless_given(configured):
    assert configured().head_dim == configured(head_dim=None).head_dim == 128
    assert configured(head_dim=96).head_dim == 96


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model_type", "mistral", ["model_type='mistral'", "'llama'"]),
        ("model_type", ..., ["model_type=None", "'llama'"]),
        ("attention_bias", True, ["attention_bias=True"]),
        ("mlp_bias", True, ["mlp_bias=True"]),
        ("hidden_act", "gelu", ["hidden_act='gelu'", "silu"]),
        ("quantization_config", {"quant_method": "fp8"}, ["quantization_config", "fp8"]),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, ["rope_type='yarn'", "llama3"]),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, ["rope_type='linear'"]),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, ["low_freq_factor=None"]),
        ("rope_scaling", 8.0, ["rope_scaling=8.0"]),
        (
            "rope_scaling",
            PUBLISHED_8B["rope_scaling"] | {"low_freq_factor": 4.0},
            ["low_freq_factor=4.0", "less than high_freq_factor=4.0"],
        ),
        (
            "rope_scaling",
            PUBLISHED_8B["rope_scaling"] | {"original_max_position_embeddings": math.inf},
            ["original_max_position_embeddings=inf"],
        ),
        ("partial_rotary_factor", 0.5, ["partial_rotary_factor=0.5"]),
        ("hidden_size", ..., ["'hidden_size'"]),
        ("hidden_size", "4096", ["hidden_size='4096'"]),
        ("hidden_size", 4100, ["hidden_size=4100", "num_attention_heads=32"]),
        ("num_hidden_layers", 0, ["num_hidden_layers=0"]),
        ("num_key_value_heads", 5, ["heads=32", "kv_heads=5"]),
        ("rms_norm_eps", -1.0, ["rms_norm_eps=-1.0"]),
        ("rms_norm_eps", math.nan, ["rms_norm_eps=nan"]),
        ("tie_word_embeddings", "no", ["tie_word_embeddings='no'"]),
    ],
)
def test_a_configuration_that_this_model_cannot_represent_is_refused(configured, key, value, named):
    message = error_of(configured, **{key: value})
    assert all(text in message for text in named), message


# --- bad directories --------------------------------------------------------------------------------


def test_a_missing_directory(tmp_path):
    assert "nowhere" in error_of(hugging_face.load, tmp_path / "nowhere")
    assert "nowhere" in error_of(hugging_face.config_from_hf, tmp_path / "nowhere")


def test_a_missing_or_damaged_configuration(copy):
    directory = copy()
    (directory / "config.json").write_text("{")
    assert "config.json" in error_of(hugging_face.load, directory)
    (directory / "config.json").write_text("[]")
    assert "not a JSON object" in error_of(hugging_face.load, directory)
    (directory / "config.json").unlink()
    assert "config.json" in error_of(hugging_face.load, directory)
    assert_bit_equal(hugging_face.load(directory, SCALED_CONFIG), hugging_face.load(SCALED))  # given, it is not needed


def test_no_weights(copy):
    directory = copy()
    (directory / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in error_of(hugging_face.load, directory)
    (directory / "pytorch_model.bin").touch()
    assert "save_pretrained" in error_of(hugging_face.load, directory)


@pytest.fixture
def sharded(tmp_path):
    """The scaled fixture in several files."""
    directory = tmp_path / "sharded"
    hugging_face.save(hugging_face.load(SCALED), SCALED_CONFIG, directory, dtype=jnp.float32, max_shard_bytes=60_000)
    return directory


def test_a_shard_that_the_index_names_is_missing(sharded):
    files = sorted(sharded.glob("*.safetensors"))
    files[1].unlink()
    message = error_of(hugging_face.load, sharded)
    assert files[1].name in message and f"1 of {len(files)}" in message


def test_more_missing_shards_than_are_listed(sharded):
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 4
    for file in files:
        file.unlink()
    message = error_of(hugging_face.load, sharded)
    assert f"and {len(files) - 3} more" in message
    assert [f.name in message for f in files[:4]] == [True, True, True, False]


def test_a_missing_or_damaged_index(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text('{"weight_map": [1]}')
    assert "weight_map" in error_of(hugging_face.load, sharded)
    index.write_text("nothing")
    assert index.name in error_of(hugging_face.load, sharded)
    index.unlink()
    message = error_of(hugging_face.load, sharded)
    assert index.name in message and "model-00001-of-" in message


@pytest.mark.parametrize("damage", ["truncated", "git-lfs pointer", "empty"])
def test_a_damaged_file(copy, damage):
    file = copy() / "model.safetensors"
    whole = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 295656\n"
    content = {"truncated": whole[:-1], "git-lfs pointer": pointer, "empty": b""}[damage]
    file.write_bytes(content)
    message = error_of(hugging_face.load, file.parent)
    assert str(file) in message and f"({len(content):,} bytes)" in message


def test_missing_tensors_are_counted_and_three_named(copy):
    directory = copy()

    def drop(tensors):
        for name in [n for n in tensors if ".mlp." in n and "layers.2" not in n]:
            del tensors[name]

    edit_tensors(directory, drop)
    message = error_of(hugging_face.load, directory)
    assert "6 of 30 tensors" in message and "and 3 more" in message
    assert message.count("model.layers.0.mlp.") == 3


def test_unexpected_tensors(copy):
    directory = copy()
    edit_tensors(directory, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": np.ones(16, "f4")}))
    message = error_of(hugging_face.load, directory)
    assert "that the model has not" in message and "model.layers.0.self_attn.q_norm.weight" in message


def test_another_number_of_layers_is_not_taken_for_the_model():
    fewer = dataclasses.replace(SCALED_CONFIG, layers=2)
    assert "has 9 tensors that the model has not: model.layers.2." in error_of(hugging_face.load, SCALED, fewer)
    more = dataclasses.replace(SCALED_CONFIG, layers=4)
    assert "9 of 39 tensors" in error_of(hugging_face.load, SCALED, more)


def test_another_shape_names_the_tensor_what_it_is_and_what_is_needed(copy):
    padded = dataclasses.replace(SCALED_CONFIG, vocab=128)
    message = error_of(hugging_face.load, SCALED, padded)
    assert "model.embed_tokens.weight" in message and "[64, 64]" in message and "[128, 64]" in message
    directory = copy()
    edit_tensors(directory, lambda t: t.update({QUERY_1: np.ones((64, 63), "f4")}))
    message = error_of(hugging_face.load, directory)
    assert QUERY_1 in message and "[64, 63]" in message and "[64, 64]" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope_scaling", None), ("rope_theta", 10_000.0), ("norm_eps", 1e-6), ("heads", 2)],
)
def test_a_model_that_differs_in_what_shapes_do_not_show_is_refused(field, value):
    # 2 heads of 32 have the same matrices as 4 of 16: transformers merges both dimensions
    changed = {field: value} | ({"kv_heads": 1, "head_dim": 32} if field == "heads" else {})
    message = error_of(hugging_face.load, SCALED, dataclasses.replace(SCALED_CONFIG, **changed))
    assert f"{field}={value}" in message and f"{field}={getattr(SCALED_CONFIG, field)}" in message


def test_quantised_tensors_are_refused(copy):
    directory = copy()
    edit_tensors(directory, lambda t: t.update({QUERY_1: np.ones((64, 64), np.int8)}))
    message = error_of(hugging_face.load, directory)
    assert QUERY_1 in message and "I8" in message


# --- refusals when saving ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights():
    return hugging_face.load(SCALED)


def test_nothing_is_overwritten(weights, tmp_path):
    hugging_face.save(weights, SCALED_CONFIG, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    other = jax.tree.map(jnp.zeros_like, weights)
    assert "already holds something" in error_of(hugging_face.save, other, SCALED_CONFIG, tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    (tmp_path / "file").write_text("kept")
    assert "already holds something" in error_of(hugging_face.save, other, SCALED_CONFIG, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_an_empty_directory_and_one_whose_parents_do_not_exist_are_used(weights, tmp_path):
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "new" / "one"):
        hugging_face.save(weights, SCALED_CONFIG, directory, dtype=jnp.float32)
        assert_bit_equal(hugging_face.load(directory), weights)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_save_leaves_nothing(weights, tmp_path, monkeypatch, interruption):
    written = []

    def interrupted(tensors, file, metadata):
        if written:
            raise interruption
        written.append(file)
        save_file(tensors, file, metadata)

    monkeypatch.setattr(forebay.models.hugging_face, "save_file", interrupted)
    expected = UserError if isinstance(interruption, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="No space left" if expected is UserError else None):
        hugging_face.save(weights, SCALED_CONFIG, tmp_path / "out", max_shard_bytes=60_000)
    assert written
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_configuration_are_not_saved(weights, tmp_path):
    wider = dataclasses.replace(SCALED_CONFIG, mlp=96)
    message = error_of(hugging_face.save, weights, wider, tmp_path / "out")
    assert "gate_DF" in message and "(3, 64, 48)" in message and "(3, 64, 96)" in message
    tied = dataclasses.replace(SCALED_CONFIG, tied_embeddings=True)
    assert "head_DV" in error_of(hugging_face.save, weights, tied, tmp_path / "out")
    untied = dataclasses.replace(weights, head_DV=None)
    assert "head_DV" in error_of(hugging_face.save, untied, SCALED_CONFIG, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "named"), [({"dtype": jnp.int8}, "'int8'"), ({"max_shard_bytes": 0}, "max_shard_bytes=0")]
)
def test_options_of_save_that_make_no_sense(weights, tmp_path, option, named):
    assert named in error_of(hugging_face.save, weights, SCALED_CONFIG, tmp_path / "out", **option)
    assert list(tmp_path.iterdir()) == []
