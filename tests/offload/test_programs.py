"""Programs as people write them: loss and every gradient under any plan are those of the plain scan.

The reference is `jax.lax.scan` without any checkpointing. Placements are drawn at random, the same ones in
every run.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from parity import assert_same, normal, place, placements, plain, quick_jit, summed

from forebay.offload import scan_layers
from forebay.sharding import make_mesh

pytestmark = pytest.mark.usefixtures("unwritten_host_memory")

D, ROWS = 4, 3
TRIPS = (1, 2, 3, 4, 5, 15, 16, 17)  # 15 to 17: where pipelining went wrong in released compilers
NAMES = ["h", "mixed"]


# ------------------------------------------------------------------ the programs


def tied(layer, x, constants):
    """Every layer also uses the embedding, which is one more layer's worth of its own weights."""
    h = checkpoint_name(x @ layer["w"], "h")
    return x + checkpoint_name(jnp.tanh(h) @ constants["tied"], "mixed")


def dropout(layer, x, constants):
    h = checkpoint_name(x @ layer["w"], "h")
    kept = jax.random.bernoulli(layer["key"], 0.7, h.shape)
    also = jax.random.bernoulli(jax.random.wrap_key_data(layer["raw_key"]), 0.7, h.shape)
    return x + checkpoint_name(jnp.where(kept, jnp.sin(h), 0.0), "mixed") * also * constants["scale"]


def mixture(layer, carry, constants):
    """Two experts, a softmax router, and the router's balancing loss added up in the carry."""
    x, aux = carry
    h = checkpoint_name(x @ layer["w"], "h")
    probabilities = jax.nn.softmax(h[:, :2])
    experts = jnp.stack([jnp.tanh(h), jnp.sin(h)], 1)
    mixed = checkpoint_name((experts * probabilities[..., None]).sum(1), "mixed")
    return x + mixed * constants["scale"], aux + (probabilities.mean(0) ** 2).sum()


def mixed_dtypes(layer, carry, constants):
    """bfloat16 activations, float32 weights, and the tokens' ids, which choose a row of a table."""
    x, ids = carry
    h = checkpoint_name(x @ layer["w"].astype(x.dtype), "h")
    mixed = checkpoint_name(jnp.sin(h) * constants["table"][ids % 2].astype(x.dtype), "mixed")
    return x + mixed, ids + 1


def inner_loops(layer, x, constants):
    """A scan and a while loop inside a layer, as in chunked attention, and a checkpoint of its own."""

    @jax.checkpoint
    def chunk(total, row):
        return total + jnp.sin(row @ layer["w"]), row * constants["scale"]

    h = checkpoint_name(x @ layer["w"], "h")
    total, rows = jax.lax.scan(chunk, jnp.zeros(D), h)
    count = jax.lax.fori_loop(0, 3, lambda i, n: n + i, 0)  # 0 + 1 + 2
    return 0.5 * x + checkpoint_name(rows + total, "mixed") / count


def inputs(layers):
    """The carry, the layers and the constants of every program; each uses what it needs."""
    weights = 0.3 * normal(2, layers, D, D)
    keys = jax.random.split(jax.random.key(7), layers)
    stacked = {"w": weights, "key": keys, "raw_key": jax.random.key_data(jax.random.split(keys[0], layers))}
    constants = {"tied": weights[0], "scale": normal(3, D), "table": normal(4, 2, D)}
    return normal(1, ROWS, D), stacked, constants


PROGRAMS = {
    "tied weights": (tied, lambda x: x),
    "dropout": (dropout, lambda x: x),
    "mixture of experts": (mixture, lambda x: (x, jnp.float32(0))),
    "mixed dtypes": (mixed_dtypes, lambda x: (x.astype(jnp.bfloat16), jnp.arange(ROWS, dtype=jnp.int32))),
    "inner loops": (inner_loops, lambda x: x),
}


def gradient_of(scan, name, layers):
    """Loss and gradients by x, the weights and every constant; tied weights are one argument used twice."""
    block, carry_of = PROGRAMS[name]
    x, stacked, constants = inputs(layers)

    def loss(x, weights, scale, table):
        tied = weights[0] if name == "tied weights" else constants["tied"]
        everything = {"tied": tied, "scale": scale, "table": table}
        return summed(scan(block, carry_of(x), stacked | {"w": weights}, everything))

    return quick_jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(
        x, stacked["w"], constants["scale"], constants["table"]
    )


@functools.cache
def reference(name, layers):
    return gradient_of(plain, name, layers)


@pytest.mark.parametrize("name", PROGRAMS)
@hypothesis.settings(max_examples=4)
@hypothesis.given(data=st.data(), layers=st.sampled_from(TRIPS))
def test_every_program_at_any_number_of_layers_under_any_plan(name, data, layers):
    plan = data.draw(placements(layers, NAMES))
    ours = gradient_of(lambda block, *a: scan_layers(block, plan, *a), name, layers)
    expected = reference(name, layers)
    if name != "mixed dtypes":
        assert_same(ours, expected)
        return
    # bfloat16 keeps 8 bits: XLA rounds at other places where it fuses otherwise
    for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.abs(a - e).max() <= 2e-2 * np.abs(e).max()


