"""Classes by exponent: sorting four symbols at a time is the same as asking every element for its class."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg.classes import CLASSES, Cuts, classify, gather, padded, scatter, sort_fours
from mfs_decompose.linalg.words import Words, word_type

_FIELDS = {1: (3, 15), 2: (7, 255), 4: (23, 255), 8: (52, 2047)}  # of a float's exponent, by size of word
_CUTS = {1: (4, 7, 9), 2: (121, 122, 124), 4: (120, 127), 8: (1020,)}


def weights(size: int, count: int, seed: int) -> Words:
    draw = np.random.default_rng(seed)
    if size == 1:
        return draw.integers(0, 256, count, dtype=np.uint8)
    values = draw.normal(0, 0.1, count)
    if size == 2:
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    return values.astype(f"<f{size}").view(word_type(size))


def slow_classes(base: Words, cuts: Cuts) -> list[int]:
    return [sum((int(w) >> cuts.shift & cuts.mask) > above for above in cuts.above) for w in base]


def slow_streams(symbols: list[int], classes: list[int]) -> list[list[int]]:
    """Fours sorted by their classes, the last one's counting most; then lane by lane."""
    fill = padded(len(symbols)) - len(symbols)
    pairs = list(zip([*symbols, *[0] * fill], [*classes, *[0] * fill], strict=True))
    fours = [pairs[at : at + 4] for at in range(0, len(pairs), 4)]
    fours.sort(key=lambda four: [class_ for _, class_ in reversed(four)])
    streams: list[list[int]] = [[] for _ in range(CLASSES)]
    for lane in range(4):
        for four in fours:
            streams[four[lane][1]].append(four[lane][0])
    return streams


def gathered(symbols: npt.NDArray[np.uint8], base: Words, cuts: Cuts) -> list[bytes]:
    found: list[list[memoryview]] = [[] for _ in range(cuts.classes)]
    classes = classify(base, cuts)
    filled = np.zeros(classes.size, np.uint8)
    filled[: symbols.size] = symbols
    gather(filled, sort_fours(classes), found)
    return [b"".join(pieces) for pieces in found]


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 300), st.integers(0, 1000), st.integers(0, 3))
def test_streams_are_those_of_the_definition(size: int, count: int, seed: int, keep: int) -> None:
    cuts = Cuts(*_FIELDS[size], _CUTS[size][:keep])
    base = weights(size, count, seed)
    symbols = np.random.default_rng(seed + 1).integers(0, 256, count, dtype=np.uint8)
    classes = slow_classes(base, cuts)
    assert classify(base, cuts)[:count].tolist() == classes
    streams = gathered(symbols, base, cuts)
    assert [list(stream) for stream in streams] == slow_streams(symbols.tolist(), classes)[: cuts.classes]
    taken = np.zeros(CLASSES, np.int64)
    back = scatter([memoryview(stream) for stream in streams], taken, sort_fours(classify(base, cuts)))
    assert back is not None and np.array_equal(back[:count], symbols) and not back[count:].any()
    assert taken.tolist() == [len(s) for s in streams] + [0] * (CLASSES - cuts.classes)


def test_a_stream_that_ends_too_early_is_noticed() -> None:
    cuts = Cuts(7, 255, (121, 122, 124))
    base = weights(2, 501, 1)
    streams = [memoryview(stream) for stream in gathered(np.zeros(501, np.uint8), base, cuts)]
    block = sort_fours(classify(base, cuts))
    for at in range(CLASSES):
        short = [stream[:-1] if number == at else stream for number, stream in enumerate(streams)]
        assert scatter(short, np.zeros(CLASSES, np.int64), block) is None
        assert scatter(streams, np.eye(CLASSES, dtype=np.int64)[at], block) is None
    assert scatter(streams[:3], np.zeros(CLASSES, np.int64), block) is None


def test_streams_of_two_blocks_follow_each_other() -> None:
    cuts = Cuts(7, 255, (121, 122, 124))
    bases = [weights(2, count, 7) for count in (37, 21)]
    symbols = [np.arange(base.size, dtype=np.uint8) for base in bases]
    parts = [gathered(each, base, cuts) for each, base in zip(symbols, bases, strict=True)]
    streams = [memoryview(first + second) for first, second in zip(*parts, strict=True)]
    taken = np.zeros(CLASSES, np.int64)
    for each, base in zip(symbols, bases, strict=True):
        back = scatter(streams, taken, sort_fours(classify(base, cuts)))
        assert back is not None and np.array_equal(back[: each.size], each)
    assert taken.tolist() == [len(stream) for stream in streams]


@pytest.mark.parametrize(
    ("words", "above", "classes"),
    [
        ([0, 0x8000, 0x007F, 0x0080, 0x80FF], (0,), [0, 0, 0, 1, 1]),  # zeros and subnormals, then exponent 1
        ([0x7F7F, 0x7F80, 0xFFC1], (253, 254), [1, 2, 2]),  # the largest finite, infinity, NaN
        ([0x7F80, 0x7F7F], (255,), [0, 0]),
    ],
)
def test_signs_and_mantissas_do_not_count(words: list[int], above: tuple[int, ...], classes: list[int]) -> None:
    assert classify(np.array(words, "<u2"), Cuts(7, 255, above))[: len(words)].tolist() == classes


def test_threads_do_not_share_scratch() -> None:
    cuts = Cuts(7, 255, (121, 122, 124))
    base = weights(2, 4001, 1)
    symbols = np.random.default_rng(2).integers(0, 256, base.size, dtype=np.uint8)
    expected = gathered(symbols, base, cuts)
    wrong: list[int] = []

    def work(number: int) -> None:
        other = weights(2, 4001, number)
        for _ in range(30):
            gathered(symbols, other, cuts)
            if gathered(symbols, base, cuts) != expected:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
