"""Weights of Mixtral and Qwen3-MoE as Hugging Face keeps them (`forebay.models.hugging_face`), in plain numbers or in FP8
with a scale for each block. The rotary halves lie the same way as here.

A model with norms of queries and keys is a Qwen3-MoE there, one without a Mixtral, which divides the chosen
experts' probabilities by their sum.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forebay.errors import UserError
from forebay.models import hugging_face as files
from forebay.models.grouped_query import Attention
from forebay.models.hugging_face import HEADS_IN, OUT_HEADS, OUT_IN, SAME, VECTOR, ConfigReader, Form
from forebay.models.moe import model
from forebay.models.moe.config import MoeConfig
from forebay.models.moe.model import Experts, Layer, Weights

# What says how to train, and is in no checkpoint.
_TRAINING_ONLY = ("balance_factor", "balance_by_layer", "capacity_factor", "overflow_limit", "grouped")


def config_from_hf(directory: str | os.PathLike[str]) -> MoeConfig:
    """The configuration in `directory/config.json`, as transformers 4 or 5 writes it for `mixtral` or `qwen3_moe`.

    Keys that are absent have the defaults of transformers' `MixtralConfig` or `Qwen3MoeConfig`, except sizes,
    which must be there. What only training needs has the defaults of `MoeConfig`, but for the balance loss's factor.

    Raises:
        UserError: no such file; not JSON; a key whose value this model cannot represent (another `model_type`,
            biases, tied embeddings, another activation or RoPE scaling, sliding windows, layers without experts, noise
            in the router); a missing or malformed size.
    """
    return _config(ConfigReader.of(directory))


def _config(read: ConfigReader) -> MoeConfig:
    kind = read.keys.get("model_type")
    if kind not in ("mixtral", "qwen3_moe"):
        raise read.refused("model_type", kind, "'mixtral' or 'qwen3_moe'")
    qwen = kind == "qwen3_moe"
    for key, value in (("attention_bias", False), ("tie_word_embeddings", False)):
        read.only(key, value)
    if qwen:
        for key, value in (("use_sliding_window", False), ("decoder_sparse_step", 1)):
            read.only(key, value)
        if read.keys.get("mlp_only_layers"):
            raise read.refused("mlp_only_layers", read.keys["mlp_only_layers"], "empty")
    else:
        for key, value in (("sliding_window", None), ("router_jitter_noise", 0.0)):
            read.only(key, value)
    read.silu_only()
    rope = read.rope()
    if rope["rope_type"] != "default":
        raise read.refused("rope_type", rope["rope_type"], "'default'")
    # transformers 4 writes `num_experts` for Qwen3-MoE, transformers 5 `num_local_experts` for both
    experts = "num_experts" if "num_experts" in read.keys else "num_local_experts"
    no_balance = read.keys.get("router_aux_loss_coef") == 0
    return MoeConfig(
        vocab=read.size("vocab_size"),
        embed=read.size("hidden_size"),
        layers=read.size("num_hidden_layers"),
        heads=read.size("num_attention_heads"),
        kv_heads=read.size("num_key_value_heads"),
        head_dim=read.head_dim(),
        moe_mlp=read.size("moe_intermediate_size" if qwen else "intermediate_size"),
        experts=read.size(experts),
        experts_per_token=read.size("num_experts_per_tok"),
        qk_norm=qwen,
        normalise_weights=read.flag("norm_topk_prob") if qwen else True,
        rope_theta=read.number(rope, "rope_theta", 10_000.0 if qwen else 1_000_000.0),
        norm_eps=read.number(read.keys, "rms_norm_eps", 1e-6 if qwen else 1e-5),
        balance_factor=0.0 if no_balance else read.number(read.keys, "router_aux_loss_coef", 0.001),
    )


def load(
    directory: str | os.PathLike[str],
    config: MoeConfig | None = None,
    *,
    dtype: Any = jnp.float32,
    shardings: Any = None,
) -> Weights[jax.Array]:
    """The weights in a Hugging Face directory.

    Args:
        config: the model they are for, as `PRESETS` has them; by default the one that `config.json` describes.
            Given, it must agree with `config.json` where there is one, but for what only training needs.
        dtype: of the result, whatever the files hold; FP8 weights are multiplied by their blocks' scales.
        shardings: a tree like the weights with a `jax.sharding.Sharding` for each; each process reads only
            what its own devices hold (but an FP8 matrix as a whole). By default everything goes to JAX's default device.

    Returns:
        Arrays with the shapes of `model.shapes(config)`.

    Raises:
        UserError: a missing directory, configuration, index or file; a damaged file; tensors that are
            missing, superfluous or of another shape; FP8 scales that do not go with their weight; a configuration that is
            not that of `config.json`.

    Example:
        `load("Qwen3-30B-A3B", PRESETS["qwen3-30b-a3b"])`
    """
    path = files.existing(directory)
    block = None
    if config is None or (path / files.CONFIG).exists():
        read = ConfigReader.of(path)
        described, block = _config(read), read.fp8_block()
        config = config or described
        files.check_same(config, described, path, but=_TRAINING_ONLY)
    return files.load(
        path, _layout(config), model.shapes(config), dtype=dtype, shardings=shardings, fp8_block=block,
        passed_over=lambda name: False,
    )  # fmt: skip


def save(
    weights: Weights[jax.Array],
    config: MoeConfig,
    directory: str | os.PathLike[str],
    *,
    dtype: Any = jnp.bfloat16,
    max_shard_bytes: float = 5e9,
    max_position_embeddings: int = 32768,
) -> None:
    """Writes weights and `config.json` so that transformers' `Qwen3MoeForCausalLM.from_pretrained` or, without norms of
    queries and keys, `MixtralForCausalLM.from_pretrained` loads them. The directory appears complete or not at all.

    Args:
        weights: arrays with the shapes of `model.shapes(config)`, on devices of this process.
        directory: new or empty.
        dtype: of the files: float32, bfloat16 or float16.
        max_shard_bytes: the tensor bytes of one file.
        max_position_embeddings: the longest sequence in tokens to declare; by default Mixtral 8x7B's.

    Raises:
        UserError: a directory that holds anything or cannot be written; weights that are not those of `config`; another
            dtype; a size of shards that is not positive; a model that neither of the two is.
    """
    if not config.qk_norm and not config.normalise_weights:
        raise UserError(
            "Mixtral divides the chosen experts' probabilities by their sum and this model has normalise_weights=False: "
            "transformers has no model without that and without norms of queries and keys to save it for"
        )
    files.save(
        weights, _layout(config), model.shapes(config),
        lambda stored: _config_to_hf(config, stored, max_position_embeddings),
        directory, dtype=dtype, max_shard_bytes=max_shard_bytes,
    )  # fmt: skip


def _layout(config: MoeConfig) -> Weights[Form]:
    layer = "model.layers.{layer}"
    attention = f"{layer}.self_attn"
    mlp, gate, up, down = ("block_sparse_moe", "w1", "w3", "w2")
    if config.qk_norm:
        mlp, gate, up, down = ("mlp", "gate_proj", "up_proj", "down_proj")
    each = f"{layer}.{mlp}.experts.{{expert}}"
    return Weights(
        embedding_VD=Form("model.embed_tokens.weight", SAME),
        moe_layers=Layer(
            attention_norm_D=Form(f"{layer}.input_layernorm.weight", VECTOR),
            attention=Attention(
                query_DHK=Form(f"{attention}.q_proj.weight", HEADS_IN),
                key_DGK=Form(f"{attention}.k_proj.weight", HEADS_IN),
                value_DGK=Form(f"{attention}.v_proj.weight", HEADS_IN),
                out_DHK=Form(f"{attention}.o_proj.weight", OUT_HEADS),
                query_norm_K=Form(f"{attention}.q_norm.weight", VECTOR) if config.qk_norm else None,
                key_norm_K=Form(f"{attention}.k_norm.weight", VECTOR) if config.qk_norm else None,
            ),
            mlp_norm_D=Form(f"{layer}.post_attention_layernorm.weight", VECTOR),
            mlp=Experts(
                router_DE=Form(f"{layer}.{mlp}.gate.weight", OUT_IN),
                gate_DEF=Form(f"{each}.{gate}.weight", OUT_IN, expert_dimension=1),
                up_DEF=Form(f"{each}.{up}.weight", OUT_IN, expert_dimension=1),
                down_DEF=Form(f"{each}.{down}.weight", SAME, expert_dimension=1),
            ),
        ),
        final_norm_D=Form("model.norm.weight", VECTOR),
        head_DV=Form("lm_head.weight", OUT_IN),
    )


def _config_to_hf(config: MoeConfig, dtype: np.dtype, max_position_embeddings: int) -> dict[str, Any]:
    """In the words of transformers 4, which version 5 understands too."""
    mixtral = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": config.moe_mlp,
        "num_local_experts": config.experts,
        "sliding_window": None,
    }
    qwen = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": config.moe_mlp * config.experts_per_token,  # of layers without experts, which it has not
        "moe_intermediate_size": config.moe_mlp,
        "num_experts": config.experts,
        "norm_topk_prob": config.normalise_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    }
    return (qwen if config.qk_norm else mixtral) | {
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance_factor,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype.name,
    }
