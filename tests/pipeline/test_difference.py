from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.pipeline.difference import Sums, add_block
from mfs_decompose.source.dtypes import torch_dtype

FLOATS = ["F64", "F32", "F16", "BF16"]
OTHERS = ["I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64", "BOOL"]
SMALL = ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"]
VALUES = st.lists(st.integers(0, 2**16 - 1), min_size=2, max_size=40)


def summed(a: torch.Tensor, b: torch.Tensor, cut: int | None = None) -> Sums:
    sums = Sums()
    cut = cut or max(1, a.shape[0])
    for start in range(0, a.shape[0], cut):
        add_block(sums, a[start : start + cut], b[start : start + cut])
    return sums


def bits(words: list[int], dtype: str) -> torch.Tensor:
    """Any bit pattern at all, as the dtype."""
    data = np.array(words, dtype=np.uint16).tobytes() * 8
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype(dtype))


@pytest.mark.parametrize("dtype", FLOATS + SMALL)
@given(one=VALUES, other=VALUES)
def test_any_bits_against_numpy(dtype: str, one: list[int], other: list[int]) -> None:
    size = min(len(one), len(other))
    a, b = bits(one[:size], dtype), bits(other[:size], dtype)
    found = summed(a, b, cut=5)
    x, y = a.to(torch.float64).numpy(), b.to(torch.float64).numpy()
    good = np.isfinite(x) & np.isfinite(y)
    words = [t.view(torch.uint8).numpy().reshape(t.numel(), -1) for t in (a, b)]
    assert found.changed == int((words[0] != words[1]).any(axis=1).sum())
    assert (found.elements, found.nonfinite) == (x.size, int((~good).sum()))
    with np.errstate(over="ignore", invalid="ignore"):
        x, y = x[good], y[good]
        norms = [float(np.sqrt((one * one).sum())) for one in (x - y, x, y)]
        largest = float(np.abs(x - y).max(initial=0.0))
        cosine = float((x * y).sum()) / (norms[1] * norms[2]) if norms[1] * norms[2] > 0 else None
    assert found.max_abs == (largest if math.isfinite(largest) else None)
    if norms[0] == 0:
        assert found.rel == 0
    elif 1e-150 < norms[1] < 1e150 and norms[0] < 1e150:
        assert found.rel == pytest.approx(norms[0] / norms[1], rel=1e-12)
    if cosine is not None and all(1e-150 < norm < 1e150 for norm in norms[1:]):
        slack = 1e-15 * (norms[1] / norms[2] + norms[2] / norms[1])
        assert found.cosine == pytest.approx(cosine, abs=1e-12 + slack)


@pytest.mark.parametrize("dtype", OTHERS)
def test_integers_and_bools(dtype: str) -> None:
    a = torch.tensor([0, 1, 1, 0, 1, 0, 0], dtype=torch.int64).to(torch_dtype(dtype))
    b = torch.tensor([0, 1, 0, 0, 1, 1, 0], dtype=torch.int64).to(torch_dtype(dtype))
    found = summed(a, b)
    assert (found.changed, found.max_abs, found.nonfinite) == (2, 1.0, 0)
    assert found.rel == pytest.approx(math.sqrt(2 / 3))
    assert found.cosine == pytest.approx(2 / 3)


def test_large_integers_differ_by_their_bits() -> None:
    """2^60 and 2^60 + 1 are one number in fp64, and two here."""
    found = summed(torch.tensor([2**60]), torch.tensor([2**60 + 1]))
    assert (found.changed, found.max_abs) == (1, 0.0)


def test_complex_numbers_are_two_numbers_and_one_element() -> None:
    a = torch.tensor([1 + 2j, 3 - 1j, complex(math.nan, 1)], dtype=torch.complex64)
    b = torch.tensor([1 + 2j, 3 + 1j, complex(math.nan, 2)], dtype=torch.complex64)
    found = summed(a, b)
    assert (found.elements, found.changed, found.nonfinite, found.max_abs) == (3, 2, 1, 2.0)


def test_another_dtype_with_the_same_values() -> None:
    a = torch.tensor([[1.5, -0.25], [math.nan, math.inf]], dtype=torch.bfloat16)
    found = summed(a, a.to(torch.float32))
    assert (found.changed, found.rel, found.max_abs, found.nonfinite) == (0, 0.0, 0.0, 2)
    assert found.cosine == pytest.approx(1)
    b = a.to(torch.float32)
    b[0, 1] += 2**-12
    assert summed(a, b).changed == 1
    assert summed(a, b).max_abs == 2**-12


def test_zeros_have_a_sign() -> None:
    found = summed(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.changed, found.max_abs, found.rel, found.cosine) == (1, 0.0, 0.0, 1.0)


def test_what_is_no_number_is_none() -> None:
    from_zero = summed(torch.zeros(3), torch.ones(3))
    assert (from_zero.rel, from_zero.cosine, from_zero.max_abs) == (None, None, 1.0)
    huge = summed(torch.tensor([1e200, 1e-3], dtype=torch.float64), torch.tensor([-1e200, 1e-3], dtype=torch.float64))
    assert (huge.rel, huge.cosine, huge.max_abs) == (None, None, 2e200)
    largest = torch.full((9,), 1.7e308, dtype=torch.float64)
    assert summed(largest, -largest, cut=2).max_abs is None
    many = torch.full((5000,), 1.2e154, dtype=torch.float64)  # each square fits, their sum does not
    assert (summed(many, many).cosine, summed(many, many / 2).rel) == (None, None)
    empty = summed(torch.zeros(0, 4), torch.zeros(0, 4))
    assert (empty.elements, empty.rel, empty.cosine, empty.max_abs) == (0, 0.0, None, 0.0)


@pytest.mark.parametrize("cut", [1, 7, 64, 1000])
def test_blocks_add_up(cut: int) -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(100, 33, generator=generator)
    b = torch.where(torch.rand(100, 1, generator=generator) < 0.5, a, a + 0.01)
    found, whole = summed(a, b, cut), summed(a, b)
    assert (found.changed, found.max_abs) == (whole.changed, whole.max_abs)
    assert found.rel == pytest.approx(whole.rel, rel=1e-14)
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0)))


def test_what_lies_in_another_order_is_read_in_ours() -> None:
    a = torch.arange(12.0).reshape(3, 4)
    assert summed(a.t().contiguous().t(), a).changed == 0
