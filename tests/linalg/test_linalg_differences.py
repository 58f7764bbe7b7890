"""Differences in chunks against differences in one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linalg_matrices import generator

from mfs_decompose.linalg import differences
from mfs_decompose.linalg.differences import difference

_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8]


def slow(own: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if torch.float64 in (own.dtype, base.dtype) else torch.float32
    return (own.to(wide) - base.to(wide)).to(torch.float32)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("base_dtype", _DTYPES)
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(5, 7, 3), (1,), (0, 4), ()])
def test_every_pair_of_types(dtype: torch.dtype, base_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    own, base = (4 * torch.randn(shape, generator=generator(seed)) for seed in (1, 2))
    found = difference(own.to(dtype), base.to(base_dtype))
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert same_bits(found, slow(own.to(dtype), base.to(base_dtype)))


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 50), st.booleans())
def test_chunks_do_not_show(rows: int, columns: int, chunk: int, turned: bool) -> None:
    own, base = (torch.randn(rows, columns, generator=generator(seed)).to(torch.bfloat16) for seed in (3, 4))
    if turned:
        own, base = own.mT, base.mT
    before, differences._CHUNK = differences._CHUNK, chunk
    try:
        assert same_bits(difference(own, base), slow(own, base))
    finally:
        differences._CHUNK = before


def test_what_no_number_is() -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-40, 65504.0], dtype=torch.float32)
    own, base = values[:, None].expand(6, 6).contiguous(), values.expand(6, 6).contiguous()
    found, expected = difference(own, base), slow(own, base)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_the_weights_are_left_alone() -> None:
    own, base = torch.ones(3, 3), torch.full((3, 3), 0.25)
    assert difference(own, base).tolist() == [[0.75] * 3] * 3
    assert own.tolist() == [[1.0] * 3] * 3 and base.tolist() == [[0.25] * 3] * 3


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError):
        difference(torch.ones(3, 1), torch.ones(1, 3))
