"""One table from the logical axes of a model to the axes of the device mesh.

A model names the dimensions of its weights and activations (`embed`, `heads`, `batch`, ...); this
module alone knows which mesh axes those are split over. Mesh axes:

| axis       | splits                                                                    |
|------------|---------------------------------------------------------------------------|
| `data`     | the batch; weights are replicated                                         |
| `fsdp`     | the batch, and weights and optimizer state (gathered layer by layer)      |
| `expert`   | the batch and the experts; weights that are not experts as under `fsdp`   |
| `sequence` | the sequence of the activations; weights as under `fsdp`                  |
| `tensor`   | heads, MLP width and vocabulary, within every layer                       |
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forebay.errors import UserError, did_you_mean, unknown

# Outermost first: neighbours along `tensor` are neighbouring devices, on the fastest links.
MESH_AXES = ("data", "fsdp", "expert", "sequence", "tensor")

# Logical axis -> mesh axes, most significant first. `None` as a logical axis is never split.
RULES: Mapping[str, tuple[str, ...]] = {
    # activations
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("sequence",),
    # weights
    "embed": ("fsdp", "expert", "sequence"),
    "expert_embed": ("fsdp", "sequence"),
    "experts": ("expert",),
    "layers": (),
    # both
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}

LogicalAxes = tuple[str | None, ...]


def parse_mesh(text: str, device_count: int) -> dict[str, int]:
    """`"fsdp=16,tensor=8"` as `{"fsdp": 16, "tensor": 8}`; an empty string is `fsdp` over all devices.

    Raises:
        UserError: an axis that is not in `MESH_AXES`, a size that is not a positive integer, or sizes
            whose product is not `device_count`.
    """
    if not text.strip():
        return {"fsdp": device_count}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (s.strip() for s in part.partition("="))
        if axis not in MESH_AXES:
            raise unknown("mesh axis", axis, MESH_AXES)
        if axis in sizes:
            raise UserError(f"mesh {text!r} gives the axis {axis!r} twice: give each axis one size")
        if not (size.isascii() and size.isdigit()) or int(size) < 1:
            raise UserError(f"mesh {text!r}: the size of {axis!r} must be a positive whole number, as in fsdp=8")
        sizes[axis] = int(size)
    total = math.prod(sizes.values())
    if total != device_count:
        raise UserError(
            f"mesh {text!r} has {' x '.join(map(str, sizes.values()))}{f' = {total}' if len(sizes) > 1 else ''} devices and there "
            f"are {device_count}: "
            f"change an axis (for example fsdp={device_count}) or the number of devices"
        )
    return sizes


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """A mesh over `devices` with all of `MESH_AXES`; those not in `sizes` have size 1.

    On TPU the devices are laid out along the physical torus; elsewhere in the order given.
    """
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    if devices[0].platform == "tpu":
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices, dtype=object).reshape(shape)
    return Mesh(grid, MESH_AXES)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """`RULES` applied to one mesh."""

    mesh: Mesh

    def size(self, logical: str) -> int:
        """Into how many parts the logical axis is split."""
        return math.prod(self.mesh.shape[a] for a in self.mesh_axes(logical))

    def about(self, size: int, logical: str, wanted: int) -> int:
        """The least size from `wanted` on that the logical axis splits evenly, at most `size`."""
        parts = self.size(logical)
        return min(size, parts * -(-wanted // parts))

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes larger than 1 that split `logical`."""
        if logical not in RULES:
            raise KeyError(f"logical axis {logical!r} is not in forebay.sharding.RULES: {did_you_mean(logical, RULES)}")
        return tuple(a for a in RULES[logical] if self.mesh.shape[a] > 1)

    def spec(self, axes: LogicalAxes) -> PartitionSpec:
        """The partition of an array whose dimensions are `axes`; a mesh axis is used once, by the first."""
        used: set[str] = set()
        parts = []
        for axis in axes:
            mesh_axes = tuple(a for a in (self.mesh_axes(axis) if axis else ()) if a not in used)
            used.update(mesh_axes)
            parts.append(mesh_axes if len(mesh_axes) > 1 else mesh_axes[0] if mesh_axes else None)
        return PartitionSpec(*parts)

    def named(self, axes: LogicalAxes, memory_kind: str | None = None) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes), memory_kind=memory_kind)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """`x` with its sharding fixed; a no-op on one device."""
        return x if self.mesh.size == 1 else jax.lax.with_sharding_constraint(x, self.named(axes))

    def tree(self, axes_tree: Any) -> Any:
        """A tree of `NamedSharding`s from a tree whose leaves are tuples of logical axes."""
        return jax.tree.map(self.named, axes_tree, is_leaf=lambda x: isinstance(x, tuple))

    def check(self, axes: LogicalAxes, shape: Sequence[int], what: str) -> None:
        """Raises `UserError` where a dimension of `what` is not divisible by the axes that split it."""
        for axis, size, part in zip(axes, shape, self.spec(axes), strict=True):
            names = (part,) if isinstance(part, str) else part or ()
            parts = math.prod(self.mesh.shape[n] for n in names)
            if size % parts:
                by = " x ".join(f"{n}={self.mesh.shape[n]}" for n in names)
                raise UserError(
                    f"{what}: its {axis} dimension of {size} is not divisible by {by}: "
                    f"choose sizes for {', '.join(map(repr, names))} whose product divides {size}"
                )


def single_device(device: Any | None = None) -> Sharding:
    """The table on a mesh of one device, by default the first there is."""
    devices = np.asarray([device or jax.devices()[0]], dtype=object)
    return Sharding(Mesh(devices.reshape([1] * len(MESH_AXES)), MESH_AXES))
