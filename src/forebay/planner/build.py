"""From the graph of a loss and a machine to a `Problem`."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from forebay.graph.block import BlockGraph, forward_costs
from forebay.graph.kept import Moved, keeping
from forebay.graph.liveness import peak_bytes
from forebay.graph.loss import LossGraph, gradients_before
from forebay.graph.working import working_bytes
from forebay.hardware import Hardware
from forebay.offload.stream import SLICE_BYTES
from forebay.planner.placement import ALWAYS_KEPT, EVERYTHING, Placement
from forebay.planner.problem import Keep, LayerProblem, Op, Predicted, Problem, evaluate
from forebay.planner.rates import Rates
from forebay.planner.simplify import simplify

LEAST_OFFLOAD_BYTES = 2**20
"""Smaller tensors are not worth a copy: at 50 GB/s a MiB takes 20 us, of the order of what starting a copy takes."""

UPDATE_SLICES = 6
"""Slices on the device during an update: of two moments one coming in, one worked on, one going out."""


@dataclasses.dataclass(frozen=True)
class Costed:
    """A loss, a machine, and the `Problem` that they make.

    Attributes:
        graph: the loss.
        rates: the machine.
        problem: the decision, with the working memory of full recomputation.
    """

    graph: LossGraph
    rates: Rates
    problem: Problem

    def predict(
        self, placements: Sequence[Placement], problem: Problem | None = None
    ) -> tuple[Predicted, dict[str, int]]:
        """Time and memory of `placements`, each stack's working memory worked out for its own placement,
        and that memory in bytes."""
        problem = problem or self.problem
        working = {}
        for stack in problem.stacks:
            block = next(b for b in self.graph.blocks if b.stack.name == stack.stack)
            working[stack.stack] = max(self._working(block, p) for p in placements if p.stack == stack.stack)
        stacks = tuple(dataclasses.replace(s, working_bytes=working[s.stack]) for s in problem.stacks)
        return evaluate(dataclasses.replace(problem, stacks=stacks), placements), working

    def _working(self, block: BlockGraph, placement: Placement) -> int:
        kept = frozenset(n for n, w in placement.tensors.items() if w != "recompute")
        return _working_bytes(_Same(block), kept)


@dataclasses.dataclass(frozen=True, eq=False)
class _Same:
    """A block, by identity, as a key."""

    block: BlockGraph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.block is self.block

    def __hash__(self) -> int:
        return id(self.block)


@functools.lru_cache(maxsize=4096)
def _working_bytes(same: _Same, kept: frozenset[str]) -> int:
    from forebay.offload.policy import checkpoint_policy

    if EVERYTHING in kept:
        return working_bytes(same.block, None)
    placement = Placement(same.block.stack.name, (0, same.block.stack.layers), dict.fromkeys(sorted(kept), "device"))
    return working_bytes(same.block, checkpoint_policy(placement))


def build(
    graph: LossGraph,
    hardware: Hardware,
    axis_sizes: dict[str, int],
    *,
    state_sizes: Sequence[int],
    device_budget: float,
    host_budget: float,
    accumulate: int = 1,
    state_host_fraction: float | None = 0.0,
    hosted_weights: Mapping[str, int] | None = None,
    sums_on_host: bool = False,
    master_bytes: tuple[int, int] = (0, 0),
    rates: Rates | None = None,
) -> Costed:
    """The problem of placing the activations of `graph` on `hardware`.

    Args:
        graph: the loss, per device.
        hardware: the machine.
        axis_sizes: the mesh.
        state_sizes: bytes on one device of each array of the optimizer's state.
        device_budget, host_budget: bytes for one device.
        accumulate: microbatches per step; the graph is of one of them.
        state_host_fraction: the share of the state in host memory; None leaves it to the solver.
        hosted_weights: for each stack the bytes of its weights, on one device, that live in host memory.
        sums_on_host: whether the sums of gradients over microbatches are in host memory.
        master_bytes: master weights beside the weights, on the device and in host memory.
        rates: how fast the machine is; by default `Rates` with its assumptions.
    """
    rates = rates or Rates(hardware, axis_sizes)
    hosted = hosted_weights or {}
    stacks = tuple(
        _with_hosted(simplify(_layer_problem(graph, block, rates, hardware.platform)), hosted.get(block.stack.name, 0))
        for block in graph.blocks
    )
    gradients = graph.parameter_bytes
    optimizer_bytes, on_host = sum(state_sizes), sum(hosted.values())
    masters, hosted_masters = master_bytes
    fixed = graph.parameter_bytes - on_host + masters + optimizer_bytes + graph.argument_bytes * accumulate
    sums = 0
    if accumulate > 1:  # the sum over the microbatches lives beside the gradients of one
        sums = gradients if sums_on_host else on_host
        fixed += gradients - sums
    outside = rates.total_s(graph.outside.costs, weights=False) + rates.total_s(graph.outside.costs, weights=True)
    # the optimizer reads weights, gradients and state, and writes weights and state
    update_bytes = 2 * (optimizer_bytes + sum(master_bytes)) + 2 * graph.parameter_bytes + gradients
    update = update_bytes / rates.reached.hbm_bytes_per_s
    d2h, h2d = rates.link_bytes_per_s()
    problem = Problem(
        stacks=stacks,
        fixed_bytes=fixed,
        loss_bytes=peak_bytes(graph.outside),
        outside_s=outside,
        update_s=update,
        outside_gradient_bytes=gradients - sum(graph.layer_bytes.values()),
        microbatches=accumulate,
        d2h_bytes_per_s=d2h,
        h2d_bytes_per_s=h2d,
        device_budget=device_budget,
        host_budget=host_budget,
        least_offload_bytes=LEAST_OFFLOAD_BYTES,
        state_sizes=tuple(state_sizes),
        state_host_fraction=state_host_fraction,
        update_slices_bytes=UPDATE_SLICES * SLICE_BYTES,
        weights_host_bytes=on_host + hosted_masters,
        gradients_host_bytes=on_host + sums,
        sums_host_bytes=sums,
    )
    return Costed(graph, rates, problem)


def _with_hosted(stack: LayerProblem, num_bytes: int) -> LayerProblem:
    """The stack with so many bytes of its weights, and of their gradients, in host memory."""
    per_layer = num_bytes // stack.layers
    return dataclasses.replace(
        stack, fetched_bytes=per_layer, sent_bytes=per_layer, gradient_bytes=stack.gradient_bytes - num_bytes
    )


def _layer_problem(graph: LossGraph, block: BlockGraph, rates: Rates, platform: str) -> LayerProblem:
    forward, backward = forward_costs(block), block.backward.costs
    kept = keeping(block, platform)
    return LayerProblem(
        stack=block.stack.name,
        layers=block.stack.layers,
        num_bytes=block.forward.num_bytes,
        ops=_ops(block, rates),
        needed=block.needed,
        names={n: v for n, v in block.named.items() if n not in ALWAYS_KEPT and any(_is_used(block, x) for x in v)},
        carry=frozenset(block.carry).union(*(block.named.get(n, ()) for n in ALWAYS_KEPT)),
        inputs=block.input_names,
        forward_s=rates.total_s(forward, weights=False),
        backward_s=rates.total_s(backward, weights=False, backward=True) - _beside_s(block, rates),
        forward_weights_s=rates.total_s(forward, weights=True),
        backward_weights_s=rates.total_s(backward, weights=True),
        working_bytes=_working_bytes(_Same(block), frozenset()),
        # TPU compilers cast the stacked weights once, before the loop (docs/xla.md)
        hoisted_bytes=graph.cast_bytes[block.stack.name] if platform == "tpu" else 0,
        gradient_bytes=graph.layer_bytes[block.stack.name],
        most_ranges=1 if block.stack.reverse else None,  # `forebay.apply` runs a reverse scan as one
        outside_gradient_bytes=gradients_before(graph.outside, block.stack.name),
        on_device=_seconds([k.device for k in kept], rates),
        on_host=_seconds([k.host for k in kept], rates),
    )


def _seconds(moved: Sequence[Moved], rates: Rates) -> dict[int, Keep]:
    rate = rates.reached.hbm_bytes_per_s
    return {v: Keep(m.forward / rate, m.backward / rate) for v, m in enumerate(moved) if m.forward or m.backward}


def _beside_s(block: BlockGraph, rates: Rates) -> float:
    """Seconds of exchanges of activations in the backward pass that run beside arithmetic: the gradients of the weights wait for no
    exchange of the way back to the layer before, nor does it for them."""
    aside = set(block.weight_gradient_ops)
    costs = block.backward.costs
    gradients = rates.total_s((costs[i] for i in aside), weights=False, backward=True)
    exchanges = sum(
        rates.collective_s(c)
        for i, cost in enumerate(costs)
        if i not in aside
        for c in cost.collectives
        if not c.of_weight
    )
    return min(gradients, exchanges)


def _is_used(block: BlockGraph, value: int) -> bool:
    """Whether keeping this value alone changes what the backward pass starts from."""
    return value in block.recomputed({value})[1]


def _ops(block: BlockGraph, rates: Rates) -> tuple[Op, ...]:
    """What full recomputation repeats."""
    positions, _ = block.recomputed(set())
    ops = []
    for i in positions:
        op, cost = block.forward.flat.ops[i], block.forward.costs[i]
        inputs = tuple(dict.fromkeys(v for v in op.inputs if v is not None and v not in block.given))
        ops.append(Op(rates.total_s([cost], weights=False), inputs, op.outputs))
    return tuple(ops)
