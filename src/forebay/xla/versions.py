"""Installed versions of the compiler, and what released ones are known to get wrong.

A build that is not in the table is not thereby right: every compile is checked for what these faults do to
it (`xla.invariants`), and a device run compares numbers before it trains (`train.parity`). The table is for
saying what is wrong before any time is spent.
"""

import dataclasses
import re
from importlib import metadata

from forebay.errors import UserError, WrongNumbersError

_PACKAGES = (
    "forebay", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-cuda13-pjrt", "jax-cuda12-pjrt",
    "nvidia-cudnn-cu13", "libtpu",
)  # fmt: skip
_GPU_COMPILERS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")

DOUBLE_BUFFERING = "xla_gpu_enable_while_loop_unrolling"


@dataclasses.dataclass(frozen=True)
class KnownFault:
    """What XLA for GPUs does wrong in the releases from `first` on and before `fixed`.

    Attributes:
        what: in a few words, what happens to a step that offloads.
        without: the compiler options without which it does not happen; none: whatever the options.
        source: where it was reported.
    """

    first: str
    fixed: str
    what: str
    without: tuple[str, ...]
    source: str


# 0.11.0 was seen to have both (`tests/xla/fixtures`), 0.11.1 and 0.12.0.1 to have neither; of 0.10.1 and 0.10.2 the
# trackers say that they carry the pass; 0.10.0 and older have not been compiled with.
KNOWN_FAULTS = (
    KnownFault(
        "0.10.1", "0.11.1",
        "gradients are wrong: the backward pass reads offloaded activations in the order of the forward pass, and "
        "double-buffered loops write two layers to one place", (),
        "openxla/xla#46231 and #47218",
    ),
    KnownFault(
        "0", "0.10.1",
        "pipelined copies in double-buffered loops may go to the place of another layer", (DOUBLE_BUFFERING,),
        "openxla/xla#39302",
    ),
)  # fmt: skip


def versions() -> dict[str, str]:
    """Installed versions of what a compile depends on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def distrusted_options(platform: str) -> dict[str, str]:
    """Options that a step which offloads must not have under the installed compiler, and why.

    Raises:
        WrongNumbersError: the installed compiler is known to get such steps wrong under any options.
    """
    if platform not in ("cuda", "gpu"):
        return {}
    return options_without(*_gpu_compiler())


def compiler_before(version: str) -> bool:
    """Whether the installed compiler for GPUs is of a release before `version`."""
    return _release(_gpu_compiler()[1]) < _release(version)


def _gpu_compiler() -> tuple[str, str]:
    """The package that brings XLA for GPUs, and its version."""
    installed = versions()
    return next(((p, installed[p]) for p in _GPU_COMPILERS if p in installed), ("jaxlib", installed["jaxlib"]))


def options_without(package: str, version: str) -> dict[str, str]:
    """`distrusted_options` of one version of the GPU compiler, which the package named brings.

    Raises:
        WrongNumbersError: as there.
    """
    found: dict[str, str] = {}
    for fault in KNOWN_FAULTS:
        if not _release(fault.first) <= _release(version) < _release(fault.fixed):
            continue
        if not fault.without:
            raise WrongNumbersError(
                f"{package} {version} must not offload: {fault.what} ({fault.source}); install {fault.fixed} or newer, or "
                f"offload nothing (for example placement=minimal)"
            )
        found |= dict.fromkeys(
            fault.without, f"{package} {version} is not trusted with it: {fault.what} ({fault.source})"
        )
    return found


def _release(version: str) -> tuple[int, ...]:
    """`"0.12.0.1"` and `"0.12.0.dev20260801"` as numbers to compare; what is not released counts as its release."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise UserError(f"{version!r} is no version of a package: reinstall jax")
    return tuple(int(n) for n in match[0].split("."))
