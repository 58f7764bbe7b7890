"""Row-sparse: the rows of a delta that changed most, at 8 bits, and nothing of the others.

For untied input embeddings, where only rows of tokens that occurred in training moved. Tied embeddings move everywhere,
through the head: they want low rank.
"""

from __future__ import annotations

import torch

from mfs_decompose.codec.arrays import read_array, tensor_bytes
from mfs_decompose.codec.base import Delta, Emit, Fetch
from mfs_decompose.codec.direct import Context, DeltaRows, Params, row_blocks
from mfs_decompose.codec.direct_sizes import direct_bytes
from mfs_decompose.codec.packed_rows import as_scale
from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.sums import squared_norm

_LEVELS = 127


class RowSparse:
    """The codec `rowsparse`; parameter `rows`, how many rows at most: rows that did not move are never stored."""

    name = "rowsparse"

    def nbytes(self, shape: tuple[int, int], params: Params) -> int | None:
        """Bytes where that many rows moved."""
        return direct_bytes("rowsparse", shape, params)

    def encode(
        self, rows: DeltaRows, shape: tuple[int, int], params: Params, emit: Emit, *, context: Context | None = None
    ) -> CodecNode:
        wanted = params["rows"]
        assert type(wanted) is int and wanted >= 0, f"{wanted!r} rows"
        index = _moved_most(rows, shape, wanted)
        scales: list[torch.Tensor] = [torch.zeros(0, dtype=torch.bfloat16)]
        emit(tensor_bytes(index))
        for start, stop in row_blocks(shape):
            here = index[(index >= start) & (index < stop)].to(torch.int64) - start
            if here.numel():
                codes, scale = _quantise(rows(start, stop)[here])
                emit(tensor_bytes(codes))
                scales.append(scale)
        emit(tensor_bytes(torch.cat(scales)))
        count, at = index.numel(), 0
        parts = []
        for name, dtype, kept, size in (
            ("index", "I32", (count,), 4 * count),
            ("value", "I8", (count, shape[1]), count * shape[1]),
            ("scale", "BF16", (count,), 2 * count),
        ):
            parts.append(Part(name, dtype, kept, at, size))
            at += size
        return CodecNode("rowsparse", params={"rows": count}, parts=tuple(parts))

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Delta:
        count = node.integer("rows")
        index = read_array(node, "index", fetch, "I32", (count,)).to(torch.int64)
        scale = read_array(node, "scale", fetch, "BF16", (count,)).to(torch.float64)
        codes = read_array(node, "value", fetch, "I8", (count, shape[1]))
        edges = (int(index[0]), int(index[-1])) if count else (0, 0)
        if edges[0] < 0 or edges[1] >= max(shape[0], 1) or not bool((index.diff() > 0).all()):
            raise ArtifactInvalid(f"codec 'rowsparse': expected rising rows within 0..{shape[0] - 1}")
        if not bool(torch.isfinite(scale).all()):
            raise ArtifactInvalid("codec 'rowsparse': a scale is not finite")
        return _Rows(index, scale, codes, shape[1])


class _Rows:
    """One product of a small integer and a bf16 value: exact."""

    def __init__(self, index: torch.Tensor, scale: torch.Tensor, codes: torch.Tensor, columns: int) -> None:
        self._index, self._scale, self._codes, self._columns = index, scale, codes, columns

    def rows(self, start: int, stop: int) -> torch.Tensor:
        dense = torch.zeros(stop - start, self._columns, dtype=torch.float64)
        first, last = torch.searchsorted(self._index, torch.tensor([start, stop])).tolist()
        values = self._codes[first:last].to(torch.float64) * self._scale[first:last].unsqueeze(1)
        dense[self._index[first:last] - start] = values
        return dense


def _moved_most(rows: DeltaRows, shape: tuple[int, int], wanted: int) -> torch.Tensor:
    """int32 numbers of the rows of most energy, rising; of equal ones the first."""
    energy = torch.tensor([squared_norm(row) for block in row_blocks(shape) for row in rows(*block)] or [0.0])
    order = torch.sort(energy, descending=True, stable=True)[1][: min(wanted, shape[0])]
    return order[energy[order] > 0].sort()[0].to(torch.int32)


def _quantise(values_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = as_scale(values_NI.abs().amax(dim=1) / _LEVELS)
    step = scale.to(torch.float32).unsqueeze(1)
    codes = torch.where(step > 0, values_NI / step, 0.0).round().clamp(-_LEVELS, _LEVELS)
    return codes.to(torch.int8), scale
