"""DeepSeek-V3 weights as Hugging Face keeps them (`forebay.models.hugging_face`), in plain numbers or in FP8 with a
scale for each block.

The multi-token-prediction layer is stored as the layer after the last. transformers passes it over, and
so does a model without it here. It repeats embedding and head, which are passed over.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forebay.models import hugging_face as files
from forebay.models.deepseek import model
from forebay.models.deepseek.config import DeepSeekConfig, Yarn
from forebay.models.deepseek.model import Attention, Experts, Layer, Mlp, Mtp, Weights
from forebay.models.hugging_face import HEADS_IN, OUT_HEADS, OUT_IN, SAME, VECTOR, ConfigReader, Form

# What says how to train, and is in no checkpoint.
_TRAINING_ONLY = (
    "mtp", "mtp_factor", "balance_factor", "bias_speed", "capacity_factor", "overflow_limit", "grouped",
)  # fmt: skip
_JOIN = ((2,), (1, 0))  # ours is [in, (token, hidden), out]


def config_from_hf(directory: str | os.PathLike[str]) -> DeepSeekConfig:
    """The configuration in `directory/config.json`, as DeepSeek or transformers 4 or 5 write it.

    What only training needs has the defaults of `DeepSeekConfig`.

    Raises:
        UserError: no such file; not JSON; a key whose value this model cannot represent (another
            `model_type`, biases, another activation, RoPE scaling, routing or quantisation); a missing or malformed size.
    """
    read = ConfigReader.of(directory)
    read.only("model_type", "deepseek_v3", required=True)
    for key, value in (
        ("attention_bias", False), ("tie_word_embeddings", False), ("rope_interleave", True), ("moe_layer_freq", 1),
        ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"),
    ):  # fmt: skip
        read.only(key, value)
    read.silu_only()
    heads = read.size("num_attention_heads")
    if read.size("num_key_value_heads", heads) != heads:
        raise read.refused("num_key_value_heads", read.keys["num_key_value_heads"], f"num_attention_heads={heads}")
    rope = read.rope()
    return DeepSeekConfig(
        vocab=read.size("vocab_size"),
        embed=read.size("hidden_size"),
        layers=read.size("num_hidden_layers"),
        dense_layers=read.size("first_k_dense_replace", least=0),
        heads=heads,
        query_lora=read.size("q_lora_rank", 0, least=0),
        kv_lora=read.size("kv_lora_rank"),
        nope_dim=read.size("qk_nope_head_dim"),
        rope_dim=read.size("qk_rope_head_dim"),
        value_dim=read.size("v_head_dim"),
        mlp=read.size("intermediate_size"),
        moe_mlp=read.size("moe_intermediate_size"),
        experts=read.size("n_routed_experts"),
        experts_per_token=read.size("num_experts_per_tok"),
        shared_experts=read.size("n_shared_experts"),
        expert_groups=read.size("n_group"),
        groups_per_token=read.size("topk_group"),
        route_scale=read.number(read.keys, "routed_scaling_factor", 2.5),
        normalise_weights=read.flag("norm_topk_prob", True),
        mtp=read.size("num_nextn_predict_layers", 0, least=0) > 0,
        rope_theta=read.number(rope, "rope_theta", 10_000.0),
        yarn=_yarn(read, rope),
        norm_eps=read.number(read.keys, "rms_norm_eps", 1e-6),
    )


def _yarn(read: ConfigReader, rope: dict[str, Any]) -> Yarn | None:
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "yarn":
        raise read.refused("rope_type", rope["rope_type"], "'yarn' or 'default'")
    return Yarn(
        factor=read.number(rope, "factor"),
        original_max_position_embeddings=int(read.number(rope, "original_max_position_embeddings")),
        beta_fast=read.number(rope, "beta_fast", 32.0),
        beta_slow=read.number(rope, "beta_slow", 1.0),
        mscale=read.number(rope, "mscale"),
        mscale_all_dim=read.number(rope, "mscale_all_dim"),
    )


def load(
    directory: str | os.PathLike[str],
    config: DeepSeekConfig | None = None,
    *,
    dtype: Any = jnp.float32,
    shardings: Any = None,
) -> Weights[jax.Array]:
    """The weights in a Hugging Face directory.

    Args:
        config: the model they are for, as `PRESETS` has them; by default the one that `config.json`
            describes, with the multi-token-prediction layer if it is stored. Given, it must agree with
            `config.json` where there is one, but for what only training needs.
        dtype: of the result, whatever the files hold; FP8 weights are multiplied by their blocks' scales.
        shardings: a tree like the weights with a `jax.sharding.Sharding` for each; each process reads only
            what its own devices hold (but an FP8 matrix as a whole). By default everything goes to JAX's default device.

    Returns:
        Arrays with the shapes of `model.shapes(config)`.

    Raises:
        UserError: a missing directory, configuration, index or file; a damaged file; tensors that are
            missing, superfluous or of another shape; FP8 scales that do not go with their weight; a configuration that is
            not that of `config.json`.
    """
    path = files.existing(directory)
    described, block = None, None
    if config is None or (path / files.CONFIG).exists():
        described = config_from_hf(path)
        block = ConfigReader.of(path).fp8_block()
    if config is None:  # transformers says that there is a prediction layer, and saves none
        assert described is not None
        after_last = f"model.layers.{described.layers}."
        stored = any(name.startswith(after_last) for name in files.stored_names(path))
        config = dataclasses.replace(described, mtp=described.mtp and stored)
    if described is not None:  # first: another number of experts would be an endless list of missing tensors
        files.check_same(config, described, path, but=_TRAINING_ONLY)
    after_last = f"model.layers.{config.layers}."
    repeated = (f"{after_last}embed_tokens.weight", f"{after_last}shared_head.head.weight")
    return files.load(
        path, _layout(config), model.shapes(config), dtype=dtype, shardings=shardings, fp8_block=block,
        passed_over=lambda name: name.startswith(repeated if config.mtp else after_last),
    )  # fmt: skip


def save(
    weights: Weights[jax.Array],
    config: DeepSeekConfig,
    directory: str | os.PathLike[str],
    *,
    dtype: Any = jnp.bfloat16,
    max_shard_bytes: float = 5e9,
    max_position_embeddings: int | None = None,
) -> None:
    """Writes weights and `config.json` so that transformers' `DeepseekV3ForCausalLM.from_pretrained` loads them.

    The multi-token-prediction layer is written as the layer after the last, without the embedding and head that it
    shares. The directory appears complete or not at all.

    Args:
        weights: arrays with the shapes of `model.shapes(config)`, on devices of this process.
        directory: new or empty.
        dtype: of the files: float32, bfloat16 or float16.
        max_shard_bytes: the tensor bytes of one file.
        max_position_embeddings: the longest sequence in tokens to declare. By default what YaRN stretches
            to, or 4096, the length DeepSeek-V3 was first trained with.

    Raises:
        UserError: a directory that holds anything or cannot be written; weights that are not those of
            `config`; another dtype; a size of shards that is not positive.
    """
    files.save(
        weights, _layout(config), model.shapes(config),
        lambda stored: _config_to_hf(config, stored, max_position_embeddings),
        directory, dtype=dtype, max_shard_bytes=max_shard_bytes,
    )  # fmt: skip


def _layout(config: DeepSeekConfig) -> Weights[Form]:
    def mlp(prefix: str, first: int) -> Mlp[Form]:
        return Mlp(
            gate_DF=Form(f"{prefix}.gate_proj.weight", OUT_IN, first),
            up_DF=Form(f"{prefix}.up_proj.weight", OUT_IN, first),
            down_DF=Form(f"{prefix}.down_proj.weight", SAME, first),
        )

    def layer(first: int, experts: bool) -> Layer[Form]:
        prefix = "model.layers.{layer}"
        attention, rest = f"{prefix}.self_attn", f"{prefix}.mlp"
        lora = config.query_lora > 0
        query = f"{attention}.q_b_proj.weight" if lora else f"{attention}.q_proj.weight"
        each = f"{rest}.experts.{{expert}}"
        routed = Experts(
            router_DE=Form(f"{rest}.gate.weight", OUT_IN, first),
            router_bias_E=Form(f"{rest}.gate.e_score_correction_bias", VECTOR, first),
            gate_DEF=Form(f"{each}.gate_proj.weight", OUT_IN, first, expert_dimension=1),
            up_DEF=Form(f"{each}.up_proj.weight", OUT_IN, first, expert_dimension=1),
            down_DEF=Form(f"{each}.down_proj.weight", SAME, first, expert_dimension=1),
            shared=mlp(f"{rest}.shared_experts", first),
        )
        return Layer(
            attention_norm_D=Form(f"{prefix}.input_layernorm.weight", VECTOR, first),
            attention=Attention(
                query_a_DQ=Form(f"{attention}.q_a_proj.weight", OUT_IN, first) if lora else None,
                query_norm_Q=Form(f"{attention}.q_a_layernorm.weight", VECTOR, first) if lora else None,
                query_b_QHK=Form(query, HEADS_IN, first),
                kv_a_DC=Form(f"{attention}.kv_a_proj_with_mqa.weight", OUT_IN, first),
                kv_norm_C=Form(f"{attention}.kv_a_layernorm.weight", VECTOR, first),
                kv_b_CHX=Form(f"{attention}.kv_b_proj.weight", HEADS_IN, first),
                out_DHW=Form(f"{attention}.o_proj.weight", OUT_HEADS, first),
            ),
            mlp_norm_D=Form(f"{prefix}.post_attention_layernorm.weight", VECTOR, first),
            mlp=routed if experts else mlp(rest, first),
        )

    last = config.layers
    after = "model.layers.{layer}"
    mtp = Mtp(
        token_norm_D=Form(f"{after}.enorm.weight", VECTOR, last),
        hidden_norm_D=Form(f"{after}.hnorm.weight", VECTOR, last),
        proj_D2D=Form(f"{after}.eh_proj.weight", _JOIN, last),
        layer=layer(last, experts=True),
        final_norm_D=Form(f"{after}.shared_head.norm.weight", VECTOR, last),
    )
    return Weights(
        embedding_VD=Form("model.embed_tokens.weight", SAME),
        dense_layers=layer(0, experts=False) if config.dense_layers else None,
        moe_layers=layer(config.dense_layers, experts=True),
        mtp=mtp if config.mtp else None,
        final_norm_D=Form("model.norm.weight", VECTOR),
        head_DV=Form("lm_head.weight", OUT_IN),
    )


def _config_to_hf(config: DeepSeekConfig, dtype: np.dtype, max_position_embeddings: int | None) -> dict[str, Any]:
    """In the words of transformers 4, which version 5 understands too."""
    yarn = config.yarn
    stretched = int(yarn.factor * yarn.original_max_position_embeddings) if yarn else 4096
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "moe_intermediate_size": config.moe_mlp,
        "num_hidden_layers": config.layers,
        "first_k_dense_replace": config.dense_layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "q_lora_rank": config.query_lora or None,
        "kv_lora_rank": config.kv_lora,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.value_dim,
        "n_routed_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "n_shared_experts": config.shared_experts,
        "n_group": config.expert_groups,
        "topk_group": config.groups_per_token,
        "routed_scaling_factor": config.route_scale,
        "norm_topk_prob": config.normalise_weights,
        "num_nextn_predict_layers": int(config.mtp),
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"type": "yarn"} | dataclasses.asdict(yarn) if yarn else None,
        "max_position_embeddings": max_position_embeddings or stretched,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype.name,
    }
