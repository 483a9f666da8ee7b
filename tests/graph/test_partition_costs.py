"""How values are split over a mesh and what that costs, worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forebay.graph.costs import Collective, Cost, analyse, sum_costs
from forebay.graph.flat import flatten
from forebay.graph.partition import local_shape, partition
from forebay.hardware import get_hardware
from forebay.ops.attention import blockwise
from forebay.planner.rates import Rates

MESH = {"fsdp": 4, "tensor": 2}


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def specs_of(function, args, inputs):
    flat = flatten(jax.make_jaxpr(function)(*args))
    specs = partition(flat, inputs, MESH)
    return [specs[o] for o in flat.outputs if o is not None]


def test_products_keep_the_batch_and_the_split_of_the_weights_columns():
    x, w = shape(8, 16, 32), shape(32, 64)
    (out,) = specs_of(lambda x, w: x @ w, (x, w), [(("fsdp",), (), ()), (("fsdp",), ("tensor",))])
    assert out == (("fsdp",), (), ("tensor",))


def test_reshapes_carry_a_split_to_the_first_part():
    (heads,) = specs_of(lambda x: x.reshape(8, 16, 4, 8), (shape(8, 16, 32),), [(("fsdp",), (), ("tensor",))])
    assert heads == (("fsdp",), (), ("tensor",), ())
    (merged,) = specs_of(lambda x: x.reshape(128, 32), (shape(8, 16, 32),), [(("fsdp",), (), ("tensor",))])
    assert merged == (("fsdp",), ("tensor",))
    # three parts cannot be split in two
    (odd,) = specs_of(lambda x: x.reshape(3, 2), (shape(6),), [(("tensor",),)])
    assert odd == ((), ())


def test_transposes_reductions_broadcasts_and_look_ups():
    x, spec = shape(8, 16, 32), (("fsdp",), (), ("tensor",))
    assert specs_of(lambda x: x.transpose(2, 0, 1), (x,), [spec]) == [(("tensor",), ("fsdp",), ())]
    assert specs_of(lambda x: x.sum(1), (x,), [spec]) == [(("fsdp",), ("tensor",))]
    assert specs_of(lambda x: x[:, None], (x,), [spec]) == [(("fsdp",), (), (), ("tensor",))]
    table, ids = shape(100, 32), shape(8, 16, dtype=jnp.int32)
    looked_up = specs_of(lambda t, i: t[i], (table, ids), [((), ("tensor",)), (("fsdp",), ())])
    assert looked_up == [(("fsdp",), (), ("tensor",))]


def test_a_constraint_decides_and_a_shard_map_says_so_itself():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    to = NamedSharding(mesh, PartitionSpec(None, ("fsdp", "tensor")))
    constrained = specs_of(lambda x: jax.lax.with_sharding_constraint(x, to), (shape(8, 16),), [(("fsdp",), ())])
    assert constrained == [((), ("fsdp", "tensor"))]
    mapped = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec("fsdp"))
    assert specs_of(mapped, (shape(8, 16),), [((), ())]) == [(("fsdp",), ())]


def test_local_shapes_are_padded():
    flat = flatten(jax.make_jaxpr(lambda x: x)(shape(10, 6)))
    assert local_shape(flat.values[0], (("fsdp",), ("tensor",)), MESH) == (3, 3)


def costs(function, args, inputs, **kwargs):
    return sum_costs(analyse(jax.make_jaxpr(function)(*args), inputs, MESH, **kwargs).costs)


def test_a_product_with_a_weight_split_over_the_batch_axis_gathers_the_weight():
    x, w = shape(8, 16, 32), shape(32, 64)
    cost = costs(lambda x, w: x @ w, (x, w), [(("fsdp",), (), ()), (("fsdp",), ())], weights=[1])
    assert cost.flops == 2 * (2 * 16) * 32 * 64  # a quarter of the batch
    # a device receives the three quarters of the weight that it does not have
    assert cost.collectives == (Collective("all_gather", 32 * 64 * 2 * 3 / 4, ("fsdp",), True),)
    assert cost.gathered_bytes == 32 * 64 * 2


def test_a_product_over_a_split_dimension_is_summed_over_the_devices():
    x, w = shape(8, 32), shape(32, 64)
    inputs = [(("fsdp",), ("tensor",)), (("tensor",), ())]
    cost = costs(lambda x, w: x @ w, (x, w), inputs)
    assert cost.flops == 2 * 2 * 16 * 64
    # an all-reduce receives twice (n - 1) / n of [2, 64] bfloat16
    assert cost.collectives == (Collective("all_reduce", 2 * 2 * 64 * 2 * 1 / 2, ("tensor",), False),)


def test_partial_sums_that_are_only_added_up_are_summed_over_devices_once():
    x, w = shape(8, 32), shape(32, 64)
    args, inputs = (x, w, w, w), [(("fsdp",), ("tensor",)), *[(("tensor",), ())] * 3]
    one = Collective("all_reduce", 2 * 2 * 64 * 2 * 1 / 2, ("tensor",), False)
    assert costs(lambda x, a, b, c: x @ a + x @ b + x @ c, args, inputs).collectives == (one,)
    # what is used as it is has to be whole, and so does what is added to something else
    assert costs(lambda x, a, b, c: ((y := x @ a) + x @ b, y), args, inputs).collectives == (one,) * 2
    assert costs(lambda x, a, b, c: jnp.exp(x @ a) + x @ b, args, inputs).collectives == (one,) * 2


def test_gradients_of_weights_are_scattered():
    x, dy = shape(8, 32), shape(8, 64)
    inputs = [(("fsdp",), ()), (("fsdp",), ())]
    cost = costs(lambda x, dy: x.T @ dy, (x, dy), inputs, scattered={(32, 64)})
    assert cost.collectives == (Collective("reduce_scatter", 32 * 64 * 2 * 3 / 4, ("fsdp",), True),)


def test_collectives_by_name_inside_shard_map():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    spec = PartitionSpec("fsdp")

    def local(x):  # [2, 16] on a device
        gathered = jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)
        return jax.lax.psum(x, "tensor") + gathered[:2]

    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    cost = costs(run, (shape(8, 16, dtype=jnp.float32),), [(("fsdp",), ())])
    size = 2 * 16 * 4
    assert sorted((c.kind, c.num_bytes, c.axes) for c in cost.collectives) == [
        ("all_gather", 4 * size * 3 / 4, ("fsdp",)),
        ("all_reduce", 2 * size / 2, ("tensor",)),
    ]


@pytest.mark.parametrize(("weights", "of_weight"), [([0], True), ([], False)])
def test_a_scatter_by_name_of_what_has_a_weights_shape_is_of_its_gradient(weights, of_weight):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    spec = PartitionSpec("fsdp")

    def local(w, x):  # [2, 16] and [8, 16] on a device
        return w + jax.lax.psum_scatter(x, "fsdp", scatter_dimension=0, tiled=True)

    run = jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
    w, x = (shape(8, 16, dtype=jnp.float32),) * 2
    cost = costs(run, (w, x), [(("fsdp",), ()), ((), ())], weights=weights)
    assert cost.collectives == (Collective("reduce_scatter", 8 * 16 * 4 * 3 / 4, ("fsdp",), of_weight),)


def test_loops_count_as_often_as_they_run():
    x, w = shape(8, 8), shape(5, 8, 8)

    def loop(x, w):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    assert costs(loop, (x, w), [((), ()), ((), (), ())]).flops == 5 * 2 * 8 * 8 * 8


def test_fused_operations_write_only_what_is_used():
    """exp and add are fused into one pass: x is read, the result is written."""
    x = shape(1024, dtype=jnp.float32)
    cost = costs(lambda x: jnp.exp(x) + 1, (x,), [((),)])
    assert cost.hbm_bytes == pytest.approx(2 * 4096)


def test_random_numbers_cost_something():
    key = jax.eval_shape(lambda: jax.random.key(0))
    cost = costs(lambda k: jax.random.uniform(k, (1024,)), (key,), [()])
    assert cost.hbm_bytes > 8 * 4096


def test_attention_in_blocks_also_says_what_its_loop_is_compiled_to():
    """Three pairs of blocks of 512: the products once each, and scores that go through HBM."""
    B, S, H, K, b, pairs = 2, 1024, 4, 32, 512, 3
    query = jax.ShapeDtypeStruct((B, S, H, K), jnp.bfloat16)
    traced = jax.make_jaxpr(lambda q, k, v: blockwise.forward(q, k, v, scale=1.0))(query, query, query)
    (attention,) = [c for c in analyse(traced, [((),) * 4] * 3, {}).costs if c.kind == "attention"]
    flops = pairs * 2 * B * H * b * b * K
    assert attention.flops == 2 * flops
    scores, block = B * H * b * b, B * b * H * K * 2
    first, second = (c for c in attention.kernels if c.kind == "matmul")
    assert (first.flops, first.hbm_bytes) == (flops, pairs * (2 * block + 4 * scores))
    # probabilities and values in bfloat16, the result in float32
    assert (second.flops, second.hbm_bytes) == (flops, pairs * (2 * scores + block + 2 * block))
    # between the products: for the maximum, for the probabilities, for their sum
    between = sum(
        c.hbm_bytes for c in attention.kernels if c.kind == "elementwise" and c.hbm_bytes >= pairs * 2 * scores
    )
    assert between == pytest.approx(pairs * (4 + 4 + 2 + 4) * scores, rel=0.1)


def test_planned_attention_in_blocks_takes_its_loops_time():
    machine = get_hardware("gb200")
    kernels = (Cost("matmul", 1e12, 1e9), Cost("elementwise", 0.0, 2e9))
    cost = Cost("attention", 1e12, 1e6, kernels=kernels)
    rates = Rates(machine, {})
    fused = dataclasses.replace(cost, kernels=())
    assert rates.compute_s(cost) == sum(map(rates.compute_s, kernels)) > rates.compute_s(fused)
