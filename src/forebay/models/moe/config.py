"""Sizes of the family of Mixtral and Qwen3-MoE and the presets by name."""

import dataclasses
from typing import Literal

from forebay.errors import UserError


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """A model with grouped-query attention and softmax-routed experts: Mixtral (arXiv:2401.04088) or, with norms of
    queries and keys, Qwen3-MoE (arXiv:2505.09388).

    Attributes:
        vocab: vocabulary.
        embed: width of the residual stream.
        layers: decoder layers, each with experts.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: a head.
        moe_mlp: width of one expert's MLP.
        experts: routed experts of a layer.
        experts_per_token: routed experts that a token goes to.
        qk_norm: whether each head of queries and keys is normed.
        normalise_weights: whether the chosen experts' probabilities are divided by their sum.
        rope_theta: base of the rotary frequencies.
        norm_eps: of the RMS norms.
        balance_factor: factor of the load-balancing loss.
        balance_by_layer: whether that is the mean of the layers' own, or of all layers together as in transformers.
        capacity_factor: room for tokens on a device, as a multiple of a perfectly balanced device's.
        overflow_limit: the largest share of rows without room with which training goes on.
        grouped: kernel of the experts' products: auto, blockwise or triton.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    moe_mlp: int
    experts: int
    experts_per_token: int
    qk_norm: bool
    normalise_weights: bool = True
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    balance_factor: float = 1e-3
    balance_by_layer: bool = False
    capacity_factor: float = 1.125
    overflow_limit: float = 0.01
    grouped: str = "auto"

    family: Literal["moe"] = "moe"

    def __post_init__(self):
        refused = None
        if self.heads % self.kv_heads:
            refused = f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}"
        elif self.head_dim % 2:
            refused = f"head_dim={self.head_dim} must be even for rotary embeddings"
        elif self.experts_per_token > self.experts:
            refused = f"experts_per_token={self.experts_per_token} exceeds experts={self.experts}"
        elif self.capacity_factor < 1:
            refused = f"capacity_factor={self.capacity_factor} is too small: even perfect balance needs 1"
        if refused:
            raise UserError(f"moe: {refused}")

    @property
    def stacks(self) -> dict[str, int]:
        """The stacks of identical layers and how many layers each has."""
        return {"moe_layers": self.layers}


# The published configurations, `config.json` of huggingface.co/Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B,
# mistralai/Mixtral-8x7B-v0.1 and mistral-community/Mixtral-8x22B-v0.1 (the instructed 8x22B has a vocabulary of 32768).
PRESETS = {
    "qwen3-30b-a3b": MoeConfig(
        vocab=151936, embed=2048, layers=48, heads=32, kv_heads=4, head_dim=128, moe_mlp=768, experts=128,
        experts_per_token=8, qk_norm=True,
    ),
    "qwen3-235b-a22b": MoeConfig(
        vocab=151936, embed=4096, layers=94, heads=64, kv_heads=4, head_dim=128, moe_mlp=1536, experts=128,
        experts_per_token=8, qk_norm=True,
    ),
    "mixtral-8x7b": MoeConfig(
        vocab=32000, embed=4096, layers=32, heads=32, kv_heads=8, head_dim=128, moe_mlp=14336, experts=8,
        experts_per_token=2, qk_norm=False, norm_eps=1e-5, balance_factor=0.02,
    ),
    "mixtral-8x22b": MoeConfig(
        vocab=32000, embed=6144, layers=56, heads=48, kv_heads=8, head_dim=128, moe_mlp=16384, experts=8,
        experts_per_token=2, qk_norm=False, norm_eps=1e-5, balance_factor=0.001,
    ),
    # for a CPU: bytes as tokens, 2.0 million weights; every layer's balance counts, and there is room for all rows on up
    # to four devices: a young router is uneven
    "qwen3-moe-tiny": MoeConfig(
        vocab=512, embed=128, layers=4, heads=4, kv_heads=2, head_dim=48, moe_mlp=64, experts=16, experts_per_token=4,
        qk_norm=True, rope_theta=10_000.0, balance_factor=0.02, balance_by_layer=True, capacity_factor=4.0,
    ),
}  # fmt: skip
