"""Mixtral and Qwen3-MoE: `config.py` has the sizes, `model.py` the arithmetic, `hugging_face.py` the weight files."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from forebay.models import experts, stacked
from forebay.models.moe import model
from forebay.models.moe.config import PRESETS, MoeConfig
from forebay.models.registry import ExampleBlock
from forebay.sharding import Sharding

__all__ = ["PRESETS", "Moe", "MoeConfig"]


@dataclasses.dataclass(frozen=True)
class Moe:
    """The `forebay.models.registry.Model` of the family of Mixtral and Qwen3-MoE."""

    name: str
    config: MoeConfig

    @property
    def stacks(self) -> Mapping[str, int]:
        return self.config.stacks

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def parameter_count(self) -> int:
        return model.parameter_count(self.config)

    def head_dims(self) -> tuple[int, int]:
        return self.config.head_dim, self.config.head_dim

    def head_shape(self) -> tuple[int, int]:
        return self.config.embed, self.config.vocab

    def small_sizes(self, layers: Mapping[str, int], sharding: Sharding) -> Mapping[str, Any]:
        c, about = self.config, sharding.about
        kv_heads = about(c.kv_heads, "kv_heads", 1)
        # two experts on each device, and as many chosen as there may be
        small = min(c.experts, 2 * sharding.size("experts"))
        return {
            "layers": layers["moe_layers"], "vocab": about(c.vocab, "vocab", 1024), "embed": about(c.embed, "embed", 256),
            "moe_mlp": about(c.moe_mlp, "mlp", 128), "kv_heads": kv_heads, "heads": kv_heads * (c.heads // c.kv_heads),
            "experts": small, "experts_per_token": min(c.experts_per_token, small),
        }  # fmt: skip

    def init(self, key: jax.Array, dtype: Any) -> model.Weights[jax.Array]:
        return model.init(key, self.config, dtype)

    def shapes(self) -> model.Weights[tuple[int, ...]]:
        return model.shapes(self.config)

    def logical_axes(self) -> model.Weights[tuple[str | None, ...]]:
        return model.logical_axes(self.config)

    def decayed(self) -> model.Weights[bool]:
        return stacked.decayed(self.shapes())

    def loss(
        self,
        weights: model.Weights[jax.Array],
        batch: Mapping[str, jax.Array],
        *,
        sharding: Sharding,
        kernel: str,
        chunking: str,
        scan_layers: Callable[..., Any],
        dtype: Any,
    ) -> tuple[jax.Array, model.Aux]:
        parts = model.Parts.of(self.config, sharding, kernel)
        return model.loss(weights, batch, parts=parts, chunking=chunking, scan_layers=scan_layers, dtype=dtype)

    def metrics(self, aux: model.Aux) -> dict[str, jax.Array]:
        """The cross entropy, and how even the experts' load is (`forebay.models.experts.metrics`)."""
        return {"loss": aux.cross_entropy, **experts.metrics(aux.load, aux.balance_loss, aux.overflow)}

    def after_update(self, weights: model.Weights[jax.Array], aux: model.Aux) -> model.Weights[jax.Array]:
        return weights

    def refusal(self, record: Mapping[str, Any]) -> str | None:
        return experts.refusal(record, self.config)

    def logits(
        self, weights: model.Weights[jax.Array], tokens: jax.Array, *, sharding: Sharding, dtype: Any
    ) -> jax.Array:
        return model.logits(weights, tokens, parts=model.Parts.of(self.config, sharding, "blockwise"), dtype=dtype)

    def load_hugging_face(self, directory: str, *, shardings: Any) -> model.Weights[jax.Array]:
        from forebay.models.moe import hugging_face

        return hugging_face.load(directory, self.config, shardings=shardings)

    def flops_per_token(self, seq: int) -> float:
        return model.flops_per_token(self.config, seq)

    def example_blocks(
        self, batch: int, seq: int, dtype: Any, sharding: Sharding, kernel: str
    ) -> dict[str, ExampleBlock]:
        c = self.config
        block = functools.partial(model.block, parts=model.Parts.of(c, sharding, kernel))
        numbered = (jax.ShapeDtypeStruct((), jnp.int32), stacked.one_layer(self.shapes().moe_layers))
        table = jax.eval_shape(lambda: experts.empty_table(c.layers, c.experts, balance=(c.experts,)))
        x = jax.ShapeDtypeStruct((batch, seq, c.embed), dtype)
        rope = (jax.ShapeDtypeStruct((seq, c.head_dim // 2), jnp.float32),) * 2
        return {"moe_layers": ExampleBlock(block, numbered, (x, table), (rope,))}
