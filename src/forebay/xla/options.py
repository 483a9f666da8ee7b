"""Compiler options for a training step.

What a step that offloads needs, and why, is in `docs/overlap.md`; that it was enough is read from
every compiled step (`forebay.xla.windows`), not taken for granted.
"""

import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay.xla.flags import flag_values, knows_flag
from forebay.xla.versions import DOUBLE_BUFFERING, compiler_before, distrusted_options

PROFILE_OPTION = "xla_gpu_pgle_profile_file_or_directory_path"
PIPELINING = "xla_gpu_enable_pipelined_host_offloading"
MEMORY_LIMIT = "xla_gpu_memory_limit_slop_factor"
TPU_PIPELINING = "xla_tpu_pipeline_memory_host_transfers"
TPU_SCHEDULING = "xla_tpu_use_aggressive_scheduling"
TPU_EARLY_STARTS = "xla_lhs_enable_release_start_policy"
TPU_GATHERS = "xla_tpu_all_gather_collective_matmul_mode"
TPU_SCATTERS = "xla_tpu_reduce_scatter_collective_matmul_mode"

_AUTOTUNING, _TRITON = "xla_gpu_autotune_level", "xla_gpu_enable_triton_gemm"
_OURS = {PROFILE_OPTION, _AUTOTUNING, _TRITON}
"""What the environment cannot set: a user's profile is within ours, and without a device kernels cannot be timed."""

_CHECKER_OPTION, _CHECKER_OFF = "xla_gpu_pgle_accuracy_checker", "PGLE_STRICTNESS_LEVEL_OFF"
"""Keeps XLA from warning of every instruction that the profile does not have."""

_WITHOUT = {
    "xla_gpu_enable_latency_hiding_scheduler": "collectives and copies do not overlap with arithmetic",
    DOUBLE_BUFFERING: "what is fetched is copied once more on the device",
    "xla_gpu_experimental_parallel_async_compute_limit": "copies between forward and backward pass wait for one another",
    PROFILE_OPTION: "copies from the host may wait until just before they are needed",
    TPU_SCHEDULING: "copies from the host begin only as early as the compiler thinks they take",
    TPU_EARLY_STARTS: "copies begin only as early as the compiler thinks they take",
    TPU_PIPELINING: "one layer's copies between forward and backward pass are exposed",
    TPU_GATHERS: "weights may be gathered in pieces where that is slower",
    MEMORY_LIMIT: "XLA counts host memory as device memory and may recompute to save it",
}
"""What is lost where a build does not have an option. Others are dropped in silence."""

_LONG_COPY_US = 1e5
"""The cost that the profile gives each copy, in microseconds.

XLA's scheduler takes kernels that are not in the profile for a few units each, whatever their size, so
that a copy's real duration would be nothing beside a layer of them. It must exceed a layer's whole
reckoning for a copy to start as early and end as late as data allows; beyond that it changes nothing.
"""

_LONGER_COPY_US = 1e7
"""The same where the profile has kernels' real times: then it must exceed a layer's, in any program."""

_PROFILED_COPIES = 512
"""Names of copies in the profile, of each kind: XLA numbers them, and a few per tensor and range of layers occur."""

_WRAPPED = ("wrapped_dynamic-slice", "wrapped_dynamic-update-slice")

_COPIES_AT_ONCE = 32
"""Copies between two loops that may be under way together: of every tensor of the two layers peeled off a loop."""

HOST_COUNTED = 3
"""How often HloRematerialization counts a buffer in host memory, at most. Llama 3.1 405B with 335.2 GiB on the host and
35.5 GiB of arguments and 25.2 GiB of temporaries on the device is 718.7 GiB to it, which is twice; DeepSeek-V3 with
178.7 GiB on the host and some 100 GiB of temporaries 555.1 GiB, 2.5 times."""

_NO_LIMIT = 1000
"""A memory limit, in percent, beyond that of any step, for when its bytes are not known."""


