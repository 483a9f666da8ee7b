"""Sizes of DeepSeek-V3's family and the presets by name."""

import dataclasses
from typing import Literal

from forebay.errors import UserError


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN's stretching of the rotary frequencies beyond the original context length (arXiv:2309.00071).

    Field names and meaning are those of the Hugging Face configuration (`rope_type: yarn`).
    """

    factor: float = 40.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig:
    """A DeepSeek-V3 model (arXiv:2412.19437).

    Attributes:
        vocab: vocabulary.
        embed: width of the residual stream.
        layers: all decoder layers; `dense_layers` of them, the first, have a plain MLP.
        dense_layers: see above.
        heads: attention heads.
        query_lora: rank of the queries' down-projection; 0 for none.
        kv_lora: rank of the keys' and values' down-projection.
        nope_dim: a query or key head's part without position.
        rope_dim: a query or key head's part with rotary position, the keys' shared by all heads.
        value_dim: a value head.
        mlp: width of the dense layers' MLP.
        moe_mlp: width of one expert's MLP.
        experts: routed experts.
        experts_per_token: routed experts that a token goes to.
        shared_experts: experts that every token goes to, as one MLP of so many times `moe_mlp`.
        expert_groups: groups of neighbouring experts.
        groups_per_token: groups that a token's experts may be of.
        route_scale: factor on the routed experts' weights.
        normalise_weights: whether the chosen experts' scores are divided by their sum.
        mtp: whether there is a multi-token-prediction layer, used in training alone.
        rope_theta: base of the rotary frequencies.
        yarn: their scaling.
        norm_eps: of the RMS norms.
        balance_factor: factor of the sequence-wise balance loss.
        bias_speed: what a step changes a router's bias by.
        mtp_factor: factor of the multi-token-prediction loss.
        capacity_factor: room for tokens on a device, as a multiple of a perfectly balanced device's.
        overflow_limit: the largest share of rows without room with which training goes on.
        grouped: kernel of the experts' products: auto, blockwise or triton.
    """

    vocab: int
    embed: int
    layers: int
    dense_layers: int
    heads: int
    query_lora: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    mlp: int
    moe_mlp: int
    experts: int
    experts_per_token: int
    shared_experts: int = 1
    expert_groups: int = 1
    groups_per_token: int = 1
    route_scale: float = 1.0
    normalise_weights: bool = True
    mtp: bool = True
    rope_theta: float = 10_000.0
    yarn: Yarn | None = None
    norm_eps: float = 1e-6
    balance_factor: float = 1e-4
    bias_speed: float = 1e-3
    mtp_factor: float = 0.3
    capacity_factor: float = 1.125
    overflow_limit: float = 0.01
    grouped: str = "auto"

    family: Literal["deepseek"] = "deepseek"

    def __post_init__(self):
        refused = None
        if not 0 <= self.dense_layers < self.layers:
            refused = f"dense_layers={self.dense_layers} must be less than layers={self.layers}"
        elif self.rope_dim % 2:
            refused = f"rope_dim={self.rope_dim} must be even for rotary embeddings"
        elif self.experts % self.expert_groups:
            refused = f"experts={self.experts} is not a multiple of expert_groups={self.expert_groups}"
        elif self.groups_per_token > self.expert_groups:
            refused = f"groups_per_token={self.groups_per_token} exceeds expert_groups={self.expert_groups}"
        elif self.experts_per_token > self.groups_per_token * (self.experts // self.expert_groups):
            refused = (
                f"experts_per_token={self.experts_per_token} exceeds the experts of groups_per_token="
                f"{self.groups_per_token} of {self.expert_groups} groups"
            )
        elif self.capacity_factor < 1:
            refused = f"capacity_factor={self.capacity_factor} is too small: even perfect balance needs 1"
        if refused:
            raise UserError(f"deepseek: {refused}")

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def stacks(self) -> dict[str, int]:
        """The stacks of identical layers and how many layers each has."""
        stacks = {"dense_layers": self.dense_layers, "moe_layers": self.moe_layers, "mtp": int(self.mtp)}
        return {name: layers for name, layers in stacks.items() if layers}


# The published configurations (huggingface.co/deepseek-ai/DeepSeek-V3, huggingface.co/moonshotai/Moonlight-16B-A3B,
# which is DeepSeek-V3's architecture without the queries' down-projection); factors of the losses and the bias's
# speed as in arXiv:2412.19437, section 4.2, for the first 10 T tokens.
PRESETS = {
    "deepseek-v3": DeepSeekConfig(
        vocab=129280, embed=7168, layers=61, dense_layers=3, heads=128, query_lora=1536, kv_lora=512,
        nope_dim=128, rope_dim=64, value_dim=128, mlp=18432, moe_mlp=2048, experts=256, experts_per_token=8,
        expert_groups=8, groups_per_token=4, route_scale=2.5, yarn=Yarn(),
    ),
    "moonlight-16b": DeepSeekConfig(
        vocab=163840, embed=2048, layers=27, dense_layers=1, heads=16, query_lora=0, kv_lora=512,
        nope_dim=128, rope_dim=64, value_dim=128, mlp=11264, moe_mlp=1408, experts=64, experts_per_token=6,
        shared_experts=2, route_scale=2.446, rope_theta=50_000.0, norm_eps=1e-5, mtp=False,
    ),
    # for a CPU: bytes as tokens, 2.2 million weights; a fast bias, for runs of hundreds of steps
    "deepseek-tiny": DeepSeekConfig(
        vocab=512, embed=128, layers=4, dense_layers=1, heads=4, query_lora=64, kv_lora=32, nope_dim=32, rope_dim=16,
        value_dim=32, mlp=384, moe_mlp=64, experts=16, experts_per_token=4, expert_groups=4, groups_per_token=2,
        route_scale=2.5, bias_speed=0.02, capacity_factor=2.0,
    ),
}  # fmt: skip
