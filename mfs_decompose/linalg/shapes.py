"""What follows from shapes alone: sketch widths, the choice of method, passes over a matrix. No tensor library needed.

Bytes must not depend on free memory or threads, so every choice that could change them is made here.
"""

from __future__ import annotations

POWER_ITERATIONS = 2
GROUP = 64
"""Values of a direction that share one scale, where it has scales."""

LONG_SIDE = 30_000
"""Longer sides of a matrix are vocabularies: the widest layers have 28,672 inputs, small vocabularies 32,000."""

CODED_FROM = 192
"""Values of a direction from which on its codes are range coded: for fewer, a last word costs what coding saves."""

_GRAM_SHARE = 0.4  # of the short side: from here on the sketch costs more than the Gram matrix


def sketch_width(rank: int, short: int) -> int:
    """Columns of the sketch for a rank: twice the rank and 16 more.

    The tails of real fine-tunes are flat. At rank 16 of one, the residual exceeds the least possible by 0.9 % (at worst
    1.7 % in a layer) with 32 columns, and by 0.4 % (0.7 %) with 48.
    """
    return min(2 * rank + 16, short)


def scales_of(length: int) -> int:
    """Scales that a banded direction has along a side: one for 64 values of a vocabulary, none for other sides."""
    return -(-length // GROUP) if length > LONG_SIDE else 0


def side_bits(length: int, other: int, bits: int) -> int:
    """Bits of a banded direction along one side: `bits`, or 8 across from a vocabulary, where they cost little."""
    return 8 if scales_of(other) and not scales_of(length) else bits


def is_coded(length: int) -> bool:
    """Whether codes along a side are range coded, or else packed."""
    return length >= CODED_FROM


def covered_rank(width: int) -> int:
    """The largest rank that a sketch of this width serves as well as one made for it."""
    return max(0, width - 16) // 2


def uses_gram(rank: int, short: int) -> bool:
    """Whether diagonalising the Gram matrix of the short side is cheaper than a sketch."""
    return sketch_width(rank, short) >= _GRAM_SHARE * short


def passes(shape: tuple[int, int], rank: int) -> int:
    """How often a blocked SVD reads an [M, N] matrix, the first time for its norm included."""
    tall = shape[0] >= shape[1]
    if tall and uses_gram(min(rank, shape[1]), shape[1]):
        return 2
    return POWER_ITERATIONS + 1 if tall else 2 * POWER_ITERATIONS + 1
