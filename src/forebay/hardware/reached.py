"""What training reaches of a machine's rates, in seconds: the one place where FLOPs and bytes become time.

The planner counts them in a traced program and the timeline in a compiled one; both ask here. `Efficiency` is the
one table of shares. Its defaults are from datasheets and public kernel benchmarks, each named beside it; none comes
from a training run. What is measured on a machine replaces them (`dataclasses.replace`).
"""

import dataclasses
import math
from typing import Literal

from forebay.hardware.machine import Hardware


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """What is reached of a machine's rates, by kind of operation, and what each operation costs besides.

    "Unverified" marks a default for which no public figure was found; docs/timeline.md has the list as a table.

    Attributes:
        matmul: of the peak arithmetic, in matrix products and convolutions. The best shapes reach 80.3 % on
            H100 and H200, 77.6 % on B200 and 85.9 % on A100 (stas00/ml-engineering, compute/accelerator,
            maximum achievable matmul FLOPS).
        attention_forward: of the peak, in fused attention. cuDNN's, causal, in bfloat16, at sequences of 4096 and 8192:
            0.60 and 0.65 on H200, 0.56 and 0.63 on GB200, for heads of 128 and of 192 and 128 alike
            (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results, cuDNN 9.19 and 9.22).
        attention_backward: the same of its gradient: 0.48 and 0.55 on H200, 0.46 and 0.53 on GB200, there 0.42 and 0.48 for
            heads of 192 and 128 (the same source).
        hbm: of the HBM bandwidth, in kernels that only move data. cuDNN's RMSNorm of 80 MiB and more: 0.77 to 0.80 on H200,
            0.76 to 0.81 on GB200 (NVIDIA/cudnn-frontend, benchmark/norms/results, cuDNN 9.19).
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
    hbm: float = 0.77
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
class Group:
    """The devices of one collective.

    Attributes:
        size: how many.
        together: the fewest of them that are in one fast domain.
        crosses: whether they are in more than one.
    """

    size: int
    together: int
    crosses: bool


@dataclasses.dataclass(frozen=True)
class Reached:
    """A machine in seconds. Bytes are per device."""

    hardware: Hardware
    efficiency: Efficiency = dataclasses.field(default_factory=Efficiency)

    @property
    def hbm_bytes_per_s(self) -> float:
        """What kernels and copies share."""
        return self.hardware.hbm_bytes_per_s * self.efficiency.hbm

    def flops_per_s(self, dtype: str, kind: str = "matmul", *, backward: bool = False) -> float:
        """Of matrix products, or with `kind` "attention" of fused attention or, `backward`, its gradient."""
        if kind != "attention":
            return self.peak_flops_per_s(dtype) * self.efficiency.matmul
        shares = self.efficiency.attention_forward, self.efficiency.attention_backward
        return self.peak_flops_per_s(dtype) * shares[backward]

    def peak_flops_per_s(self, dtype: str) -> float:
        """Of products of operands of a dtype, in numpy's words or HLO's: float32 on NVIDIA GPUs runs as TF32, elsewhere as
        bfloat16."""
        rates = self.hardware.flops_per_s
        if dtype.startswith(("float8", "f8")):
            return rates.get("fp8", rates["bf16"])
        return rates.get("tf32", rates["bf16"]) if dtype in ("float32", "float64", "f32", "f64") else rates["bf16"]

    def link_bytes_per_s(self, direction: Literal["d2h", "h2d"], devices: int) -> float:
        """Between one device and its host, as the `devices` of a training step use it: all at once."""
        link = self.hardware.host_link
        alone, together, nominal = (
            getattr(link, f"{direction}_{which}_bytes_per_s") for which in ("measured", "all_active", "nominal")
        )
        measured = alone if devices == 1 else together or alone
        return measured or nominal * self.efficiency.host_link

    def ring_s(self, received: float, group: Group) -> float:
        """A collective in which a device receives so many bytes, in rings.

        Of an all-gather, a reduce-scatter or a broadcast (n - 1) / n of the whole, of an all-reduce twice that
        (P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms", 2009). Where a group crosses domains its rings
        enter and leave a domain through the ports of all members there, which bounds the rate.
        """
        rate = min(self._inside, group.together * self._port) if group.crosses else self._inside
        return self._hops_s(group) + received / rate

    def exchange_s(self, num_bytes: float, group: Group) -> float:
        """An all-to-all of what a device puts in: each peer's part goes there directly, and what leaves the domain through
        the device's own port."""
        n, near = group.size, group.together if group.crosses else group.size
        seconds = max((near - 1) / n * num_bytes / self._inside, (n - near) / n * num_bytes / self._port)
        return self._hops_s(group) + seconds

    def permute_s(self, num_bytes: float, group: Group) -> float:
        """One hop; on a TPU it takes one of the torus's links."""
        links = 1 if self.hardware.tpu is None else 2 * self.hardware.tpu.dimensions
        return self._hops_s(group) + num_bytes / (self._port if group.crosses else self._inside / links)

    @property
    def _inside(self) -> float:
        return self.hardware.interconnect.domain_bytes_per_s * self.efficiency.interconnect

    @property
    def _port(self) -> float:
        return self.hardware.interconnect.network_bytes_per_s * self.efficiency.network

    def _hops_s(self, group: Group) -> float:
        hops = math.ceil(math.log2(group.size)) if group.size > 1 else 0
        return hops * (self.efficiency.network_hop_s if group.crosses else self.efficiency.hop_s)
