"""Amounts as people write them in a recipe: a share, bytes, a cap that is either, or the drift to stay under."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from mfs_decompose.errors import UsageError
from mfs_decompose.units import format_bytes, format_fraction, parse_bytes, parse_fraction

# A bare `5` is far likelier a forgotten percent sign than five bytes.
_SMALLEST_BARE_BYTES = 1000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Budget:
    """A cap for each variant: a share of its checkpoint, or bytes. Exactly one of the two is set."""

    share: float | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        assert (self.share is None) != (self.nbytes is None)

    def cap(self, checkpoint_bytes: int) -> int:
        """The bytes this budget allows for a variant whose own checkpoint has `checkpoint_bytes`."""
        if self.nbytes is not None:
            return self.nbytes
        assert self.share is not None
        return int(self.share * checkpoint_bytes)

    def plain(self) -> float | int:
        """The value as JSON: a fraction, or whole bytes. `read_budget` reads it back."""
        if self.nbytes is not None:
            return self.nbytes
        assert self.share is not None
        return self.share

    def __str__(self) -> str:
        return format_bytes(self.nbytes) if self.nbytes is not None else format_fraction(self.share or 0.0)


TargetKind = Literal["kl", "ppl"]


@dataclass(frozen=True, slots=True)
class Target:
    """How far each variant may drift: `kl` in nats a token, `ppl` as `|ln ppl ratio|`, of which the upper end of the
    95 % interval must hold.
    """

    kind: TargetKind
    limit: float

    def plain(self) -> str:
        """The value as JSON and on the command line: `kl=0.001`. `read_target` reads it back."""
        return f"{self.kind}={self.limit!r}"

    def __str__(self) -> str:
        return self.plain()


def shown(value: object) -> str:
    """A value as an error quotes it: its repr, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_bytes(value: object) -> int:
    """Read an amount of bytes from YAML: a whole number, or text such as `2GB`.

    Raises:
        ValueError: the value is not an amount of bytes above 0.
    """
    if isinstance(value, str):
        count = _reading(parse_bytes, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        count = value
    else:
        raise ValueError(f"expected an amount of bytes such as 2GB, found {shown(value)}")
    if count <= 0:
        raise ValueError(f"expected an amount of bytes above 0, found {shown(value)}")
    return count


def read_share(value: object) -> float:
    """Read a share from YAML: a number above 0 and at most 1, or text such as `5%`.

    Raises:
        ValueError: the value is not a share.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"expected a share such as 5% or 0.05, found {shown(value)}")
    return _reading(parse_fraction, value if isinstance(value, str) else repr(value))


def read_budget(value: object) -> Budget:
    """Read `5%`, `0.05`, `80MB` or a whole number of bytes.

    Raises:
        ValueError: the value is neither a share nor bytes, or could be meant as both.
    """
    if isinstance(value, Budget):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"expected a budget such as 5% or 80MB, found {shown(value)}")
    text = str(value).strip()
    if text.endswith("%"):
        return Budget(share=read_share(text))
    if text[-1:].isalpha():
        return Budget(nbytes=read_bytes(text))
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"expected a budget such as 5% or 80MB, found {shown(value)}") from None
    if 0 < number <= 1:
        return Budget(share=number)
    if text.isdecimal() and int(text) >= _SMALLEST_BARE_BYTES:
        return Budget(nbytes=int(text))
    raise ValueError(f"expected a budget such as 5% or 80MB, found {shown(value)} (write {text}% or {text}B)")


def read_target(value: object) -> Target:
    """Read `kl=1e-3`, `ppl=0.001`, or a mapping of one of the two words to a number.

    Raises:
        ValueError: another word, or no number above 0.
    """
    if isinstance(value, Target):
        return value
    kind, limit = "", value
    if isinstance(value, str):
        kind, _, limit = value.partition("=")
    elif isinstance(value, Mapping) and len(value) == 1:
        ((kind, limit),) = value.items()
    kinds = [known for known in get_args(TargetKind) if known == str(kind).strip()]
    try:
        number = math.nan if isinstance(limit, bool) or not isinstance(limit, str | int | float) else float(limit)
    except (ValueError, OverflowError):
        number = math.nan
    if not kinds or not 0.0 < number < math.inf:
        raise ValueError(f"expected a target such as kl=1e-3 or ppl=0.001, found {shown(value)}")
    return Target(kinds[0], number)


def _reading(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except UsageError as error:
        raise ValueError(error.message) from None
