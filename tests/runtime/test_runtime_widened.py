"""Forms that were widened for speed give the products of those they came from."""

from __future__ import annotations

import warnings

import pytest
import torch

from mfs_decompose.runtime.ops.cpu import CpuOps
from mfs_decompose.runtime.ops.reference import ReferenceOps
from mfs_decompose.runtime.resident_forms import Csr, Factor, Form, LowRank, Rows, widen
from mfs_decompose.runtime.resident_read import _as_entries, _name_values

OUT, IN, RANK = 150, 192, 7


def factor(length: int, seed: int, *, half: bool, narrow: bool = True) -> Factor:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (RANK, length), generator=draw, dtype=torch.int8)
    groups = -(-length // 64) if narrow else 1
    return Factor(codes, 0.01 * torch.rand(RANK, groups, generator=draw) + 0.001, half)


def entries(named: bool, seed: int = 3) -> Csr:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, (OUT, IN), generator=draw).float() * (torch.rand(OUT, IN, generator=draw) < 0.1)
    values[5] = 0
    return _as_entries(0.5 * values, _name_values(0.5 * values) if named else None)


FORMS: dict[str, Form] = {
    "halves": LowRank(factor(OUT, 1, half=True), factor(IN, 2, half=True)),
    "scales": LowRank(factor(OUT, 1, half=False), factor(IN, 2, half=False, narrow=False)),
    "named entries": entries(named=True),
    "entries": entries(named=False),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_products_are_the_same(name: str, rows: int) -> None:
    form, wide = FORMS[name], widen(FORMS[name])
    x = torch.randn(rows, IN, generator=torch.Generator().manual_seed(rows))
    expected, found, narrow = (torch.ones(rows, OUT) for _ in range(3))
    ReferenceOps().add(form, x, expected)
    CpuOps().add(form, x, narrow)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CpuOps().add(wide, x, found)
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) < 1e-5 * scale > float((narrow - expected).abs().max())


@pytest.mark.parametrize("name", FORMS)
def test_transposed_products_and_rows_are_the_same(name: str) -> None:
    form, wide = FORMS[name], widen(FORMS[name])
    x, ids = torch.randn(3, OUT), torch.tensor([0, 5, OUT - 1, 5])
    for operation in ("add_transposed", "look_up"):
        expected, found = torch.zeros(3, IN), torch.zeros(3, IN)
        if operation == "look_up":
            expected, found = torch.zeros(4, IN), torch.zeros(4, IN)
            ReferenceOps().look_up(form, ids, OUT, expected)
            CpuOps().look_up(wide, ids, OUT, found)
        else:
            ReferenceOps().add_transposed(form, x, expected)
            CpuOps().add_transposed(wide, x, found)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_large_factors_are_widened_in_pieces_to_the_same_product() -> None:
    draw = torch.Generator().manual_seed(9)
    rank, length = 130, 2112  # more than one piece, the last one shorter
    sides = [
        Factor(
            torch.randint(-128, 128, (rank, n), generator=draw, dtype=torch.int8),
            0.01 * torch.rand(rank, -(-n // 64), generator=draw),
            True,
        )
        for n in (length, 1100)
    ]
    form = LowRank(*sides)
    x = torch.randn(2, 1100, generator=draw)
    expected, found = torch.zeros(2, length), torch.zeros(2, length)
    ReferenceOps().add(form, x, expected)
    CpuOps().add(form, x, found)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_what_would_become_as_large_as_weights_stays() -> None:
    rows = Rows(torch.tensor([1], dtype=torch.int32), torch.ones(1, IN, dtype=torch.int8), torch.ones(1), False)
    assert widen(rows) is rows
    wide = widen(FORMS["named entries"])
    assert isinstance(wide, Csr) and wide.columns.dtype == torch.int32 and wide.codes.dtype == torch.float32
