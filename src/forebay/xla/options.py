"""Compiler options for a training step."""

from typing import Any


def compiler_options(platform: str, *, deviceless: bool, offloads: bool) -> dict[str, Any]:
    """Options for one compile, by flag name without the leading dashes.

    Args:
        platform: "cuda", "gpu", "tpu" or "cpu".
        deviceless: whether the compiler has no device to time kernels on.
        offloads: whether the step moves anything to the host.
    """
    if platform not in ("cuda", "gpu"):
        return {}
    # collectives and copies overlap with arithmetic only under this scheduler
    options: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": True}
    # XLA's own all-reduce kernels abort the compiler at 33 to 64 devices (jax 0.12.0.1); NCCL's are used instead
    options["xla_gpu_experimental_use_collective_kernels"] = ""
    if deviceless:
        options["xla_gpu_autotune_level"] = 0
    if offloads:
        # without it, a copy to the host ends in the iteration that starts it
        options["xla_gpu_enable_pipelined_host_offloading"] = True
    return options
