"""What a training program is, as dataclasses: the command line and the YAML files come from these."""

import dataclasses
from typing import Any

AUTO = "auto"
PROFILES = (AUTO, "copies", "timeline")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (decoupled weight decay, arXiv:1711.05101) with warmup, cosine decay and clipping.

    Attributes:
        learning_rate: peak learning rate, reached after the warmup.
        warmup_steps: steps of linear increase from zero.
        final_learning_rate_fraction: the learning rate at the last step, as a fraction of the peak.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the root of the second moment.
        weight_decay: decoupled weight decay; norms are not decayed.
        clip_norm: gradients are scaled down to this global norm; 0 does not clip.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 100
    final_learning_rate_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class ProgramConfig:
    """The training step: model, sizes, mesh, placement, optimizer.

    Attributes:
        model: name of a model preset.
        sizes: fields of the preset's configuration to replace, as in --sizes.layers 8.
        mesh: mesh axes and sizes, as in fsdp=16,tensor=8; axes are data, fsdp, expert, sequence, tensor. Empty is
            fsdp over all devices.
        batch: sequences per step, over all devices and microbatches.
        seq: tokens per sequence.
        accumulate: microbatches per step, whose gradients are added up before the update.
        placement: where activations go: a preset of MaxText's (full, minimal, minimal_offloaded, ...; none keeps
            everything), tensor=device|host|recompute, or both, as in "full,context=host"; ranges of layers as in
            "minimal_offloaded@0:28;minimal@28:32". Empty leaves it to plan.
        plan: a plan file, or auto, which plans for the machine; not used where there is a placement.
        optimizer_host_fraction: the share of the optimizer state that lives in host memory, 0 to 1; it comes in and goes
            out by slices during the update. Without it the plan says.
        parameters_host_fraction: the same for the layers' weights, which come in layer by layer, and whose gradients
            go out. Without it the plan says.
        master_weights: where float32 master weights live beside working weights in the compute dtype: host or
            device; empty is float32 weights alone.
        accumulate_on: where the sum of the microbatches' gradients lives, device or host.
        dtype: compute dtype; weights and optimizer state are float32.
        attention: attention kernel: auto, cudnn, splash or blockwise.
        loss_chunking: how the loss avoids whole logits: auto, tokens or vocab.
        profile: what XLA's scheduler for GPUs is told of times: copies, that those between device and host take long;
            timeline, also how long kernels and collectives take, in a second compile that is kept where it is faster;
            auto, the second where the machine is known.
        steps: training steps; the learning rate's decay ends there.
        optimizer: the optimizer.
    """

    model: str = "llama-tiny"
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    mesh: str = ""
    batch: int = 8
    seq: int = 256
    accumulate: int = 1
    placement: str = ""
    plan: str = "auto"
    optimizer_host_fraction: float | None = None
    parameters_host_fraction: float | None = None
    master_weights: str = ""
    accumulate_on: str = "device"
    dtype: str = "bfloat16"
    attention: str = "auto"
    loss_chunking: str = "auto"
    profile: str = AUTO
    steps: int = 1000
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    @property
    def is_planned(self) -> bool:
        """Whether where activations go is left to the planner."""
        return not self.placement and self.plan == AUTO
