"""The slow oracle: every form as a dense fp32 matrix, one product a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mfs_decompose.runtime.ops.dense import to_dense
from mfs_decompose.runtime.ops.program import Part, Program
from mfs_decompose.runtime.resident_forms import Form, Rows


class ReferenceOps:
    """Ops of `dispatch.Ops`."""

    name = "reference"
    together = False

    def takes(self, form: Form) -> bool:
        return False

    def program(self, parts: Sequence[Part]) -> Program:
        raise AssertionError("it takes no form")

    def add(self, form: Form, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        if isinstance(form, Rows) and form.own:
            product = x_TI @ form.values().mT
            if form.index is None:
                y_TO.copy_(product)
            else:
                y_TO[:, form.index.to(torch.int64)] = product
            return
        y_TO += x_TI @ to_dense(form, y_TO.shape[1]).mT

    def add_transposed(self, form: Form, x_TO: torch.Tensor, y_TI: torch.Tensor) -> None:
        assert not (isinstance(form, Rows) and form.own), "its rows are inputs here: what they replace is not known"
        y_TI += x_TO @ to_dense(form, x_TO.shape[1])

    def look_up(self, form: Form, ids_N: torch.Tensor, rows: int, values_NI: torch.Tensor) -> None:
        dense = to_dense(form, rows)[ids_N]
        if not (isinstance(form, Rows) and form.own):
            values_NI += dense
        elif form.index is None:
            values_NI.copy_(dense)
        else:
            known = torch.isin(ids_N, form.index.to(ids_N.dtype))
            values_NI[known] = dense[known]
