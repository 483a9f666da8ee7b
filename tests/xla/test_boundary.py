"""Copies between the forward and the backward pass: what a compile says of them, and what plans can do."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from forebay.hardware import get_hardware
from forebay.offload import scan_layers
from forebay.planner.placement import Placement
from forebay.sharding import make_mesh
from forebay.xla.compile import CompiledStep, compile_step
from forebay.xla.exposure import boundary_exposed_bytes, layer_bytes
from forebay.xla.options import compiler_options
from forebay.xla.topology import compile_only_devices
from forebay.xla.windows import Transfer

WIDTH, ROWS, LAYERS = 512, 1024, 9
SLICE = ROWS * WIDTH * 2  # of one tensor of one layer, bfloat16


def compiled(kept: int) -> CompiledStep:
    """A step of layers with two tensors on the host, of which the last layers keep theirs on the device."""

    def block(w, x):
        a = checkpoint_name(x @ w, "a")
        b = checkpoint_name(jnp.sin(a) @ w.T, "b")
        return x + jnp.cos(b) @ w

    plan = [Placement("layers", (0, LAYERS - kept), {"a": "host", "b": "host"})]
    if kept:
        plan.append(Placement("layers", (LAYERS - kept, LAYERS), {"a": "device", "b": "device"}))

    def loss(weights, x):
        return (jnp.sin(scan_layers(block, plan, x, weights).astype(jnp.float32)) ** 2).sum()

    whole = NamedSharding(make_mesh({}, compile_only_devices(get_hardware("gb200"), 1)), PartitionSpec())
    step = jax.jit(jax.grad(loss), in_shardings=whole, out_shardings=whole)
    shapes = (
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16),
    )
    return compile_step(step, shapes, options=compiler_options("cuda", deviceless=True, offloads=True))


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_nothing_waits_between_forward_and_backward_pass(kept):
    """What the last layer of a range stores stays on the device until the backward pass, which begins with it."""
    step = compiled(kept)
    assert step.violations == ()
    assert layer_bytes(step.transfers) == 2 * SLICE
    assert boundary_exposed_bytes(step.transfers) == 0
    for direction in ("d2h", "h2d"):  # no more copies than layers
        moved = [t for t in step.transfers if t.direction == direction]
        assert sum(t.num_bytes * t.count for t in moved) == (LAYERS - kept) * 2 * SLICE


@pytest.mark.parametrize(
    ("where", "window", "exposed"), [("boundary", 0.25, 75), ("boundary", 1.0, 0), ("loop", 0.0, 0), ("update", 0.0, 0)]
)
def test_only_what_the_boundary_lacks_is_counted(where, window, exposed):
    lacking = 100 * (1 - window)
    assert boundary_exposed_bytes([Transfer("a", "layers", "d2h", where, 100, 1, window, lacking)]) == exposed


def test_bytes_of_a_layer_are_one_copy_of_each_tensor():
    moved = [
        Transfer("a", "layers", "d2h", "loop", 100, 8, 1.0), Transfer("a", "layers", "d2h", "boundary", 100, 1, 1.0),
        Transfer("b", "layers", "d2h", "loop", 20, 8, 1.0), Transfer("b", "layers", "h2d", "loop", 20, 8, 1.0),
        Transfer("mu", "", "d2h", "update", 999, 1, 1.0),
    ]  # fmt: skip
    assert layer_bytes(moved) == 120
