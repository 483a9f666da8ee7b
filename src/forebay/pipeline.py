"""The arrows of the design put together: program, mesh and machine to a plan, proved by the compiler."""

import dataclasses
import hashlib
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forebay.errors import MissingExtraError, UserError, WrongNumbersError
from forebay.hardware import Hardware, get_hardware
from forebay.planner.build import Costed, build
from forebay.planner.placement import EVERYTHING, PRESETS, Placement
from forebay.planner.plan import ModelId, Plan
from forebay.planner.problem import evaluate
from forebay.planner.rank import rank
from forebay.planner.reasons import reasons, shadow_price, unnamed_notes
from forebay.planner.search import MAX_COMPILES, Compile, Decision, Found, Measured, search
from forebay.planner.solve import DEFAULT_TIME_LIMIT_S
from forebay.timeline.compare import difference, of_compiled
from forebay.units import MiB, format_seconds, parse_bytes

HOST_SHARE = 0.8
"""The share of the host's memory that plans may fill; the rest is for the system, the data and the processes.
A public recipe for GB200 caps the pinned pool at 180 of about 223 GiB per GPU, which is this."""


def plan(
    loss: Callable[..., Any],
    parameters: Any,
    *args: Any,
    hardware: str | Hardware,
    mesh: Any = None,
    optimizer: Any = None,
    hbm: str | int | None = None,
    host: str | int | None = None,
    variants: int = 2,
    max_compiles: int = MAX_COMPILES,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    verify: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The fastest plan for a loss function that fits the memory there is, compiled.

    Args:
        loss: `loss(parameters, *args)` returns a scalar, or a pair of a scalar and something else. Its
            layers are scanned (`forebay.scan_layers` without a plan, or `jax.lax.scan`), or are
            `jax.checkpoint` blocks that repeat; what checkpointing they have is replaced by the plan's.
            Activations without names get some (`forebay.auto_name`).
        parameters, args: pytrees of `jax.ShapeDtypeStruct`s or arrays; those that are split over devices
            carry `NamedSharding`s of `mesh`.
        hardware: a machine, or the name of one that `forebay hardware` lists.
        mesh: the `jax.sharding.Mesh`. To have the plan compiled for a machine that is not there, build
            it over `forebay.compile_only_devices`. None is one device.
        optimizer: an optax optimizer, whose state and update are then part of the step.
        hbm: device memory to plan for, as bytes or text like "170GiB"; by default what XLA may use.
        host: host memory per device; by default `HOST_SHARE` of what there is.
        variants: the most ranges of layers that a stack is cut into, not counting the last layer. With 1, `plan.policy` and
            `plan.apply` can be used; `forebay.apply` and `forebay.scan_layers` take any plan.
        max_compiles: the most plans to compile.
        time_limit_s: for each run of the solver.
        verify: whether to compile at all.
        progress: is called with a line whenever something takes long.

    Returns:
        The plan. Run it with `forebay.apply(loss, plan)`, in a function that is jitted with
        `compiler_options=forebay.compiler_options(plan)`; the function there says how a step for GPUs gets
        those that are the best for it. `plan.verified` says whether it was compiled
        and found to fit; where it could not be compiled, `plan.notes` says why.

    Raises:
        UserError: nothing to decide; nothing fits; unknown hardware; a name used twice.
    """
    from forebay.graph.loss import trace_loss

    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UserError(f"optimizer={optimizer!r} is no optax optimizer: pass one, for example optax.adamw(1e-4)")
    machine = hardware if isinstance(hardware, Hardware) else get_hardware(hardware)
    axis_sizes = dict(mesh.shape) if mesh is not None else {}
    graph = trace_loss(loss, parameters, *args, axis_sizes=axis_sizes)
    costed = build(
        graph, machine, axis_sizes, state_sizes=_state_sizes(optimizer, parameters, axis_sizes),
        device_budget=device_budget(machine, hbm), host_budget=host_budget(machine, host),
    )  # fmt: skip
    base = Plan(
        placements=(),
        model=ModelId(getattr(loss, "__name__", type(loss).__name__), _fingerprint(costed)),
        hardware=machine.name,
        devices=math.prod(axis_sizes.values()),
        mesh={a: n for a, n in axis_sizes.items() if n > 1},
    )
    compile_plan, why_not = None, "it was not asked for (verify=False)"
    if verify:
        budget = int(costed.problem.device_budget)
        compile_plan, why_not = _compiler(loss, parameters, args, machine, mesh, optimizer, base, budget)
    return find_plan(
        costed, base, compile_plan, why_not, variants=variants, max_compiles=max_compiles, time_limit_s=time_limit_s,
        progress=progress,
    )  # fmt: skip


def find_plan(
    costed: Costed,
    base: Plan,
    compile_plan: Compile | None,
    why_not: str | None = None,
    *,
    variants: int = 2,
    max_compiles: int = MAX_COMPILES,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The plan found for `costed`, with its reasons; `base` says what it is for.

    `compile_plan` compiles placements; where it is None, `why_not` says why.

    Raises:
        InfeasibleError: nothing fits.
    """
    found = search(
        costed, compile_plan, variants=variants, max_compiles=max_compiles, time_limit_s=time_limit_s, progress=progress
    )
    candidates = rank(
        found, costed, compile_plan, variants=variants, max_compiles=max_compiles, time_limit_s=time_limit_s,
        progress=progress,
    )  # fmt: skip
    found = candidates[0].found if candidates else found
    notes = [*unnamed_notes(costed), *found.notes]
    if len(candidates) > 1:
        times = ", ".join(f"{c.name} {format_seconds(c.step_s)}" for c in candidates)
        notes.append(f"compiled plans, by the step time of their timelines: {times}; the first was taken")
    if found.measured is None:
        notes.insert(0, f"not compiled, so its memory is an estimate: {why_not}")
    notes += found.measured.notes if found.measured else ()
    found = _as_compiled(found)
    price = shadow_price(found.problem, found.predicted.step_s, variants=variants, time_limit_s=time_limit_s)
    predicted = _predicted(found, price)
    if found.measured is not None and found.measured.step_s is not None:
        predicted["timeline_step_time_s"] = found.measured.step_s
        notes += [line for line in (difference(predicted, found.measured.report["timeline"]),) if line]
    return dataclasses.replace(
        base,
        placements=found.placements,
        optimizer_host_fraction=found.problem.state_host_fraction or 0.0,
        predicted=predicted,
        compiled=None if found.measured is None else found.measured.report,
        verified=found.fits,
        alternatives=tuple(alternatives(costed, found)),
        reasons=tuple(reasons(found.problem, found.placements)),
        notes=tuple(notes),
    )


def _as_compiled(found: Found) -> Found:
    """With an account that gives the plan the bytes that the compiler gave it."""
    off = found.predicted.device_bytes - evaluate(found.problem, found.placements).device_bytes
    problem = dataclasses.replace(found.problem, correction_bytes=found.problem.correction_bytes + off)
    return dataclasses.replace(found, problem=problem)


def alternatives(costed: Costed, found: Found) -> list[dict[str, Any]]:
    """The presets under the same account, corrected by what the compiles taught: step time, bytes, whether they fit."""
    rows, seen = [], set()
    for name, preset in PRESETS.items():
        placements = preset_placements(costed, preset)
        if placements in seen:  # of some presets a model carries the same tensors, or none
            continue
        seen.add(placements)
        predicted, _ = costed.predict(placements, found.problem)
        if not math.isfinite(predicted.step_s):  # it moves what there is no link for
            continue
        rows.append(
            {
                "name": name, "step_time_s": predicted.step_s, "device_bytes": predicted.device_bytes,
                "host_bytes": predicted.host_bytes, "fits": predicted.fits(found.problem),
            }
        )  # fmt: skip
    return rows


def preset_placements(costed: Costed, preset: Any) -> tuple[Placement, ...]:
    """A preset on every stack, for the tensors that each carries."""
    return tuple(
        Placement(
            b.stack.name, (0, b.stack.layers), {n: w for n, w in preset.items() if n in b.named or n == EVERYTHING}
        )
        for b in costed.graph.blocks
    )


def device_budget(machine: Hardware, hbm: str | int | None, memory_fraction: float | None = None) -> int:
    """Bytes of device memory to plan for.

    Raises:
        UserError: not a size, or more than the machine has.
    """
    if hbm is None:
        return machine.usable_hbm_bytes(memory_fraction)
    budget = parse_bytes(hbm)
    if 0 < budget < MiB:
        raise UserError(f"hbm={hbm} is {budget} bytes: write a size with its unit, like 170GiB")
    if budget > machine.hbm_bytes or budget == 0:
        raise UserError(
            f"hbm={hbm}: {machine.name} has {machine.hbm_bytes / 2**30:.1f} GiB on each device: give at most that, and not 0"
        )
    return budget


def host_budget(machine: Hardware, host: str | int | None) -> int:
    """Bytes of host memory to plan for, per device.

    Raises:
        UserError: not a size, or more than the host has.
    """
    there = machine.host.memory_bytes_per_device
    if host is None:
        return int(HOST_SHARE * there)
    budget = parse_bytes(host)
    if budget > there:
        raise UserError(
            f"host={host}: a host of {machine.name} has {there / 2**30:.1f} GiB for each device: give at most that"
        )
    return budget


def _predicted(found: Found, price: float | None) -> dict[str, Any]:
    p = found.predicted
    return {
        "device_bytes": int(p.device_bytes), "host_bytes": int(p.host_bytes), "step_time_s": p.step_s,
        "exposed_s": {"d2h": p.exposed_d2h_s, "h2d": p.exposed_h2d_s}, "recompute_s": p.recompute_s,
        "fullest_at": p.where, "device_budget_bytes": int(found.problem.device_budget),
        "host_budget_bytes": int(found.problem.host_budget), "optimality_gap": found.gap, "compiles": found.compiles,
        "seconds_saved_by_one_more_gib": price,
        "state": {
            "optimizer_bytes": sum(found.problem.state_sizes),
            "optimizer_host_bytes": found.problem.state_host_bytes,
            "weights_host_bytes": found.problem.weights_host_bytes,
            "gradients_host_bytes": found.problem.gradients_host_bytes,
        },
    }  # fmt: skip


def _fingerprint(costed: Costed) -> str:
    """Over the stacks' lengths, names and shapes: equal where a plan fits alike."""
    text = [(b.stack.name, b.stack.layers, b.stack.names, [str(a) for a in b.stack.avals]) for b in costed.graph.blocks]
    return hashlib.sha256(repr(text).encode()).hexdigest()[:12]


def _state_sizes(optimizer: Any, parameters: Any, axis_sizes: dict[str, int]) -> list[int]:
    """Bytes on one device of each array of the optimizer's state."""
    if optimizer is None:
        return []
    import jax
    import optax

    from forebay.graph.flat import Array
    from forebay.graph.partition import local_shape, spec_of

    state = jax.eval_shape(optimizer.init, parameters)
    specs = optax.tree.map_params(
        optimizer, lambda _, p: getattr(p, "sharding", None), state, parameters, transform_non_params=lambda _: None
    )
    sizes = []
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(specs, is_leaf=lambda x: x is None), strict=True):
        local = local_shape(Array(leaf.shape, leaf.dtype), spec_of(sharding, len(leaf.shape)), axis_sizes)
        sizes.append(math.prod(local) * leaf.dtype.itemsize)
    return sizes


