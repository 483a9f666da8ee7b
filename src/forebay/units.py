"""Reading and printing sizes. Bytes are printed in GiB, links in GB/s."""

import math
import re
from fractions import Fraction

from forebay.errors import UserError

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB,
}  # fmt: skip


def parse_bytes(text: str | int | float) -> int:
    """A number of bytes from `170GiB`, `1.5 TB`, `4096`. Units are decimal unless they carry an `i`.

    Raises `UserError` for anything else, and for negative sizes.
    """
    if isinstance(text, int | float):
        if not math.isfinite(text):
            raise UserError(f"cannot read {text!r} as a size: write it like 170GiB, 80GB or a number of bytes")
        value, unit = Fraction(text), ""
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        if match is None or match[2].lower() not in _UNITS:
            raise UserError(f"cannot read {text!r} as a size: write it like 170GiB, 80GB or a number of bytes")
        value, unit = Fraction(match[1]), match[2].lower()
    if value < 0:
        raise UserError(f"a size cannot be negative: {text!r}")
    return round(value * _UNITS[unit])


def format_gib(num_bytes: float, digits: int = 2) -> str:
    """`num_bytes` as GiB, the unit of machines and of full-size models."""
    return f"{num_bytes / GiB:,.{digits}f} GiB"


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` in the largest binary unit that keeps it at or above one."""
    for unit, size in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:,.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration in s, ms or us, three digits after the point."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:,.3f} {unit}"
    return f"{seconds / 1e-6:,.0f} us"


def format_count(count: float) -> str:
    """A number of parameters or tokens as people say it: 8.03 B, 860.9 M."""
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"
