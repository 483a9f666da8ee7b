"""Compiler options for code that is not ours: those under which the copies of a plan hide."""

from collections.abc import Sequence
from typing import Any

import jax

from forebay.planner.plan import Plan
from forebay.xla.options import PIPELINING, variants
from forebay.xla.options import compiler_options as options_for
from forebay.xla.versions import DOUBLE_BUFFERING


def compiler_options(plan: Plan, devices: Sequence[Any] | None = None) -> dict[str, Any]:
    """What XLA needs to be told for the copies of a plan to hide, for `jax.jit(step, compiler_options=...)`.

    Without it the copies between device and host start and end in the layer that needs them, and XLA counts host memory
    as device memory and recomputes to save it. They are the options under which `forebay.plan` compiled the plan; of one
    that it did not compile, the first choice of several (`forebay.xla.options.variants`). What they come to in a step of
    yours, `forebay.compile_step(jitted, args).transfers` says. They are for loops of `forebay.apply` and
    `forebay.scan_layers`, which start copies a layer ahead. A `jax.lax.scan` of your own over `plan.apply(block)` leaves that
    to the compiler: on GPUs add `"xla_gpu_enable_pipelined_host_offloading": True`, on TPUs drop
    `xla_tpu_pipeline_memory_host_transfers`.

    Args:
        plan: what the step's layers run under.
        devices: those of the step's mesh, present or compile-only; `jax.devices()` when not given.

    Returns:
        Options by flag name without dashes; none on a CPU. An option that the installed build lacks is left out, with a warning.

    Raises:
        WrongNumbersError: the installed jax is known to compute wrong gradients with offloading.
    """
    devices = jax.devices() if devices is None else list(devices)
    platform = "cuda" if devices[0].platform == "gpu" else devices[0].platform
    options = options_for(
        platform, deviceless=devices[0] not in jax.devices(), offloads=plan.offloads,
        collective_matmul=bool(plan.collective_matmul),
    )  # fmt: skip
    found, compiled_with = list(variants(options)), (plan.compiled or {}).get("compiler_options", options)
    return min(
        found, key=lambda v: sum((name in v) != (name in compiled_with) for name in (DOUBLE_BUFFERING, PIPELINING))
    )
