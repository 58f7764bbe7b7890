"""Forms as they are: factors stay factors, codes are widened for one product and dropped again.

Each group of rows is a slice, so that no row is gathered, and what a row gets depends on its own group alone.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch.nn import functional

from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.runtime.ops.dense import to_dense, unpack
from mfs_decompose.runtime.resident_forms import Csr, Ell, Factor, Form, LowRank, Packed, Rows

_PIECE = 1 << 17  # elements of a factor widened at a time: half a MiB
_BLOCK = 1 << 18  # elements of a packed matrix unpacked at a time: 1 MiB stays in the cache


class CpuOps:
    """Ops of `dispatch.Ops`, in plain torch."""

    name = "cpu"
    stacks = True

    def add(self, form: Form, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        if isinstance(form, LowRank):
            _add_low_rank(form, x_TI, y_TO)
        elif isinstance(form, Ell):
            # A bag of columns a row, weighted: x^T is the table.
            y_TO += functional.embedding_bag(
                form.columns.to(torch.int32), x_TI.mT.contiguous(), mode="sum", per_sample_weights=form.values()
            ).mT
        elif isinstance(form, Csr) and form.columns.dtype == torch.int32 and form.levels is None:
            y_TO += (_sparse(form, y_TO.shape[1]) @ x_TI.mT.contiguous()).mT
        elif isinstance(form, Csr):
            y_TO += functional.embedding_bag(
                form.columns.to(torch.int32),
                x_TI.mT.contiguous(),
                form.offsets,
                mode="sum",
                per_sample_weights=form.values(),
                include_last_offset=True,
            ).mT
        elif isinstance(form, Packed):
            for start, stop in _blocks(form):
                y_TO[:, start:stop].addmm_(x_TI, unpack(form.rows(start, stop)).mT)
        else:
            _add_rows(form, x_TI, y_TO)

    def add_transposed(self, form: Form, x_TO: torch.Tensor, y_TI: torch.Tensor) -> None:
        assert not (isinstance(form, Rows) and form.own), "its rows are inputs here: what they replace is not known"
        if isinstance(form, LowRank):
            self.add(form.transposed, x_TO, y_TI)
        elif isinstance(form, Packed):
            for start, stop in _blocks(form):
                y_TI.addmm_(x_TO[:, start:stop], unpack(form.rows(start, stop)))
        elif isinstance(form, Ell | Csr):
            y_TI.addmm_(x_TO, to_dense(form, x_TO.shape[1]))
        else:
            inputs = x_TO if form.index is None else x_TO[:, form.index.to(torch.int64)]
            y_TI.addmm_(inputs, form.values())

    def look_up(self, form: Form, ids_N: torch.Tensor, rows: int, values_NI: torch.Tensor) -> None:
        if isinstance(form, LowRank):
            values_NI.addmm_(_picked(form.left, ids_N).mT, form.right.values())
        elif isinstance(form, Ell):
            entries = form.values()[ids_N]
            values_NI.scatter_add_(1, form.columns.to(torch.int32)[ids_N].to(torch.int64), entries)
        elif isinstance(form, Csr):
            _look_up_entries(form, ids_N, values_NI)
        elif isinstance(form, Packed):
            scales = form.scales if form.scales.shape[0] == 1 else form.scales[ids_N]
            values_NI += unpack(Packed(form.codes[ids_N], form.bits, form.levels, scales, form.width))
        else:
            _look_up_rows(form, ids_N, values_NI)


def _add_low_rank(form: LowRank, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
    """Factors are widened a piece at a time, which stays in the cache; small ones in one.

    What scales a whole direction goes to the few numbers between the factors instead of into every code, the halves of
    such codes beside them: a pass over the codes costs as much as a product.
    """
    left, right = form.left, form.right
    inner_TR = None
    for start, stop in _pieces(right):
        x = x_TI if stop - start == x_TI.shape[1] else x_TI[:, start:stop]
        product = functional.linear(x, _unscaled(right, start, stop))
        inner_TR = product if inner_TR is None else inner_TR.add_(product)
    assert inner_TR is not None
    if right.half and right.by_direction:
        inner_TR.add_(x_TI.sum(dim=1, keepdim=True), alpha=0.5)
    for side in (right, left):
        if side.scales is not None and side.by_direction:
            inner_TR.mul_(side.scales.mT)
    for start, stop in _pieces(left):
        y = y_TO if stop - start == y_TO.shape[1] else y_TO[:, start:stop]
        y.addmm_(inner_TR, _unscaled(left, start, stop))
    if left.half and left.by_direction:
        y_TO.add_(inner_TR.sum(dim=1, keepdim=True), alpha=0.5)


def _picked(factor: Factor, at_N: torch.Tensor) -> torch.Tensor:
    """Some values of every direction, fp32 [R, N]."""
    nibbles = None if factor.nibbles is None else factor.nibbles[:, at_N]
    scales = factor.scales
    if scales is not None and not factor.by_direction:
        wide = factor.codes[:, at_N].to(torch.float32).add_(0.5 if factor.half else 0.0)
        return wide * scales[:, (at_N + factor.first) // GROUP]
    return Factor(factor.codes[:, at_N], scales, factor.half, nibbles=nibbles).values()


def _unscaled(factor: Factor, start: int, stop: int) -> torch.Tensor:
    """Values start..stop of every direction, fp32; the codes alone where scales and halves are of whole directions."""
    if factor.by_direction:
        return factor.columns(start, stop).whole_codes().to(torch.float32)
    whole = stop - start == factor.codes.shape[1]
    return (factor if whole else factor.columns(start, stop)).values()


def _pieces(factor: Factor) -> list[tuple[int, int]]:
    """Columns start..stop; one piece where nothing has to be widened, or not much."""
    rank, length = factor.rank, factor.codes.shape[1]
    if rank * length <= _PIECE or (factor.scales is None and factor.codes.dtype == torch.float32):
        return [(0, length)]
    step = max(GROUP, _PIECE // max(rank, 1) // GROUP * GROUP)
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _sparse(form: Csr, rows: int) -> torch.Tensor:
    """The form as torch's own sparse matrix; memory is shared."""
    _accept_beta()
    return torch.sparse_csr_tensor(form.offsets, form.columns, form.codes, (rows, form.width), check_invariants=False)


