"""Machines: their memory, rates and links, each figure with its source. Knows nothing of jax."""

from forebay.hardware.load import get_hardware, list_hardware, read_machines
from forebay.hardware.machine import (
    DEFAULT_MEMORY_FRACTION,
    CudaTarget,
    Hardware,
    Host,
    HostLink,
    Interconnect,
    TpuTarget,
)
from forebay.hardware.reached import IDEAL, Efficiency, Group, Reached

__all__ = [
    "DEFAULT_MEMORY_FRACTION",
    "IDEAL",
    "CudaTarget",
    "Efficiency",
    "Group",
    "Hardware",
    "Host",
    "HostLink",
    "Interconnect",
    "Reached",
    "TpuTarget",
    "get_hardware",
    "list_hardware",
    "read_machines",
]
