"""The solver against trying every plan, and how plans follow budgets and links."""

import dataclasses
import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
from problems import best_by_trying, every_plan, random_problem, random_stack

from forebay.errors import UserError
from forebay.planner.placement import Placement, Where
from forebay.planner.problem import Keep, LayerProblem, Op, Problem, evaluate, layer_cost
from forebay.planner.simplify import simplify
from forebay.planner.solve import solve

GIB = 2**30


def problem(stack: LayerProblem, **changes: Any) -> Problem:
    base = Problem(
        stacks=(stack,), fixed_bytes=0, loss_bytes=0, outside_s=0.0, d2h_bytes_per_s=GIB, h2d_bytes_per_s=GIB,
        device_budget=math.inf, host_budget=math.inf,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def chain(layers: int = 4) -> LayerProblem:
    """x -> a (3 s) -> b (5 s), the backward pass needs both; x, a and b are 1 GiB each."""
    return LayerProblem(
        stack="layers", layers=layers, num_bytes=(GIB, GIB, GIB), ops=(Op(3.0, (0,), (1,)), Op(5.0, (1,), (2,))),
        needed=(1, 2), names={"a": (1,), "b": (2,)}, carry=frozenset({0}), inputs=(), forward_s=10.0, backward_s=20.0,
    )  # fmt: skip


def check(p: Problem, variants: int) -> None:
    found, best = solve(p, variants=variants, relative_gap=1e-9), best_by_trying(p, variants)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.predicted.fits(p)
        assert found.predicted.step_s == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(150))
def test_one_range_is_as_good_as_trying_every_plan(seed):
    generator = random.Random(seed)
    stack = random_stack(generator, names=generator.randint(1, 5), layers=generator.randint(1, 6))
    check(random_problem(generator, (stack,)), 1)


@pytest.mark.parametrize("seed", range(3))
def test_eight_tensors_are_as_good_as_trying_every_plan(seed):
    generator = random.Random(1000 + seed)
    check(random_problem(generator, (random_stack(generator, names=8, layers=3),)), 1)


@pytest.mark.parametrize("seed", range(60))
def test_two_ranges_are_as_good_as_trying_every_plan(seed):
    generator = random.Random(2000 + seed)
    stack = random_stack(generator, names=generator.randint(1, 2), layers=generator.randint(2, 4))
    check(random_problem(generator, (stack,)), 2)


@pytest.mark.parametrize("seed", range(30))
def test_two_stacks_are_as_good_as_trying_every_plan(seed):
    generator = random.Random(3000 + seed)
    stacks = tuple(
        random_stack(generator, names=2, layers=generator.randint(1, 4), stack=s) for s in ("first", "second")
    )
    check(random_problem(generator, stacks), 1)


@pytest.mark.parametrize("seed", range(60))
def test_merging_operations_changes_no_cost(seed):
    generator = random.Random(4000 + seed)
    stack = random_stack(generator, names=generator.randint(1, 3), layers=2)
    p = random_problem(generator, (stack,))
    merged = simplify(stack)
    for (placement,) in every_plan(p, stack, 1):
        before, after = (layer_cost(s, placement.tensors) for s in (stack, merged))
        assert (after.device_bytes, after.host_bytes) == (before.device_bytes, before.host_bytes)
        assert after.recompute_s == pytest.approx(before.recompute_s)


def test_what_a_choice_costs_by_hand():
    p = problem(chain())
    # x is stored (1 GiB a layer), both are repeated: 4 * (10 + 20 + 8)
    full = evaluate(p, [Placement("layers", (0, 4), {})])
    assert (full.step_s, full.device_bytes, full.recompute_s) == (152.0, 4 * GIB, 32.0)
    # a kept, b from it: 4 * (10 + 20 + 5); x is not needed then
    kept = evaluate(p, [Placement("layers", (0, 4), {"a": "device"})])
    assert (kept.step_s, kept.device_bytes) == (140.0, 4 * GIB)
    # both on the host, 2 s a layer each way, hidden; two layers' copies are on the device
    host = evaluate(p, [Placement("layers", (0, 4), {"a": "host", "b": "host"})])
    assert (host.step_s, host.device_bytes, host.host_bytes, host.exposed_d2h_s) == (120.0, 4 * GIB, 8 * GIB, 0.0)
    # a link of 1/6 GiB/s: 12 s a layer against 10 forward, 20 backward
    slow = evaluate(dataclasses.replace(p, d2h_bytes_per_s=GIB / 6, h2d_bytes_per_s=GIB / 6), host_plan())
    assert slow.exposed_d2h_s == pytest.approx(4 * 2.0)
    assert slow.step_s == pytest.approx(4 * (12 + 20))


