"""How long one piece of work takes on a machine: its rates, times what share of each is reached.

`Efficiency` is the one table of these shares. Its defaults are from datasheets and public kernel
benchmarks, each named beside it; none comes from a training run. What is measured on a machine replaces
them (`dataclasses.replace`).
"""

import dataclasses
import math

from forebay.hardware import Hardware
from forebay.xla.schedule import Collective, Work


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """What is reached of a machine's rates, by kind of operation, and what each operation costs besides.

    "Unverified" marks a default for which no public figure was found; docs/timeline.md has the list as a table.

    Attributes:
        matmul: of the peak arithmetic, in matrix products and convolutions. The best shapes reach 80.3 % on
            H100 and H200, 77.6 % on B200 and 85.9 % on A100 (stas00/ml-engineering, compute/accelerator,
            maximum achievable matmul FLOPS).
        attention_forward: of the peak, in fused attention. With head dimension 128 at 8k and 16k cuDNN reaches
            595 to 600 of 989 TFLOP/s on H100 (arXiv:2407.08608), FlashAttention-3 614 to 621
            (pytorch/benchmark#2391).
        attention_backward: the same of its gradient. Unverified.
        hbm: of the HBM bandwidth, in kernels that only move data. Unverified; the planner's.
        interconnect: of the links within a domain, large messages. An all-gather on 8 H100 reaches 360 of
            450 GB/s, which is what NVIDIA expects (NVIDIA/nccl-tests#326).
        network: of the port to other domains. 46 to 48 GB/s of a 400 Gb/s port (NVIDIA/nccl-tests#290).
        host_link: of a link between device and host of which only the nominal rate is known: 55 of 64 GB/s on
            PCIe 5 (`forebay hardware h100`). A measured rate is used as it is.
        host_memory: of the bandwidth of a CPU's memory. Unverified.
        kernel_s: added to each kernel on a GPU: the ramps at both ends, launches being hidden. Unverified.
        hop_s, network_hop_s: added to a collective for each doubling of its group, within a domain and
            across. Unverified.
        copy_s: added to each copy between device and host. Unverified.
    """

    matmul: float = 0.78
    attention_forward: float = 0.60
    attention_backward: float = 0.50
    hbm: float = 0.85
    interconnect: float = 0.80
    network: float = 0.94
    host_link: float = 0.86
    host_memory: float = 0.80
    kernel_s: float = 2e-6
    hop_s: float = 3e-6
    network_hop_s: float = 8e-6
    copy_s: float = 5e-6


IDEAL = Efficiency(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
"""Every rate as sold, nothing on top: a bound, and what timelines worked out by hand assume."""


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

    @property
    def hbm_bytes_per_s(self) -> float:
        """What kernels and copies share."""
        return self.hardware.hbm_bytes_per_s * self.efficiency.hbm

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
            seconds = work.link_bytes / self.link_bytes_per_s(work.kind) + self.efficiency.copy_s
            return Cost(work.kind, seconds, work.link_bytes, work.link_bytes)
        if work.kind == "h2h":
            rate = min(self.host_bytes_per_s / 2, self.link_bytes_per_s("d2h"), self.link_bytes_per_s("h2d"))
            return Cost("host", work.link_bytes / rate + self.efficiency.copy_s, 0.0, 2 * work.link_bytes)
        if work.collective is not None:
            return self.collective(work.collective)
        if work.kind == "host" or thread == "host":
            return Cost("host", self.efficiency.copy_s)
        lane = thread or "compute"
        return Cost(lane, self._kernel_s(work), work.hbm_bytes)

    def link_bytes_per_s(self, direction: str) -> float:
        """Between one device and its host, as the devices of a training step use it: all at once."""
        link = self.hardware.host_link
        alone, together, nominal = (
            getattr(link, f"{direction}_{which}_bytes_per_s") for which in ("measured", "all_active", "nominal")
        )
        measured = alone if self.devices == 1 else together or alone
        return measured or nominal * self.efficiency.host_link

    def collective(self, c: Collective) -> Cost:
        """One collective.

        A ring passes (n - 1) / n of the bytes through every device's link, twice for an all-reduce (P. Patarasuk,
        X. Yuan, "Bandwidth optimal all-reduce algorithms", 2009). Where a group crosses domains its rings enter
        and leave a domain through the ports of all members there, which bounds the rate. An all-to-all sends
        each peer its part directly: those in other domains through the device's own port.
        """
        net, groups, e = self.hardware.interconnect, c.groups, self.efficiency
        n, domain = groups.size, net.domain_devices
        crosses = groups.crosses(domain)
        hops = math.ceil(math.log2(n)) if n > 1 else 0
        fixed = hops * (e.network_hop_s if crosses else e.hop_s)
        inside, port = net.domain_bytes_per_s * e.interconnect, net.network_bytes_per_s * e.network
        lane = "network" if crosses else "interconnect"
        if n == 1:
            return Cost(lane, 2 * c.num_bytes / self.hbm_bytes_per_s, 2.0 * c.num_bytes)
        if c.opcode == "collective-permute":
            if self.hardware.tpu is not None:  # one hop takes one of the torus's links
                inside /= 2 * self.hardware.tpu.dimensions
            seconds = c.num_bytes / (port if crosses else inside)
            return Cost(lane, fixed + seconds, 2.0 * c.num_bytes)
        if c.opcode in ("all-to-all", "ragged-all-to-all"):
            near = groups.together(domain) if crosses else n
            seconds = max((near - 1) / n * c.num_bytes / inside, (n - near) / n * c.num_bytes / port)
            return Cost(lane, fixed + seconds, 2.0 * (n - 1) / n * c.num_bytes)
        passed = c.num_bytes if c.opcode == "collective-broadcast" else (n - 1) / n * c.num_bytes
        passed *= 2 if c.opcode == "all-reduce" else 1
        rate = min(inside, groups.together(domain) * port) if crosses else inside
        return Cost(lane, fixed + passed / rate, 2.0 * passed)

    def _kernel_s(self, work: Work) -> float:
        moved = work.hbm_bytes / self.hbm_bytes_per_s
        launch = 0.0 if self.hardware.platform == "tpu" else self.efficiency.kernel_s
        if not work.flops:
            return launch + moved
        reached = self.efficiency.matmul
        if work.kind == "attention":
            reached = self.efficiency.attention_backward if work.backward else self.efficiency.attention_forward
        return launch + max(moved, work.flops / (self.peak_flops_per_s(work.dtype) * reached))

    def peak_flops_per_s(self, dtype: str) -> float:
        """Of products of operands of a dtype in HLO's words: float32 on NVIDIA GPUs runs as TF32, elsewhere as bfloat16."""
        rates = self.hardware.flops_per_s
        if dtype.startswith("f8"):
            return rates.get("fp8", rates["bf16"])
        return rates.get("tf32", rates["bf16"]) if dtype in ("f32", "f64") else rates["bf16"]
