"""Sparse: the largest entries of each row of a delta, as many in every row.

Steps are entries a row, largest magnitude first; arrays are [step, row], so that a shorter fit is a prefix.
Equal counts need no row pointers and give every row the same work in a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from mfs_decompose.codec.arrays import read_array
from mfs_decompose.codec.base import Fetch, Fit
from mfs_decompose.codec.sizes import SHORT_INDEX, VALUE_BYTES
from mfs_decompose.codec.tree import CodecNode, shown
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.shapes import GROUP
from mfs_decompose.linalg.sums import squared_norm

_WINDOW = 40  # a value 2^-40 of the largest adds nothing; flushing it keeps exponents bounded


class Sparse:
    """The codec `sparse`; parameter `values` is bf16 or int8 (one bf16 scale a step and 64 rows)."""

    name = "sparse"

    def array_names(self, params: Mapping[str, str]) -> tuple[str, ...]:
        return ("scale", "index", "value") if params["values"] == "int8" else ("index", "value")

    def fit(
        self, deltas_BOI: torch.Tensor, steps: int, keys: Sequence[int], params: Mapping[str, str]
    ) -> list[Fit | None]:
        return [self._finish([_largest(delta, steps)], delta.shape[1], params) for delta in deltas_BOI]

    def fit_blocks(
        self,
        blocks: Callable[[], Iterator[tuple[int, torch.Tensor]]],
        shape: tuple[int, int],
        steps: int,
        key: int,
        params: Mapping[str, str],
        device: str = "cpu",
    ) -> Fit | None:
        return self._finish([_largest(block, steps) for _, block in blocks()], shape[1], params)

    def _finish(self, found: list[_Largest], columns: int, params: Mapping[str, str]) -> Fit:
        index = torch.cat([part.index_SO for part in found], dim=1)
        values = torch.cat([part.values_SO for part in found], dim=1)
        energy = torch.tensor([squared_norm(step) for step in values], dtype=torch.float64)
        narrow = torch.uint16 if columns <= SHORT_INDEX else torch.int32
        arrays = {"index": index.to(torch.int32).to(narrow), **_code_values(values, params["values"])}
        return Fit(energy, math.fsum(part.total for part in found), arrays)

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> _Entries:
        fmt = node.params.get("values")
        if not isinstance(fmt, str) or fmt not in VALUE_BYTES:
            raise ArtifactInvalid(f"codec 'sparse': unknown values {shown(fmt)}")
        steps, (rows, columns) = node.integer("steps"), shape
        index = read_index(node, fetch, steps, shape)
        values = read_array(node, "value", fetch, "BF16" if fmt == "bf16" else "I8", (steps, rows)).to(torch.float64)
        if fmt == "int8":
            scale = read_array(node, "scale", fetch, "BF16", (steps, -(-rows // GROUP))).to(torch.float64)
            values = values * scale.repeat_interleave(GROUP, dim=1)[:, :rows]
        return _Entries(index.to(torch.int64), values, columns)


def read_index(node: CodecNode, fetch: Fetch, steps: int, shape: tuple[int, int]) -> torch.Tensor:
    """The columns of entries, uint16 or int32 [steps, O].

    Raises:
        ArtifactInvalid: they cannot be read, or one lies outside of the matrix.
    """
    rows, columns = shape
    index = read_array(node, "index", fetch, "U16" if columns <= SHORT_INDEX else "I32", (steps, rows))
    wide = index.to(torch.int32)
    if wide.numel() and not 0 <= int(wide.min()) <= int(wide.max()) < columns:
        raise ArtifactInvalid(f"codec 'sparse': a column index lies outside 0..{columns - 1}")
    return index


class _Entries:
    def __init__(self, index_SO: torch.Tensor, values_SO: torch.Tensor, columns: int) -> None:
        self._index_SO, self._values_SO, self._columns = index_SO, values_SO, columns

    def rows(self, start: int, stop: int) -> torch.Tensor:
        dense = torch.zeros(stop - start, self._columns, dtype=torch.float64)
        return dense.scatter_(1, self._index_SO[:, start:stop].mT, self._values_SO[:, start:stop].mT)


class _Largest:
    """The `steps` entries of largest magnitude of each row, largest first; ties go to the lower column."""

    def __init__(self, index_SO: torch.Tensor, values_SO: torch.Tensor, total: float) -> None:
        self.index_SO, self.values_SO, self.total = index_SO, values_SO, total


def _largest(delta_OI: torch.Tensor, steps: int) -> _Largest:
    # A stable sort, not topk: deltas of bf16 weights are full of ties, and topk breaks them as it likes.
    order = torch.sort(delta_OI.abs(), dim=1, descending=True, stable=True)[1][:, :steps]
    return _Largest(order.mT.contiguous(), delta_OI.gather(1, order).mT.contiguous(), squared_norm(delta_OI))


def _code_values(values_SO: torch.Tensor, fmt: str) -> dict[str, torch.Tensor]:
    if fmt == "bf16":
        return {"value": _flush(values_SO)}
    steps, rows = values_SO.shape
    groups = -(-rows // GROUP)
    padded = torch.nn.functional.pad(values_SO, (0, groups * GROUP - rows)).view(steps, groups, GROUP)
    scale = (padded.abs().amax(dim=2) / 127).to(torch.bfloat16)
    step = scale.to(torch.float32).unsqueeze(2)
    codes = torch.where(step > 0, padded / step, 0.0).round().clamp(-127, 127)
    return {"scale": scale, "value": codes.view(steps, -1)[:, :rows].to(torch.int8)}


def _flush(values: torch.Tensor) -> torch.Tensor:
    rounded = values.to(torch.bfloat16)
    largest = float(rounded.abs().max()) if rounded.numel() else 0.0
    return torch.where(rounded.abs() < largest * 2.0**-_WINDOW, torch.zeros_like(rounded), rounded)
