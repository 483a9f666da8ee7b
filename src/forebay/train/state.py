"""The training state and the optimizer that updates it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from forebay.errors import UserError
from forebay.train.config import OptimizerConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes: the number of steps done, float32 weights, optimizer state."""

    step: Any
    weights: Any
    optimizer: Any


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warmup from zero, then cosine decay that ends at step `steps`.

    Raises:
        UserError: a warmup that is not shorter than the run.
    """
    if config.warmup_steps >= steps:
        raise UserError(
            f"optimizer.warmup_steps={config.warmup_steps} must be less than steps={steps}: shorten the warmup or train longer"
        )
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=steps,
        end_value=config.learning_rate * config.final_learning_rate_fraction,
    )


def make_optimizer(config: OptimizerConfig, steps: int, decayed: Any) -> optax.GradientTransformation:
    """AdamW as `config` says; `decayed` is a tree like the weights, False where decay does not apply."""
    adamw = optax.adamw(
        learning_rate_schedule(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm > 0 else adamw


def state_shardings(
    optimizer: optax.GradientTransformation, shapes: Any, weight_shardings: Any, replicated: Any
) -> Any:
    """A `TrainState` of shardings: moments like their weights, counters replicated."""
    moments = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, shapes),
        weight_shardings,
        transform_non_params=lambda _: replicated,
    )
    return TrainState(replicated, weight_shardings, moments)


def initial_state(optimizer: optax.GradientTransformation, weights: Any) -> TrainState:
    return TrainState(jnp.int32(0), weights, optimizer.init(weights))
