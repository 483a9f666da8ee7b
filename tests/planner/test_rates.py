"""The planner's seconds are the timeline's, where both know what is done; and by hand, on a machine with round figures."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from forebay.graph.costs import Collective, Cost
from forebay.hardware import IDEAL, Group, Hardware, Host, HostLink, Interconnect, Reached, get_hardware
from forebay.planner.rates import Rates
from forebay.timeline.costs import CostModel
from forebay.xla.groups import Groups
from forebay.xla.schedule import Collective as Compiled
from forebay.xla.schedule import Work

approx = pytest.approx
TOY = Hardware(
    name="toy", title="round figures", platform="cuda", hbm_bytes=10**6, hbm_bytes_per_s=100.0,
    flops_per_s={"bf16": 1000.0, "tf32": 500.0, "fp8": 2000.0}, host_link=HostLink("link", 10.0, 20.0),
    host=Host(10**9, 4, 4), interconnect=Interconnect("links", 4, 50.0, 10.0),
)  # fmt: skip
HALF = dataclasses.replace(
    IDEAL,
    matmul=0.5,
    attention_forward=0.4,
    attention_backward=0.2,
    hbm=0.5,
    interconnect=0.5,
    network=0.5,
    host_link=0.5,
)


def groups(sizes: dict[str, int], axes: tuple[str, ...]) -> Groups:
    """The groups along `axes` of a mesh whose devices are numbered along the last axis first."""
    numbers: Any = np.arange(int(np.prod(list(sizes.values())))).reshape(list(sizes.values()))
    chosen = [k for k, a in enumerate(sizes) if a in axes]
    others = [k for k in range(len(sizes)) if k not in chosen]
    size = int(np.prod([list(sizes.values())[k] for k in chosen]))
    return Groups(tuple(map(tuple, numbers.transpose([*others, *chosen]).reshape(-1, size).tolist())))


def test_work_by_hand():
    rates = Rates(TOY, {}, HALF)
    assert rates.compute_s(Cost("matmul", 3000.0)) == approx(6)
    assert rates.compute_s(Cost("matmul", 3000.0, dtype="float32")) == approx(12)
    assert rates.compute_s(Cost("attention", 1000.0)) == approx(2.5)
    assert rates.compute_s(Cost("attention", 1000.0), backward=True) == approx(5)
    assert rates.compute_s(Cost("matmul", 3000.0, hbm_bytes=500.0)) == approx(10)
    assert Rates(TOY, {"fsdp": 8}, HALF).link_bytes_per_s() == (5, 10), "of a nominal rate its share"


def test_a_collective_moves_hbm_bytes_while_the_links_carry_them():
    rates = Rates(TOY, {"fsdp": 4, "tensor": 2}, HALF)
    exchange = Collective("all_gather", 300.0, ("tensor",))  # 12 s on the links
    assert rates.total_s([Cost("collective", hbm_bytes=500.0, collectives=(exchange,))], weights=False) == approx(12)
    assert rates.total_s([Cost("collective", hbm_bytes=1000.0, collectives=(exchange,))], weights=False) == approx(20)
    # a product waits for what it gathers
    product = Cost("matmul", 3000.0, collectives=(exchange,))
    assert rates.total_s([product], weights=False) == approx(6 + 12)
    of_weight = dataclasses.replace(exchange, of_weight=True)
    gathered = Cost("collective", hbm_bytes=1000.0, collectives=(of_weight,))
    assert rates.total_s([gathered], weights=False) == 0
    assert rates.total_s([gathered], weights=True) == approx(12)


def test_collectives_by_hand():
    rates = Rates(TOY, {"fsdp": 4, "tensor": 2}, HALF)
    # 2 neighbours are in one domain of 4; the 4 along fsdp are 2 in each of two domains
    assert rates.group(("tensor",)) == Group(2, 2, False)
    assert rates.group(("fsdp",)) == Group(4, 2, True)
    assert rates.group(("fsdp", "tensor")) == Group(8, 4, True)
    gather = Collective("all_gather", 300.0, ("tensor",))
    assert rates.collective_s(gather) == approx(300 / 25)
    assert rates.collective_s(dataclasses.replace(gather, axes=("fsdp",))) == approx(300 / 10)  # two ports of 5
    assert rates.collective_s(dataclasses.replace(gather, axes=("fsdp", "tensor"))) == approx(300 / 20)
    # a device puts in 400 and keeps a quarter: 100 stay in the domain, 200 leave it through its own port
    assert rates.collective_s(Collective("all_to_all", 300.0, ("fsdp",))) == approx(200 / 5)


@pytest.mark.parametrize("name", ["h200", "gb200", "v5p"])
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 8}, {"fsdp": 128}, {"fsdp": 16, "expert": 8}, {"data": 2, "fsdp": 9, "tensor": 8}]
)
def test_a_collective_takes_as_long_as_in_the_timeline(name, sizes):
    machine = get_hardware(name)
    devices = int(np.prod(list(sizes.values())))
    rates, costs = Rates(machine, sizes), CostModel(machine, devices)
    kinds: Any = (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2), ("all_to_all", 1))
    every = itertools.chain.from_iterable(itertools.combinations(sizes, n) for n in range(1, len(sizes) + 1))
    for axes in every:
        joined, whole = groups(sizes, axes), 1_000_000_000
        received = whole * (joined.size - 1) / joined.size
        for kind, times in kinds:
            ours = rates.collective_s(Collective(kind, times * received, axes))
            theirs = costs.collective(Compiled(kind.replace("_", "-"), whole, joined)).seconds
            assert ours == approx(theirs), (axes, kind)


@pytest.mark.parametrize("name", ["h200", "gb200", "v5p"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_product_and_an_attention_take_as_long_as_in_the_timeline_but_for_the_launch(name, backward):
    machine = get_hardware(name)
    rates, costs = Rates(machine, {"fsdp": 8}), CostModel(machine, 8)
    launch = 0.0 if machine.platform == "tpu" else costs.efficiency.kernel_s
    kinds: Any = (("matmul", "bfloat16", "bf16"), ("matmul", "float32", "f32"), ("attention", "bfloat16", "bf16"))
    for kind, dtype, hlo in kinds:
        for flops, moved in ((1e15, 1e6), (1e6, 1e11)):
            ours = rates.compute_s(Cost(kind, flops, moved, dtype=dtype), backward=backward)
            theirs = costs.cost(Work(kind, flops, hlo, backward, moved)).seconds
            assert ours + launch == approx(theirs)
    reached = Reached(machine)
    assert rates.link_bytes_per_s() == (reached.link_bytes_per_s("d2h", 8), reached.link_bytes_per_s("h2d", 8))
