"""The generator against SplitMix64 in plain Python integers, and its use as a stream that can be cut anywhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg import seeds
from mfs_decompose.linalg.seeds import random_bits16, random_matrix, stream_key

_MASK = (1 << 64) - 1
_KEYS = st.integers(0, _MASK)


def splitmix64(key: int, index: int) -> int:
    """Output `index` of SplitMix64 seeded with `key`, as Steele, Lea and Flood give it."""
    state = (key + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def slow_bits16(key: int, start: int, count: int) -> list[int]:
    return [(splitmix64(key, i // 4) >> (16 * (i % 4))) & 0xFFFF for i in range(start, start + count)]


def test_the_oracle_gives_the_published_numbers() -> None:
    # The five numbers that Rosetta Code and the reference implementation list for the seed 1234567.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [splitmix64(1234567, i) for i in range(5)] == published


@given(_KEYS, st.integers(0, 1 << 44), st.integers(0, 37))
def test_any_part_of_the_stream_equals_the_oracle(key: int, start: int, count: int) -> None:
    bits = random_bits16(key, start, count)
    assert bits.dtype == torch.int32
    assert bits.tolist() == slow_bits16(key, start, count)


@given(_KEYS, st.integers(0, 203), st.integers(0, 203))
def test_any_slice_equals_the_whole(key: int, one: int, other: int) -> None:
    start, stop = sorted((one, other))
    whole = random_bits16(key, 0, 203)
    assert torch.equal(random_bits16(key, start, stop - start), whole[start:stop])


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_the_size_of_the_inner_chunk_does_not_show(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    expected = random_bits16(99, 5, 1001)
    monkeypatch.setattr(seeds, "_CHUNK", chunk)
    assert torch.equal(random_bits16(99, 5, 1001), expected)


def test_a_stream_longer_than_a_chunk_goes_on() -> None:
    start = 4 * seeds._CHUNK - 6
    assert random_bits16(5, 0, start + 13)[start:].tolist() == slow_bits16(5, start, 13)


def test_every_lane_is_uniform() -> None:
    count = 1 << 18
    bits = random_bits16(stream_key(0, "test", "uniform"), 0, count).to(torch.float64)
    five_sigma = 5 * 65536 / math.sqrt(12 * count / 4)
    for lane in range(4):
        assert abs(float(bits[lane::4].mean()) - 32767.5) < five_sigma
    assert int(bits.min()) < 4 and int(bits.max()) > 65531


def test_keys_depend_on_seed_purpose_and_name() -> None:
    keys = {
        stream_key(seed, purpose, name)
        for seed in (0, 1, 10)
        for purpose in ("svd", "round")
        for name in ("model.a", "model.b", "")
    }
    assert len(keys) == 18
    assert all(0 <= key <= _MASK for key in keys)


def test_parts_of_a_key_do_not_run_together() -> None:
    assert stream_key(1, "1", "x") != stream_key(11, "", "x")
    assert stream_key(1, "ab", "c") != stream_key(1, "a", "bc")


def test_keys_stay_what_they_are() -> None:
    # Artifacts are restored with these: another number would change the restored bytes of all of them.
    assert stream_key(0, "round", "model.layers.0.mlp.up_proj.weight") == 0x66FED3CDE4C238EF


def test_matrices_have_the_values_of_the_stream_in_rows() -> None:
    matrix = random_matrix(77, 6, 5)
    expected = [(bits + 0.5) / 32768 - 1 for bits in slow_bits16(77, 0, 30)]
    assert matrix.dtype == torch.float32
    assert matrix.shape == (6, 5)
    assert matrix.flatten().tolist() == expected  # every one is exact in fp32


def test_a_matrix_is_uniform_on_the_open_interval() -> None:
    matrix = random_matrix(3, 400, 300).to(torch.float64)
    assert -1 < float(matrix.min()) < -0.999
    assert 0.999 < float(matrix.max()) < 1
    assert abs(float(matrix.mean())) < 5 / math.sqrt(3 * matrix.numel())
    assert abs(float(matrix.var()) - 1 / 3) < 0.01
    assert not bool((matrix == 0).any())


def test_columns_of_a_matrix_are_independent() -> None:
    matrix = random_matrix(8, 5000, 9).to(torch.float64)
    correlation = torch.corrcoef(matrix.mT) - torch.eye(9)
    assert float(correlation.abs().max()) < 5 / math.sqrt(5000)


def test_an_empty_matrix() -> None:
    assert random_matrix(1, 0, 7).shape == (0, 7)
    assert random_matrix(1, 7, 0).shape == (7, 0)
