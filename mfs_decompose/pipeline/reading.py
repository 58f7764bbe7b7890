"""The weights of a run: base and variants, read by rows, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from mfs_decompose.base_extraction import delta_rows
from mfs_decompose.codec.base import Rows, block_rows
from mfs_decompose.codec.shared import Shared
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.model import Item
from mfs_decompose.plan.units import ROW_BLOCK_ELEMENTS
from mfs_decompose.source.checkpoint import TensorReader

Advance = Callable[[int], None]

DeltaOf = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the first row, a variant's rows and the base's, and gives the delta that a codec is to store, fp32."""


@dataclass(frozen=True)
class Sources:
    """Readers of the base as stored and of every variant, and the shared deltas that items build on.

    `common` is what a shared delta was made of [O, I], all of it: what items store beside it is fitted to what that
    leaves.
    """

    base: TensorReader
    variants: Mapping[str, TensorReader]
    shared: Mapping[Key, Shared] = field(default_factory=dict)
    common: Mapping[Key, torch.Tensor] = field(default_factory=dict)

    @property
    def bytes_read(self) -> int:
        """Bytes of weights read so far."""
        return self.base.bytes_read + sum(reader.bytes_read for reader in self.variants.values())

    def own(self, item: Item) -> Rows:
        """Rows of the variant's tensor."""
        reader = self.variants[item.variant]
        return lambda start, stop: reader.rows(item.name, start, stop)

    def of_base(self, item: Item) -> Rows | None:
        """Rows of the base's tensor; None where there is none to compare with."""
        if item.base is None:
            return None
        name = item.base.name
        return lambda start, stop: self.base.rows(name, start, stop)

    def delta_of(self, item: Item) -> DeltaOf:
        """What is left of an item's delta for its codec: all of it, or what its shared delta leaves."""
        shared = self.shared.get(item.key)
        if shared is None:
            return lambda start, own, base: delta_rows(own, base)
        opened, scale = shared.open(), _matrix_rows(shared.shape[0], item)

        def rest(start: int, own: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
            known = opened.rows(start * scale, (start + own.shape[0]) * scale).reshape(own.shape)
            return (own.to(torch.float64) - base.to(torch.float64) - known).to(torch.float32)

        return rest

    def fitted_of(self, item: Item) -> DeltaOf:
        """What directions are fitted to: an item's delta, without all that it has in common with others."""
        common = self.common.get(item.key)
        if common is None:
            return self.delta_of(item)
        scale = _matrix_rows(common.shape[0], item)

        def rest(start: int, own: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
            known = common[start * scale : (start + own.shape[0]) * scale].reshape(own.shape)
            return delta_rows(own, base) - known.to(torch.float32)

        return rest

    def fitted_blocks(self, item: Item, advance: Advance) -> Iterator[tuple[int, torch.Tensor]]:
        """What is fitted of the common rows, in row blocks of the matrix a codec sees: (first row, fp32 rows)."""
        own, base = self.own(item), self.of_base(item)
        assert base is not None and item.matrix is not None
        scale, columns = item.matrix[0] // item.common.rows, item.matrix[1]
        delta = self.fitted_of(item)
        step = block_rows(item.common, ROW_BLOCK_ELEMENTS)
        for start in range(0, item.common_rows, step):
            stop = min(start + step, item.common_rows)
            yield start * scale, delta(start, own(start, stop), base(start, stop)).reshape(-1, columns)
            advance((stop - start) * (item.spec.row_bytes + _row_bytes(item)))


def row_blocks(item: Item, elements: int, splits: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Row ranges of a tensor of about `elements`, none across the end of the common rows or one of `splits`."""
    step = block_rows(item.spec, elements)
    edges = sorted({0, item.common_rows, item.spec.rows, *splits})
    return [(start, min(start + step, high)) for low, high in pairwise(edges) for start in range(low, high, step)]


def _matrix_rows(rows: int, item: Item) -> int:
    """Rows of the matrix that a row of an item's base tensor is."""
    return rows // (item.base.rows if item.base is not None else 1)


def _row_bytes(item: Item) -> int:
    return item.base.row_bytes if item.base is not None else 0
