"""Random planning problems, and the best plan by trying every one."""

import itertools
import random
from collections.abc import Iterator

from forebay.planner.placement import EVERYTHING, Placement
from forebay.planner.problem import Keep, LayerProblem, Op, Problem, evaluate


def random_stack(generator: random.Random, *, names: int, layers: int, stack: str = "layers") -> LayerProblem:
    """A layer as a random graph: value 0 is its input, operation i makes value i + 1 from earlier ones."""
    count = names + generator.randint(0, 3)
    ops = []
    for i in range(count):
        inputs = generator.sample(range(i + 1), k=min(i + 1, generator.randint(1, 3)))
        ops.append(Op(generator.choice([0.0, 1.0, 2.0, 5.0, 9.0]), tuple(inputs), (i + 1,)))
    values = list(range(1, count + 1))
    named = generator.sample(values, k=names)
    needed = [v for v in range(count + 1) if generator.random() < 0.6] or [count]
    return LayerProblem(
        stack=stack,
        layers=layers,
        num_bytes=tuple(generator.randint(1, 20) * 2**28 for _ in range(count + 1)),
        ops=tuple(ops),
        needed=tuple(needed),
        names={f"t{v}": (v,) for v in sorted(named)},
        carry=frozenset({0}),
        inputs=(),
        forward_s=generator.choice([3.0, 8.0, 20.0]),
        backward_s=generator.choice([6.0, 16.0, 40.0]),
        forward_weights_s=generator.choice([0.0, 5.0, 15.0]),
        backward_weights_s=generator.choice([0.0, 10.0, 30.0]),
        working_bytes=generator.randint(0, 4) * 2**30,
        gradient_bytes=generator.randint(0, 4) * 2**30,
        outside_gradient_bytes=generator.randint(0, 2) * 2**30,
        on_device=random_keeping(generator, count + 1),
        on_host=random_keeping(generator, count + 1),
    )


def random_keeping(generator: random.Random, values: int) -> dict[int, Keep]:
    """What storing and reading back takes, from nothing for any value to more than what computing some again does."""
    if generator.random() < 0.3:
        return {}
    seconds = [0.0, 0.5, 1.5, 4.0]
    return {v: Keep(generator.choice(seconds), generator.choice(seconds)) for v in range(values)}


def random_problem(generator: random.Random, stacks: tuple[LayerProblem, ...]) -> Problem:
    """Budgets from too small to ample."""
    total = sum(s.layers * sum(s.num_bytes) for s in stacks) + 12 * 2**30
    return Problem(
        stacks=stacks,
        fixed_bytes=3 * 2**30,
        loss_bytes=generator.randint(0, 6) * 2**30,
        outside_s=1.0,
        d2h_bytes_per_s=generator.choice([0.0, 2**28, 2**30, 2**32]),
        h2d_bytes_per_s=generator.choice([2**28, 2**30, 2**32]),
        device_budget=generator.uniform(0.1, 1.1) * total,
        host_budget=generator.choice([0.0, 0.2, 0.6, 2.0]) * total,
        least_offload_bytes=generator.choice([0, 2**30]),
    )


def every_choice(problem: Problem, stack: LayerProblem) -> Iterator[dict]:
    names = list(stack.names)
    for places in itertools.product(("device", "host", "recompute"), repeat=len(names)):
        tensors = dict(zip(names, places, strict=True))
        if any(w == "host" and not problem.may_offload(stack, n) for n, w in tensors.items()):
            continue
        yield tensors
        if "recompute" not in places:
            yield {EVERYTHING: "device"} | tensors


def every_plan(problem: Problem, stack: LayerProblem, variants: int) -> Iterator[tuple[Placement, ...]]:
    choices = list(every_choice(problem, stack))
    for tensors in choices:
        yield (Placement(stack.stack, (0, stack.layers), tensors),)
    if variants == 2:
        for cut in range(1, stack.layers):
            for a, b in itertools.product(choices, repeat=2):
                yield Placement(stack.stack, (0, cut), a), Placement(stack.stack, (cut, stack.layers), b)


def best_by_trying(problem: Problem, variants: int) -> float | None:
    """The least step time of all plans that fit; None if none does."""
    best = None
    for plans in itertools.product(*(list(every_plan(problem, s, variants)) for s in problem.stacks)):
        predicted = evaluate(problem, [p for plan in plans for p in plan])
        if predicted.fits(problem) and (best is None or predicted.step_s < best):
            best = predicted.step_s
    return best
