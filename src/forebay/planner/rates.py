"""How long the operations of a traced program take on a machine and a mesh; the rates are `forebay.hardware.reached`'s,
which the timeline of a compiled program goes by too.

What a compiled program adds to each kernel is not counted: kernels are not known yet.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping

from forebay.graph.costs import Collective, Cost
from forebay.hardware import Efficiency, Group, Hardware, Reached


@dataclasses.dataclass(frozen=True)
class Rates:
    """A machine and a mesh as seconds.

    Attributes:
        hardware: the machine.
        axis_sizes: the mesh, outermost axis first; neighbours along the last are neighbouring devices.
        efficiency: what is reached of the machine's rates.
    """

    hardware: Hardware
    axis_sizes: Mapping[str, int]
    efficiency: Efficiency = dataclasses.field(default_factory=Efficiency)
    _groups: dict[tuple[str, ...], Group] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @functools.cached_property
    def reached(self) -> Reached:
        return Reached(self.hardware, self.efficiency)

    def link_bytes_per_s(self) -> tuple[float, float]:
        """To the host and from it, per device, all devices of the mesh copying."""
        devices = math.prod(self.axis_sizes.values())
        return self.reached.link_bytes_per_s("d2h", devices), self.reached.link_bytes_per_s("h2d", devices)

    def compute_s(self, cost: Cost, *, backward: bool = False) -> float:
        """Arithmetic or HBM traffic of one operation, whichever takes longer; `backward` where it is of a gradient."""
        if cost.kernels:
            return sum(self.compute_s(kernel) for kernel in cost.kernels)
        traffic = cost.hbm_bytes / self.reached.hbm_bytes_per_s
        if cost.kind not in ("matmul", "attention"):
            return traffic
        return max(traffic, cost.flops / self.reached.flops_per_s(cost.dtype, cost.kind, backward=backward))

    def collective_s(self, collective: Collective) -> float:
        """One collective, by the bytes that a device receives."""
        group, received = self.group(collective.axes), collective.num_bytes
        if group.size == 1:
            return 0.0
        if collective.kind == "permute":
            return self.reached.permute_s(received, group)
        if collective.kind == "all_to_all":
            return self.reached.exchange_s(received * group.size / (group.size - 1), group)
        return self.reached.ring_s(received, group)

    def group(self, axes: Iterable[str]) -> Group:
        """The devices that differ along `axes`."""
        wanted = set(axes)
        chosen = tuple(a for a, n in self.axis_sizes.items() if a in wanted and n > 1)
        if chosen not in self._groups:
            self._groups[chosen] = self._counted(chosen)
        return self._groups[chosen]

    def _counted(self, axes: tuple[str, ...]) -> Group:
        domain = self.hardware.interconnect.domain_devices
        here: Counter[tuple[tuple[int, ...], int]] = Counter()
        positions = itertools.product(*map(range, self.axis_sizes.values()))
        for number, position in enumerate(positions):
            others = tuple(p for a, p in zip(self.axis_sizes, position, strict=True) if a not in axes)
            here[others, number // domain] += 1
        groups = Counter(others for others, _ in here)
        return Group(math.prod(self.axis_sizes[a] for a in axes), min(here.values()), max(groups.values()) > 1)

    def total_s(self, costs: Iterable[Cost], *, weights: bool, backward: bool = False) -> float:
        """Time of collectives of weights (`weights`), or of everything else; `backward` as in `compute_s`.

        A collective reads and writes HBM while it takes its time on the links.
        """
        total = 0.0
        for cost in costs:
            exchanged = sum(self.collective_s(c) for c in cost.collectives if c.of_weight == weights)
            if weights:
                total += exchanged
            elif cost.kind != "collective":
                total += exchanged + self.compute_s(cost, backward=backward)
            elif exchanged or not cost.collectives:
                total += max(exchanged, self.compute_s(cost))
        return total
