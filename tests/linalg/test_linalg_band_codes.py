"""Codes of bands: coded and back, at the bytes that a plan counts on, and bytes that are none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.band_codes import code_bits, decode_codes, encode_codes, shares
from mfs_decompose.linalg.bands import RATE, RATE_LONG, WIDTHS
from mfs_decompose.linalg.midrise import Quantiser
from mfs_decompose.linalg.range_coder import OVERHEAD


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("bits", WIDTHS)
def test_models_are_even_and_fall_from_the_middle(bits: int, long: bool) -> None:
    whole = shares(bits, long)
    assert whole.shape == (1 << bits,) and int(whole.min()) > 0
    assert np.array_equal(whole, whole[::-1])
    upper = whole[1 << (bits - 1) :]
    assert np.all(np.diff(upper) <= 0) and upper[0] > upper[-1]


def test_models_are_those_of_the_format() -> None:
    """Written artifacts hang on these: the first and last shares of each width."""
    found = {(bits, long): shares(bits, long)[1 << (bits - 1) :] for bits in WIDTHS for long in (False, True)}
    assert {key: (int(half[0]), int(half[1]), int(half[-1])) for key, half in found.items()} == {
        (8, False): (1_048_576, 1_047_693, 1_104), (8, True): (1_048_576, 1_048_052, 17_958),
        (6, False): (1_048_576, 1_033_823, 928), (6, True): (1_048_576, 1_039_483, 13_940),
        (4, False): (1_048_576, 865_195, 4_818), (4, True): (1_048_576, 920_232, 27_096),
        (3, False): (1_048_576, 567_934, 26_471), (3, True): (1_048_576, 603_587, 38_145),
        (2, False): (1_048_576, 172_099, 172_099), (2, True): (1_048_576, 149_108, 149_108),
    }  # fmt: skip


@pytest.mark.parametrize("bits", WIDTHS)
def test_normal_directions_take_what_a_plan_gives_them(bits: int) -> None:
    directions = torch.randn(40, 1000, generator=torch.Generator().manual_seed(3))
    codes = Quantiser(directions, bits).codes()
    expected = code_bits(codes, bits, False) / codes.numel()
    assert expected == pytest.approx(RATE[bits] / 64, rel=0.03)
    assert 8 * len(encode_codes([(codes, bits)], False)) == pytest.approx(expected * codes.numel(), abs=8 * OVERHEAD)
    assert RATE[bits] / 64 < bits  # what the coder is for


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("bits", WIDTHS)
def test_the_commonest_codes_always_fit(bits: int, long: bool) -> None:
    """So that enlarging steps ends: from the shortest side that is coded."""
    rate = (RATE_LONG if long else RATE)[bits]
    codes = torch.full((1, 192), 1 << (bits - 1), dtype=torch.uint8)
    assert code_bits(codes, bits, long) / 8 + OVERHEAD <= math.ceil(192 * rate / 512)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(WIDTHS)), max_size=4),
    st.integers(1, 300),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_codes_come_back(bands: list[tuple[int, int]], length: int, long: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    codes = [
        (torch.randint(0, 1 << bits, (count, length), generator=draw).to(torch.uint8), bits) for count, bits in bands
    ]
    data = encode_codes(codes, long)
    promised = sum(code_bits(*band, long) for band in codes) / 8
    assert promised - 1 <= len(data) <= promised + OVERHEAD
    found = decode_codes(data, bands, length, long)
    assert len(found) == len(codes)
    for back, (given_, _) in zip(found, codes, strict=True):
        assert back.dtype == torch.uint8 and torch.equal(back, given_)


def test_bytes_that_are_no_codes_are_refused() -> None:
    codes = torch.randint(0, 4, (20, 300), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    data = encode_codes([(codes, 2)], False)
    with pytest.raises(ArtifactInvalid, match="at least"):
        decode_codes(data[:-1], [(20, 2)], 300, False)
    with pytest.raises(ArtifactInvalid, match="at least"):
        decode_codes(data, [(20, 8)], 300, False)
    with pytest.raises(ArtifactInvalid, match="at least"):  # before memory is asked for
        decode_codes(b"", [(1 << 20, 2)], 1 << 20, False)
    with pytest.raises(ArtifactInvalid, match="more words"):
        decode_codes(data + data, [(20, 2)], 300, False)
    assert decode_codes(b"", [], 300, False) == []
