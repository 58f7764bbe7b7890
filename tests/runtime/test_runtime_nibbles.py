"""Directions of few bits, two in a byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.runtime import nibbles
from mfs_decompose.runtime.nibbles import pack_nibbles, spread
from mfs_decompose.runtime.ops.cpu import CpuOps
from mfs_decompose.runtime.resident_forms import Factor, LowRank, Rows, cut_rows, move

OUT, IN = 37, 21


def factors(rank: int, seed: int, *, half: bool = True, small: int = 0, out: int = OUT, width: int = IN) -> LowRank:
    """Codes of 8 bits, the last `small` directions of 4."""
    draw = torch.Generator().manual_seed(seed)
    sides = []
    for length in (out, width):
        codes = torch.randint(-128, 128, (rank, length), generator=draw, dtype=torch.int8)
        codes[rank - small :] = codes[rank - small :] >> 4
        sides.append(Factor(codes, 0.003 * torch.rand(rank, 1, generator=draw), half))
    return LowRank(*sides)


@pytest.fixture
def packs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nibbles, "LARGE", 0)


@given(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.integers(0, 3))
def test_nibbles_hold_the_same_values(whole: int, small: int, half: bool, which: int) -> None:
    form = factors(whole + small, 1, half=half, small=small)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nibbles, "LARGE", (0, (whole + small) * (IN + 1), 1 << 20, (whole + small) * OUT)[which])
        packed = pack_nibbles(form)
    assert isinstance(packed, LowRank) and packed.left.rank == packed.right.rank == whole + small
    if which in (0, 3) and small > 1:
        assert packed.left.nibbles is not None and packed.left.nibbles.shape[0] == small // 2
        assert (packed.right.nibbles is None) == (which == 3)
    expected = form.left.values().mT @ form.right.values()
    assert torch.allclose(packed.left.values().mT @ packed.right.values(), expected, atol=1e-4)
    assert pack_nibbles(packed) is packed


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_side_is_packed_where_the_other_has_8_bits(packs_all: None, side: str) -> None:
    """As across from a vocabulary."""
    wide, few = factors(9, 2), factors(9, 3, small=9)
    form = LowRank(few.left, wide.right) if side == "left" else LowRank(wide.left, few.right)
    packed = pack_nibbles(form)
    assert isinstance(packed, LowRank)
    own, other = (packed.left, packed.right) if side == "left" else (packed.right, packed.left)
    assert own.nibbles is not None and own.nibbles.shape[0] == 4
    assert other.nibbles is None and other.codes.shape[0] == 9
    expected = form.left.values().mT @ form.right.values()
    assert torch.allclose(packed.left.values().mT @ packed.right.values(), expected, atol=1e-4)


def test_what_is_not_of_small_integers_is_not_packed(packs_all: None) -> None:
    form = factors(6, 1, small=6)
    for other in (
        LowRank(Factor(torch.randn(6, OUT)), form.right),
        factors(6, 2),
        Rows(None, torch.ones(2, IN), None, False),
    ):
        assert pack_nibbles(other) is other


def test_packed_forms_are_cut_moved_named_and_looked_up(packs_all: None) -> None:
    form = factors(7, 3, small=5)
    packed = pack_nibbles(form)
    assert isinstance(packed, LowRank) and packed.name == "low rank int4/int8"
    assert pack_nibbles(factors(4, 3, small=4)).name == "low rank int4"
    assert sum(one.nbytes for one in packed.tensors()) == 5 * (OUT + IN) + 2 * 4 * 7
    dense = form.left.values().mT @ form.right.values()
    part = cut_rows(move(packed, "cpu"), 5, 20)
    ids = torch.tensor([3, 0, 14])
    y, z = torch.zeros(3, IN), torch.zeros(3, 15)
    CpuOps().look_up(part, ids, 15, y)
    assert torch.allclose(y, dense[5:20][ids], atol=1e-4)
    x = torch.randn(3, IN)
    CpuOps().add(part, x, z)
    assert torch.allclose(z, x @ dense[5:20].mT, atol=1e-3)


def test_spread_codes_are_sixteenfold(packs_all: None) -> None:
    form = factors(6, 4, small=4)
    packed = pack_nibbles(form)
    assert isinstance(packed, LowRank) and packed.left.nibbles is not None
    wide = spread(packed.left.codes, packed.left.nibbles)
    assert torch.equal(wide[:2], form.left.codes[:2]) and torch.equal(wide[2:], form.left.codes[2:] * 16)