def _compiler(
    loss: Callable[..., Any],
    parameters: Any,
    args: Sequence[Any],
    machine: Hardware,
    mesh: Any,
    optimizer: Any,
    base: Plan,
    budget: int,
) -> tuple[Compile | None, str | None]:
    """A function that compiles the step under some placements, or why there is none; `budget` is the device memory that it
    may use."""
    import jax
    import jax.sharding

    from forebay.offload.apply import apply
    from forebay.timeline.profile import profiled
    from forebay.xla.compile import CompiledStep, compile_hidden, compile_step
    from forebay.xla.exposure import explain
    from forebay.xla.invariants import explain_violations
    from forebay.xla.options import PROFILE_OPTION, compiler_options
    from forebay.xla.topology import compile_only_devices

    if isinstance(mesh, jax.sharding.AbstractMesh):
        return None, "the mesh is abstract: build it over forebay.compile_only_devices"
    try:
        devices = compile_only_devices(machine, 1) if mesh is None else list(mesh.devices.flat)
    except MissingExtraError as error:
        return None, str(error)
    platform = "cuda" if devices[0].platform == "gpu" else devices[0].platform
    if platform != machine.platform:
        return (
            None,
            f"the mesh is of {platform} devices and {machine.name} is not: build it over forebay.compile_only_devices",
        )
    default = jax.sharding.SingleDeviceSharding(devices[0])
    if mesh is not None:
        default = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def split(x: Any) -> Any:
        named = isinstance(getattr(x, "sharding", None), jax.sharding.NamedSharding)
        return x.sharding if named and mesh is not None else default  # an array's own device is not the machine's

    shardings = jax.tree.map(split, (parameters, *args))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (parameters, *args))
    deviceless = devices[0] not in jax.devices()
    state = None if optimizer is None else jax.eval_shape(optimizer.init, shapes[0])

    def compiled_under(plan: Plan) -> tuple[CompiledStep, Mapping[str, Any], tuple[str, ...]]:
        planned = apply(loss, plan)
        gradient = jax.value_and_grad(lambda p, *a: _scalar(planned(p, *a)), allow_int=True)

        def step(weights: Any, optimizer_state: Any, *batch: Any) -> Any:
            import optax

            value, gradients = gradient(weights, *batch)
            if optimizer is None:
                return value, gradients
            with jax.named_scope("optimizer"):
                updates, new = optimizer.update(gradients, optimizer_state, weights)
                return value, optax.apply_updates(weights, updates), new

        moments = None
        if optimizer is not None:
            import optax

            moments = optax.tree.map_params(
                optimizer, lambda _, s: s, typing.cast(Any, state), shardings[0], transform_non_params=lambda _: default
            )
        jitted = jax.jit(
            step,
            in_shardings=(shardings[0], moments, *shardings[1:]),
            out_shardings=(default, shardings[0]) if optimizer is None else (default, shardings[0], moments),
            donate_argnums=() if optimizer is None else (0, 1),
        )
        options = compiler_options(
            machine.platform,
            deviceless=deviceless,
            offloads=plan.stores,
        )
        abstract = (shapes[0], state, *shapes[1:])
        compiled, options = compile_hidden(jitted, abstract, options, judged=machine.platform == "cuda")
        if machine.platform != "cuda":
            return compiled, options, ()
        made = profiled(
            compiled,
            options,
            machine,
            len(devices),
            budget,
            lambda options: compile_step(jitted, abstract, options=options),
        )
        note = f"{made.note}; give your own step to forebay.compiler_options for as much" if made.kept else made.note
        return made.compiled, made.options, (note,)

    def compile_plan(decision: Decision) -> Measured:
        compiled, options, notes = compiled_under(dataclasses.replace(base, placements=decision.placements, model=None))
        if compiled.violations:
            raise WrongNumbersError(explain_violations(compiled.violations))
        report = {
            "device_bytes": dataclasses.asdict(compiled.device) | {"total": compiled.device.total},
            "host_bytes": {"total": compiled.host.total},
            "peak": [{"name": r.name, "kind": r.kind, "bytes": r.num_bytes} for r in compiled.peak_rows("device")],
            "remat_clones": compiled.remat.count,
            "compile_time_s": compiled.compile_time_s,
            "versions": dict(compiled.versions),
            # without those that are the compiling machine's
            "compiler_options": {k: v for k, v in options.items() if k != PROFILE_OPTION},
        }
        shown = explain(compiled.transfers, None, compiled.remat.count)
        made = report["timeline"] = of_compiled(compiled, machine, len(devices))
        return Measured(
            compiled.device.total, compiled.host.total, compiled.refused is not None, report,
            (*notes, *(() if shown is None else (shown,))), None if made is None else made["step_time_s"],
        )  # fmt: skip

    return compile_plan, None


def _scalar(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result