def test_storing_and_reading_back_take_their_time_in_either_pass():
    stack = dataclasses.replace(chain(), on_device={2: Keep(6.0, 1.0)}, on_host={2: Keep(0.5, 0.25)})
    p = problem(stack)
    # b kept: 4 * (10 + 6 + 20 + 1 + 3 for a); on the host 4 * (10.5 + 20.25 + 3)
    assert evaluate(p, [Placement("layers", (0, 4), {"b": "device"})]).step_s == 160.0
    assert evaluate(p, [Placement("layers", (0, 4), {"b": "host"})]).step_s == 135.0
    # with 7 s for 5 s of recomputing, b is kept nowhere but on the host, and not at all where there is none
    assert [dict(x.tensors) for x in at_best(p)] == [{"a": "device", "b": "host"}]
    assert [dict(x.tensors) for x in at_best(dataclasses.replace(p, host_budget=0.0))] == [{"a": "device"}]


def at_best(p: Problem) -> tuple[Placement, ...]:
    found = solve(p)
    assert found is not None
    return found.placements


def test_a_layer_of_what_each_range_moves_stays_until_its_backward_pass():
    p = problem(chain(8), loss_bytes=16 * GIB)
    moved: Mapping[str, Where] = {"a": "host", "b": "host"}  # 2 GiB a layer
    for ranges in ([(0, 8)], [(0, 3), (3, 8)]):
        plan = [Placement("layers", r, moved) for r in ranges]
        assert evaluate(p, plan).device_bytes == (16 + 2 * len(ranges)) * GIB
        assert evaluate(p, plan).where == "the loss"
    # during the backward pass of the second range its own two layers are there, and one of the first's
    plan = [Placement("layers", r, moved) for r in [(0, 3), (3, 8)]]
    assert evaluate(dataclasses.replace(p, loss_bytes=0), plan).device_bytes == (2 + 2 * 2) * GIB


def host_plan() -> list[Placement]:
    return [Placement("layers", (0, 4), {"a": "host", "b": "host"})]


def test_memory_is_counted_at_every_point_of_the_backward_pass():
    """The first range's backward runs after what the second stored is gone, but under all the gradients."""
    stack = dataclasses.replace(chain(), working_bytes=8 * GIB, gradient_bytes=4 * GIB)
    p = problem(stack, loss_bytes=3 * GIB, fixed_bytes=GIB)
    plan = [Placement("layers", (0, 2), {"a": "device", "b": "device"}), Placement("layers", (2, 4), {})]
    # stored: 2 * 2 and 2 * 1; at the end of the stack all 6 with gradients and working memory
    assert evaluate(p, plan).device_bytes == (1 + 6 + 4 + 8) * GIB
    assert evaluate(p, plan).where == "backward of layers 2:4"
    assert evaluate(dataclasses.replace(p, loss_bytes=20 * GIB), plan).where == "the loss"


def test_with_room_nothing_is_recomputed_or_moved():
    for seed in range(20):
        generator = random.Random(seed)
        stack = dataclasses.replace(random_stack(generator, names=4, layers=5), on_device={}, on_host={})
        found = solve(dataclasses.replace(random_problem(generator, (stack,)), device_budget=1e6 * GIB))
        assert found is not None
        assert (found.predicted.recompute_s, found.predicted.host_bytes) == (0.0, 0.0)


def test_without_a_link_nothing_is_moved():
    for seed in range(40):
        generator = random.Random(seed)
        p = random_problem(generator, (random_stack(generator, names=4, layers=5),))
        found = solve(dataclasses.replace(p, d2h_bytes_per_s=0.0, h2d_bytes_per_s=0.0, host_budget=1e6 * GIB))
        assert found is None or found.predicted.host_bytes == 0


def test_over_an_infinite_link_nothing_is_recomputed_that_may_be_moved():
    """Every needed value has a name, and only the working copies take memory."""
    for seed in range(40):
        generator = random.Random(seed)
        stack = random_stack(generator, names=4, layers=5)
        named = tuple(v for values in stack.names.values() for v in values)
        stack = dataclasses.replace(stack, needed=named, working_bytes=0, on_device={}, on_host={})
        p = random_problem(generator, (stack,))
        room = p.fixed_bytes + p.loss_bytes + stack.gradient_bytes + stack.outside_gradient_bytes
        p = dataclasses.replace(
            p, d2h_bytes_per_s=1e30, h2d_bytes_per_s=1e30, host_budget=1e6 * GIB, least_offload_bytes=0,
            device_budget=room + 2 * sum(stack.num_bytes),
        )  # fmt: skip
        found = solve(p)
        assert found is not None
        assert found.predicted.recompute_s == 0


