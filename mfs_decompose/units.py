"""Bytes, fractions and durations, read from people and written for people.

Bytes are integers. `MB` is 10^6 and `MiB` is 2^20. A ratio is a fraction: `5%` reads as 0.05.
"""

from __future__ import annotations

import re

from mfs_decompose.errors import UsageError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Read `1.5GB`, `80 MB`, `512MiB` or a plain number of bytes.

    Raises:
        UsageError: the text is not an amount of bytes.
    """
    match = _NUMBER.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"expected an amount of bytes such as 80MB or 1.5GiB, found {text!r}")
    return int(float(match[1]) * unit)


def parse_fraction(text: str) -> float:
    """Read `5%` or `0.05` as 0.05.

    Raises:
        UsageError: the text is not a fraction above 0 and at most 1.
    """
    body = text.strip()
    percent = body.endswith("%")
    try:
        value = float(body[:-1] if percent else body)
    except ValueError:
        raise UsageError(f"expected a share such as 5% or 0.05, found {text!r}") from None
    value = value / 100 if percent else value
    if not 0 < value <= 1:
        raise UsageError(f"expected a share above 0 and at most 100%, found {text!r}")
    return value


def format_bytes(count: int) -> str:
    """Write bytes with three significant digits, in decimal units: `13.4 MB`."""
    size = float(count)
    if abs(size) < 1000:
        return f"{count} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
    size /= 1000
    return f"{size:.3g} TB" if size < 999.5 else f"{size:.0f} TB"


def format_fraction(value: float) -> str:
    """Write a fraction as a percentage with three significant digits: `4.98 %`."""
    return f"{value * 100:.3g} %"


def format_duration(seconds: float) -> str:
    """Write a duration as `8.2 s`, `3 min 05 s` or `2 h 10 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
