"""What the devices and the host of this process are."""

import os
from pathlib import Path
from typing import Any

from forebay.errors import UserError
from forebay.hardware.load import list_hardware
from forebay.hardware.machine import Hardware, Host, HostLink, Interconnect

_CGROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_of(device: Any) -> Hardware | None:
    """The machine in forebay's table that a device is of; None when it is not in it."""
    kind = device.device_kind.lower().replace(" ", "").replace("lite", "e")
    kind = "tpuv5p" if kind == "tpuv5" else kind  # what jax calls it
    matches = [name for name in list_hardware() if name in kind or name.removeprefix("tpu") == kind.removeprefix("tpu")]
    return list_hardware()[max(matches, key=len)] if matches else None


def hardware_of(device: Any) -> Hardware:
    """The machine that a present device is.

    Raises:
        UserError: a kind of device that no machine of `forebay hardware` is.
    """
    if device.platform == "cpu":
        return cpu_hardware()
    machine = machine_of(device)
    if machine is None:
        raise UserError(
            f"no machine is known for devices of kind {device.device_kind!r}, so there is nothing to plan with: describe it in "
            f"a TOML file (FOREBAY_HARDWARE), or give --placement"
        )
    return machine


def cpu_hardware() -> Hardware:
    """This computer's processor as a device: its memory is the host's, so nothing is gained by moving anything.

    Its rates are round figures of one core's order; on a CPU plans are not about time.
    """
    memory, source = available_host_bytes()
    return Hardware(
        name="cpu",
        title="this computer's processor",
        platform="cpu",
        hbm_bytes=memory,
        hbm_bytes_per_s=2e10,
        flops_per_s={"bf16": 1e11},
        host_link=HostLink("none: host memory is device memory", 0.0, 0.0),
        host=Host(memory, 1, 1),
        interconnect=Interconnect("memory", 1, 1e10, 1e10),
        sources={"hbm_bytes": source, "hbm_bytes_per_s": "assumed", "flops_per_s": "assumed"},
    )


def available_host_bytes() -> tuple[int, str]:
    """The memory that this process may have, in bytes, and what says so: the machine or its control group."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    best = (total, "the machine's memory")
    for file in _CGROUP_FILES:
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < best[0]:
            best = (int(text), f"the limit of its control group, {file}")
    return best
