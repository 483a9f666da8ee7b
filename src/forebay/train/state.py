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
    """Everything that a step changes: the number of steps done, weights, optimizer state.

    Weights are float32. Where there are master weights these are, and `weights` are working copies in the compute
    dtype of those that weight decay applies to.
    """

    step: Any
    weights: Any
    optimizer: Any
    master: Any = None


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
    """AdamW as `config` says, without the clipping; `decayed` is a tree like the weights, False where decay does not
    apply."""
    return optax.adamw(
        learning_rate_schedule(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decayed,
    )


def optimizer_shardings(
    optimizer: optax.GradientTransformation, shapes: Any, weight_shardings: Any, replicated: Any
) -> Any:
    """Shardings of the optimizer's state: moments like their weights, counters replicated."""
    return optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, shapes),
        weight_shardings,
        transform_non_params=lambda _: replicated,
    )


def initial_state(optimizer: optax.GradientTransformation, weights: Any, working: Any = None) -> TrainState:
    """The state before the first step, with float32 `weights`.

    `working` is a tree of the dtypes of working weights; where it is given, `weights` are the master weights.
    """
    state = TrainState(jnp.int32(0), weights, optimizer.init(weights))
    if working is None:
        return state
    return dataclasses.replace(state, weights=jax.tree.map(lambda w, d: w.astype(d), weights, working), master=weights)
