"""Integers through the range coder and back, near their entropy, and damage refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.integer_coder import BUCKETS, coded_bits, decode_integers, encode_integers, to_buckets


def _slow_bucket(value: int) -> int:
    """Itself below 32, then sixteen buckets an octave."""
    if value < 32:
        return value
    octave = value.bit_length() - 1
    return (octave - 4) * 16 + (value >> (octave - 4))


_INTEGERS = st.integers(0, 40) | st.integers(0, 2**64 - 1) | st.integers(0, 63).map(lambda bit: 1 << bit)


@given(st.lists(_INTEGERS, max_size=60))
def test_buckets_are_floats_of_five_bits(values: list[int]) -> None:
    found = to_buckets(np.array(values, np.uint64))
    assert found.tolist() == [_slow_bucket(value) for value in values]


def test_the_largest_bucket() -> None:
    assert int(to_buckets(np.array([2**64 - 1], np.uint64))[0]) == BUCKETS - 1


def test_buckets_rise_with_the_integer() -> None:
    assert (np.diff(to_buckets(np.arange(100_000, dtype=np.uint64))) >= 0).all()


@given(st.lists(st.tuples(_INTEGERS, st.integers(0, 4)), max_size=80))
def test_integers_come_back(pairs: list[tuple[int, int]]) -> None:
    values = np.array([value for value, _ in pairs], np.uint64)
    classes = np.array([number for _, number in pairs], np.uint8)
    data = encode_integers(values, classes, 5)
    np.testing.assert_array_equal(decode_integers(data, classes, 5), values)


def _geometric(count: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    classes = draw.integers(0, 3, count).astype(np.uint8)
    mean = np.array([0.01, 2.0, 300.0])[classes]
    return draw.exponential(mean).astype(np.uint64), classes


def test_the_size_is_near_the_entropy() -> None:
    values, classes = _geometric(60_000)
    ideal = 0.0
    for number in range(3):
        counts = np.unique(values[classes == number], return_counts=True)[1]
        ideal += -(counts * np.log2(counts / counts.sum())).sum() / 8
    size = len(encode_integers(values, classes, 3))
    # The wide class has 300 integers and more: buckets share what the entropy of single integers would have to learn.
    assert ideal * 0.98 < size < ideal * 1.02
    estimate = coded_bits(to_buckets(values), classes, 3) / 8
    assert 0 < estimate < size


def test_a_class_of_one_value_costs_nothing() -> None:
    values, classes = np.zeros(100_000, np.uint64), np.zeros(100_000, np.uint8)
    assert len(encode_integers(values, classes, 1)) < 40
    values[5] = 1
    assert len(encode_integers(values, classes, 1)) < 50


def test_rare_values_cost_about_their_information() -> None:
    values = np.zeros(1 << 18, np.uint64)
    values[:: 1 << 12] = 1
    size = len(encode_integers(values, np.zeros(values.size, np.uint8), 1))
    share = 2.0**-12
    entropy = values.size * (-share * math.log2(share) - (1 - share) * math.log2(1 - share)) / 8
    assert size < entropy * 1.1 + 40


def test_classes_without_members_are_allowed() -> None:
    values, classes = np.array([7, 7, 90], np.uint64), np.array([1, 1, 3], np.uint8)
    np.testing.assert_array_equal(decode_integers(encode_integers(values, classes, 9), classes, 9), values)


def test_the_code_is_deterministic() -> None:
    values, classes = _geometric(5000)
    assert encode_integers(values, classes, 3) == encode_integers(values.copy(), classes.copy(), 3)


@settings(max_examples=200)
@given(st.data())
def test_damage_is_refused_or_decodes_to_something(data: st.DataObject) -> None:
    values, classes = _geometric(400)
    good = bytearray(encode_integers(values, classes, 3))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)) | st.just(len(good)))
    try:
        found = decode_integers(bytes(good[:cut]), classes, 3)
    except ArtifactInvalid:
        return
    assert found.dtype == np.uint64 and found.size == values.size


@pytest.mark.parametrize("data", [b"", b"\0" * 11, b"\0" * 12, b"\xff" * 40])
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactInvalid):
        decode_integers(data, np.zeros(9, np.uint8), 1)


def test_a_model_for_other_classes_is_refused() -> None:
    values, classes = _geometric(400)
    data = encode_integers(values, classes, 3)
    with pytest.raises(ArtifactInvalid):
        decode_integers(data, np.full(400, 3, np.uint8), 4)
    with pytest.raises(ArtifactInvalid):
        decode_integers(data, np.zeros(400, np.uint8), 2)


def test_a_model_that_inflates_is_refused() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(b"\0" * 50_000_000)
    data = len(bomb).to_bytes(4, "little") + bytes(8) + bomb
    with pytest.raises(ArtifactInvalid, match="models of 50000000 bytes"):
        decode_integers(data, np.zeros(9, np.uint8), 1)
