"""What a codec answers to a number of bytes, and how its one knob is set to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.frontier.work import Work
from benchmarks.rate_drift_rows import Decoded

Decode = Callable[[], Iterator[Decoded]]


@dataclass(frozen=True)
class Plan:
    """A codec set to a size.

    Attributes:
        knobs: what was set, for the table.
        decode: each tensor once, encoded and read back; what its bytes add up to is the size.
    """

    knobs: Mapping[str, Any]
    decode: Decode


Codec = Callable[[Work, Sequence[str], int], Plan | None]
"""Plans the deltas of the matrices named, for at most that many bytes, or for the nearest size it can reach.

None: it has no size near, and leaves the cell out.
"""


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number in low..high that fits, sizes rising with it; `low` where none does."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def shares(work: Work, names: Sequence[str], budget: int) -> dict[str, int]:
    """Each layer's part of the bytes, by its size: the rule of Delta-CoMe and ImPart.

    They give an MLP 1.45 times the rank of an attention matrix, which in the models they publish is the same ratio of
    bytes for each (11008 * 4096 / (11008 + 4096) over 4096 / 2 is 1.46).
    """
    total = work.stored_bytes(names)
    return {name: budget * work.stored_bytes([name]) // total for name in names}
