"""Planning our own training step: for machines that are not there, and for the devices there are."""

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from forebay.agreement import from_first
from forebay.errors import UserError, WrongNumbersError
from forebay.graph.loss import LossGraph, trace_loss
from forebay.hardware import Hardware
from forebay.hardware.present import available_host_bytes, cpu_hardware, hardware_of
from forebay.pipeline import device_budget, find_plan, host_budget
from forebay.planner.build import Costed, build
from forebay.planner.plan import Plan
from forebay.planner.problem import layer_cost
from forebay.planner.search import MAX_COMPILES, Decision, InfeasibleError, Measured
from forebay.planner.solve import DEFAULT_TIME_LIMIT_S
from forebay.report.memory import compile_json
from forebay.timeline.compare import of_compiled
from forebay.timeline.profile import profiled
from forebay.train.config import ProgramConfig
from forebay.train.program import Program, make_program
from forebay.train.run_config import TrainConfig
from forebay.xla.compile import CompiledStep, compile_hidden, compile_step
from forebay.xla.estimate import argument_bytes, offloaded_bytes
from forebay.xla.invariants import explain_violations
from forebay.xla.options import compiler_options, memory_limit_percent

_NOT_TOLD = "profile=timeline does nothing here: it is for XLA's scheduler on GPUs of a machine that is known"


def silent(text: str) -> None:
    """Progress that nobody looks at."""
    del text


def planned_program(
    config: ProgramConfig,
    devices: Sequence[Any],
    hardware: Hardware | None = None,
    *,
    hbm: str | None = None,
    host: str | None = None,
    memory_fraction: float | None = None,
    variants: int = 2,
    max_compiles: int = MAX_COMPILES,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    progress: Callable[[str], None] = silent,
) -> Program:
    """The program that `config` describes, planned where it leaves the placement to the planner.

    Args:
        config: the training step.
        devices: present or compile-only.
        hardware: what they are; None finds out.
        hbm, host: budgets per device, as text like "170GiB"; by default what XLA may use, and most of
            the host's memory.
        memory_fraction: the share of HBM that XLA may use, where `hbm` is None.
        variants: the most ranges of layers; see `forebay.planner.solve.solve`.
        max_compiles: the most plans to compile.
        time_limit_s: seconds that each run of the solver may take.
        progress: is called with a line whenever something takes long.

    Raises:
        UserError: anything wrong in the configuration; nothing fits; unknown devices.
        WrongNumbersError: the compiler makes a step of a plan that cannot compute the right numbers.
    """
    program = make_program(config, devices)
    if not config.is_planned:
        return program
    hardware = hardware or hardware_of(devices[0])
    device_bytes, host_bytes = device_budget(hardware, hbm, memory_fraction), host_budget(hardware, host)
    base = dataclasses.replace(program.plan, placements=(), hardware=hardware.name)
    deviceless = devices[0] not in jax.devices()

    def compile_plan(base: Plan, decision: Decision) -> Measured:
        plan = dataclasses.replace(
            base, placements=decision.placements, optimizer_host_fraction=decision.state_host_fraction
        )
        candidate = dataclasses.replace(program, plan=plan)
        done = compile_program(
            candidate, hardware, deviceless=deviceless, memory_fraction=memory_fraction, usable_bytes=device_bytes
        )
        compiled = done.compiled
        if compiled.violations:
            raise WrongNumbersError(explain_violations(compiled.violations))
        report = compile_json(compiled, candidate, hardware, memory_fraction, done.options)
        notes = (*done.notes, *([report["exposed"]] if report["exposed"] else []))
        made = report["timeline"] = of_compiled(
            compiled, hardware, len(devices), program.flops_per_step / len(devices),
        )  # fmt: skip
        return Measured(
            compiled.device.total, compiled.host.total, compiled.refused is not None, report, notes,
            None if made is None else made["step_time_s"],
        )  # fmt: skip

    def find(parameters_host_fraction: float) -> Plan:
        these = dataclasses.replace(base, parameters_host_fraction=parameters_host_fraction)
        costed = cost_program(
            dataclasses.replace(program, plan=these), hardware, device_bytes, host_bytes, config.optimizer_host_fraction
        )
        return find_plan(
            costed, these, None if hardware.platform == "cpu" else functools.partial(compile_plan, these),
            "the memory of a CPU is not checked", variants=variants, max_compiles=max_compiles,
            time_limit_s=time_limit_s, progress=progress,
        )  # fmt: skip

    # weights come in twice a microbatch and their gradients go out: only where nothing fits with them on the device
    try:
        plan = find(config.parameters_host_fraction or 0.0)
    except InfeasibleError:
        if config.parameters_host_fraction is not None or not hardware.host_link.h2d_bytes_per_s:
            raise
        progress("nothing fits with the weights on the device: planning with the layers' weights on the host")
        plan = find(1.0)
    return dataclasses.replace(program, plan=plan)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step, the options that it was compiled with, and what this build could not do of them."""

    compiled: CompiledStep
    options: Mapping[str, Any]
    notes: tuple[str, ...]


def compile_program(
    program: Program,
    hardware: Hardware | None,
    *,
    deviceless: bool,
    memory_fraction: float | None = None,
    usable_bytes: int | None = None,
    save_hlo: Path | None = None,
    agreed: Callable[[Callable[[], str]], str] = lambda make: make(),
) -> Compiled:
    """The program's step, compiled under the options that hide most of its copies.

    For GPUs it is then compiled once more with the times of its timeline (`forebay.timeline.profile`), unless
    `profile=copies`.
    `hardware` is None for devices that no machine is known for; these have no timeline. `usable_bytes` is the device memory
    that the second may take, by default what XLA may use; `agreed` see `profiled`.
    """
    step = program.jit_step()  # one function, so that it is traced once
    args, cuda = (program.abstract_state, program.abstract_batch), hardware is not None and hardware.platform == "cuda"
    about: dict[str, Any] = {"weight_shapes": program.local_weight_shapes(), "hosted": program.hosted_arguments()}
    options, notes = step_options(program, hardware, deviceless=deviceless, memory_fraction=memory_fraction, step=step)
    compiled, options = compile_hidden(step, args, options, judged=cuda, save_hlo=save_hlo, **about)
    if hardware is None or not cuda or program.config.profile == "copies":
        return Compiled(compiled, options, (*notes, *_not_told(program)))
    second = None if save_hlo is None else save_hlo.with_name(f"{save_hlo.name}.profiled")
    made = profiled(
        compiled, options, hardware, program.sharding.mesh.size,
        hardware.usable_hbm_bytes(memory_fraction) if usable_bytes is None else usable_bytes,
        lambda options: compile_step(step, args, options=options, save_hlo=second, **about), agreed,
    )  # fmt: skip
    if save_hlo is not None and second is not None and second.exists():
        second.replace(save_hlo) if made.kept else second.unlink()
    return Compiled(made.compiled, made.options, (*notes, made.note))


def _not_told(program: Program) -> tuple[str, ...]:
    """What to say where the scheduler is not told the timeline's times."""
    return (_NOT_TOLD,) if program.config.profile == "timeline" else ()


