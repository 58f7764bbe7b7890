from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.errors import UsageError
from mfs_decompose.units import format_bytes, format_duration, format_fraction, parse_bytes, parse_fraction


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("7", 7),
        ("7B", 7),
        ("80MB", 80_000_000),
        ("80 mb", 80_000_000),
        (" 1.5GB ", 1_500_000_000),
        (".5kB", 500),
        ("512MiB", 512 * 2**20),
        ("2TiB", 2 * 2**40),
    ],
)
def test_bytes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 XB", "1e9", "1,5GB", "5%", "1GB2", "inf", "nan", "0x10", "١GB"])
def test_what_is_not_bytes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected an amount of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"), [("5%", 0.05), ("0.05", 0.05), (" 100 % ", 1.0), ("1", 1.0), ("0.1%", 0.001)]
)
def test_shares_are_read(text: str, value: float) -> None:
    assert parse_fraction(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("text", ["", "%", "0", "0%", "101%", "1.01", "-5%", "nan", "nan%", "inf", "5%%", "5MB"])
def test_what_is_not_a_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a share"):
        parse_fraction(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (13_400_000, "13.4 MB"),
        (999_600, "1 MB"),
        (2_470_000_000, "2.47 GB"),
        (1_230_000_000_000, "1.23 TB"),
    ],
)
def test_bytes_are_written(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 999 * 10**12))
def test_written_bytes_read_back_within_half_a_percent(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.005 * count + 1


def test_fractions_are_written_as_percent() -> None:
    assert format_fraction(0.0498) == "4.98 %"
    assert format_fraction(1.0) == "100 %"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (8.24, "8.2 s"), (60, "1 min 00 s"), (185.4, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations_are_written(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
