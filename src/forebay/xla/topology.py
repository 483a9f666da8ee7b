"""Devices that are not there: what XLA needs to compile for a machine on any computer.

The CUDA plugin and libtpu both offer compile-only devices; a `Mesh` over them and
`jit(...).lower(...).compile()` give the executable that the real machine would run.
"""

import contextlib
import importlib.util
import itertools
import math
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forebay.errors import UserError, missing_extra
from forebay.hardware import Hardware, TpuTarget
from forebay.xla.flags import check_xla_flags

if TYPE_CHECKING:
    from jaxlib._jax import Device

_TORUS_BLOCK = 4
"""From 64 chips on, 3D slices are built of 4x4x4 blocks (Google Cloud documentation, TPU v5p)."""

_SMALL_SHAPES = {
    2: ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    3: ((1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
}
"""Slices that can be had (Google Cloud documentation, TPU v5e and v5p), and two chips of a host."""

_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask where there is no TPU
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling takes no device, so several processes may do it at once
    # libtpu complains on standard error for each of these that it cannot find out
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def compile_only_devices(hardware: Hardware, count: int) -> "list[Device]":
    """`count` devices of a machine that need not be there, in XLA's order.

    A device is what jax shows as one: TPU v5p's two cores are one device, TPU7x's are two.

    Raises:
        UserError: the machine does not come in this number (names the nearest that it comes in), or
            `XLA_FLAGS` has a name that its compiler would end the process for.
        MissingExtraError: the compiler of its platform is not installed.
    """
    if hardware.cuda is not None:
        topology = gpu_topology(hardware, count)
        check_xla_flags((hardware.platform,))
        return _cuda_devices(hardware, topology)
    assert hardware.tpu is not None, "a machine has the target of its platform"
    shape = tpu_shape(hardware, count)
    check_xla_flags((hardware.platform,))
    return _tpu_devices(hardware.tpu, shape)


def gpu_topology(hardware: Hardware, count: int) -> str:
    """XLA's text for `count` GPUs: slices x hosts x devices per host. Up to a host any number; then whole hosts.

    Raises:
        UserError: beyond one host, a number that does not fill hosts.
    """
    per_host = hardware.host.devices
    if 1 <= count <= per_host:
        return f"1x1x{count}"
    if count < 1 or count % per_host:
        hosts = max(count // per_host, 1)
        nearest = sorted({1, per_host} if count < 1 else {hosts * per_host, (hosts + 1) * per_host})
        raise _impossible(hardware, count, nearest, f"hosts of {per_host}")
    return f"1x{count // per_host}x{per_host}"


def tpu_shape(hardware: Hardware, count: int) -> tuple[int, ...]:
    """The slice, in chips, that has `count` devices: the most cubic one where there are several.

    Raises:
        UserError: no slice has this number of devices.
    """
    assert hardware.tpu is not None, "only TPUs come in slices"
    shapes = _tpu_shapes(hardware.tpu)
    if count not in shapes:
        below = max((c for c in shapes if c < count), default=None)
        above = min((c for c in shapes if c > count), default=None)
        nearest = [c for c in (below, above) if c is not None]
        largest = "x".join(map(str, hardware.tpu.max_shape))
        raise _impossible(hardware, count, nearest, f"slices of up to {largest} chips")
    return shapes[count]


def _tpu_shapes(tpu: TpuTarget) -> dict[int, tuple[int, ...]]:
    """The shapes by their number of devices."""
    shapes = {math.prod(shape): shape for shape in _SMALL_SHAPES[tpu.dimensions]}
    if tpu.dimensions == 3:
        sides = [range(_TORUS_BLOCK, side + 1, _TORUS_BLOCK) for side in sorted(tpu.max_shape)]
        for shape in itertools.product(*sides):
            best = shapes.get(math.prod(shape))
            if list(shape) == sorted(shape) and (best is None or sum(shape) < sum(best)):
                shapes[math.prod(shape)] = shape
    limit = sorted(tpu.max_shape)
    return {
        chips * tpu.devices_per_chip: shape
        for chips, shape in shapes.items()
        if all(side <= longest for side, longest in zip(sorted(shape), limit, strict=True))
    }


def _impossible(hardware: Hardware, count: int, nearest: list[int], unit: str) -> UserError:
    choices = " or ".join(map(str, nearest))
    return UserError(f"{hardware.name} does not come in {count} devices but in {unit}: take {choices}")


def _cuda_devices(hardware: Hardware, topology: str) -> "list[Device]":
    if not any(_installed(f"jax_plugins.xla_cuda{version}") for version in (13, 12)):
        raise missing_extra("jax-cuda13-plugin", "aot", f"compiling for {hardware.name}")
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        hardware.name, platform="cuda", target_config=target_config(hardware), topology=topology
    ).devices


def _installed(package: str) -> bool:
    parent = package.rpartition(".")[0]
    return (not parent or _installed(parent)) and importlib.util.find_spec(package) is not None


def _tpu_devices(tpu: TpuTarget, shape: tuple[int, ...]) -> "list[Device]":
    if not _installed("libtpu"):
        raise missing_extra("libtpu", "aot", f"compiling for {tpu.topology}")
    from jax.experimental import topologies

    with _environment(_LIBTPU_ENVIRONMENT):
        return topologies.get_topology_desc(f"{tpu.topology}:{'x'.join(map(str, shape))}", platform="tpu").devices


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that are not set yet, set for a while."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def compute_capability(device: Any) -> tuple[int, int]:
    """A jax GPU's compute capability, (9, 0) for Hopper; (0, 0) of a device that has none."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def absent_gpu(lowered: Any) -> Any | None:
    """One of the GPUs that a `jax.stages.Lowered` is for; None where they are there or it is for something else."""
    client = lowered._lowering.compile_args.get("backend")
    return client.devices()[0] if client is not None and client.platform == "gpu" and _only_compiles(client) else None


def is_absent(device: Any) -> bool:
    """Whether a jax device can only be compiled for."""
    return _only_compiles(device.client)


def _only_compiles(client: Any) -> bool:
    return type(client).__name__ == "CompileOnlyPyClient"


def target_config(hardware: Hardware) -> str:
    """The GPU as a text `GpuTargetConfigProto`, the form in which XLA takes a GPU that is not there.

    The limits written out here are the same for all NVIDIA data-centre GPUs from A100 to GB300 (XLA's own
    files in `xla/backends/gpu/target_config/specs`), as are the versions, which decide what code the compiler
    may generate. `pcie_bandwidth` is the link to the host, whatever it is.
    """
    gpu = hardware.cuda
    assert gpu is not None, "only GPUs have a target config"
    major, minor = gpu.compute_capability
    feature = "ACCELERATED_FEATURES" if gpu.accelerated_features else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core_bytes}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_optin_bytes}
  core_count: {gpu.core_count}
  fpus_per_core: {gpu.fpus_per_core}
  clock_rate_ghz: {gpu.clock_ghz}
  l2_cache_size: {gpu.l2_cache_bytes}
  memory_bandwidth: {round(hardware.hbm_bytes_per_s)}
  device_memory_size: {hardware.hbm_bytes}
  pcie_bandwidth: {round(hardware.host_link.d2h_nominal_bytes_per_s)}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}{"a" if gpu.accelerated_features else ""}"
  name: "{gpu.device_name}"
  device_address_bits: 64
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.15.0"
  device_interconnect_info {{ active_links: {gpu.interconnect_links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 15 }}
device_description_str: "{gpu.device_name}"
"""
