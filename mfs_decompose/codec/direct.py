"""Codecs that write a delta straight from its rows, without a fit of which every prefix is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, overload

from mfs_decompose.codec.base import DECODE_ELEMENTS, Delta, Emit, Fetch
from mfs_decompose.codec.tree import CodecNode, Json
from mfs_decompose.errors import ArtifactInvalid

if TYPE_CHECKING:
    import torch

DeltaRows = Callable[[int, int], "torch.Tensor"]
"""Reads rows start..stop of a delta seen as a matrix: finite, fp32 [stop - start, I], on the CPU."""

Params = Mapping[str, Json]


@dataclass(frozen=True)
class Context:
    """What a codec may look at beside the delta: rows start..stop of the base, [stop - start, I], in its own dtype."""

    base_rows: DeltaRows


class DirectCodec(Protocol):
    """A codec of a delta seen as a matrix [O, I]."""

    name: str

    def encode(
        self, rows: DeltaRows, shape: tuple[int, int], params: Params, emit: Emit, *, context: Context | None = None
    ) -> CodecNode:
        """Write the delta through `emit`, in order; holds a block of rows, and reads `rows` as often as it needs."""

    def open(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> Delta:
        """Open a stored delta; ArtifactInvalid where the node is not one that `encode` can write."""

    def nbytes(self, shape: tuple[int, int], params: Params) -> int | None:
        """Bytes of any delta of this shape; None where they depend on its values."""


class _RowBlocks(Sequence[tuple[int, int]]):
    """Not a list: a hostile shape has as many blocks as it likes."""

    def __init__(self, rows: int, step: int) -> None:
        self._rows, self._starts = rows, range(0, max(rows, 1), step)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, at: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[int, int]]: ...

    def __getitem__(self, at: int | slice) -> tuple[int, int] | Sequence[tuple[int, int]]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        return self._starts[at], min(self._starts[at] + self._starts.step, self._rows)


def row_blocks(shape: tuple[int, int]) -> Sequence[tuple[int, int]]:
    """Rows start..stop of blocks of about a million elements, cut by shape alone.

    Eight rows at least; a matrix without rows has one block.
    """
    return _RowBlocks(shape[0], max(8, DECODE_ELEMENTS // max(shape[1], 1) // 8 * 8))


def params_of(node: CodecNode, **allowed: tuple[Json, ...]) -> list[Json]:
    """The parameters named, in order, each one of its allowed values.

    Raises:
        ArtifactInvalid: one is something else.
    """
    found: list[Json] = []
    for key, values in allowed.items():
        value = node.params.get(key)
        if not any(type(value) is type(one) and value == one for one in values):
            raise ArtifactInvalid(f"codec {node.codec!r}: unknown {key} {value!r}"[:200])
        found.append(value)
    return found


def positive(node: CodecNode, key: str) -> float:
    """A finite number above 0 among the parameters.

    Raises:
        ArtifactInvalid: it is something else.
    """
    value = node.params.get(key)
    if type(value) is not float or not math.isfinite(value) or value <= 0:
        raise ArtifactInvalid(f"codec {node.codec!r}: expected a number above 0 for {key!r}, found {value!r}"[:200])
    return value
