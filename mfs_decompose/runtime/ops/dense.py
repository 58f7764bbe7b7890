"""Forms written out as fp32 matrices: for the reference, and for ops that have nothing better."""

from __future__ import annotations

from functools import lru_cache

import torch

from mfs_decompose.linalg.packing import unpack_bits
from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.runtime.resident_forms import TRITS, Csr, Ell, Form, LowRank, Packed


def to_dense(form: Form, rows: int) -> torch.Tensor:
    """The matrix of a form, fp32 [rows, I]; rows that `Rows` does not name are zero."""
    if isinstance(form, LowRank):
        return form.left.values().mT @ form.right.values()
    if isinstance(form, Ell):
        values = form.values()
        dense = values.new_zeros(rows, form.width)
        return dense.scatter_add_(1, form.columns.to(torch.int64), values)
    if isinstance(form, Packed):
        return unpack(form)
    if isinstance(form, Csr):
        values = form.values()
        counts = form.offsets.diff()
        at = torch.repeat_interleave(torch.arange(rows, device=counts.device), counts)
        dense = values.new_zeros(rows, form.width)
        dense[at, form.columns.to(torch.int64)] = values
        return dense
    values = form.values()
    if form.index is None:
        return values
    dense = values.new_zeros(rows, values.shape[1])
    dense[form.index.to(torch.int64)] = values
    return dense


def unpack(form: Packed) -> torch.Tensor:
    """The values of packed codes, fp32 [O, I]."""
    names = _codes_of_bytes(form.bits, form.codes.device)
    if names is None:
        codes = unpack_bits(form.codes, form.bits, form.width).to(torch.int32)
        values = form.levels[codes]
    else:
        table = form.levels[names]
        values = torch.nn.functional.embedding(form.codes.to(torch.int32), table).flatten(1)[:, : form.width]
    scales = form.scales.to(torch.float32)
    if scales.dim() == 1:
        return values * (scales if scales.numel() == 1 else scales.unsqueeze(1))
    whole = form.width // GROUP * GROUP
    if whole == form.width:
        return (values.view(-1, scales.shape[1], GROUP) * scales.unsqueeze(2)).flatten(1)
    return values * scales.repeat_interleave(GROUP, dim=1)[:, : form.width]


@lru_cache(maxsize=16)
def _codes_of_bytes(bits: int, device: torch.device) -> torch.Tensor | None:
    """The codes that each byte holds, int64 [256, codes]; None where codes cross bytes."""
    whole = torch.arange(256, device=device).unsqueeze(1)
    if bits == 0:
        return whole // torch.tensor([3**at for at in range(TRITS)], device=device) % 3
    if 8 % bits:
        return None
    return whole >> torch.arange(0, 8, bits, device=device) & ((1 << bits) - 1)