@pytest.mark.parametrize("layers", TRIPS)
def test_every_number_of_layers_with_the_last_kept(layers):
    """What a plan for hidden copies looks like: all offloaded but the last layer."""
    ranges = [(0, layers - 1, {"h": "host", "mixed": "host"})] * (layers > 1) + [(layers - 1, layers, {"*": "device"})]
    ours = gradient_of(lambda block, *a: scan_layers(block, place(*ranges), *a), "mixture of experts", layers)
    assert_same(ours, reference("mixture of experts", layers))


def test_the_references_use_everything_that_they_are_differentiated_by():
    """Otherwise equal gradients would prove nothing: what each program does not use is known."""
    unused = {
        "tied weights": {2, 3},
        "dropout": {3},
        "mixture of experts": {3},
        "mixed dtypes": {2},
        "inner loops": {3},
    }
    for name, nothing in unused.items():
        gradients = reference(name, 3)[1]
        assert {i for i, g in enumerate(gradients) if not np.asarray(g, np.float32).any()} == nothing, name


# ------------------------------------------------------------------ what is done to the program

PLAN = place((0, 2, {"h": "host"}), (2, 4, {"h": "device", "mixed": "host"}), (4, 5, {"*": "device"}))
LAYERS = 5


def loss_of(scan):
    """Of x, the weights and the constants."""

    def loss(x, weights, scale):
        _, stacked, constants = inputs(LAYERS)
        return summed(scan(dropout, x, stacked | {"w": weights}, constants | {"scale": scale}))

    return loss


OURS, PLAIN = loss_of(lambda block, *a: scan_layers(block, PLAN, *a)), loss_of(plain)


def arguments():
    x, stacked, constants = inputs(LAYERS)
    return x, stacked["w"], constants["scale"]


def microbatches_inside(loss):
    """Gradients of each microbatch, added up in a loop: how a step accumulates."""

    def accumulated(x, weights, scale):
        def add(total, part):
            found = jax.value_and_grad(loss, argnums=(1, 2))(part, weights, scale)
            return jax.tree.map(jnp.add, total, found), None

        zeros = (jnp.float32(0), (jnp.zeros_like(weights), jnp.zeros_like(scale)))
        return jax.lax.scan(add, zeros, jnp.stack([x, 2 * x, x - 1]))[0]

    return quick_jit(accumulated)


def microbatches_outside(loss):
    """A loop over microbatches, differentiated as a whole."""

    def total(x, weights, scale):
        parts = jnp.stack([x, 2 * x, x - 1])
        return jax.lax.scan(lambda t, part: (t + loss(part, weights, scale), None), jnp.float32(0), parts)[0]

    return quick_jit(jax.value_and_grad(total, argnums=(0, 1, 2)))


def over_devices(loss):
    """Each device has its rows and whole weights, by `shard_map`; differentiated from the outside."""
    mesh = make_mesh({"data": 3}, jax.devices()[:3])
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def total(x, weights, scale):
        local = jax.shard_map(
            lambda *a: loss(*a)[None], mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows, check_vma=False
        )
        return local(x, weights, scale).sum()

    return quick_jit(jax.value_and_grad(total, argnums=(0, 1, 2)))


def updated(loss):
    """A step whose weights are donated: the gradients must not read what the update has overwritten."""

    def step(weights, x, scale):
        value, gradient = jax.value_and_grad(loss, argnums=1)(x, weights, scale)
        return weights - 0.1 * gradient, value

    jitted = jax.jit(step, donate_argnums=0)

    def twice(x, weights, scale):
        weights, _ = jitted(jnp.array(weights), x, scale)
        return jitted(weights, x, scale)

    return twice


TRANSFORMS = {
    "grad of jit": lambda loss: jax.grad(jax.jit(loss), argnums=(0, 1, 2)),
    "jit of grad of jit": lambda loss: quick_jit(jax.value_and_grad(jax.jit(loss), argnums=(0, 1, 2))),
    "vmap over inputs of grad": lambda loss: quick_jit(
        lambda x, *rest: jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None, None))(jnp.stack([x, -x]), *rest)
    ),
    "grad of vmap over weights": lambda loss: quick_jit(
        jax.grad(
            lambda x, w, scale: jax.vmap(loss, in_axes=(None, 0, None))(x, jnp.stack([w, 2 * w]), scale).sum(),
            (0, 1, 2),
        )
    ),
    "inside a checkpoint": lambda loss: quick_jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2))),
    "microbatches, gradients inside the loop": microbatches_inside,
    "microbatches, gradients of the loop": microbatches_outside,
    "shard_map": over_devices,
    "donated": updated,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transformations(name):
    transform = TRANSFORMS[name]
    assert_same(transform(OURS)(*arguments()), transform(PLAIN)(*arguments()))