@cache
def _accept_beta() -> None:
    """torch says once that such matrices are beta: here, and not to a user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1), check_invariants=False)


def _blocks(form: Packed) -> list[tuple[int, int]]:
    rows = form.codes.shape[0]
    step = max(8, _BLOCK // max(form.width, 1))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _add_rows(form: Rows, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
    product = functional.linear(x_TI, form.values())
    if form.index is not None:
        index = form.index.to(torch.int64)
        if form.own:
            y_TO[:, index] = product
        else:
            y_TO.index_add_(1, index, product)
    elif form.own:
        y_TO.copy_(product)
    else:
        y_TO += product


def _look_up_entries(form: Csr, ids_N: torch.Tensor, values_NI: torch.Tensor) -> None:
    firsts, counts = form.offsets[ids_N], form.offsets.diff()[ids_N]
    rows = torch.repeat_interleave(torch.arange(ids_N.numel(), device=ids_N.device), counts)
    # The k-th entry of a row lies k behind its first.
    behind = torch.arange(rows.numel(), device=ids_N.device) - (counts.cumsum(0) - counts)[rows]
    at = firsts[rows] + behind
    values_NI[rows, form.columns[at.to(torch.int64)].to(torch.int64)] += form.values()[at.to(torch.int64)]


def _look_up_rows(form: Rows, ids_N: torch.Tensor, values_NI: torch.Tensor) -> None:
    at, known = ids_N, None
    if form.index is not None:
        index = form.index.to(ids_N.dtype)
        at = torch.searchsorted(index, ids_N).clamp(max=index.numel() - 1)
        known = index[at] == ids_N
    found = form.codes[at].to(torch.float32)
    if form.scales is not None:
        found = found * form.scales[at].to(torch.float32).unsqueeze(1)
    if form.own:
        values_NI.copy_(found if known is None else torch.where(known.unsqueeze(1), found, values_NI))
    else:
        values_NI += found if known is None else found * known.unsqueeze(1)
