"""The seconds of a layer by its graph, on machines that are fast or slow at one thing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forebay.graph.loss import trace_loss
from forebay.hardware import Efficiency, Reached, get_hardware
from forebay.planner.build import build

AXES = {"tensor": 2}


@pytest.fixture(scope="module")
def graph():
    """Two products, split over their hidden dimension: one sum over devices in either pass."""
    mesh = Mesh(np.array(jax.devices()[:2]), "tensor")

    def shaped(dims, *spec):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def block(x, w):
        return x + jnp.tanh(x @ w["in"]) @ w["out"], None

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, weights)[0].astype(jnp.float32))

    weights = {"in": shaped((4, 1024, 4096), None, None, "tensor"), "out": shaped((4, 4096, 1024), None, "tensor")}
    return trace_loss(loss, weights, shaped((8192, 1024)), axis_sizes=AXES)


def layer(graph, bytes_per_s: float):
    """The problem of a layer on a H200 whose links carry so much."""
    machine = get_hardware("h200")
    links = dataclasses.replace(machine.interconnect, domain_bytes_per_s=bytes_per_s)
    machine = dataclasses.replace(machine, interconnect=links)
    costed = build(graph, machine, AXES, state_sizes=(), device_budget=1e12, host_budget=0.0)
    exchange = next(c for cost in graph.blocks[0].backward.costs for c in cost.collectives)
    assert exchange.kind == "all_reduce" and exchange.num_bytes == 2 * 8192 * 1024 * 2 / 2
    return costed.problem.stacks[0], costed.rates.collective_s(exchange)


def test_an_exchange_of_the_backward_pass_runs_beside_the_gradients_of_weights(graph):
    free, nothing = layer(graph, 1e30)
    near, moment = layer(graph, 450e9)
    far, long = layer(graph, 1e9)
    flops_per_s = Reached(get_hardware("h200"), Efficiency()).flops_per_s("bfloat16", "matmul")
    gradients = 2 * (2 * 8192 * 1024 * 2048) / flops_per_s
    assert nothing < moment < gradients < long
    # a sum that is shorter than the two weights' gradients is hidden behind them, of a longer one what is longer waits
    assert near.backward_s == pytest.approx(free.backward_s)
    assert far.backward_s - free.backward_s == pytest.approx(long - gradients, rel=1e-3)
    # nothing runs beside the forward pass's
    assert far.forward_s - free.forward_s == pytest.approx(long, rel=1e-3)
