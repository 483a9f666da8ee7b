"""Sizes of the Llama family and the presets by name."""

import dataclasses
from typing import Literal

from forebay.errors import UserError
from forebay.models.rope import RopeScaling


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """A Llama model. Sizes are counts, `norm_eps` and `rope_theta` as in the published configurations."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = False

    family: Literal["llama"] = "llama"

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise UserError(f"llama: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"llama: head_dim={self.head_dim} must be even for rotary embeddings")

    @property
    def stacks(self) -> dict[str, int]:
        """The stacks of identical layers and how many layers each has."""
        return {"layers": self.layers}


# Llama 3.1: "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3, and the published configurations.
PRESETS = {
    "llama3.1-8b": LlamaConfig(128256, 4096, 32, 32, 8, 128, 14336, rope_scaling=RopeScaling()),
    "llama3.1-70b": LlamaConfig(128256, 8192, 80, 64, 8, 128, 28672, rope_scaling=RopeScaling()),
    "llama3.1-405b": LlamaConfig(128256, 16384, 126, 128, 8, 128, 53248, rope_scaling=RopeScaling()),
    # for a CPU: bytes as tokens, 0.9 million weights
    "llama-tiny": LlamaConfig(512, 128, 4, 4, 2, 32, 384, rope_theta=10_000.0, tied_embeddings=True),
}
