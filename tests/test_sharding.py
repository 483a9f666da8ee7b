"""Logical axes on meshes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from forebay.errors import UserError
from forebay.sharding import MESH_AXES, make_mesh, parse_mesh, single_device


def refused(call):
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        ("fsdp=16,tensor=8", 128, {"fsdp": 16, "tensor": 8}),
        (" data = 2 , fsdp=4 ", 8, {"data": 2, "fsdp": 4}),
        ("", 8, {"fsdp": 8}),
        ("fsdp=1", 1, {"fsdp": 1}),
    ],
)
def test_a_mesh_from_text(text, devices, expected):
    assert parse_mesh(text, devices) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fspd=8", "did you mean 'fsdp'"),
        ("fsdp=8,fsdp=1", "'fsdp' twice"),
        ("fsdp", "positive whole number"),
        ("fsdp=0", "positive whole number"),
        ("fsdp=-8", "positive whole number"),
        ("fsdp=2.0", "positive whole number"),
        ("fsdp=eight", "positive whole number"),
        ("fsdp=4,tensor=4", "4 x 4 = 16 devices and there are 8"),
        ("fsdp=4", "there are 8"),
    ],
)
def test_a_mesh_that_cannot_be(text, says):
    assert says in refused(lambda: parse_mesh(text, 8))


def test_every_mesh_has_every_axis_and_tensor_neighbours_are_neighbours():
    mesh = make_mesh({"tensor": 2, "fsdp": 4}, jax.devices())
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "expert": 1, "sequence": 1, "tensor": 2}
    assert [[d.id for d in pair] for pair in mesh.devices.reshape(4, 2)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("mesh", "axes", "spec"),
    [
        ("fsdp=8", ("batch", "sequence", None), P("fsdp", None, None)),
        ("data=2,fsdp=4", ("batch", "sequence", None), P(("data", "fsdp"), None, None)),
        ("data=2,fsdp=2,sequence=2", ("batch", "sequence", None), P(("data", "fsdp"), "sequence", None)),
        ("data=2,fsdp=2,sequence=2", ("layers", "embed", "mlp"), P(None, ("fsdp", "sequence"), None)),
        ("expert=4,tensor=2", ("layers", "embed", "heads", None), P(None, "expert", "tensor", None)),
        ("tensor=8", ("embed", "vocab"), P(None, "tensor")),
        ("fsdp=8", ("embed", "batch"), P("fsdp", None)),  # a mesh axis splits one dimension: the first
    ],
)
def test_the_table(sharding_of, mesh, axes, spec):
    assert sharding_of(mesh).spec(axes) == spec


def test_sizes_of_logical_axes(sharding_of):
    sharding = sharding_of("data=2,fsdp=2,tensor=2")
    assert [sharding.size(a) for a in ("batch", "embed", "vocab", "sequence", "layers")] == [4, 2, 2, 1, 1]


def test_a_logical_axis_that_is_not_in_the_table(sharding_of):
    with pytest.raises(KeyError, match="did you mean 'embed'"):
        sharding_of("fsdp=8").spec(("embedd",))


def test_a_tree_of_shardings(sharding_of):
    tree = sharding_of("fsdp=8").tree({"a": ("embed", None), "b": (None,)})
    assert {k: s.spec for k, s in tree.items()} == {"a": P("fsdp", None), "b": P(None)}


def test_constraining(sharding_of):
    x = jnp.zeros((8, 4))
    split = jax.jit(lambda x: sharding_of("fsdp=8").constrain(x, "batch", None))(x)
    assert {s.data.shape for s in split.addressable_shards} == {(1, 4)}
    assert single_device().constrain(x, "batch", None) is x


def test_what_does_not_divide_names_the_axes_and_the_sizes(sharding_of):
    sharding = sharding_of("data=2,fsdp=2,tensor=2")
    sharding.check(("batch", "vocab"), (4, 6), "a batch")
    message = refused(lambda: sharding.check(("batch", "vocab"), (6, 6), "a batch of 6"))
    for part in ("a batch of 6", "batch dimension of 6", "data=2 x fsdp=2"):
        assert part in message
    assert "vocab dimension of 7" in refused(lambda: sharding.check(("batch", "vocab"), (4, 7), "x"))
