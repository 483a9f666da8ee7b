"""Applying a plan: names, checkpoint policies and the scan over layers."""

from typing import Any

from jax.ad_checkpoint import checkpoint_name

from forebay.offload.policy import checkpoint_policy
from forebay.offload.scan import scan_layers

__all__ = ["checkpoint_policy", "name", "scan_layers"]


def name(x: Any, name: str) -> Any:
    """`x`, an array or a pytree of arrays, as an activation called `name` that a plan can place.

    The value is unchanged. This is `jax.ad_checkpoint.checkpoint_name`; activations named by either are
    the same to forebay.
    """
    return checkpoint_name(x, name)
