"""How long one piece of a compiled program takes on a machine, and which lane it takes it on.

The rates are those of `forebay.hardware.reached`.
"""

import dataclasses
import functools
import math

from forebay.hardware import IDEAL, Efficiency, Group, Hardware, Reached
from forebay.xla.schedule import Collective, Work

__all__ = ["IDEAL", "Cost", "CostModel", "Efficiency"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one piece of work takes.

    Attributes:
        lane: what it runs on: "compute", "d2h", "h2d", "interconnect", "network", "copy", "host", "sparsecore".
        seconds: alone on the machine.
        hbm_bytes: device memory traffic; spread over the seconds, what it takes of the shared bandwidth.
        host_bytes: the same of host memory.
    """

    lane: str
    seconds: float
    hbm_bytes: float = 0.0
    host_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class CostModel:
    """A machine in seconds. `devices` run the program."""

    hardware: Hardware
    devices: int
    efficiency: Efficiency = dataclasses.field(default_factory=Efficiency)

    @functools.cached_property
    def reached(self) -> Reached:
        return Reached(self.hardware, self.efficiency)

    @property
    def hbm_bytes_per_s(self) -> float:
        """What kernels and copies share."""
        return self.reached.hbm_bytes_per_s

    @property
    def host_bytes_per_s(self) -> float:
        """One device's share of its CPU's memory bandwidth, all devices of the CPU copying; infinite if unknown."""
        host = self.hardware.host
        if host.cpu_memory_bytes_per_s is None:
            return math.inf
        sharing = min(self.devices, host.devices_per_cpu)
        return host.cpu_memory_bytes_per_s * self.efficiency.host_memory / sharing

    def cost(self, work: Work, thread: str = "") -> Cost:
        """Of one instruction; `thread` is where it runs if not on the compute units."""
        if work.kind in ("d2h", "h2d"):
            seconds = work.link_bytes / self.reached.link_bytes_per_s(work.kind, self.devices) + self.efficiency.copy_s
            return Cost(work.kind, seconds, work.link_bytes, work.link_bytes)
        if work.kind == "h2h":
            rate = min(
                self.host_bytes_per_s / 2, *(self.reached.link_bytes_per_s(d, self.devices) for d in ("d2h", "h2d"))
            )
            return Cost("host", work.link_bytes / rate + self.efficiency.copy_s, 0.0, 2 * work.link_bytes)
        if work.collective is not None:
            return self.collective(work.collective)
        if work.kind == "host" or thread == "host":
            return Cost("host", self.efficiency.copy_s)
        lane = thread or "compute"
        return Cost(lane, self._kernel_s(work), work.hbm_bytes)

    def collective(self, c: Collective) -> Cost:
        """One collective."""
        n, domain = c.groups.size, self.hardware.interconnect.domain_devices
        group = Group(n, c.groups.together(domain), c.groups.crosses(domain))
        lane = "network" if group.crosses else "interconnect"
        if n == 1:
            return Cost(lane, 2 * c.num_bytes / self.hbm_bytes_per_s, 2.0 * c.num_bytes)
        if c.opcode == "collective-permute":
            return Cost(lane, self.reached.permute_s(c.num_bytes, group), 2.0 * c.num_bytes)
        if c.opcode in ("all-to-all", "ragged-all-to-all"):
            return Cost(lane, self.reached.exchange_s(c.num_bytes, group), 2.0 * (n - 1) / n * c.num_bytes)
        received = c.num_bytes if c.opcode == "collective-broadcast" else (n - 1) / n * c.num_bytes
        received *= 2 if c.opcode == "all-reduce" else 1
        return Cost(lane, self.reached.ring_s(received, group), 2.0 * received)

    def _kernel_s(self, work: Work) -> float:
        moved = work.hbm_bytes / self.hbm_bytes_per_s
        launch = 0.0 if self.hardware.platform == "tpu" else self.efficiency.kernel_s
        if not work.flops:
            return launch + moved
        return launch + max(moved, work.flops / self.reached.flops_per_s(work.dtype, work.kind, backward=work.backward))
