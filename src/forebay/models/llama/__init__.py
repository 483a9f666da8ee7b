"""Llama 3: `config.py` has the sizes, `model.py` the arithmetic, `hugging_face.py` the weight files."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from forebay.models import stacked
from forebay.models.llama import model
from forebay.models.llama.config import PRESETS, LlamaConfig
from forebay.models.registry import ExampleBlock
from forebay.models.rope import RopeScaling
from forebay.sharding import Sharding

__all__ = ["PRESETS", "Llama", "LlamaConfig", "RopeScaling"]


@dataclasses.dataclass(frozen=True)
class Llama:
    """The `forebay.models.registry.Model` of the Llama family."""

    name: str
    config: LlamaConfig

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
        return {
            "layers": layers["layers"], "vocab": about(c.vocab, "vocab", 1024), "embed": about(c.embed, "embed", 256),
            "mlp": about(c.mlp, "mlp", 512), "kv_heads": kv_heads, "heads": kv_heads * (c.heads // c.kv_heads),
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
    ) -> tuple[jax.Array, jax.Array]:
        loss = model.loss(
            weights, batch, config=self.config, sharding=sharding, kernel=kernel, chunking=chunking,
            scan_layers=scan_layers, dtype=dtype,
        )  # fmt: skip
        return loss, loss

    def metrics(self, aux: jax.Array) -> dict[str, jax.Array]:
        return {"loss": aux}

    def after_update(self, weights: model.Weights[jax.Array], aux: jax.Array) -> model.Weights[jax.Array]:
        return weights

    def refusal(self, record: Mapping[str, Any]) -> str | None:
        return None

    def logits(
        self, weights: model.Weights[jax.Array], tokens: jax.Array, *, sharding: Sharding, dtype: Any
    ) -> jax.Array:
        return model.logits(weights, tokens, config=self.config, sharding=sharding, dtype=dtype)

    def load_hugging_face(self, directory: str, *, shardings: Any) -> model.Weights[jax.Array]:
        from forebay.models.llama import hugging_face

        return hugging_face.load(directory, self.config, shardings=shardings)

    def flops_per_token(self, seq: int) -> float:
        return model.flops_per_token(self.config, seq)

    def example_blocks(
        self, batch: int, seq: int, dtype: Any, sharding: Sharding, kernel: str
    ) -> dict[str, ExampleBlock]:
        block = functools.partial(model.block, config=self.config, sharding=sharding, kernel=kernel)
        layer = stacked.one_layer(self.shapes().layers)
        x = jax.ShapeDtypeStruct((batch, seq, self.config.embed), dtype)
        table = jax.ShapeDtypeStruct((seq, self.config.head_dim // 2), jax.numpy.float32)
        return {"layers": ExampleBlock(block, layer, x, ((table, table),))}
