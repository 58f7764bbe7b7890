"""Where exponents are cut: never worse than any other cut, on the same counts."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg.classes import CLASSES
from mfs_decompose.linalg.cuts import _costs, _partition, choose_scheme


def bits(rows: list[list[int]]) -> float:
    sums = [sum(column) for column in zip(*rows, strict=True)]
    return -sum(count * math.log2(count / sum(sums)) for count in sums if count)


def cost(counts: list[list[int]], ends: list[int]) -> float:
    edges = [0, *ends, len(counts)]
    return sum(bits(counts[low:high]) for low, high in pairwise(edges))


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=1, max_size=7))
def test_no_partition_is_cheaper(counts: list[list[int]]) -> None:
    ends = _partition(_costs(np.array(counts)))
    inner = range(1, len(counts))
    others = [list(choice) for parts in range(CLASSES) for choice in combinations(inner, parts)]
    assert ends in others
    assert cost(counts, ends) <= min(cost(counts, other) for other in others) + 1e-9


def test_one_row_is_not_cut() -> None:
    assert _partition(_costs(np.array([[3, 1]]))) == []


@pytest.mark.parametrize("count", [1, 5, 30_000])
def test_larger_weights_move_fewer_steps_and_get_narrower_digits(count: int) -> None:
    draw = np.random.default_rng(1)
    values = draw.normal(0, 0.1, count).astype("<f4")
    moved = values + draw.normal(0, 1e-3, count).astype("<f4")
    base, own = ((each.view("<u4") >> 16).astype("<u2") for each in (values, moved))
    scheme = choose_scheme(own, base, 7, 255)
    assert len(scheme.widths) == scheme.cuts.classes <= CLASSES
    assert list(scheme.cuts.above) == sorted(set(scheme.cuts.above))
    assert scheme.aside == 0
    assert list(scheme.widths) == sorted(scheme.widths, reverse=True)
    assert scheme.cuts.classes == (CLASSES if count > 1000 else scheme.cuts.classes)


def test_noise_below_a_byte_stands_aside() -> None:
    draw = np.random.default_rng(2)
    values = draw.normal(0, 0.1, 9000).astype("<f4")
    own, base = (values + draw.normal(0, 1e-4, 9000).astype("<f4")).view("<u4"), values.view("<u4")
    scheme = choose_scheme(own, base, 23, 255)
    assert scheme.aside in (1, 2)
    assert choose_scheme(base, base, 23, 255).aside == 0
    foreign = draw.integers(0, 1 << 32, 9000, dtype=np.uint32)
    assert choose_scheme(foreign, base, 23, 255).aside == 3


def test_what_is_the_same_everywhere_is_one_class_of_single_bits() -> None:
    base = np.full(5000, 0x3F80, "<u2")
    scheme = choose_scheme(base, base, 7, 255)
    assert (scheme.cuts.above, scheme.aside, scheme.widths) == ((), 0, (1,))
