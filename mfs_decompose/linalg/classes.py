"""Symbols sorted into a few classes by what both sides know, and put back.

How far a fine-tune moves a weight, counted in steps of the weight's format, depends on the weight's exponent: twice the
magnitude, half the steps. So differences are coded by classes of neighbouring exponents of the base. Four classes lose
little (on a 135M pair 13.9 % of the bytes instead of 13.2 % with a class an exponent), and then four neighbours make
one key of 8 bits: one radix sort, one gather and one scatter move four symbols at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest

import numpy as np
import numpy.typing as npt

from mfs_decompose.linalg.words import Words, word_type

CLASSES = 4
BLOCK = 1 << 18
"""Symbols sorted at a time; part of the format."""

_LANES = 4
_KEYS = np.arange(CLASSES**_LANES, dtype=np.uint8)
_NOTHING = memoryview(b"")
# Runs of one class among sorted fours, lane after lane: 64 of each class among the firsts, 16, 4 and 1 behind; the keys
# where they begin and end.
_RUN_EDGES = [np.arange(0, _KEYS.size + 1, CLASSES**lane) for lane in range(_LANES)]
_BEGIN, _END = (np.concatenate([edges[part] for edges in _RUN_EDGES]) for part in (slice(-1), slice(1, None)))
_LANE_EDGES = [0, *accumulate(len(edges) - 1 for edges in _RUN_EDGES)]

Symbols = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cuts:
    """Where the exponents in bits `shift` and up of a word, under `mask`, are cut: a class is how many of the
    ascending `above` an exponent exceeds."""

    shift: int
    mask: int
    above: tuple[int, ...]

    @property
    def classes(self) -> int:
        return len(self.above) + 1


@dataclass(frozen=True)
class Sorted:
    """Fours of a block in the order of their keys: the class of the first neighbour lowest, equal keys as they come.

    `bounds` says where each of the 256 keys begins, and where the last one ends.
    """

    order: Integers
    bounds: Integers

    def runs(self) -> Integers:
        """Lengths of the runs of one class, all of the firsts, then of the seconds, thirds and fourths: [85, class]."""
        lengths: Integers = (self.bounds[_END] - self.bounds[_BEGIN]).reshape(-1, CLASSES)
        return lengths


def padded(count: int) -> int:
    """Symbols of a block in all classes together: zeros of class 0 fill up the last four."""
    return -(-count // _LANES) * _LANES


def classify(base: Words, cuts: Cuts) -> Symbols:
    """The class of every word of a block, zeros behind; the next call of this thread overwrites it."""
    classes = _SCRATCH.classes[: padded(base.size)]
    inner, exceeds = classes[: base.size], _SCRATCH.exceeds[: base.size]
    classes[base.size if cuts.above else 0 :] = 0
    if cuts.above:
        # An exponent exceeds a cut where the magnitude, its bits and those below, reaches the next power of two.
        magnitudes = _SCRATCH.words(base.itemsize)[: base.size]
        np.bitwise_and(base, (cuts.mask + 1 << cuts.shift) - 1, out=magnitudes)
        np.greater_equal(magnitudes, (cuts.above[0] + 1) << cuts.shift, out=inner.view(np.bool_))
        for above in cuts.above[1:]:
            np.greater_equal(magnitudes, (above + 1) << cuts.shift, out=exceeds)
            np.add(inner, exceeds.view(np.uint8), out=inner)
    return classes


def sort_fours(classes: Symbols) -> Sorted:
    """Sort what `classify` gave, four at a time."""
    quads = classes.view("<u4")
    folded, shifted, key = (each[: quads.size] for each in (_SCRATCH.folded, _SCRATCH.shifted, _SCRATCH.key))
    np.right_shift(quads, 6, out=folded)
    np.bitwise_or(folded, quads, out=folded)
    np.right_shift(folded, 12, out=shifted)
    np.bitwise_or(folded, shifted, out=folded)
    np.copyto(key, folded, casting="unsafe")
    order = key.argsort(kind="stable")
    return Sorted(order, np.append(np.searchsorted(key, _KEYS, sorter=order), quads.size))


def gather(symbols: Symbols, block: Sorted, found: Sequence[list[memoryview]]) -> None:
    """Append the symbols of a block to those of their class in `found`: among the sorted fours those of the firsts,
    then of the seconds, thirds and fourths."""
    fours = symbols.view("<u4").take(block.order, mode="wrap")
    shifted = _SCRATCH.shifted[: fours.size]
    for lane in range(_LANES):
        np.right_shift(fours, 8 * lane, out=shifted)  # and a cast: faster than a step through bytes
        values = shifted.astype(np.uint8).data
        edges = block.bounds[:: CLASSES**lane].tolist()
        for at, pieces in enumerate(found):
            pieces += map(values.__getitem__, map(slice, edges[at::CLASSES], edges[at + 1 :: CLASSES]))


def scatter(streams: Sequence[memoryview], taken: Integers, block: Sorted) -> Symbols | None:
    """Undo `gather` for one block, from `taken[c]` symbols into the stream of each class, and move `taken` on.

    None where a stream ends too early. The next call of this thread overwrites what it gave.
    """
    lengths = block.runs()
    stops = taken + lengths.cumsum(axis=0)
    starts = stops - lengths
    taken[:] = stops[-1]
    if any(end > held for end, held in zip_longest(taken.tolist(), map(len, streams), fillvalue=0)):
        return None
    pieces = [_NOTHING] * lengths.size
    for at, (stream, first, last) in enumerate(zip(streams, starts.T.tolist(), stops.T.tolist(), strict=False)):
        pieces[at::CLASSES] = map(stream.__getitem__, map(slice, first, last))
    lanes = [np.frombuffer(b"".join(pieces[low:high]), np.uint8) for low, high in pairwise(_LANE_EDGES)]
    fours, wide = _SCRATCH.folded[: block.order.size], _SCRATCH.shifted[: block.order.size]
    np.copyto(fours, lanes.pop())
    while lanes:
        np.left_shift(fours, 8, out=fours)
        np.copyto(wide, lanes.pop())
        np.bitwise_or(fours, wide, out=fours)
    symbols = _SCRATCH.symbols[: fours.size * _LANES]
    symbols.view("<u4")[block.order] = fours
    return symbols


class _Scratch(threading.local):
    """Arrays of one block, kept by every thread: fresh ones cost more in page faults than in arithmetic."""

    def __init__(self) -> None:
        self.classes, self.exceeds = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.bool_)
        self.folded, self.shifted = np.empty(BLOCK // _LANES, "<u4"), np.empty(BLOCK // _LANES, "<u4")
        self.key = np.empty(BLOCK // _LANES, np.uint8)
        self.symbols = np.empty(BLOCK, np.uint8)
        self._bytes = np.empty(2 * BLOCK, np.uint8)

    def words(self, size: int) -> Words:
        """A block of words of `size` bytes; the same memory whatever the size."""
        if self._bytes.size < size * BLOCK:
            self._bytes = np.empty(size * BLOCK, np.uint8)
        return self._bytes[: size * BLOCK].view(word_type(size))


_SCRATCH = _Scratch()
