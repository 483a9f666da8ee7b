"""DeepSeek-V3: `config.py` has the sizes, `model.py` the arithmetic, `hugging_face.py` the weight files."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from forebay.models import experts, stacked
from forebay.models.deepseek import model
from forebay.models.deepseek.config import PRESETS, DeepSeekConfig, Yarn
from forebay.models.registry import ExampleBlock
from forebay.ops.moe.routing import adjusted_bias
from forebay.sharding import Sharding

__all__ = ["PRESETS", "DeepSeek", "DeepSeekConfig", "Yarn"]


@dataclasses.dataclass(frozen=True)
class DeepSeek:
    """The `forebay.models.registry.Model` of the DeepSeek-V3 family."""

    name: str
    config: DeepSeekConfig

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
        return self.config.head_dim, self.config.value_dim

    def head_shape(self) -> tuple[int, int]:
        return self.config.embed, self.config.vocab

    def small_sizes(self, layers: Mapping[str, int], sharding: Sharding) -> Mapping[str, Any]:
        c, about = self.config, sharding.about
        dense = layers.get("dense_layers", 0)
        # two experts of each group on each device, and as many chosen as there may be
        groups = c.expert_groups
        experts = min(c.experts, math.lcm(groups, sharding.size("experts")) * 2)
        per_group = experts // groups
        return {
            "layers": dense + layers["moe_layers"], "dense_layers": dense, "vocab": about(c.vocab, "vocab", 1024),
            "embed": about(c.embed, "embed", 256), "mlp": about(c.mlp, "mlp", 512),
            "moe_mlp": about(c.moe_mlp, "mlp", 128), "heads": about(c.heads, "heads", 2), "experts": experts,
            "experts_per_token": min(c.experts_per_token, c.groups_per_token * per_group),
            **({"query_lora": 128} if c.query_lora else {}), "kv_lora": min(c.kv_lora, 128),
            "bias_speed": 0.0,  # a bias moves by the sign of a difference, which rounding may turn
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
        """The cross entropies, and how even the experts' load is (`forebay.models.experts.metrics`)."""
        mtp = {"mtp_loss": aux.mtp_cross_entropy} if self.config.mtp else {}
        return {"loss": aux.cross_entropy, **mtp, **experts.metrics(aux.load, aux.balance_loss, aux.overflow)}

    def after_update(self, weights: model.Weights[jax.Array], aux: model.Aux) -> model.Weights[jax.Array]:
        """With the routers' biases moved against their experts' load."""

        def adjusted(layer: model.Layer[jax.Array], load: jax.Array) -> model.Layer[jax.Array]:
            assert isinstance(layer.mlp, model.Experts)
            bias = adjusted_bias(layer.mlp.router_bias_E, load, self.config.bias_speed)
            return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, router_bias_E=bias))

        count = self.config.moe_layers
        mtp = weights.mtp
        if mtp is not None:
            mtp = dataclasses.replace(mtp, layer=adjusted(mtp.layer, aux.load[count:]))
        return dataclasses.replace(weights, moe_layers=adjusted(weights.moe_layers, aux.load[:count]), mtp=mtp)

    def refusal(self, record: Mapping[str, Any]) -> str | None:
        return experts.refusal(record, self.config)

    def logits(
        self, weights: model.Weights[jax.Array], tokens: jax.Array, *, sharding: Sharding, dtype: Any
    ) -> jax.Array:
        return model.logits(weights, tokens, parts=model.Parts.of(self.config, sharding, "blockwise"), dtype=dtype)

    def load_hugging_face(self, directory: str, *, shardings: Any) -> model.Weights[jax.Array]:
        from forebay.models.deepseek import hugging_face

        return hugging_face.load(directory, self.config, shardings=shardings)

    def flops_per_token(self, seq: int) -> float:
        return model.flops_per_token(self.config, seq)

    def example_blocks(
        self, batch: int, seq: int, dtype: Any, sharding: Sharding, kernel: str
    ) -> dict[str, ExampleBlock]:
        config, shapes = self.config, self.shapes()
        parts = model.Parts.of(config, sharding, kernel)
        x = jax.ShapeDtypeStruct((batch, seq, config.embed), dtype)
        rope = (jax.ShapeDtypeStruct((seq, config.rope_dim // 2), jnp.float32),) * 2
        table = lambda layers: jax.eval_shape(lambda: experts.empty_table(layers, config.experts))  # noqa: E731
        numbered = (jax.ShapeDtypeStruct((), jnp.int32), stacked.one_layer(shapes.moe_layers))
        blocks = {
            "dense_layers": ExampleBlock(
                functools.partial(model.dense_block, parts=parts), stacked.one_layer(shapes.dense_layers), x, (rope,)
            ),
            "moe_layers": ExampleBlock(
                functools.partial(model.moe_block, parts=parts), numbered, (x, table(config.moe_layers)), (rope,)
            ),
            "mtp": ExampleBlock(
                functools.partial(model.mtp_block, parts=parts), stacked.one_layer(shapes.mtp),
                (x, table(1)), (x, rope),
            ),
        }  # fmt: skip
        return {name: blocks[name] for name in self.stacks}
