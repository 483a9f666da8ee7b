"""`forebay.plan` on code that is not ours, compiled for GPUs that are not there."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import forebay
from forebay.errors import UserError
from forebay.planner.search import InfeasibleError
from forebay.xla.options import PROFILE_OPTION

L, D, F, N, S = 8, 1024, 4096, 16, 1024
GIB = 2**30


def program(mesh=None):
    """A plain JAX model without a name in it, and abstract arguments, split over `mesh`."""

    def shape(dims, spec, dtype=jnp.float32):
        sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    parameters = {"wi": shape((L, D, F), (None, "fsdp")), "wo": shape((L, F, D), (None, None, "fsdp"))}
    return parameters, shape((N, S, D), ("fsdp",), jnp.bfloat16)


def loss(p, x):
    @jax.checkpoint
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["wi"].astype(x.dtype)) @ w["wo"].astype(x.dtype), None

    x, _ = jax.lax.scan(layer, x, p)
    return (x.astype(jnp.float32) ** 2).mean()


@pytest.fixture(scope="module")
def mesh():
    devices = forebay.compile_only_devices(forebay.get_hardware("h200"), 4)
    return Mesh(np.array(devices), ("fsdp",))


@pytest.fixture(scope="module")
def plan(mesh):
    return forebay.plan(loss, *program(mesh), hardware="h200", mesh=mesh, optimizer=optax.adamw(1e-3), hbm="1.1GiB")


def test_a_plan_is_compiled_fits_and_says_why(plan, mesh):
    assert plan.verified
    assert plan.compiled["device_bytes"]["total"] == plan.predicted["device_bytes"] <= 1.1 * GIB
    assert plan.hardware == "h200" and plan.devices == 4 and plan.mesh == {"fsdp": 4}
    # Adam keeps two float32 moments of 64 Mi parameters; a quarter of weights and moments is here
    assert plan.compiled["device_bytes"]["arguments"] >= 3 * 4 * 2 * L * D * F // 4
    tensors = {r["tensor"] for r in plan.reasons}
    assert tensors <= {"dot_0", "dot_1", "operand_0"} and "dot_0" in tensors
    assert all(
        {"where", "step_time_s", "device_bytes", "fits"} <= set(a) for r in plan.reasons for a in r["alternatives"]
    )
    options = forebay.compiler_options(plan, list(mesh.devices.flat))
    of_profile = {PROFILE_OPTION, "xla_gpu_pgle_accuracy_checker"}  # the planned step has its timeline's times
    compiled_with, offered = (
        {k: v for k, v in o.items() if k not in of_profile} for o in (plan.compiled["compiler_options"], options)
    )
    assert compiled_with == offered
    assert "dot_0" in plan.explain() and "compiled and fits" in plan.explain()


def test_a_plan_survives_its_file(plan, tmp_path):
    file = tmp_path / "plan.json"
    plan.save(file)
    assert json.loads(file.read_text())["schema"] == "forebay.plan/1"
    again = forebay.Plan.load(file)
    assert again.placements == plan.placements
    assert again.to_json() == json.loads(json.dumps(plan.to_json()))


def test_less_memory_is_a_slower_plan_that_still_fits(plan, mesh):
    small = forebay.plan(loss, *program(mesh), hardware="h200", mesh=mesh, optimizer=optax.adamw(1e-3), hbm="0.6GiB")
    assert small.verified and small.predicted and plan.predicted
    assert small.predicted["device_bytes"] <= 0.6 * GIB
    assert small.predicted["step_time_s"] > plan.predicted["step_time_s"]


def test_a_mesh_that_is_not_of_the_machine_is_planned_and_called_unverified():
    here = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    found = forebay.plan(loss, *program(here), hardware="h200", mesh=here)
    assert not found.verified and found.compiled is None
    assert any("the mesh is of cpu devices" in n for n in found.notes)
    abstract = AbstractMesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    found = forebay.plan(loss, *program(abstract), hardware="h200", mesh=abstract)
    assert not found.verified
    assert any("the mesh is abstract" in n for n in found.notes)


def test_arrays_do_as_well_as_their_shapes():
    """Arrays lie on a device of this computer; the plan is for another."""
    parameters = {"wi": jnp.zeros((3, 64, 128)), "wo": jnp.zeros((3, 128, 64))}
    found = forebay.plan(loss, parameters, jnp.zeros((4, 8, 64)), hardware="h200")
    assert found.verified
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), parameters)
    same = forebay.plan(loss, shapes, jax.ShapeDtypeStruct((4, 8, 64), jnp.float32), hardware="h200")
    assert same.placements == found.placements


def test_budgets_are_checked():
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"hbm": "900GiB"}, "h200 has 141.0 GiB on each device"),
        ({"hbm": "x"}, "cannot read 'x' as a size"),
        ({"host": "9000GiB"}, "a host of h200 has"),
        ({"hardware": "h2000"}, "did you mean 'h200'"),
        ({"hbm": 1.5}, "write a size with its unit"),
        ({"optimizer": "adam"}, "is no optax optimizer"),
    )
    for arguments, message in cases:
        with pytest.raises(UserError, match=message):
            forebay.plan(loss, *program(), **({"hardware": "h200", "verify": False} | arguments))
    with pytest.raises(InfeasibleError, match="weights, optimizer state and gradients alone need"):
        forebay.plan(loss, *program(), hardware="h200", hbm="0.3GiB", verify=False)


def test_a_large_product_without_a_name_is_pointed_at():
    """Two up-projections, one of which carries a name that no plan will ever see: none at all."""

    def half_named(p, x):
        def layer(x, w):
            gate = forebay.name(x @ w["wi"].astype(x.dtype), "mlpwi_0")
            up = x @ (2 * w["wi"]).astype(x.dtype)
            return x + (jax.nn.gelu(gate) * up) @ w["wo"].astype(x.dtype), None

        return (jax.lax.scan(layer, x, p)[0].astype(jnp.float32) ** 2).mean()

    found = forebay.plan(half_named, *program(), hardware="h200", verify=False)
    (note,) = [n for n in found.notes if "without a name" in n]
    assert "matmul" in note and "test_pipeline.py" in note and "128 MiB" in note  # 16 x 1024 x 4096 bfloat16


def test_a_reverse_scan_is_planned_as_one_range():
    def backwards(p, x):
        def layer(x, w):
            return x + jax.nn.gelu(x @ w["wi"].astype(x.dtype)) @ w["wo"].astype(x.dtype), None

        return (jax.lax.scan(layer, x, p, reverse=True)[0].astype(jnp.float32) ** 2).mean()

    found = forebay.plan(backwards, *program(), hardware="h200", hbm="2.5GiB", verify=False)
    assert len(found.placements) == 1
    jax.eval_shape(forebay.apply(backwards, found), *program())
