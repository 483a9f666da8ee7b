"""Sizes as people write them."""

import pytest

from forebay.errors import UserError
from forebay.units import format_bytes, format_gib, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096), ("0", 0), (4096, 4096), (1.5, 2), ("1 b", 1),
        ("1kB", 10**3), ("2 MB", 2 * 10**6), ("80GB", 80 * 10**9), ("1.5 TB", 15 * 10**11), ("3g", 3 * 10**9),
        ("1KiB", 2**10), ("1mib", 2**20), ("170GiB", 170 * 2**30), ("0.5TiB", 2**39), (".5GiB", 2**29),
        ("1e3", 1000), ("2.5e-1 GiB", 2**28),
    ],
)  # fmt: skip
def test_reading(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "-1GiB", -1, "1,5GB", "1 GiBs", "12 parsec", "1 2", "0x10", "nan", "inf"]
)
def test_what_is_not_a_size(text):
    with pytest.raises(UserError) as error:
        parse_bytes(text)
    assert "\n" not in str(error.value)
    assert repr(text) in str(error.value)


def test_printing():
    assert format_gib(170 * 2**30) == "170.00 GiB"
    assert format_gib(1536 * 2**30, 1) == "1,536.0 GiB"
    assert format_gib(-(2**29)) == "-0.50 GiB"
    assert [format_bytes(n) for n in (0, 1023, 2**10, 3 * 2**19, 2**30, -(2**31), 5 * 2**42)] == [
        "0 B", "1,023 B", "1.00 KiB", "1.50 MiB", "1.00 GiB", "-2.00 GiB", "20.00 TiB",
    ]  # fmt: skip
