"""Compiler options for code that is not ours: those under which the copies of a plan hide."""

from collections.abc import Sequence
from typing import Any

import jax

from forebay.agreement import from_first
from forebay.errors import UserError, WrongNumbersError
from forebay.hardware import Hardware, get_hardware
from forebay.planner.plan import Plan
from forebay.timeline.profile import profiled
from forebay.xla.compile import compile_hidden, compile_step
from forebay.xla.invariants import explain_violations
from forebay.xla.options import PIPELINING, TPU_PIPELINING, may_pipeline, variants
from forebay.xla.options import compiler_options as options_for
from forebay.xla.versions import DOUBLE_BUFFERING


def compiler_options(
    plan: Plan,
    devices: Sequence[Any] | None = None,
    *,
    own_scan: bool = False,
    step: Any = None,
    args: Sequence[Any] = (),
    hardware: str | Hardware | None = None,
) -> dict[str, Any]:
    """What XLA needs to be told for the copies of a plan to hide, for `jax.jit(step, compiler_options=...)`.

    Without it the copies between device and host start and end in the layer that needs them, and XLA counts host memory
    as device memory and recomputes to save it. They are the options under which `forebay.plan` compiled the plan; of one
    that it did not compile, the first choice of several (`forebay.xla.options.variants`). What they come to in a step of
    yours, `forebay.compile_step(jitted, args).transfers` says.

    With `step`, for GPUs, they are the best for that step: it is compiled with one choice after the other until its copies
    hide, then once more with the times of its timeline (`forebay.timeline.profile`), which stay where that is faster. That takes as
    long as it takes to compile the step two times or more; all processes of a run have to ask, and get the same.

    Args:
        plan: what the step's layers run under.
        devices: those of the step's mesh, present or compile-only; `jax.devices()` when not given.
        own_scan: whether the layers run in a `jax.lax.scan` of your own over `plan.apply(block)`, or under `plan.policy()`.
            `forebay.apply` and `forebay.scan_layers` start copies a layer ahead; yours leaves that to the compiler, which is
            then told to.
        step: the result of `jax.jit` without these options, for these devices.
        args: what it takes, arrays or their shapes.
        hardware: the machine, by default the plan's.

    Returns:
        Options by flag name without dashes; none on a CPU. An option that the installed build lacks is left out, with a warning.

    Raises:
        WrongNumbersError: the installed jax is known to compute wrong gradients with offloading, or what was compiled of `step`
            cannot be right.
        UserError: `step` is given, and no machine.
    """
    devices = jax.devices() if devices is None else list(devices)
    platform = "cuda" if devices[0].platform == "gpu" else devices[0].platform
    options = options_for(platform, deviceless=devices[0] not in jax.devices(), offloads=plan.offloads)
    found, compiled_with = list(variants(options)), (plan.compiled or {}).get("compiler_options", options)
    best = min(
        found, key=lambda v: sum((name in v) != (name in compiled_with) for name in (DOUBLE_BUFFERING, PIPELINING))
    )
    if own_scan and plan.offloads:
        best.pop(TPU_PIPELINING, None)
        if may_pipeline(platform):
            best[PIPELINING] = True
    if step is None or platform != "cuda":
        return best
    machine = hardware or plan.hardware
    if machine is None:
        raise UserError("the plan does not say which machine it is for: give hardware, one of `forebay hardware`")
    machine = machine if isinstance(machine, Hardware) else get_hardware(machine)
    args = tuple(args)
    compiled, chosen = compile_hidden(step, args, best)
    if compiled.violations:
        raise WrongNumbersError(explain_violations(compiled.violations))
    made = profiled(
        compiled, chosen, machine, len(devices), machine.usable_hbm_bytes(),
        lambda options: compile_step(step, args, options=options), from_first,
    )  # fmt: skip
    return dict(made.options)
