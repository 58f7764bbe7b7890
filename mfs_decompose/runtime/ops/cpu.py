"""Forms as they are: factors stay factors, codes are widened for one product and dropped again.

Each group of rows is a slice, so that no row is gathered, and what a row gets depends on its own group alone.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mfs_decompose.runtime.batch_plan import FEW_ROWS
from mfs_decompose.runtime.ops.dense import to_dense, unpack
from mfs_decompose.runtime.ops.factors import expand, pick, shrink
from mfs_decompose.runtime.ops.program import Part, Program, Taken, takes
from mfs_decompose.runtime.resident_forms import Csr, Ell, Form, LowRank, Packed, Rows

_BLOCK = 1 << 18  # elements of a packed matrix unpacked at a time: 1 MiB stays in the cache


class CpuOps:
    """Ops of `dispatch.Ops`, in plain torch but for programs."""

    name = "cpu"
    together = True
    takes = staticmethod(takes)
    program = Program

    def add(self, form: Form, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        few = x_TI.shape[0] <= FEW_ROWS and not y_TO.requires_grad  # no gradient passes through a kernel
        if few and isinstance(form, Taken) and takes(form):
            Program([Part(form, 0, x_TI.shape[0], 0, y_TO.shape[1])]).add(x_TI.contiguous(), y_TO)
        elif isinstance(form, LowRank):
            expand(form.left, shrink(form.right, x_TI), y_TO)
        elif isinstance(form, Ell):
            # A bag of columns a row, weighted: x^T is the table.
            y_TO += functional.embedding_bag(
                form.columns.to(torch.int32), x_TI.mT.contiguous(), mode="sum", per_sample_weights=form.values()
            ).mT
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
            expand(form.right, pick(form.left, ids_N), values_NI)
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
