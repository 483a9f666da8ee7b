"""The decision as numbers: what each layer keeps, moves or recomputes, and what that costs.

A `Problem` says, for every stack of layers, what its backward pass needs, which operations make it and
how long each takes; how much memory the rest of the step takes; and how fast the links are.
`evaluate` gives time and memory of any choice; `forebay.planner.solve` finds the best one under the
same rules. Times are in seconds, bytes are per device.

The rules, for a range of n layers under one placement:

- The backward pass needs certain values. One that is kept is stored, on the device or on the host; one
  that is not is made again from its inputs, and these are needed in turn.
- Forward and backward each take the longest of three things that run beside one another: arithmetic
  (with storing and reading back what is kept, the backward's with what it recomputes), gathering and scattering the
  weights, and the copies to or from the host.
- What the last layer of a range would send stays on the device until its backward pass, which begins with it: no copy
  waits at the turn (`forebay.offload.scan`).
- Optimizer state on the host comes in and goes out by slices during the update, which takes the longer of its work on
  HBM and of these copies. Weights on the host come in for each layer in both passes, and their gradients go out.
- Device memory at the loss: all that is stored, a layer of what each range moves, and what the loss needs. During the
  backward pass of a range: what is stored for it and for those before it, the gradients so far, the working memory of
  a layer, and two layers' copies in flight.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from forebay.planner.hosted import LEAST_BYTES, choose_hosted
from forebay.planner.placement import EVERYTHING, Placement

COPY_SLOTS = 2
"""Layers whose copies from the host are on the device at once: the one in use and the next."""


@dataclasses.dataclass(frozen=True)
class Op:
    """Something that may have to be computed again: `seconds` for one layer."""

    seconds: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Keep:
    """Seconds that keeping a value adds to a layer's arithmetic: storing it in the forward pass, reading it back in
    the backward pass."""

    store_s: float = 0.0
    load_s: float = 0.0


_NOTHING = Keep()


@dataclasses.dataclass(frozen=True)
class LayerProblem:
    """One stack of layers; everything is for one layer unless it says otherwise.

    Attributes:
        stack: its name.
        layers: how many.
        num_bytes: the size of each value.
        ops: what makes the values that the backward pass needs, and those that these need.
        needed: the values that the backward pass needs.
        names: the values of each name that can be placed.
        carry: values that come from the layer before: stored on the device where they are needed as such.
        inputs: names of the carry itself: on the device unless they are moved.
        forward_s, backward_s: arithmetic and exchanges of activations, nothing recomputed.
        forward_weights_s, backward_weights_s: gathering the weights, scattering their gradients.
        working_bytes: the most that a layer's backward pass has on the device besides what is stored.
        hoisted_bytes: what the compiler keeps for all layers together from the first to the last use: weights in
            the compute dtype.
        gradient_bytes: the gradients of all layers together.
        outside_gradient_bytes: gradients of weights outside of the stacks that are there before its backward pass.
        most_ranges: into how many ranges it can be cut at most; None is any number.
        fetched_bytes: weights that come from the host for a layer, in either pass.
        sent_bytes: gradients of a layer that go to the host.
        on_device, on_host: what keeping each value there takes; a value that is not in it takes nothing.
    """

    stack: str
    layers: int
    num_bytes: tuple[int, ...]
    ops: tuple[Op, ...]
    needed: tuple[int, ...]
    names: Mapping[str, tuple[int, ...]]
    carry: frozenset[int]
    inputs: tuple[str, ...]
    forward_s: float
    backward_s: float
    forward_weights_s: float = 0.0
    backward_weights_s: float = 0.0
    working_bytes: int = 0
    hoisted_bytes: int = 0
    gradient_bytes: int = 0
    outside_gradient_bytes: int = 0
    most_ranges: int | None = None
    fetched_bytes: int = 0
    sent_bytes: int = 0
    on_device: Mapping[int, Keep] = dataclasses.field(default_factory=dict)
    on_host: Mapping[int, Keep] = dataclasses.field(default_factory=dict)

    def keep(self, value: int, where: Literal["device", "host"]) -> Keep:
        return (self.on_host if where == "host" else self.on_device).get(value, _NOTHING)

    @functools.cached_property
    def producers(self) -> dict[int, int]:
        return {v: i for i, op in enumerate(self.ops) for v in op.outputs}

    @functools.cached_property
    def name_of(self) -> dict[int, str]:
        return {v: n for n, values in self.names.items() for v in values}

    @functools.cached_property
    def unnamed(self) -> tuple[int, ...]:
        """Needed values without a name: only a placement of everything keeps them."""
        return tuple(v for v in self.needed if v not in self.name_of and v not in self.carry)

    @functools.cached_property
    def costs(self) -> dict[frozenset[tuple[str, str]], "LayerCost"]:
        """What `layer_cost` has found already, by placement."""
        return {}

    def size(self, name: str) -> int:
        return sum(self.num_bytes[v] for v in self.names[name])


@dataclasses.dataclass(frozen=True)
class Problem:
    """A whole step.

    Attributes:
        stacks: in the order in which they run forward.
        fixed_bytes: on the device throughout: weights, optimizer state, batch.
        loss_bytes: what the loss and everything else outside of the stacks needs at its fullest.
        outside_s: time of everything outside of the stacks: embedding, head, loss; like the stacks', of a microbatch.
        update_s: time of the optimizer's update, once a step.
        outside_gradient_bytes: gradients of the weights outside of the stacks, as they are at the update.
        microbatches: in a step.
        d2h_bytes_per_s, h2d_bytes_per_s: the link to the host, all devices copying; 0 for none.
        device_budget, host_budget: what there is.
        correction_bytes: what the compiler was found to need beyond this account of the device.
        least_offload_bytes: tensors smaller than this per layer are not moved.
        state_sizes: the arrays of the optimizer's state; all of them are in `fixed_bytes`.
        state_host_fraction: the share of them in host memory (`forebay.planner.hosted.choose_hosted`); None leaves
            it to the solver.
        update_slices_bytes: on the device during an update of anything in host memory: slices coming in, worked on,
            going out.
        weights_host_bytes: weights in host memory, which are not in `fixed_bytes`.
        gradients_host_bytes: their gradients, which are not in any `gradient_bytes`, and sums of gradients.
        sums_host_bytes: of these the sums over microbatches, which come in and go out after each.
    """

    stacks: tuple[LayerProblem, ...]
    fixed_bytes: int
    loss_bytes: int
    outside_s: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    device_budget: float
    host_budget: float
    update_s: float = 0.0
    outside_gradient_bytes: int = 0
    microbatches: int = 1
    correction_bytes: float = 0.0
    least_offload_bytes: int = 0
    state_sizes: tuple[int, ...] = ()
    state_host_fraction: float | None = 0.0
    update_slices_bytes: int = 0
    weights_host_bytes: int = 0
    gradients_host_bytes: int = 0
    sums_host_bytes: int = 0

    @functools.cached_property
    def state_host_bytes(self) -> int:
        """Of the optimizer's state."""
        hosted = choose_hosted(self.state_sizes, self.state_host_fraction or 0.0)
        return sum(size for size, h in zip(self.state_sizes, hosted, strict=True) if h)

    @property
    def movable_state_bytes(self) -> int:
        if not (self.d2h_bytes_per_s > 0 and self.h2d_bytes_per_s > 0):
            return 0
        return sum(size for size in self.state_sizes if size >= LEAST_BYTES)

    def update_copies(self, state_host_bytes: float) -> tuple[float, float]:
        """Bytes of one update that go out and that come in: state and weights both, gradients in, for their norm
        and for the update."""
        out = state_host_bytes + self.weights_host_bytes
        return out, out + 2 * self.gradients_host_bytes

    def stack(self, name: str) -> LayerProblem:
        return next(s for s in self.stacks if s.stack == name)

    @property
    def gradient_bytes(self) -> int:
        """Of all stacks."""
        return sum(s.gradient_bytes for s in self.stacks)

    @property
    def update_bytes(self) -> float:
        """On the device while the optimizer updates: what stays, all gradients, and slices of what does not stay."""
        streamed = self.base_host_bytes
        slices = self.update_slices_bytes if streamed else 0
        stays = self.fixed_bytes - self.state_host_bytes
        return stays + self.gradient_bytes + self.outside_gradient_bytes + slices

    @property
    def base_bytes(self) -> float:
        """On the device throughout forward and backward pass."""
        stays = self.fixed_bytes - self.state_host_bytes
        return stays + self.correction_bytes + sum(s.hoisted_bytes for s in self.stacks)

    @property
    def base_host_bytes(self) -> int:
        """In host memory throughout: state, weights and gradients."""
        return self.state_host_bytes + self.weights_host_bytes + self.gradients_host_bytes

    def may_offload(self, stack: LayerProblem, name: str, layers: int | None = None) -> bool:
        """Whether so many layers, by default all of the stack's, could have the tensor on the host."""
        links = self.d2h_bytes_per_s > 0 and self.h2d_bytes_per_s > 0 and (layers or stack.layers) > 1
        return links and self.host_budget > 0 and stack.size(name) >= max(self.least_offload_bytes, 1)


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """One layer under one placement: what is stored, the seconds of what is recomputed, and those of storing and of
    reading back what is not."""

    device_bytes: int
    host_bytes: int
    recompute_s: float
    stored: Mapping[str, int]
    """Bytes by name; unnamed ones under `EVERYTHING`."""
    store_s: float = 0.0
    load_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Predicted:
    """What a choice costs. `exposed_d2h_s`, `exposed_h2d_s`: copies that nothing hides."""

    step_s: float
    device_bytes: float
    host_bytes: float
    recompute_s: float
    exposed_d2h_s: float
    exposed_h2d_s: float
    where: str
    """The point of the step at which the device is fullest."""

    def fits(self, problem: Problem) -> bool:
        tolerance = 1 + 1e-6
        return (
            self.device_bytes <= problem.device_budget * tolerance
            and self.host_bytes <= problem.host_budget * tolerance
        )


