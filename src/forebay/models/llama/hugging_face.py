"""Llama weights as Hugging Face keeps them (`forebay.models.hugging_face`). The rotary halves lie the same way in both."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forebay.errors import UserError
from forebay.models import hugging_face as files
from forebay.models.hugging_face import HEADS_IN, OUT_HEADS, OUT_IN, SAME, VECTOR, ConfigReader, Form
from forebay.models.llama import model
from forebay.models.llama.config import LlamaConfig
from forebay.models.llama.model import Layer, Weights
from forebay.models.rope import RopeScaling

# Rotary frequencies that early conversions stored although they follow from the configuration.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"

_LAYOUT = Weights(
    embedding_VD=Form("model.embed_tokens.weight", SAME),
    layers=Layer(
        attention_norm_D=Form("model.layers.{layer}.input_layernorm.weight", VECTOR),
        query_DHK=Form("model.layers.{layer}.self_attn.q_proj.weight", HEADS_IN),
        key_DGK=Form("model.layers.{layer}.self_attn.k_proj.weight", HEADS_IN),
        value_DGK=Form("model.layers.{layer}.self_attn.v_proj.weight", HEADS_IN),
        out_DHK=Form("model.layers.{layer}.self_attn.o_proj.weight", OUT_HEADS),
        mlp_norm_D=Form("model.layers.{layer}.post_attention_layernorm.weight", VECTOR),
        gate_DF=Form("model.layers.{layer}.mlp.gate_proj.weight", OUT_IN),
        up_DF=Form("model.layers.{layer}.mlp.up_proj.weight", OUT_IN),
        down_DF=Form("model.layers.{layer}.mlp.down_proj.weight", SAME),
    ),
    final_norm_D=Form("model.norm.weight", VECTOR),
    head_DV=Form("lm_head.weight", OUT_IN),
)


def config_from_hf(directory: str | os.PathLike[str]) -> LlamaConfig:
    """The configuration in `directory/config.json`, as transformers 4 or 5 writes it.

    Keys that are absent have the defaults of transformers' `LlamaConfig`, except sizes, which must be there.

    Raises:
        UserError: no such file; not JSON; a key whose value this model cannot represent (another
            `model_type`, biases, another activation or RoPE scaling, quantisation); a missing or
            malformed size.
    """
    return _config(ConfigReader.of(directory))


def load(
    directory: str | os.PathLike[str],
    config: LlamaConfig | None = None,
    *,
    dtype: Any = jnp.float32,
    shardings: Any = None,
) -> Weights[jax.Array]:
    """The weights in a Hugging Face directory: `model.safetensors`, or the files that its index names.

    Args:
        config: the model they are for, as `forebay.models.llama.PRESETS` has them; by default the one
            that `config.json` describes. Given, it must agree with `config.json` where there is one.
        dtype: of the result, whatever the files hold.
        shardings: a tree like the weights with a `jax.sharding.Sharding` for each, which may put them in
            any memory; each process reads only what its own devices hold. By default everything goes to
            JAX's default device.

    Returns:
        Arrays with the shapes of `model.shapes(config)`.

    Raises:
        UserError: a missing directory, configuration, index or file; a damaged file; tensors that are
            missing, superfluous, quantised or of another shape; a configuration that is not that of `config.json`.

    Example:
        `load("Llama-3.1-8B", PRESETS["llama3.1-8b"])`
    """
    path = files.existing(directory)
    described = config_from_hf(path) if config is None or (path / files.CONFIG).exists() else None
    config = config or described
    assert config is not None
    tied_head = _LAYOUT.head_DV.name if config.tied_embeddings and _LAYOUT.head_DV else None

    def check(stored: Mapping[str, files.StoredTensor]) -> None:
        if tied_head is not None and tied_head in stored:
            _check_tied(stored, tied_head, path)
        if described is not None:
            files.check_same(config, described, path)

    return files.load(
        path, _layout(config), model.shapes(config), dtype=dtype, shardings=shardings, check=check,
        passed_over=lambda name: name == tied_head or name.endswith(_DERIVED_SUFFIX),
    )  # fmt: skip


def save(
    weights: Weights[jax.Array],
    config: LlamaConfig,
    directory: str | os.PathLike[str],
    *,
    dtype: Any = jnp.bfloat16,
    max_shard_bytes: float = 5e9,
    max_position_embeddings: int | None = None,
) -> None:
    """Writes weights and `config.json` so that transformers' `LlamaForCausalLM.from_pretrained` loads them.

    The directory appears complete or not at all. The token ids of begin and end of text are left open in
    `config.json`: they belong to the tokenizer.

    Args:
        weights: arrays with the shapes of `model.shapes(config)`, on devices of this process.
        directory: new or empty.
        dtype: of the files: float32, bfloat16 or float16.
        max_shard_bytes: the tensor bytes of one file; more than this is split into files with an index. A
            tensor larger than this has a file of its own.
        max_position_embeddings: the longest sequence in tokens to declare. By default what the RoPE scaling
            stretches to, or 8192, the length Llama 3 was first trained with.

    Raises:
        UserError: a directory that holds anything or cannot be written; weights that are not those of
            `config`; another dtype; a size of shards that is not positive.
    """
    files.save(
        weights, _layout(config), model.shapes(config),
        lambda stored: _config_to_hf(config, stored, max_position_embeddings),
        directory, dtype=dtype, max_shard_bytes=max_shard_bytes,
    )  # fmt: skip


def _layout(config: LlamaConfig) -> Weights[Form]:
    return dataclasses.replace(_LAYOUT, head_DV=None) if config.tied_embeddings else _LAYOUT


def _config(read: ConfigReader) -> LlamaConfig:
    read.only("model_type", "llama", required=True)
    read.only("attention_bias", False)
    read.only("mlp_bias", False)
    read.only("quantization_config", None)
    read.silu_only()
    heads = read.size("num_attention_heads")
    rope = read.rope()
    return LlamaConfig(
        vocab=read.size("vocab_size"),
        embed=read.size("hidden_size"),
        layers=read.size("num_hidden_layers"),
        heads=heads,
        kv_heads=read.size("num_key_value_heads", heads),
        head_dim=read.head_dim(),
        mlp=read.size("intermediate_size"),
        rope_theta=read.number(rope, "rope_theta", 10_000.0),
        rope_scaling=_rope_scaling(read, rope),
        norm_eps=read.number(read.keys, "rms_norm_eps", 1e-6),
        tied_embeddings=read.flag("tie_word_embeddings"),
    )


def _rope_scaling(read: ConfigReader, rope: Mapping[str, Any]) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        raise read.refused("rope_type", rope["rope_type"], "'llama3' or 'default'")
    low, high = read.number(rope, "low_freq_factor"), read.number(rope, "high_freq_factor")
    if low >= high:  # frequencies are blended over the interval between the two
        raise read.refused("low_freq_factor", low, f"less than high_freq_factor={high}")
    return RopeScaling(
        factor=read.number(rope, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=int(read.number(rope, "original_max_position_embeddings")),
    )


def _config_to_hf(config: LlamaConfig, dtype: np.dtype, max_position_embeddings: int | None) -> dict[str, Any]:
    """In the words of transformers 4, which version 5 understands too."""
    scaling = config.rope_scaling
    stretched = int(scaling.factor * scaling.original_max_position_embeddings) if scaling else 8192
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "llama3"} | dataclasses.asdict(scaling) if scaling else None,
        "max_position_embeddings": max_position_embeddings or stretched,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype.name,
    }


def _check_tied(stored: Mapping[str, files.StoredTensor], head: str, path: Any) -> None:
    """Some writers store the tied head as well; it must then be what it is tied to."""
    embedding = _LAYOUT.embedding_VD.name
    if not np.array_equal(stored[head][...], stored[embedding][...]):
        raise UserError(
            f"{head} in {str(path)!r} is not equal to {embedding} although the embeddings are tied: "
            f"load it as a model with untied embeddings"
        )