def test_more_memory_is_never_slower():
    for seed in range(12):
        generator = random.Random(seed)
        p = random_problem(generator, (random_stack(generator, names=3, layers=6),))
        times = []
        for share in (0.2, 0.35, 0.5, 0.7, 0.9, 1.2):
            total = 6 * sum(p.stacks[0].num_bytes) + 12 * GIB
            found = solve(dataclasses.replace(p, device_budget=share * total), relative_gap=1e-9)
            times.append(math.inf if found is None else found.predicted.step_s)
        assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(times)), (seed, times)


def test_small_tensors_stay_where_they_are():
    """The output of a softmax's statistics is a few kB a layer: moving it would cost more than it frees."""
    stack = dataclasses.replace(chain(), num_bytes=(GIB, 2048, GIB))
    p = problem(stack, device_budget=4.5 * GIB, least_offload_bytes=2**20)
    found = solve(p)
    assert found is not None
    assert all(placement.tensors.get("a") != "host" for placement in found.placements)


def test_a_host_that_is_too_small_is_respected():
    stack = chain(8)
    found = solve(problem(stack, device_budget=9 * GIB, host_budget=5 * GIB))
    assert found is not None
    assert found.predicted.host_bytes <= 5 * GIB


def test_the_solver_writes_nothing(capfd):
    """HiGHS has lines of its own for standard output, and a plan is printed there as JSON."""
    generator = random.Random(5)
    for _ in range(5):
        solve(random_problem(generator, (random_stack(generator, names=5, layers=20),)))
    print("still here")
    assert capfd.readouterr().out == "still here\n"


def test_no_plan_in_the_time_given_is_not_called_infeasible():
    generator = random.Random(1)
    stack = random_stack(generator, names=8, layers=100)
    with pytest.raises(UserError, match="no plan in 1e-06 s: give it longer"):
        solve(problem(stack, device_budget=0.5 * 100 * sum(stack.num_bytes)), time_limit_s=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_the_share_of_the_optimizers_state_is_as_good_as_the_best_of_many(seed):
    """The solver may move any number of bytes; no share of whole arrays is better, and moving none is allowed."""
    generator = random.Random(4000 + seed)
    stack = random_stack(generator, names=generator.randint(1, 3), layers=generator.randint(1, 4))
    p = dataclasses.replace(
        random_problem(generator, (stack,)),
        fixed_bytes=20 * GIB,
        state_sizes=tuple(generator.randint(1, 4) * GIB for _ in range(5)),
        update_s=generator.choice([0.0, 2.0]),
        microbatches=generator.choice([1, 4]),
        update_slices_bytes=GIB // 4,
    )
    free = solve(dataclasses.replace(p, state_host_fraction=None), variants=1, relative_gap=1e-9)
    fixed = [
        solve(dataclasses.replace(p, state_host_fraction=f / 10), variants=1, relative_gap=1e-9)
        for f in range(11)
        if f == 0 or p.movable_state_bytes
    ]
    times = [s.predicted.step_s for s in fixed if s is not None]
    if not times:
        return  # whole arrays may be more than the host has room for, where some bytes of them are not
    assert free is not None
    moved = free.state_host_fraction * sum(p.state_sizes)
    # what the solver thinks of its answer, in which the state is not made of whole arrays
    rate = min(p.d2h_bytes_per_s, p.h2d_bytes_per_s)
    exact = dataclasses.replace(p, state_host_fraction=0.0, fixed_bytes=p.fixed_bytes - round(moved))
    step = evaluate(exact, free.placements).step_s - p.update_s + max(p.update_s, moved / rate if moved else 0.0)
    assert step <= min(times) * (1 + 1e-6)


def test_state_moves_where_its_copies_cost_less_than_what_they_let_stay():
    """Ten GiB of state, one of them movable for two seconds at 1 GiB/s, let `b` stay, which takes 5 s to repeat."""
    p = problem(
        chain(layers=1), fixed_bytes=10 * GIB, state_sizes=(GIB,) * 10, state_host_fraction=None,
        device_budget=11 * GIB + 1, host_budget=4 * GIB,
    )  # fmt: skip
    found = solve(p, variants=1)
    assert found is not None
    assert found.state_host_fraction == pytest.approx(0.1, abs=0.01)
    assert found.predicted.host_bytes == GIB
