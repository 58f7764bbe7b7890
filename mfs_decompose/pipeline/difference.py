"""How far two blocks of numbers are from each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Sums:
    """What adds up over the blocks of two tensors: sums of squares of A - B, A and B, and counts of elements."""

    difference: list[float] = field(default_factory=list)
    a: list[float] = field(default_factory=list)
    b: list[float] = field(default_factory=list)
    elements: int = 0
    changed: int = 0
    nonfinite: int = 0
    largest: float = 0.0

    @property
    def max_abs(self) -> float | None:
        return _finite(self.largest)

    @property
    def squares(self) -> tuple[float, float]:
        """||A - B||^2 and ||A||^2."""
        return _total(self.difference), _total(self.a)

    @property
    def rel(self) -> float | None:
        """||A - B|| / ||A||; None where A is zero and B is not."""
        difference, a = self.squares
        if difference == 0.0:
            return 0.0
        return _finite(math.sqrt(difference) / math.sqrt(a)) if 0.0 < a < math.inf else None

    @property
    def cosine(self) -> float | None:
        """(A, B) / (||A|| ||B||), by the norms alone: 2 (A, B) = ||A||^2 + ||B||^2 - ||A - B||^2."""
        (difference, a), b = self.squares, _total(self.b)
        scale = math.sqrt(a) * math.sqrt(b)
        if not scale > 0.0 or not math.isfinite(scale):
            return None
        return _finite(min(1.0, max(-1.0, (a + b - difference) / 2 / scale)))


def add_block(sums: Sums, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add two blocks of one shape, of any dtypes.

    Of one dtype, elements differ when their bits do; of two, when their values do (a NaN is a NaN).
    """
    import torch

    count = a.numel()
    if not count:
        return
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    same_dtype = a.dtype == b.dtype
    sums.elements += count
    x = _wide(a)
    if same_dtype and torch.equal(_words(a), _words(b)):
        y, differs = x, None
    else:
        y = _wide(b)
        differs = _words(a) != _words(b) if same_dtype else _any(x != y, count) & ~_any(x.isnan() & y.isnan(), count)
    finite = torch.isfinite(x) & torch.isfinite(y)
    if not bool(finite.all()):
        sums.nonfinite += int(_any(~finite, count).sum())
        x, y = torch.where(finite, x, 0.0), torch.where(finite, y, 0.0)
    sums.a.append(_squared(x))
    sums.b.append(_squared(y))
    if differs is not None:
        delta = x - y
        sums.changed += int(differs.sum())
        sums.largest = max(sums.largest, float(delta.abs().max()))
        sums.difference.append(_squared(delta))


def _words(values: torch.Tensor) -> torch.Tensor:
    """The bits, as integers."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(kinds[values.element_size()])


def _wide(values: torch.Tensor) -> torch.Tensor:
    """fp64; a complex number is two of them."""
    import torch

    return (torch.view_as_real(values).reshape(-1) if values.is_complex() else values).to(torch.float64)


def _any(flags: torch.Tensor, count: int) -> torch.Tensor:
    """One flag an element, also where an element is two numbers."""
    return flags.reshape(count, -1).any(dim=1)


def _squared(values: torch.Tensor) -> float:
    """Infinite where the squares of large F64 do not fit."""
    from mfs_decompose.linalg.sums import squared_norm

    try:
        return squared_norm(values)
    except OverflowError:
        return math.inf


def _total(parts: list[float]) -> float:
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
