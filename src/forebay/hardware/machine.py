"""What is known of a machine. Units are in the names; bytes are bytes, rates are per second.

A *device* is what jax calls one: a GPU, a TPU chip (v5e, v5p, v6e), half a TPU7x chip.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from forebay.errors import UserError

Platform = Literal["cuda", "tpu", "cpu"]

DEFAULT_MEMORY_FRACTION = 0.9
"""The share of a GPU's memory that XLA is taken to have when nobody says otherwise.

It is what training jobs usually set (`XLA_PYTHON_CLIENT_MEM_FRACTION=.9`). jax reserves 0.75 when the
variable is not set: then pass 0.75.
"""


@dataclasses.dataclass(frozen=True)
class HostLink:
    """The link between one device and the memory of its host, per direction (d2h: device to host).

    Attributes:
        name: what the link is, for example "NVLink-C2C".
        d2h_nominal_bytes_per_s, h2d_nominal_bytes_per_s: what the link is sold as.
        d2h_measured_bytes_per_s, h2d_measured_bytes_per_s: measured with one device copying at a time.
        d2h_all_active_bytes_per_s, h2d_all_active_bytes_per_s: measured per device while all devices of
            the host copy in that direction. Training is that case.
    """

    name: str
    d2h_nominal_bytes_per_s: float
    h2d_nominal_bytes_per_s: float
    d2h_measured_bytes_per_s: float | None = None
    h2d_measured_bytes_per_s: float | None = None
    d2h_all_active_bytes_per_s: float | None = None
    h2d_all_active_bytes_per_s: float | None = None

    @property
    def d2h_bytes_per_s(self) -> float:
        """The figure to plan with: all devices active if measured, else one, else nominal."""
        return self.d2h_all_active_bytes_per_s or self.d2h_measured_bytes_per_s or self.d2h_nominal_bytes_per_s

    @property
    def h2d_bytes_per_s(self) -> float:
        """The figure to plan with: all devices active if measured, else one, else nominal."""
        return self.h2d_all_active_bytes_per_s or self.h2d_measured_bytes_per_s or self.h2d_nominal_bytes_per_s


@dataclasses.dataclass(frozen=True)
class Host:
    """The computer that the devices are in.

    Attributes:
        memory_bytes: host memory, all of it.
        devices: devices in one host.
        devices_per_cpu: devices whose copies go through the same CPU, and so contend for its memory.
        cpu_memory_bytes_per_s: the bandwidth of one CPU's memory, reads and writes together; None if not known.
    """

    memory_bytes: int
    devices: int
    devices_per_cpu: int
    cpu_memory_bytes_per_s: float | None = None

    @property
    def memory_bytes_per_device(self) -> int:
        return self.memory_bytes // self.devices


@dataclasses.dataclass(frozen=True)
class Interconnect:
    """How devices reach one another.

    Attributes:
        name: the fast network, for example "NVLink 5" or "ICI, 3D torus".
        domain_devices: devices that the fast network joins.
        domain_bytes_per_s: what one device can send over it, all of its links together, one direction.
        network_bytes_per_s: what one device can send outside its domain, one direction.
    """

    name: str
    domain_devices: int
    domain_bytes_per_s: float
    network_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class CudaTarget:
    """What XLA's GPU compiler wants to know of a GPU that is not there (`GpuTargetConfigProto`)."""

    device_name: str
    compute_capability: tuple[int, int]
    accelerated_features: bool
    core_count: int
    fpus_per_core: int
    clock_ghz: float
    l2_cache_bytes: int
    shared_memory_per_core_bytes: int
    shared_memory_per_block_optin_bytes: int
    interconnect_links: int


@dataclasses.dataclass(frozen=True)
class TpuTarget:
    """What libtpu wants to know of a TPU slice that is not there.

    Attributes:
        topology: libtpu's name of the generation, the part before the colon of `v5p:4x4x8`.
        dimensions: 2 or 3, those of the torus.
        devices_per_chip: 1, or 2 where jax shows each core as a device.
        max_shape: the largest slice, in chips.
        available_hbm_bytes: what the compiler itself counts as available to a program, per device.
    """

    topology: str
    dimensions: int
    devices_per_chip: int
    max_shape: tuple[int, ...]
    available_hbm_bytes: int


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of machine. Every figure is per device unless its name or its class says otherwise.

    Attributes:
        name: how it is asked for (`--hardware gb200`).
        title: what it is, in words.
        platform: the XLA platform, "cuda", "tpu", or "cpu" for the computer that runs this.
        hbm_bytes: the device memory that the driver reports.
        hbm_bytes_per_s: its bandwidth.
        flops_per_s: dense peak by arithmetic: "bf16", "fp8", and "tf32" for what XLA may use for float32
            matrix products on an NVIDIA GPU.
        cuda, tpu: what the compiler needs to know; exactly the one of its platform is there, none for a CPU.
        sources: where the figures come from, by the dotted path of the key or of the table it is in.
    """

    name: str
    title: str
    platform: Platform
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    host_link: HostLink
    host: Host
    interconnect: Interconnect
    cuda: CudaTarget | None = None
    tpu: TpuTarget | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def usable_hbm_bytes(self, memory_fraction: float | None = None) -> int:
        """The device memory that a program can have, in bytes.

        With `memory_fraction`, that share of `hbm_bytes`. Without: on a GPU `DEFAULT_MEMORY_FRACTION`
        (0.9, as with `XLA_PYTHON_CLIENT_MEM_FRACTION=.9`; jax's own default is 0.75); on a TPU what the
        compiler counts as available (it refuses larger programs).

        Raises:
            UserError: the fraction is not in (0, 1].
        """
        if memory_fraction is not None and not 0 < memory_fraction <= 1:
            raise UserError(f"the memory fraction {memory_fraction} is not in (0, 1]: write it like 0.9")
        if memory_fraction is None and self.tpu is not None:
            return self.tpu.available_hbm_bytes
        return int(self.hbm_bytes * (DEFAULT_MEMORY_FRACTION if memory_fraction is None else memory_fraction))

    def source(self, path: str) -> str | None:
        """Where the figure at a dotted path comes from: its own source, else that of the table it is in."""
        while path:
            if path in self.sources:
                return self.sources[path]
            path = path.rpartition(".")[0]
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers; the target of the other platform is left out."""
        data = dataclasses.asdict(self)
        data["flops_per_s"] = dict(self.flops_per_s)
        data["sources"] = dict(self.sources)
        data["host"]["memory_bytes_per_device"] = self.host.memory_bytes_per_device
        data["usable_hbm_bytes"] = self.usable_hbm_bytes()
        for target in ("cuda", "tpu"):
            if data[target] is None:
                del data[target]
        return _lists_for_tuples(data)


def _lists_for_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists_for_tuples(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