def run_options(program: Program, hardware: Hardware | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Compiler options for running the program on the devices there are, of `hardware` if that is known, and what this
    build could not do of them.

    A program that moves anything to the host is compiled and its copies are looked at first; they may need other options
    than the first choice. For GPUs one is compiled for its times, unless `profile=copies`.

    Raises:
        WrongNumbersError: what was compiled cannot compute the right numbers.
    """
    on_cpu = program.sharding.mesh.devices.flat[0].platform == "cpu"
    timed = hardware is not None and hardware.platform == "cuda" and program.config.profile != "copies"
    if on_cpu or not (program.offloads or timed):
        options, notes = step_options(program, hardware, deviceless=False)
        return options, (*notes, *_not_told(program))
    done = compile_program(program, hardware, deviceless=False, agreed=from_first)
    if done.compiled.violations:
        raise WrongNumbersError(explain_violations(done.compiled.violations))
    return dict(done.options), done.notes


def step_options(
    program: Program,
    hardware: Hardware | None,
    *,
    deviceless: bool,
    memory_fraction: float | None = None,
    step: Any = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Compiler options for a program's step, and what is lost because this build does not have some of them.

    `hardware` is None for devices that no machine is known for; `step` is the jitted step, where it is made already.
    """
    platform = program.sharding.mesh.devices.flat[0].platform
    limit_percent = None
    if hardware is not None and hardware.platform == "cuda":
        args, on_host = (program.abstract_state, program.abstract_batch), 0
        if program.offloads:
            on_host = offloaded_bytes((step or program.jit_step()).trace(*args).jaxpr, program.sharding.mesh.size)
        limit_percent = memory_limit_percent(
            hardware.hbm_bytes,
            hardware.usable_hbm_bytes(memory_fraction),
            argument_bytes(args, (program.state_shardings, program.batch_shardings), program.hosted_arguments()[0]),
            on_host,
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = compiler_options(
            platform,
            deviceless=deviceless,
            offloads=program.offloads,
            memory_limit_percent=limit_percent,
        )
    return options, tuple(str(w.message) for w in caught)


def cost_program(
    program: Program,
    hardware: Hardware,
    device_bytes: int,
    host_bytes: int,
    state_host_fraction: float | None = 0.0,
) -> Costed:
    """The planning problem of a program; without a `state_host_fraction`, where the optimizer's state lives is part of
    it."""
    axis_sizes = dict(program.sharding.mesh.shape)
    return build(
        program_graph(program), hardware, axis_sizes, state_sizes=program.optimizer_sizes,
        device_budget=device_bytes, host_budget=host_bytes, accumulate=program.config.accumulate,
        state_host_fraction=state_host_fraction, hosted_weights=program.hosted_weight_bytes,
        sums_on_host=program.config.accumulate_on == "host", master_bytes=program.master_bytes,
    )  # fmt: skip


def program_graph(program: Program) -> LossGraph:
    """The graph of the loss of one microbatch."""

    def with_sharding(shapes: Any, shardings: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)

    batch = {
        k: jax.ShapeDtypeStruct((x.shape[0] // program.config.accumulate, *x.shape[1:]), x.dtype)
        for k, x in program.abstract_batch.items()
    }
    return trace_loss(
        program.unplanned_objective,
        with_sharding(program.abstract_state.weights, program.state_shardings.weights),
        with_sharding(batch, program.batch_shardings),
        axis_sizes=dict(program.sharding.mesh.shape),
    )


def run_plan(config: TrainConfig) -> TrainConfig:
    """The configuration of a run that is resumed goes on with the plan that the run was made with."""
    file = Path(config.run_dir) / "plan.json"
    if config.resume and config.is_planned and file.exists():
        return dataclasses.replace(config, plan=str(file))
    return config


def check_host_memory(program: Program, devices: Sequence[Any]) -> None:
    """Refuses a plan whose host memory this process cannot have, before anything runs.

    On GPUs that is the pool of pinned memory, and everywhere the memory that the process may have.

    Raises:
        UserError: names the limit and the variable or the setting to change.
    """
    platform = devices[0].platform
    if program.offloads and platform != "cpu":
        here = sum(d.process_index == devices[0].process_index for d in devices)
        refuse_host_bytes(planned_host_bytes(program) * here, here, platform)


def planned_host_bytes(program: Program) -> int:
    """What the program keeps on the host, per device: activations of one microbatch at a time, and what lives there
    between steps."""
    hardware = cpu_hardware()  # bytes do not depend on it
    memory, fraction = hardware.hbm_bytes, program.plan.optimizer_host_fraction
    problem = cost_program(program, hardware, memory, memory, fraction).problem
    return problem.base_host_bytes + sum(
        (p.layers[1] - p.layers[0]) * layer_cost(problem.stack(p.stack), p.in_loop.tensors).host_bytes
        for p in program.plan.placements
    )


def refuse_host_bytes(needed: int, devices_here: int, platform: str) -> None:
    """Raises `UserError` where this process cannot have `needed` bytes of host memory."""
    gib = 2**30
    if platform in ("gpu", "cuda"):
        # one pool for all devices of a process, 64 GB unless it is told otherwise
        limit = int(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64")) * gib
        if needed > limit:
            raise UserError(
                f"the plan keeps {needed / gib:.1f} GiB in pinned host memory, and the pool may have {limit / gib:.0f} GiB: "
                f"set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={-(-needed * 11 // (10 * gib))}, or plan with --host "
                f"{limit // devices_here // gib}GiB"
            )
    there, source = available_host_bytes()
    if needed > there:
        raise UserError(
            f"the plan keeps {needed / gib:.1f} GiB in host memory, and this process may have {there / gib:.1f} GiB ({source}): "
            f"raise that limit, or plan with --host {there // devices_here // gib}GiB"
        )
