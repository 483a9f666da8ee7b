"""GPU kernels that this process has assembled before, for compiles that nothing will run.

Steps under different plans have most of their kernels in common, and turning these into machine code is much of XLA's
work. It can keep them in a file, in which they go by a fingerprint of the code and its launch. XLA does not lock
the file, so each process has one of its own for each kind of device, and one compile at a time uses it. What is run on a
device is compiled without.
"""

import functools
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.xla.flags import flag_values, knows_flag
from forebay.xla.topology import absent_gpu

KERNEL_CACHE = "xla_gpu_kernel_cache_file"
_in_use = threading.Lock()


@contextmanager
def kernel_cache(lowered: Any) -> Iterator[dict[str, str]]:
    """Compiler options under which a `jax.stages.Lowered` takes its kernels from those known and adds its own; none where it
    is to be compiled for devices that are there, or not for GPUs, or while another thread compiles."""
    kind = _kind_of_absent_gpus(lowered)
    if kind is None or not _in_use.acquire(blocking=False):
        yield {}
        return
    try:
        yield {KERNEL_CACHE: str(Path(_folder().name) / kind)}
    finally:
        _in_use.release()


def _kind_of_absent_gpus(lowered: Any) -> str | None:
    device = absent_gpu(lowered)
    if device is None:
        return None
    if not knows_flag("cuda", KERNEL_CACHE) or KERNEL_CACHE in flag_values("cuda", os.environ):
        return None
    return device.device_kind.replace(" ", "-")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="forebay-kernels-")
