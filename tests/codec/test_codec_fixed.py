"""Integer factors in bytes and back; what could round, or fill the memory, is refused."""

from __future__ import annotations

import pytest
import torch
from codec_entries import Stored, generator
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_decompose.codec.fixed import encode_fixed, open_fixed
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.fixed_point import FixedFactors, is_exact


def _random(rank: int, rows: int, columns: int, spread: float, seed: int = 1) -> FixedFactors:
    draw = generator(seed)
    sizes = torch.logspace(spread, 0, rank).unsqueeze(1) if rank else torch.ones(0, 1)
    sides = [(torch.randn(rank, length, generator=draw) * sizes).round().to(torch.int32) for length in (rows, columns)]
    return FixedFactors(sides[0], sides[1], tuple(-40 + k for k in range(rank)))


def _store(factors: FixedFactors) -> Stored:
    pieces: list[bytes] = []
    node = encode_fixed(factors, pieces.append)
    return Stored(node, b"".join(pieces))


def _equal(one: FixedFactors, other: FixedFactors) -> bool:
    return (
        torch.equal(one.left, other.left)
        and torch.equal(one.right, other.right)
        and one.exponents == other.exponents
        and one.left.dtype == other.left.dtype
    )


@settings(max_examples=30)
@given(st.integers(0, 4), st.integers(10, 40), st.integers(10, 30), st.floats(0, 3.5), st.integers(0, 9))
def test_factors_come_back(rank: int, rows: int, columns: int, spread: float, seed: int) -> None:
    factors = _random(rank, rows, columns, spread, seed)
    assert is_exact(factors)
    stored = _store(factors)
    assert stored.node.nbytes == len(stored.data)
    assert _equal(open_fixed(stored.node, stored.fetch, (rows, columns)), factors)


def test_the_node_survives_json() -> None:
    stored = _store(_random(3, 40, 31, 2.0))
    node = CodecNode.from_json(stored.node.to_json())
    assert _equal(open_fixed(node, stored.fetch, (40, 31)), _random(3, 40, 31, 2.0))


@pytest.mark.parametrize("scale", [1.0, 3.0, 20.0, 900.0])
def test_codes_cost_about_their_entropy(scale: float) -> None:
    draw = generator(2)
    sides = [(torch.randn(8, length, generator=draw) * scale).round().to(torch.int32) for length in (900, 700)]
    factors = FixedFactors(sides[0], sides[1], (0,) * 8)
    ideal = 8 * 1600 * (torch.log2(torch.tensor(scale)) + 2.0471) / 8  # the entropy of a rounded normal number
    assert _store(factors).node.nbytes < float(ideal) * 1.03 + 150


def test_directions_of_unlike_size_cost_their_own() -> None:
    small, mixed = _random(4, 600, 500, 0.0), _random(4, 600, 500, 3.0)
    bits = 8 * (_store(mixed).node.nbytes - _store(small).node.nbytes) / 1100
    assert 0.85 * (3 + 2 + 1) * 3.32 < bits < 1.15 * (3 + 2 + 1) * 3.32


def test_a_product_that_could_round_is_refused() -> None:
    stored = _store(_random(3, 40, 31, 2.0))
    blob = bytearray(stored.data)
    blob[0:2] = (300).to_bytes(2, "little")  # the first direction's exponent: far above the others
    with pytest.raises(ArtifactInvalid, match="could round"):
        open_fixed(stored.node, Stored(stored.node, bytes(blob)).fetch, (40, 31))


def test_a_rank_that_fills_the_memory_is_refused() -> None:
    stored = _store(_random(3, 40, 31, 2.0))
    for rank in (20, 4097, 1 << 40):
        with pytest.raises(ArtifactInvalid, match="of rank"):
            open_fixed(stored.with_params(rank=rank), stored.fetch, (40, 31))
    with pytest.raises(ArtifactInvalid):
        open_fixed(stored.with_params(rank=2), stored.fetch, (40, 31))
    with pytest.raises(ArtifactInvalid):
        open_fixed(stored.with_params(rank=None), stored.fetch, (40, 31))


def test_another_shape_is_refused() -> None:
    stored = _store(_random(3, 40, 31, 2.0))
    for shape in ((41, 31), (40, 30), (31, 40), (0, 31), (2, 2)):
        with pytest.raises(ArtifactInvalid):
            open_fixed(stored.node, stored.fetch, shape)


def test_arrays_of_another_kind_are_refused() -> None:
    stored = _store(_random(3, 40, 31, 2.0))
    for node in (
        stored.with_part("left", dtype="I8"),
        stored.with_part("left", shape=(1,)),
        stored.without_part("right"),
    ):
        with pytest.raises(ArtifactInvalid):
            open_fixed(node, stored.fetch, (40, 31))
    with pytest.raises(ArtifactInvalid):
        open_fixed(stored.node, lambda at, count: stored.fetch(at, count)[:-1], (40, 31))


@settings(max_examples=150)
@given(st.data())
def test_damage_is_refused_or_gives_exact_factors(data: st.DataObject) -> None:
    stored = _store(_random(3, 40, 31, 2.5))
    blob = bytearray(stored.data)
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = open_fixed(stored.node, Stored(stored.node, bytes(blob)).fetch, (40, 31))
    except ArtifactInvalid:
        return
    assert is_exact(found)
