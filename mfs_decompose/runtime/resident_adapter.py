"""A tensor of an adapter's merge as forms: factors stay the adapter's own, in their own dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from mfs_decompose.artifact.values import StoredTensor, read_adapter_tensor
from mfs_decompose.codec.adapter_params import AdapterParams, FactorParams, read_adapter_params
from mfs_decompose.runtime.resident_forms import Factor, LowRank, Placed, Rows
from mfs_decompose.runtime.resident_read import dense_form

if TYPE_CHECKING:
    from mfs_decompose.artifact.reader import Family


def adapter_forms(family: Family, variant: str, tensor: str, stored: StoredTensor) -> list[Placed]:
    """The forms of a matrix or stack that the codec `adapter` makes.

    DoRA scales whole outputs, and factors of a part of a matrix's columns have no form of their own: both are served as
    the dense difference.

    Raises:
        ArtifactInvalid: the adapter is damaged.
    """
    record = family.variant(variant).tensors[tensor]
    params = read_adapter_params(family.tree(variant, tensor).params, tensor)
    shape = record.shape
    if params.replace is not None and not params.factors and params.magnitude is None and params.tokens is None:
        return _own(read_adapter_tensor(family, variant, params.replace))
    if not _is_factored(params, shape):
        return _dense(family, record.base_name, stored)
    found: list[Placed] = []
    for factor in params.factors:
        found += _factors(family, variant, factor, shape)
    if params.tokens is not None:
        name, rows = params.tokens
        order = torch.tensor(rows, dtype=torch.int32).argsort()
        values = read_adapter_tensor(family, variant, name)[order]
        index = torch.tensor(rows, dtype=torch.int32)[order]
        found.append(Placed(Rows(index, values, None, True), 0, shape[0]))
    return found


def _is_factored(params: AdapterParams, shape: tuple[int, ...]) -> bool:
    if params.replace is not None or params.magnitude is not None or params.add:
        return False
    return all(factor.at is None or factor.at[-1] == (0, shape[-1]) for factor in params.factors)


def _own(values: torch.Tensor) -> list[Placed]:
    slices = [(None, values)] if values.dim() == 2 else list(enumerate(values))
    return [Placed(Rows(None, part, None, True), 0, part.shape[0], at) for at, part in slices]


def _dense(family: Family, base: str | None, stored: StoredTensor) -> list[Placed]:
    shape = stored.spec.shape
    if base is None or family.manifest.base.tensors[base].shape != shape:
        return _own(torch.cat([stored.served(*block) for block in stored.blocks()]))
    found = []
    for at in [None] if len(shape) == 2 else range(shape[0]):

        def rows(start: int, stop: int, at: int | None = at) -> torch.Tensor:
            first, last = (start, stop) if at is None else (at, at + 1)
            own = stored.served(first, last).to(torch.float64)
            difference = own - family.base_rows(base, first, last).to(torch.float64)
            return difference if at is None else difference[0, start:stop]

        form = dense_form(rows, (shape[-2], shape[-1]))
        if form is not None:
            found.append(Placed(form, 0, shape[-2], at))
    return found


def _factors(family: Family, variant: str, params: FactorParams, shape: tuple[int, ...]) -> list[Placed]:
    """Products of two factors in the boxes of the tensor where they lie; a box has all columns."""
    a, b = (read_adapter_tensor(family, variant, name) for name in (params.a, params.b))
    experts = params.experts or 1
    rank = a.shape[0] // experts
    a_ERI, b_EOR = a.reshape(experts, rank, a.shape[1]), b.reshape(b.shape[0], rank, experts).permute(2, 0, 1)
    out, into = params.out or (0, b.shape[0]), params.into or (0, a.shape[1])
    first = (params.of or (0, experts))[0]
    at = params.at or tuple((0, size) for size in shape)
    (start, stop), places = at[-2], range(*at[0]) if len(shape) == 3 else (None,)
    found = []
    for offset, place in enumerate(places):
        left = Factor(b_EOR[first + offset, slice(*out)].mT.contiguous())
        right = _scaled(a_ERI[first + offset, :, slice(*into)].contiguous(), params.scale)
        form = LowRank(left, right)
        found.append(Placed(form.transposed if params.transposed else form, start, stop, place))
    return found


def _scaled(codes: torch.Tensor, scale: float) -> Factor:
    if scale == 1.0:
        return Factor(codes)
    assert math.isfinite(scale)
    return Factor(codes, torch.full((codes.shape[0], 1), scale, dtype=torch.float32))
