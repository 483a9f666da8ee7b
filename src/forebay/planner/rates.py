"""How long things take on a machine: its rates, times how much of each is reached.

The efficiencies are assumptions, the same for every machine until they are measured on it. For
comparison: one H200 reaches 0.79e15 of its 0.99e15 FLOP/s on bfloat16 products of 8192-cubed matrices.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from forebay.graph.costs import Collective, Cost
from forebay.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The share of a rate that training reaches: of the peak arithmetic in matrix products and in
    attention kernels, of the HBM bandwidth, of the interconnect."""

    matmul: float = 0.75
    attention: float = 0.5
    hbm: float = 0.85
    interconnect: float = 0.75


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

    def compute_s(self, cost: Cost) -> float:
        """Arithmetic or HBM traffic of one operation, whichever takes longer."""
        traffic = cost.hbm_bytes / (self.hardware.hbm_bytes_per_s * self.efficiency.hbm)
        if cost.kind not in ("matmul", "attention"):
            return traffic
        reached = self.efficiency.attention if cost.kind == "attention" else self.efficiency.matmul
        return max(traffic, cost.flops / (self.peak_flops_per_s(cost.dtype) * reached))

    def peak_flops_per_s(self, dtype: str) -> float:
        """Of products of operands of this dtype: float32 on NVIDIA GPUs runs as TF32, elsewhere as bfloat16."""
        rates = self.hardware.flops_per_s
        if "float8" in dtype and "fp8" in rates:
            return rates["fp8"]
        return rates.get("tf32", rates["bf16"]) if dtype in ("float32", "float64") else rates["bf16"]

    def collective_s(self, collective: Collective) -> float:
        """One collective, by the bytes that a device receives."""
        return collective.num_bytes / (self.bytes_per_s(collective.axes) * self.efficiency.interconnect)

    def bytes_per_s(self, axes: Iterable[str]) -> float:
        """What one device receives per second from the devices that differ from it along `axes`.

        Within a domain its links; across domains no more than the network ports of the members of the
        group that are in one domain together.
        """
        axes = [a for a in self.axis_sizes if a in set(axes) and self.axis_sizes[a] > 1]
        net = self.hardware.interconnect
        if not axes:
            return net.domain_bytes_per_s
        names = list(self.axis_sizes)
        inner = math.prod(self.axis_sizes[a] for a in names[names.index(axes[-1]) + 1 :])
        span = math.prod(self.axis_sizes[a] for a in names[names.index(axes[0]) :])
        if span <= net.domain_devices:
            return net.domain_bytes_per_s
        together = max(1, min(math.prod(self.axis_sizes[a] for a in axes), net.domain_devices // inner))
        return min(net.domain_bytes_per_s, together * net.network_bytes_per_s)

    def total_s(self, costs: Iterable[Cost], *, weights: bool) -> float:
        """Time of collectives of weights (`weights`), or of everything else."""
        total = 0.0
        for cost in costs:
            total += sum(self.collective_s(c) for c in cost.collectives if c.of_weight == weights)
            if not weights:
                total += self.compute_s(cost)
        return total