def layer_cost(stack: LayerProblem, tensors: Mapping[str, str]) -> LayerCost:
    """One layer of `stack` with its tensors placed so."""
    key = frozenset(tensors.items())
    if key not in stack.costs:
        stack.costs[key] = _layer_cost(stack, tensors)
    return stack.costs[key]


def _layer_cost(stack: LayerProblem, tensors: Mapping[str, str]) -> LayerCost:
    where = {v: tensors[n] for n, values in stack.names.items() if tensors.get(n) in ("device", "host") for v in values}
    everything = EVERYTHING in tensors
    if everything:
        where |= dict.fromkeys(stack.unnamed, "device")
        where |= {v: "device" for values in stack.names.values() for v in values if v not in where}
    producers, name_of = stack.producers, stack.name_of
    todo, seen, ops = list(stack.needed), set(), set()
    stored: dict[str, int] = {}
    device = host = 0
    store_s = load_s = 0.0
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        size = stack.num_bytes[value]
        if value in where or value in stack.carry:
            name = name_of.get(value, EVERYTHING)
            stored[name] = stored.get(name, 0) + size
            kept = stack.keep(value, "host" if where.get(value) == "host" else "device")
            store_s, load_s = store_s + kept.store_s, load_s + kept.load_s
            if where.get(value) == "host":
                host += size
            else:
                device += size
        elif value in producers and producers[value] not in ops:
            ops.add(producers[value])
            todo += stack.ops[producers[value]].inputs
    return LayerCost(device, host, sum(stack.ops[i].seconds for i in ops), stored, store_s, load_s)


