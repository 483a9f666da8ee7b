"""Models by name, behind one small interface that the trainer and the planner use."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from forebay.errors import UserError, unknown
from forebay.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class ExampleBlock:
    """One layer of a stack and abstract arguments for it, enough to trace it: `block(layer, x, *constants)`."""

    block: Callable[..., Any]
    layer: Any
    x: Any
    constants: tuple[Any, ...]


class Model(Protocol):
    """What a model family provides. Shapes and shardings are of whole arrays, over all devices."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Any: ...
    @property
    def stacks(self) -> Mapping[str, int]:
        """Stacks of identical layers, and how many layers each has."""
        ...

    @property
    def vocab(self) -> int: ...
    @property
    def parameter_count(self) -> int: ...
    def head_dims(self) -> tuple[int, int]:
        """Sizes of a key head and of a value head."""
        ...

    def head_shape(self) -> tuple[int, int]:
        """Embed and vocabulary of the output embedding."""
        ...

    def small_sizes(self, layers: Mapping[str, int], sharding: Sharding) -> Mapping[str, Any]:
        """Fields of its configuration for a small model of the same kind, with so many layers in each stack, that
        `sharding` still splits: the same head size and grouping, some hundreds of features."""
        ...

    def init(self, key: jax.Array, dtype: Any) -> Any: ...
    def shapes(self) -> Any:
        """A tree like the weights with a shape tuple for each."""
        ...

    def logical_axes(self) -> Any:
        """A tree like the weights with a tuple of logical axes for each (`forebay.sharding`)."""
        ...

    def decayed(self) -> Any:
        """A tree like the weights with False for those that weight decay leaves alone."""
        ...

    def loss(
        self,
        weights: Any,
        batch: Any,
        *,
        sharding: Sharding,
        kernel: str,
        chunking: str,
        scan_layers: Callable[..., Any],
        dtype: Any,
    ) -> tuple[jax.Array, Any]:
        """What is minimised, a scalar, and what else the model tells of the batch: a pytree of float32 arrays,
        of which the trainer takes the mean over microbatches."""
        ...

    def metrics(self, aux: Any) -> dict[str, jax.Array]:
        """Scalars for the record of a step, from what `loss` tells; `loss` among them is the mean next-token cross
        entropy in nats."""
        ...

    def after_update(self, weights: Any, aux: Any) -> Any:
        """The weights after the optimizer's update, those without a gradient changed as the model wants it."""
        ...

    def refusal(self, record: Mapping[str, Any]) -> str | None:
        """Why training must not go on after a step with this record, and what to do; None where it may."""
        ...

    def logits(self, weights: Any, tokens: jax.Array, *, sharding: Sharding, dtype: Any) -> jax.Array: ...
    def load_hugging_face(self, directory: str, *, shardings: Any) -> Any:
        """Weights from a Hugging Face directory, float32, each array placed by its sharding."""
        ...

    def flops_per_token(self, seq: int) -> float: ...
    def example_blocks(
        self, batch: int, seq: int, dtype: Any, sharding: Sharding, kernel: str
    ) -> dict[str, ExampleBlock]: ...


def fingerprint(model: Model) -> str:
    """Twelve hexadecimal digits over the model's sizes: equal for models that a plan fits alike."""
    text = json.dumps(dataclasses.asdict(model.config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _families() -> dict[str, tuple[Callable[..., Model], Any]]:
    """For each model's name its family and configuration."""
    from forebay.models import deepseek, llama, moe

    found: dict[str, tuple[Callable[..., Model], Any]] = {n: (llama.Llama, c) for n, c in llama.PRESETS.items()}
    found |= {n: (deepseek.DeepSeek, c) for n, c in deepseek.PRESETS.items()}
    return found | {n: (moe.Moe, c) for n, c in moe.PRESETS.items()}


def model_names() -> list[str]:
    return list(_families())


def get_model(name: str, sizes: Mapping[str, Any] | None = None) -> Model:
    """The model called `name`, with some fields of its configuration replaced by `sizes`.

    Raises:
        UserError: an unknown name, a size that its configuration does not have, or one of another type.
    """
    families = _families()
    if name not in families:
        raise unknown("model", name, families)
    family, config = families[name]
    return family(name, _replace(config, sizes or {}, name))


def _replace(config: Any, sizes: Mapping[str, Any], name: str) -> Any:
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for key, value in sizes.items():
        if key not in fields or key == "family":
            raise unknown(f"size of {name}", key, [k for k in fields if k != "family"])
        old = fields[key]
        if (
            isinstance(old, bool) != isinstance(value, bool)
            or (isinstance(old, int) and not isinstance(value, int))
            or (isinstance(old, float) and not isinstance(value, int | float))
        ):
            raise UserError(f"size {key}={value!r} of {name}: it must be of the type of {old!r}")
        if not isinstance(value, bool) and isinstance(value, int | float) and value <= 0:
            raise UserError(f"size {key}={value!r} of {name} must be positive")
    return dataclasses.replace(config, **sizes)
