"""The fast ops against the slow oracle: every form, odd sizes, strange ranks, slices of wider outputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_families import few_rows

from mfs_decompose.errors import UsageError
from mfs_decompose.linalg.packing import pack_bits, packed_bytes
from mfs_decompose.runtime import nibbles
from mfs_decompose.runtime.nibbles import pack_nibbles
from mfs_decompose.runtime.ops import cpu, factors
from mfs_decompose.runtime.ops.cpu import CpuOps
from mfs_decompose.runtime.ops.dispatch import choose_ops
from mfs_decompose.runtime.ops.reference import ReferenceOps
from mfs_decompose.runtime.resident_forms import Csr, Ell, Factor, Form, LowRank, Packed, Rows, cut_rows

SIZES = st.integers(1, 140)


def draw_factor(data: st.DataObject, rank: int, length: int, draw: torch.Generator) -> Factor:
    kind = data.draw(
        st.sampled_from(["int8", "half", "int16", "float32", "bfloat16", "float16", "direction", "halves"])
    )
    if kind in ("float32", "bfloat16", "float16"):
        return Factor(torch.randn(rank, length, generator=draw).to(getattr(torch, kind)))
    limit, dtype = (128, torch.int8) if kind != "int16" else (3000, torch.int16)
    codes = torch.randint(-limit, limit, (rank, length), generator=draw, dtype=dtype)
    groups = 1 if kind in ("direction", "halves") else -(-length // 64)
    return Factor(codes, torch.rand(rank, groups, generator=draw) / limit, kind in ("half", "halves"))


def draw_form(data: st.DataObject, rows: int, columns: int, draw: torch.Generator) -> Form:
    kind = data.draw(st.sampled_from(["lowrank", "ell", "csr", "packed", "rows"]))
    if kind == "lowrank":
        rank = data.draw(st.integers(1, 9))
        return LowRank(draw_factor(data, rank, rows, draw), draw_factor(data, rank, columns, draw))
    if kind == "ell":
        steps = data.draw(st.integers(1, columns))
        index = torch.stack([torch.randperm(columns, generator=draw)[:steps] for _ in range(rows)])
        dtype = data.draw(st.sampled_from([torch.uint16, torch.int32]))
        if data.draw(st.booleans()):
            return Ell(index.to(dtype), torch.randn(rows, steps, generator=draw).to(torch.bfloat16), None, columns)
        codes = torch.randint(-127, 128, (rows, steps), generator=draw, dtype=torch.int8)
        scales = (torch.rand(-(-rows // 64), steps, generator=draw) / 127).to(torch.bfloat16)
        return Ell(index.to(dtype), codes, scales, columns)
    if kind == "csr":
        there = torch.rand(rows, columns, generator=draw) < data.draw(st.sampled_from([0.05, 0.5]))
        there[-1, 0] = True
        offsets = torch.nn.functional.pad(there.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
        index, count = there.nonzero()[:, 1].to(torch.int32), int(there.sum())
        if data.draw(st.booleans()):
            return Csr(offsets, index, torch.randn(count, generator=draw), None, columns)
        codes = torch.randint(0, 9, (count,), generator=draw, dtype=torch.uint8)
        return Csr(offsets, index.to(torch.uint16), codes, torch.randn(9, generator=draw), columns)
    if kind == "packed":
        bits = data.draw(st.integers(0, 8))
        count = 3 if bits == 0 else 1 << bits
        width = -(-columns // 5) if bits == 0 else packed_bytes(columns, bits)
        if bits == 0:
            codes = torch.randint(0, 243, (rows, width), generator=draw, dtype=torch.uint8)
        else:
            codes = pack_bits(torch.randint(0, count, (rows, columns), generator=draw).to(torch.uint8), bits)
        shape = data.draw(st.sampled_from([(1,), (rows,), (rows, -(-columns // 64))]))
        scales = torch.rand(shape, generator=draw).to(torch.bfloat16)
        return Packed(codes, bits, torch.randn(count, generator=draw), scales, columns)
    own = data.draw(st.booleans())
    count = data.draw(st.integers(1, rows))
    index = torch.randperm(rows, generator=draw)[:count].sort().values.to(torch.int32)
    if data.draw(st.booleans()):
        codes = torch.randint(-127, 128, (count, columns), generator=draw, dtype=torch.int8)
        return Rows(index, codes, torch.rand(count, generator=draw).to(torch.bfloat16) / 100, own)
    values = torch.randn(rows, columns, generator=draw)
    return Rows(None, values.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16]))), None, own)


@given(SIZES, SIZES, st.integers(1, 9), st.data())
def test_products(rows: int, columns: int, tokens: int, data: st.DataObject) -> None:
    """A few tokens go through compiled kernels; the same ones as many do not."""
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    form = draw_form(data, rows, columns, draw)
    x = torch.randn(tokens, columns, generator=draw)
    wide = torch.randn(tokens, rows + 5, generator=draw)
    answers = []
    for ops, few in ((ReferenceOps(), 0), (CpuOps(), 0), (CpuOps(), 9)):
        y = wide.clone()
        with few_rows(few):
            ops.add(form, x, y[:, 2 : 2 + rows])
        assert torch.equal(y[:, :2], wide[:, :2])
        assert torch.equal(y[:, 2 + rows :], wide[:, 2 + rows :])
        answers.append(y)
    for other in answers[1:]:
        assert torch.allclose(answers[0], other, rtol=1e-4, atol=1e-4 * (1 + float(answers[0].abs().max())))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 3), st.data())
def test_factors_in_pieces(rows: int, columns: int, tokens: int, data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    form = LowRank(draw_factor(data, 5, rows, draw), draw_factor(data, 5, columns, draw))
    x, y = torch.randn(tokens, columns, generator=draw), torch.randn(tokens, rows, generator=draw)
    answers = [y.clone(), y.clone()]
    ReferenceOps().add(form, x, answers[0])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(factors, "_PIECE", data.draw(st.sampled_from([1, 640, 1000])))
        patched.setattr(cpu, "FEW_ROWS", 0)
        CpuOps().add(form, x, answers[1])
    assert torch.allclose(answers[0], answers[1], rtol=1e-4, atol=1e-4 * (1 + float(answers[0].abs().max())))


@given(st.integers(1, 300), st.integers(1, 300), st.booleans(), st.data())
def test_nibbles_with_scales_of_groups(rows: int, columns: int, half: bool, data: st.DataObject) -> None:
    """As a vocabulary's factor has them, whole and in parts that begin inside of a group."""
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    sides = []
    for length in (rows, columns):
        codes = torch.randint(-8, 8, (7, length), generator=draw, dtype=torch.int8)
        groups = data.draw(st.sampled_from([1, -(-length // 64)]))
        sides.append(Factor(codes, torch.rand(7, groups, generator=draw), half))
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    ids = torch.randint(0, stop - start, (3,), generator=draw)
    plain = cut_rows(LowRank(*sides), start, stop)
    x, y, z = (torch.randn(3, length, generator=draw) for length in (columns, stop - start, columns))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nibbles, "LARGE", data.draw(st.sampled_from([0, 7 * max(rows, columns)])))
        patched.setattr(factors, "_PIECE", data.draw(st.sampled_from([1, 640, 1 << 18])))
        patched.setattr(cpu, "FEW_ROWS", data.draw(st.sampled_from([0, 64])))
        packed = cut_rows(pack_nibbles(LowRank(*sides)), start, stop)
        assert "int4" in packed.name
        answers = []
        for ops, form in ((ReferenceOps(), plain), (CpuOps(), packed), (ReferenceOps(), packed)):
            found = y.clone(), z.clone(), z.clone()
            ops.add(form, x, found[0])
            ops.add_transposed(form, y, found[1])
            ops.look_up(form, ids, stop - start, found[2])
            answers.append(found)
    for other in answers[1:]:
        for one, two in zip(answers[0], other, strict=True):
            assert torch.allclose(one, two, rtol=1e-4, atol=1e-4 * (1 + float(one.abs().max())))


@given(SIZES, SIZES, st.integers(1, 9), st.data())
def test_products_of_the_transpose(rows: int, columns: int, tokens: int, data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    form = draw_form(data, rows, columns, draw)
    if isinstance(form, Rows) and form.own:
        return
    x, y = torch.randn(tokens, rows, generator=draw), torch.randn(tokens, columns, generator=draw)
    answers = [y.clone(), y.clone()]
    ReferenceOps().add_transposed(form, x, answers[0])
    CpuOps().add_transposed(form, x, answers[1])
    assert torch.allclose(answers[0], answers[1], rtol=1e-4, atol=1e-4 * (1 + float(answers[0].abs().max())))


@given(SIZES, SIZES, st.data())
def test_rows_that_are_looked_up(rows: int, columns: int, data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    form = draw_form(data, rows, columns, draw)
    ids = torch.randint(0, rows, (data.draw(st.integers(1, 12)),), generator=draw)
    base = torch.randn(ids.numel(), columns, generator=draw)
    answers = [base.clone(), base.clone()]
    ReferenceOps().look_up(form, ids, rows, answers[0])
    CpuOps().look_up(form, ids, rows, answers[1])
    assert torch.allclose(answers[0], answers[1], rtol=1e-4, atol=1e-4 * (1 + float(answers[0].abs().max())))


def test_gradients_pass_where_they_are_asked_for() -> None:
    form = LowRank(Factor(torch.randn(2, 5)), Factor(torch.randn(2, 7)))
    x = torch.randn(3, 7, requires_grad=True)
    y = x @ torch.zeros(7, 5)
    CpuOps().add(form, x, y)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.allclose(x.grad, (form.left.values().mT @ form.right.values()).sum(dim=0).expand(3, 7), atol=1e-5)


def test_ops_are_chosen_by_name_or_device() -> None:
    assert choose_ops("auto", "cpu").name == "cpu"
    assert choose_ops("reference", "cpu").name == "reference"
    with pytest.raises(UsageError, match="found ops 'fast'"):
        choose_ops("fast", "cpu")
    with pytest.raises(UsageError, match="for tpu"):
        choose_ops("auto", "tpu")