def compiler_options(
    platform: str,
    *,
    deviceless: bool,
    offloads: bool,
    memory_limit_percent: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Options for one compile, by flag name without the leading dashes.

    An option that the installed build does not have, or is known to get wrong, is left out, with a warning that
    says what is lost.

    Args:
        platform: "cuda", "gpu", "tpu" or "cpu".
        deviceless: whether the compiler has no device to time kernels on.
        offloads: whether the step moves anything to the host.
        memory_limit_percent: see the function of that name. When not given, a step that offloads is
            compiled without the scheduler's limit, and that it fits is not the compiler's concern; others under XLA's own.
        environ: the environment, `os.environ` when not given. What `XLA_FLAGS` and, for TPUs, `LIBTPU_INIT_ARGS` set
            is left to them, with a warning where that is not what would be chosen here; a profile is added to.

    Raises:
        WrongNumbersError: the installed build is known to get steps that offload wrong; see `xla.versions`.
    """
    environ = os.environ if environ is None else environ
    if platform in ("cuda", "gpu"):
        options = _gpu_options(deviceless, offloads, memory_limit_percent, environ)
    elif platform == "tpu":
        # in pieces, around a ring, only where libtpu is sure that it pays
        options: dict[str, Any] = {TPU_GATHERS: "post_spmd_conservative", TPU_SCATTERS: "post_spmd_conservative"}
        if offloads:
            # the loops over layers start each copy a layer ahead: the compiler is not to do it once more
            options |= {TPU_SCHEDULING: "ENABLED", TPU_EARLY_STARTS: True, TPU_PIPELINING: False}
    else:
        return {}
    lacking = {n: f"this build of XLA has no option {n}" for n in options if not knows_flag(platform, n)}
    distrusted = distrusted_options(platform) if offloads else {}
    for name, why in (lacking | distrusted).items():
        if options.pop(name, None) is not None and name in _WITHOUT:
            warnings.warn(f"{why}: {_WITHOUT[name]}", stacklevel=2)
    return _users_first(options, platform, environ)


def _users_first(options: Mapping[str, Any], platform: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The options without those that the user's environment sets."""
    found = {n: v for n, v in flag_values(platform, environ).items() if n in options and n not in _OURS}
    for name, value in found.items():
        if value.lower() != str(options[name]).lower():
            lost = f": {_WITHOUT[name]}" if name in _WITHOUT else ""
            warnings.warn(f"the environment sets {name}={value}, instead of {options[name]}{lost}", stacklevel=3)
    return {n: v for n, v in options.items() if n not in found}


def _gpu_options(
    deviceless: bool, offloads: bool, memory_limit_percent: int | None, environ: Mapping[str, str]
) -> dict[str, Any]:
    options: dict[str, Any] = {
        # collectives and copies overlap with arithmetic only under this scheduler
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # XLA's own all-reduce kernels abort the compiler at 33 to 64 devices (jax 0.12.0.1); NCCL's are used instead
        "xla_gpu_experimental_use_collective_kernels": "",
    }
    if deviceless:
        options[_AUTOTUNING] = 0
        if compiler_before("0.12"):  # with which products that no kernel was timed for do not compile to Triton's
            options[_TRITON] = False
    if memory_limit_percent or offloads:
        options[MEMORY_LIMIT] = memory_limit_percent or _NO_LIMIT
    if offloads:
        options |= {
            DOUBLE_BUFFERING: "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
            # copies that are outside of loops count as asynchronous kernels, of which 2 at a time are scheduled
            "xla_gpu_experimental_parallel_async_compute_limit": _COPIES_AT_ONCE,
            _CHECKER_OPTION: _CHECKER_OFF,
        }
        if profile := _profile(environ, {}, _LONG_COPY_US):
            options[PROFILE_OPTION] = profile
    return options


def variants(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The options, and those to try where copies are exposed under them, or wrong.

    First XLA's own pipelining of host copies, on top of that of `forebay.scan_layers`. What is fetched may have to be
    exchanged between devices before the next layer can use it, where its sharding is another than that of what was stored,
    and its copy then ends before the layer does; XLA's pipelining leaves the exchange in the next iteration, at the price of one
    more layer at either end of each loop. Then loops that are not double-buffered, in which what is fetched is copied once
    more on the device.
    """
    yield dict(options)
    if DOUBLE_BUFFERING in options:
        if may_pipeline("cuda"):
            yield {**options, PIPELINING: True}
        yield {k: v for k, v in options.items() if k != DOUBLE_BUFFERING}


def may_pipeline(platform: str) -> bool:
    """Whether XLA's own pipelining of host copies may be asked for: the build has it, and the user has not decided on it."""
    return knows_flag(platform, PIPELINING) and PIPELINING not in flag_values(platform, os.environ)


def with_profile(
    options: Mapping[str, Any], platform: str, costs_us: Mapping[str, float], environ: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """The options with a profile in which instructions take `costs_us` microseconds, and copies between device and host
    long. Costs in a profile of the user's own are kept. None where there can be no such profile.

    Args:
        options: those of `compiler_options` for the same platform.
        costs_us: by the names of instructions as the scheduler finds them.
    """
    if platform not in ("cuda", "gpu") or not knows_flag(platform, PROFILE_OPTION):
        return None
    profile = _profile(os.environ if environ is None else environ, costs_us, _LONGER_COPY_US)
    if profile is None:
        return None
    checker = {_CHECKER_OPTION: _CHECKER_OFF} if knows_flag(platform, _CHECKER_OPTION) else {}
    return {**options, **checker, PROFILE_OPTION: profile}


def profile_text(costs_us: Mapping[str, float]) -> str:
    """A `tensorflow.profiler.ProfiledInstructionsProto` as text."""
    return "".join(f'costs {{ name: "{name}" cost_us: {us:.10g} }}\n' for name, us in costs_us.items())


def memory_limit_percent(hbm_bytes: int, usable_bytes: int, argument_bytes: int, host_bytes: int) -> int:
    """XLA's `memory_limit_slop_factor` under which its limit is the device's memory, all that may be used of it, and not
    the host's with it.

    XLA's GPU compiler limits temporaries to that percentage of (80 % of HBM - arguments), and counts
    buffers in host memory among them (`xla/service/gpu/gpu_hlo_schedule.cc`; it recomputes what exceeds the
    limit, and the scheduler gives up overlap to keep it), up to `HOST_COUNTED` times where loops are pipelined. Here the
    limit becomes the memory that a program may use, less its arguments, plus that. Never below XLA's own 95.

    All arguments are bytes on one device.
    """
    base = memory_limit_bytes(hbm_bytes, argument_bytes, 100)
    if base <= 0:
        return _NO_LIMIT
    return max(95, round(100 * (usable_bytes - argument_bytes + HOST_COUNTED * host_bytes) / base))


def memory_limit_bytes(hbm_bytes: int, argument_bytes: int, percent: int) -> int:
    """What XLA lets temporaries take on a GPU, in bytes, host memory included, for a `memory_limit_slop_factor`."""
    return int((0.8 * hbm_bytes - argument_bytes) * percent / 100)


def _profile(environ: Mapping[str, str], costs_us: Mapping[str, float], copy_us: float) -> str | None:
    """The file of a profile (`tensorflow.profiler.ProfiledInstructionsProto` as text) with these costs, in which copies
    between device and host take `copy_us`.

    Costs that the user's own profile has come first and are kept. Other forms of profile than text
    cannot be added to: then it is left as it is.
    """
    text = ""
    if own := _users_profile(environ):
        try:
            text = Path(own).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            warnings.warn(
                f"the profile {own} is not a text file and is used as it is: {_WITHOUT[PROFILE_OPTION]}", stacklevel=4
            )
            return None
    known = set(re.findall(r'name:\s*"([^"]*)"', text))
    copies = {f"{kind}.{n}" if n else kind: copy_us for kind in _WRAPPED for n in range(_PROFILED_COPIES)}
    text += "\n" + profile_text({name: us for name, us in {**costs_us, **copies}.items() if name not in known})
    # one file for the same text: the path is part of the compiler's options, and so of its cache key
    path = Path(tempfile.gettempdir()) / f"forebay-profile-{os.getuid()}-{_digest(text)}.pbtxt"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    return str(path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _users_profile(environ: Mapping[str, str]) -> str | None:
    return flag_values("cuda", environ).get(PROFILE_OPTION)
