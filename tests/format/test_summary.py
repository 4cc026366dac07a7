"""Figures as people read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardconv.format.summary import human


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"),
        (999_600_000, "1 GB"), (99_950_000, "100 MB"), (12_345, "12.3 kB"), (1_637_376_352, "1.64 GB"),
        (999_499_999_999, "999 GB"), (999_500_000_000, "1 TB"), (47_000_000_000_000, "47 TB"),
        (2_500_000_000_000_000, "2,500 TB"), (-999_600_000, "-1 GB"), (-12_345, "-12.3 kB"),
    ],
)  # fmt: skip
def test_bytes_are_told_in_three_digits(nbytes: int, text: str) -> None:
    """Decimal units, rounded first and named after, so that no unit is printed with a thousand of it."""
    assert human(nbytes) == text


@given(st.integers(0, 10**17))
def test_no_size_is_told_in_powers(nbytes: int) -> None:
    """Every number of bytes is told in plain digits, within half a percent of what it is."""
    number, unit = re.fullmatch(r"([\d.,]+) (B|kB|MB|GB|TB)", human(nbytes)).groups()
    value = float(number.replace(",", "")) * {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert abs(value - nbytes) <= 0.005 * nbytes
