"""From a configuration and devices to a training step: the one place where model, plan and mesh meet.

The same `Program` is run by the trainer and compiled, for machines that are not there, by
`forebay compile`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from forebay.errors import UserError, unknown
from forebay.graph.residuals import BlockNames, block_names
from forebay.models.registry import Model, fingerprint, get_model
from forebay.offload import scan_layers
from forebay.ops.attention import KernelChoice, choose_kernel
from forebay.ops.cross_entropy import CHUNKINGS, choose_chunking
from forebay.planner.placement import parse_placement
from forebay.planner.plan import ModelId, Plan
from forebay.sharding import Sharding, make_mesh, parse_mesh, single_device
from forebay.train.config import AUTO, ProgramConfig
from forebay.train.state import TrainState, initial_state, learning_rate_schedule, make_optimizer, state_shardings

LONGEST_SEQUENCE = 2**24
"""Attention visits pairs of blocks of 512 tokens; beyond this their list alone would take gigabytes."""
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step and everything about it that is known before it runs.

    Attributes:
        names: for each stack of layers, the activations that a plan can place.
        kernel: the attention kernel in the program and the one a fully equipped machine would use.
    """

    config: ProgramConfig
    model: Model
    sharding: Sharding
    plan: Plan
    names: dict[str, BlockNames]
    kernel: KernelChoice
    chunking: str
    optimizer: optax.GradientTransformation

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
        shapes = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s, jnp.float32), self.model.shapes(), is_leaf=lambda x: isinstance(x, tuple)
        )
        return jax.eval_shape(functools.partial(initial_state, self.optimizer), shapes)

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        weights = self.sharding.tree(self.model.logical_axes())
        return state_shardings(self.optimizer, self.abstract_state.weights, weights, self.sharding.named(()))

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        tokens = jax.ShapeDtypeStruct((self.config.batch, self.config.seq), jnp.int32)
        return {"inputs": tokens, "targets": tokens}

    @property
    def batch_shardings(self) -> dict[str, Any]:
        return dict.fromkeys(("inputs", "targets"), self.sharding.named(("batch", "sequence")))

    def init(self, key: jax.Array) -> TrainState:
        """A new training state, each array made where it will live."""

        def make(key: jax.Array) -> TrainState:
            return initial_state(self.optimizer, self.model.init(key, jnp.float32))

        return jax.jit(make, out_shardings=self.state_shardings)(key)

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
            weights, batch, sharding=self.sharding, kernel=self.kernel.compiled, chunking=self.chunking,
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

        def add(total: Any, microbatch: dict[str, jax.Array]) -> tuple[Any, None]:
            gradients, aux = gradient(weights, microbatch)
            with jax.named_scope("accumulate"):
                return jax.tree.map(lambda t, p: t + p / parts, total, (aux, gradients)), None

        microbatches = jax.tree.map(split, batch)
        told = jax.eval_shape(lambda w, b: self.objective(w, jax.tree.map(lambda x: x[0], b))[1], weights, microbatches)
        with jax.named_scope("accumulate"):
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (told, weights))
        return jax.lax.scan(add, zeros, microbatches)[0]

    def step(self, state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update. The metrics are scalars: the model's (`loss`, nats per token, is one of them), `grad_norm` (before
        clipping), `learning_rate`."""
        aux, gradients = self.aux_and_gradients(state.weights, batch)
        with jax.named_scope("optimizer"):
            norm = optax.tree.norm(gradients)
            updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.weights)
            weights = self.model.after_update(optax.apply_updates(state.weights, updates), aux)
            learning_rate = learning_rate_schedule(self.config.optimizer, self.config.steps)(state.step)
        metrics = self.model.metrics(aux)
        metrics |= {"grad_norm": norm, "learning_rate": jnp.asarray(learning_rate, jnp.float32)}
        return TrainState(state.step + 1, weights, optimizer), metrics

    def jit_step(self, options: Mapping[str, Any] | None = None) -> Any:
        """The step, jitted, with its shardings and the state donated; `options` are for the compiler."""
        return jax.jit(
            self.step,
            in_shardings=(self.state_shardings, self.batch_shardings),
            out_shardings=(self.state_shardings, None),
            donate_argnums=0,
            compiler_options=dict(options or {}) or None,
        )

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
    if config.loss_chunking not in CHUNKINGS:
        raise unknown("loss chunking", config.loss_chunking, CHUNKINGS)
    model = get_model(config.model, config.sizes)
    sharding = Sharding(make_mesh(parse_mesh(config.mesh, len(devices)), devices))
    _check_divisible(config, model, sharding)
    key_dim, value_dim = model.head_dims()
    kernel = choose_kernel(
        config.attention, devices[0].platform, seq=config.seq, head_dim=key_dim, v_head_dim=value_dim,
        sequence_parallel=sharding.size("sequence") > 1,
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
    plan.check(model.stacks, carried, identity)
    for placement in plan.placements:
        for name in names[placement.stack].inputs:
            if placement.tensors.get(name) == "recompute":
                raise UserError(
                    f"{name!r} is the input of the block of {placement.stack!r} and cannot be recomputed from anything: "
                    f"place it on device or host"
                )
    return plan


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