def _copy_s(num_bytes: float, bytes_per_s: float) -> float:
    if not num_bytes:
        return 0.0
    return num_bytes / bytes_per_s if bytes_per_s > 0 else math.inf


def evaluate(problem: Problem, placements: Sequence[Placement]) -> Predicted:
    """Time and memory of `placements`, which cover every stack in order of layers."""
    step = problem.outside_s
    exposed_d2h = exposed_h2d = recompute = host = 0.0
    base = problem.base_bytes
    stored = 0.0
    points: list[tuple[float, str]] = []
    later_gradients = problem.gradient_bytes
    for stack in problem.stacks:
        for placement in (p for p in placements if p.stack == stack.stack):
            n = placement.layers[1] - placement.layers[0]
            cost = layer_cost(stack, placement.in_loop.tensors)
            d2h = _copy_s(n * cost.host_bytes, problem.d2h_bytes_per_s)
            h2d = _copy_s(n * cost.host_bytes, problem.h2d_bytes_per_s)
            fetch = _copy_s(n * stack.fetched_bytes, problem.h2d_bytes_per_s)
            send = _copy_s(n * stack.sent_bytes, problem.d2h_bytes_per_s)
            forward = n * max(stack.forward_s + cost.store_s, stack.forward_weights_s)
            backward = n * max(stack.backward_s + cost.load_s + cost.recompute_s, stack.backward_weights_s)
            exposed_d2h += max(0.0, d2h - forward) + max(0.0, send - backward)
            exposed_h2d += max(0.0, fetch - forward) + max(0.0, h2d + fetch - backward)
            step += max(forward, d2h, fetch) + max(backward, h2d + fetch, send)
            recompute += n * cost.recompute_s
            host += n * cost.host_bytes
            stored += n * cost.device_bytes
            working = stack.working_bytes + COPY_SLOTS * (cost.host_bytes + stack.fetched_bytes + stack.sent_bytes)
            points.append(
                (
                    base + stored + later_gradients + stack.outside_gradient_bytes + working,
                    f"backward of {stack.stack} {placement.layers[0]}:{placement.layers[1]}",
                )
            )
            stored += cost.host_bytes
        later_gradients -= stack.gradient_bytes
    points.append((base + stored + problem.loss_bytes, "the loss"))
    points.append((problem.update_bytes, "the update"))
    device, where = max(points)
    m = problem.microbatches
    slower = min(problem.d2h_bytes_per_s, problem.h2d_bytes_per_s)
    sums = _copy_s(problem.sums_host_bytes, slower)
    out, back = problem.update_copies(problem.state_host_bytes)
    out, back = _copy_s(out, problem.d2h_bytes_per_s), _copy_s(back, problem.h2d_bytes_per_s)
    return Predicted(
        m * (step + sums) + max(problem.update_s, out, back),
        device,
        host + problem.base_host_bytes,
        m * recompute,
        m * exposed_d2h + (max(0.0, out - problem.update_s) if out > back else 0.0),  # both ways at once: one waits
        m * (exposed_h2d + sums) + (max(0.0, back - problem.update_s) if back >= out else 0.0),
        where,
    )
