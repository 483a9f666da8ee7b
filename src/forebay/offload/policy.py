"""From a placement to a `jax.checkpoint` policy."""

from collections.abc import Callable
from typing import Any

import jax

from forebay.planner.placement import ALWAYS_KEPT, EVERYTHING, Placement

DEVICE_MEMORY = "device"
HOST_MEMORY = "pinned_host"


def checkpoint_policy(placement: Placement) -> Callable[..., Any]:
    """The policy that keeps, offloads and recomputes as `placement` says.

    Names not in the placement, and everything that has no name, are recomputed; with `*=device` they
    are kept, and those of `ALWAYS_KEPT` always.
    """
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[n for n in placement.names("device") if n != EVERYTHING]
        + sorted(ALWAYS_KEPT - set(placement.names("host"))),
        names_which_can_be_offloaded=list(placement.names("host")),
        offload_src=DEVICE_MEMORY,
        offload_dst=HOST_MEMORY,
    )
    if EVERYTHING not in placement.tensors:
        return named
    placed = set(placement.tensors)

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        if primitive.name == "name" and params["name"] in placed:
            return named(primitive, *args, **params)
        return primitive.name != "name"  # a name passes on what is kept already

    return policy


def apply(block: Callable[..., Any], placement: Placement, *, scanned: bool = True) -> Callable[..., Any]:
    """`block` under its placement; `scanned` is whether it is the body of a loop, where common
    subexpressions cannot undo the recomputation (`prevent_cse=False`)."""
    if dict(placement.tensors) == {EVERYTHING: "device"}:
        return block
    return jax.checkpoint(block, policy=checkpoint_policy(placement), prevent_cse=not scanned)
