"""From a configuration and devices to a training step: the one place where model, plan and mesh meet.

The same `Program` is run by the trainer and compiled, for machines that are not there, by
`forebay compile`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from forebay.errors import UserError, unknown
from forebay.graph.residuals import BlockNames, block_names
from forebay.models.registry import Model, fingerprint, get_model
from forebay.offload import scan_layers
from forebay.offload.memories import settle, with_memory
from forebay.offload.optimizer import add_streamed, no_sums, streamed_update
from forebay.offload.stream import SLICE_BYTES
from forebay.ops.attention import KernelChoice, choose_kernel
from forebay.ops.cross_entropy import CHUNKINGS, choose_chunking
from forebay.planner.hosted import LEAST_BYTES, choose_hosted
from forebay.planner.placement import parse_placement
from forebay.planner.plan import ModelId, Plan
from forebay.sharding import Sharding, make_mesh, parse_mesh, single_device
from forebay.train.config import AUTO, PROFILES, ProgramConfig
from forebay.train.state import (
    TrainState,
    initial_state,
    learning_rate_schedule,
    make_optimizer,
    optimizer_shardings,
)
from forebay.xla.estimate import local_bytes

LONGEST_SEQUENCE = 2**24
"""Attention visits pairs of blocks of 512 tokens; beyond this their list alone would take gigabytes."""
MEMORIES = ("device", "host")
AT_ONCE_BYTES = 2**32
"""What is made on a device at once of a new state that lives in host memory."""
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step and everything about it that is known before it runs.

    Attributes:
        names: for each stack of layers, the activations that a plan can place.
        kernel: the attention kernel in the program and the one a fully equipped machine would use.
        least_host_bytes: arrays of the state that take less on a device stay there.
        slice_bytes: the most that a slice of what is in host memory takes on a device while it is updated.
    """

    config: ProgramConfig
    model: Model
    sharding: Sharding
    plan: Plan
    names: dict[str, BlockNames]
    kernel: KernelChoice
    chunking: str
    optimizer: optax.GradientTransformation
    least_host_bytes: int = LEAST_BYTES
    slice_bytes: int = SLICE_BYTES

    @property
    def dtype(self) -> Any:
        return DTYPES[self.config.dtype]

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch * self.config.seq

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of one step over all devices; see the model's `flops_per_token`."""
        return self.model.flops_per_token(self.config.seq) * self.tokens_per_step

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        return jax.eval_shape(self._initial_state, _float32_shapes(self.model))

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """How each array is split over devices, and in which memory it is."""
        return with_memory(self._split, self.hosted)

    @functools.cached_property
    def hosted(self) -> TrainState:
        """For each array of the state, whether it lives in host memory."""
        state, split = self.abstract_state, self._split
        hosted = jax.tree.map(lambda _: False, state)
        optimizer = choose_hosted(
            local_bytes(state.optimizer, split.optimizer), self.plan.optimizer_host_fraction, self.least_host_bytes
        )
        weights, treedef = jax.tree.flatten(state.weights)
        stacked = jax.tree.leaves(self._stacked)
        sizes = local_bytes(state.weights, split.weights)
        chosen = iter(
            choose_hosted(
                [b for b, s in zip(sizes, stacked, strict=True) if s],
                self.plan.parameters_host_fraction,
                self.least_host_bytes,
            )
        )
        in_layers = [next(chosen) if s else False for s in stacked]
        masters = None
        if state.master is not None:  # only those that there is a working copy of
            on_host = self.config.master_weights == "host"
            masters = [on_host and w.dtype != jnp.float32 for w in weights]
            masters = jax.tree.unflatten(treedef, masters)
        return dataclasses.replace(
            hosted,
            weights=jax.tree.unflatten(treedef, in_layers),
            optimizer=jax.tree.unflatten(jax.tree.structure(state.optimizer), optimizer),
            master=masters,
        )

    @property
    def optimizer_sizes(self) -> list[int]:
        """Bytes on one device of each array of the optimizer's state."""
        return local_bytes(self.abstract_state.optimizer, self._split.optimizer)

    @property
    def hosted_weight_bytes(self) -> dict[str, int]:
        """For each stack, the bytes on one device of its weights that live in host memory."""
        found = dict.fromkeys(self.model.stacks, 0)
        sizes = local_bytes(self.abstract_state.weights, self._split.weights)
        hosted = jax.tree.leaves_with_path(self.hosted.weights)
        for (path, is_hosted), size in zip(hosted, sizes, strict=True):
            if is_hosted:
                found[path[0].name] += size  # a stack's weights are in the field of its name
        return found

    @property
    def master_bytes(self) -> tuple[int, int]:
        """Bytes on one device of the master weights: on the device, and in host memory."""
        if self.abstract_state.master is None:
            return 0, 0
        sizes = local_bytes(self.abstract_state.master, self._split.master)
        on_host = sum(s for s, h in zip(sizes, jax.tree.leaves(self.hosted.master), strict=True) if h)
        return sum(sizes) - on_host, on_host

    @functools.cached_property
    def _split(self) -> TrainState:
        weights = self.sharding.tree(self.model.logical_axes())
        replicated = self.sharding.named(())
        moments = optimizer_shardings(self.optimizer, self.abstract_state.weights, weights, replicated)
        return TrainState(replicated, weights, moments, None if self.abstract_state.master is None else weights)

    @property
    def _stacked(self) -> Any:
        """A tree like the weights, True for those of layers."""
        is_tuple = lambda x: isinstance(x, tuple)  # noqa: E731
        return jax.tree.map(lambda axes: axes[:1] == ("layers",), self.model.logical_axes(), is_leaf=is_tuple)

    def _initial_state(self, weights: Any) -> TrainState:
        working = None
        if self.config.master_weights:
            working = jax.tree.map(lambda decayed: self.dtype if decayed else jnp.float32, self.model.decayed())
        return initial_state(self.optimizer, weights, working)

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        tokens = jax.ShapeDtypeStruct((self.config.batch, self.config.seq), jnp.int32)
        return {"inputs": tokens, "targets": tokens}

    @property
    def batch_shardings(self) -> dict[str, Any]:
        return dict.fromkeys(("inputs", "targets"), self.sharding.named(("batch", "sequence")))

    def init(self, key: jax.Array) -> TrainState:
        """A new training state, each array made where it will live."""
        return self._make_state(lambda key: self._initial_state(self.model.init(key, jnp.float32)), key)

    def state_of(self, weights: Any) -> TrainState:
        """The state before the first step, with these float32 weights."""
        on_device = functools.partial(jax.tree.map, lambda w: jax.device_put(w, jax.memory.Space.Device))
        return self._make_state(lambda weights: self._initial_state(on_device(weights)), weights)

    def _make_state(self, make: Callable[[Any], TrainState], argument: Any) -> TrainState:
        """The arrays on the device at once, those in host memory a few at a time: together they may be too large for
        the device."""
        shardings, hosted = jax.tree.leaves(self.state_shardings), jax.tree.leaves(self.hosted)
        treedef = jax.tree.structure(self.abstract_state)

        def some(chosen: Sequence[int]) -> Any:
            pick = jax.jit(
                lambda x: [jax.tree.leaves(make(x))[i] for i in chosen], out_shardings=[shardings[i] for i in chosen]
            )
            return zip(chosen, pick(argument), strict=True)

        groups, size = [[i for i, h in enumerate(hosted) if not h]], AT_ONCE_BYTES
        sizes = local_bytes(self.abstract_state, self._split)
        for i in (i for i, h in enumerate(hosted) if h):
            size += sizes[i]
            if size > AT_ONCE_BYTES:
                groups.append([])
                size = sizes[i]
            groups[-1].append(i)
        leaves = {}
        for group in groups:
            leaves |= some(group)
        return jax.tree.unflatten(treedef, [leaves[i] for i in range(len(hosted))])

    def loss(self, weights: Any, batch: dict[str, jax.Array]) -> jax.Array:
        """Mean cross entropy in nats per token of one microbatch."""
        return self.model.metrics(self.objective(weights, batch)[1])["loss"]

    def objective(self, weights: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        """What is minimised over one microbatch, and what else the model tells of it."""
        return self._objective(weights, batch, self.plan)

    def unplanned_objective(self, weights: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        """`objective` without a plan: what the planner looks at."""
        return self._objective(weights, batch, None)

    def _objective(self, weights: Any, batch: dict[str, jax.Array], plan: Plan | None) -> tuple[jax.Array, Any]:
        def scan(block: Any, x: Any, layers: Any, *constants: Any, stack: str) -> Any:
            return scan_layers(block, plan, x, layers, *constants, stack=stack)

        return self.model.loss(
            weights, batch, sharding=self.sharding, kernel=self.kernel.name, chunking=self.chunking,
            scan_layers=scan, dtype=self.dtype,
        )  # fmt: skip

    def aux_and_gradients(self, weights: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        """What the model tells of the batch and the gradients: means over the microbatches, in float32."""
        parts = self.config.accumulate
        gradient = jax.grad(self.objective, has_aux=True)
        if parts == 1:
            gradients, aux = gradient(weights, batch)
            return aux, gradients

        def split(x: jax.Array) -> jax.Array:
            return self.sharding.constrain(x.reshape(parts, -1, x.shape[1]), None, "batch", "sequence")

        def add(total: Any, turn: tuple[jax.Array, dict[str, jax.Array]]) -> tuple[Any, None]:
            number, microbatch = turn
            gradients, aux = gradient(weights, microbatch)
            with jax.named_scope("accumulate"):
                told = jax.tree.map(lambda t, p: t + p / parts, total[0], aux)
                sums = add_streamed(
                    total[1], gradients, 1 / parts, self._split.weights, self.slice_bytes, first=number == 0
                )
                return (told, sums), None

        microbatches = jax.tree.map(split, batch)
        told = jax.eval_shape(lambda w, b: self.objective(w, jax.tree.map(lambda x: x[0], b))[1], weights, microbatches)
        with jax.named_scope("accumulate"):
            told = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), told)
            nothing = no_sums(weights, self._sums_hosted)
        return jax.lax.scan(add, (told, nothing), (jnp.arange(parts), microbatches))[0]

    @property
    def _sums_hosted(self) -> Any:
        """For each weight whether the sum of its gradients over microbatches is in host memory."""
        everything = self.config.accumulate_on == "host"
        hosted, treedef = jax.tree.flatten(self.hosted.weights)
        sizes = local_bytes(self.abstract_state.weights, self._split.weights)
        return jax.tree.unflatten(
            treedef, [h or (everything and b >= self.least_host_bytes) for h, b in zip(hosted, sizes, strict=True)]
        )

    def step(self, state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update. The metrics are scalars: the model's (`loss`, nats per token, is one of them), `grad_norm` (before
        clipping), `learning_rate`."""
        state = settle(state, self.hosted)
        aux, gradients = self.aux_and_gradients(state.weights, batch)
        copies = None if state.master is None else state.weights
        with jax.named_scope("optimizer"):
            weights, optimizer, copies, norm = streamed_update(
                self.optimizer, gradients, state.optimizer, state.weights if copies is None else state.master,
                clip_norm=self.config.optimizer.clip_norm, shardings=self._split.weights, copies=copies, checked=True,
                slice_bytes=self.slice_bytes,
            )  # fmt: skip
            learning_rate = learning_rate_schedule(self.config.optimizer, self.config.steps)(state.step)
            weights = self.model.after_update(weights, aux)
            copies = None if copies is None else self.model.after_update(copies, aux)
        metrics = self.model.metrics(aux)
        metrics |= {"grad_norm": norm, "learning_rate": jnp.asarray(learning_rate, jnp.float32)}
        if copies is None:
            return TrainState(state.step + 1, weights, optimizer), metrics
        return TrainState(state.step + 1, copies, optimizer, weights), metrics

    def jit_step(self, options: Mapping[str, Any] | None = None) -> Any:
        """The step, jitted, with its shardings and the state donated; `options` are for the compiler."""
        return jax.jit(
            self.step,
            in_shardings=(self.state_shardings, self.batch_shardings),
            out_shardings=(self.state_shardings, self.sharding.named(())),
            donate_argnums=0,
            compiler_options=dict(options or {}) or None,
        )

    def hosted_arguments(self) -> tuple[list[bool], list[bool]]:
        """For each argument of the step and each result but the metrics, in order, whether it is in host memory."""
        state = jax.tree.leaves(self.hosted)
        return [*state, *(False for _ in self.abstract_batch)], state

    @property
    def offloads(self) -> bool:
        """Whether anything at all lives on the host."""
        return self.plan.offloads or any(jax.tree.leaves((self.hosted, self._sums_hosted)))

    def local_weight_shapes(self) -> set[tuple[int, ...]]:
        """The shapes that the weights have on one device."""
        leaves = jax.tree.leaves(self.abstract_state.weights)
        shardings = jax.tree.leaves(self.state_shardings.weights)
        return {tuple(s.shard_shape(w.shape)) for w, s in zip(leaves, shardings, strict=True)}

    def notes(self) -> list[str]:
        """What a reader of any number about this program should know."""
        notes = [self.kernel.note] if self.kernel.note else []
        mesh = {axis: size for axis, size in self.sharding.mesh.shape.items() if size > 1}
        made_for = {
            "devices": (self.plan.devices, self.sharding.mesh.size), "batch": (self.plan.batch, self.config.batch),
            "seq": (self.plan.seq, self.config.seq), "mesh": (dict(self.plan.mesh) if self.plan.devices else None, mesh),
        }  # fmt: skip
        other = [f"{key} {there} (here {here})" for key, (there, here) in made_for.items() if there not in (None, here)]
        if other:
            notes.append(f"the plan was made for {', '.join(other)}: its predictions and that it fits are of that")
        for placement in self.plan.placements:
            known = self.names[placement.stack]
            useless = [n for n in known.not_residuals if placement.tensors.get(n, "recompute") != "recompute"]
            notes += [
                f"{name!r} is not a residual of the block of {placement.stack!r}: nothing in the backward pass needs it, "
                f"so placing it changes nothing"
                for name in useless
            ]
            if placement.in_loop != placement:
                first, past_last = placement.layers
                names = ", ".join(repr(n) for n in placement.names("host"))
                notes.append(
                    f"{names} of layers {first}:{past_last} of {placement.stack!r} stay on the device: a single layer is no "
                    f"loop, and moves nothing to the host"
                )
        return list(dict.fromkeys(notes))


def make_program(config: ProgramConfig, devices: Sequence[Any]) -> Program:
    """The program that `config` describes, on `devices` (present or compile-only).

    Where the configuration leaves the placement to the planner, everything is recomputed:
    `forebay.train.planning.planned_program` does the planning.

    Raises:
        UserError: anything in the configuration that is unknown or does not divide; see the modules that
            read each part.
    """
    for field in ("batch", "seq", "accumulate", "steps"):
        if getattr(config, field) < 1:
            raise UserError(f"{field}={getattr(config, field)} must be at least 1")
    if config.seq > LONGEST_SEQUENCE:
        raise UserError(f"seq={config.seq} is longer than the {LONGEST_SEQUENCE} tokens that a sequence may have")
    if config.dtype not in DTYPES:
        raise unknown("dtype", config.dtype, DTYPES)
    if config.master_weights not in MEMORIES and config.master_weights:
        raise unknown("memory for master_weights", config.master_weights, MEMORIES)
    if config.master_weights and config.dtype == "float32":
        raise UserError("master_weights beside float32 weights would be the same twice: drop it, or use dtype=bfloat16")
    if config.profile not in PROFILES:
        raise unknown("profile", config.profile, PROFILES)
    if config.accumulate_on not in MEMORIES:
        raise unknown("memory for accumulate_on", config.accumulate_on, MEMORIES)
    if config.accumulate_on == "host" and config.accumulate == 1:
        raise UserError("accumulate_on=host with accumulate=1: there is no sum to keep, drop it or accumulate more")
    if config.loss_chunking not in CHUNKINGS:
        raise unknown("loss chunking", config.loss_chunking, CHUNKINGS)
    model = get_model(config.model, config.sizes)
    sharding = Sharding(make_mesh(parse_mesh(config.mesh, len(devices)), devices))
    _check_divisible(config, model, sharding)
    key_dim, value_dim = model.head_dims()
    kernel = choose_kernel(
        config.attention, devices[0], seq=config.seq, head_dim=key_dim, v_head_dim=value_dim,
        dtype=DTYPES[config.dtype], sequence_parallel=sharding.size("sequence") > 1,
    )  # fmt: skip
    names = trace_names(model, devices[0])
    embed, vocab = model.head_shape()
    dtype = DTYPES[config.dtype]
    return Program(
        config=config,
        model=model,
        sharding=sharding,
        plan=_plan(config, model, names, sharding, len(devices)),
        names=names,
        kernel=kernel,
        chunking=choose_chunking(config.loss_chunking, sharding, embed, vocab, jnp.dtype(dtype).itemsize),
        optimizer=make_optimizer(config.optimizer, config.steps, model.decayed()),
    )


def trace_names(model: Model, device: Any) -> dict[str, BlockNames]:
    """For each stack, the names that its activations carry; found by tracing one layer, nothing is computed."""
    sharding = single_device(device)
    examples = model.example_blocks(1, 16, jnp.bfloat16, sharding, "blockwise")
    return {stack: block_names(e.block, e.layer, e.x, *e.constants) for stack, e in examples.items()}


def _plan(config: ProgramConfig, model: Model, names: dict[str, BlockNames], sharding: Sharding, devices: int) -> Plan:
    identity = ModelId(model.name, fingerprint(model))
    carried = {stack: n.carried for stack, n in names.items()}
    if not config.placement and config.plan != AUTO:
        plan = Plan.load(config.plan)
    else:
        mesh = {axis: size for axis, size in sharding.mesh.shape.items() if size > 1}
        plan = Plan(
            parse_placement(config.placement or "full", model.stacks, carried),
            model=identity, devices=devices, mesh=mesh, batch=config.batch, seq=config.seq,
        )  # fmt: skip
    fractions = {
        name: value
        for name in ("optimizer_host_fraction", "parameters_host_fraction")
        if (value := getattr(config, name)) is not None
    }
    plan = dataclasses.replace(plan, **fractions)
    plan.check(model.stacks, carried, identity)
    for placement in plan.placements:
        for name in names[placement.stack].inputs:
            if placement.tensors.get(name) == "recompute":
                raise UserError(
                    f"{name!r} is the input of the block of {placement.stack!r} and cannot be recomputed from anything: "
                    f"place it on device or host"
                )
    return plan


def _float32_shapes(model: Model) -> Any:
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), model.shapes(), is_leaf=lambda x: isinstance(x, tuple)
    )


def _check_divisible(config: ProgramConfig, model: Model, sharding: Sharding) -> None:
    if config.batch % config.accumulate:
        raise UserError(
            f"batch={config.batch} is not divisible by accumulate={config.accumulate}: choose a multiple of it"
        )
    micro = config.batch // config.accumulate
    what = f"batch={config.batch}" + (f" in {config.accumulate} microbatches" if config.accumulate > 1 else "")
    sharding.check(
        ("batch", "sequence"), (micro, config.seq), f"a batch of {micro} sequences of {config.seq} tokens ({what})"
    )
    is_tuple = lambda x: isinstance(x, tuple)  # noqa: E731
    axes = jax.tree.leaves(model.logical_axes(), is_leaf=is_tuple)
    for (path, shape), logical in zip(jax.tree.leaves_with_path(model.shapes(), is_leaf=is_tuple), axes, strict=True):
        sharding.check(logical, shape, f"{model.name}: weight {path[-1].name}")
