"""Where the rows of one packed step find their keys: built once a step on the CPU, read by every layer.

Sequences with one new row are decoded together, in batches of like lengths: a request of 100 tokens beside one of
8,000 is not padded to 8,000. Sequences with more rows go one by one, their rows a few at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mfs_decompose.runtime.kv import NOTHING, KvCache, KvGroup, SequenceKv
from mfs_decompose.runtime.ops.pages import Pages


class Segment(NamedTuple):
    """`length` rows of one sequence, from row `start` of the step on, behind `past` tokens that have keys."""

    kv: SequenceKv
    start: int
    length: int
    past: int


@dataclass
class DecodeBatch:
    """Sequences with one row each.

    Attributes:
        rows: [B] of the step; None where they are all rows in order.
        table: [B, blocks], padded with NOTHING.
        keys: how many of the gathered keys the longest needs.
        hidden: bool [B, keys], true where a key is none of the row's; None where there are no such.
        pages: the same for the kernel.
    """

    rows: torch.Tensor | None
    table: torch.Tensor
    keys: int
    hidden: torch.Tensor | None
    pages: Pages
    _masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def mask_for(self, dtype: torch.dtype) -> torch.Tensor | None:
        """[B, 1, 1, keys], to be added to scores."""
        if self.hidden is None:
            return None
        if dtype not in self._masks:
            mask = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
            self._masks[dtype] = mask.masked_fill_(self.hidden, float("-inf"))[:, None, None, :]
        return self._masks[dtype]


@dataclass(frozen=True)
class Chunk:
    """`length` > 1 rows of one sequence; its first visible key is the first of `table` [1, blocks], in all `keys`.

    `table` is None where the rows see each other only: nothing is gathered.
    """

    start: int
    length: int
    table: torch.Tensor | None
    keys: int


@dataclass
class GroupLayout:
    """One step for the layers of one window; `slots` [T] is where each row's key is written."""

    window: int | None
    slots: torch.Tensor
    decodes: list[DecodeBatch]
    chunks: list[Chunk]
    _causal: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def causal_mask(self, rows: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
        """[1, 1, rows, keys], to be added to scores, where the last row sees up to the last key.

        Counted from the end, a mask of more keys begins earlier and is otherwise the same: only the widest is kept.
        """
        found = self._causal.get((rows, dtype))
        if found is None:
            most = max(chunk.keys for chunk in self.chunks)
            device = self.slots.device
            query = torch.arange(most - rows, most, device=device)[:, None]
            key = torch.arange(most, device=device)[None]
            hidden = key > query
            if self.window is not None:
                hidden |= key <= query - self.window
            found = torch.zeros(1, 1, rows, most, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
            self._causal[rows, dtype] = found
        return found[..., found.shape[3] - keys :]


class StepLayout:
    """The layouts of one step, by group of layers and device.  Segments lie in the order of their rows."""

    def __init__(self, kv: KvCache, segments: Sequence[Segment]) -> None:
        self.rows = sum(segment.length for segment in segments)
        self._kv = kv
        self._segments = segments
        self._groups: dict[tuple[int, torch.device], GroupLayout] = {}

    def group(self, index: int, device: torch.device) -> GroupLayout:
        found = self._groups.get((index, device))
        if found is None:
            found = _lay_out(self._kv.groups[index], index, self._segments, self._kv.block_size, self.rows, device)
            self._groups[index, device] = found
        return found


def _lay_out(
    group: KvGroup, index: int, segments: Sequence[Segment], block_size: int, rows: int, device: torch.device
) -> GroupLayout:
    slots: list[int] = []
    chunks: list[Chunk] = []
    singles: list[_Single] = []
    for segment in segments:
        table, start, length, past = segment.kv.tables[index], *segment[1:]
        slots += [table[at // block_size] * block_size + at % block_size for at in range(past, past + length)]
        first = group.first_needed(past, block_size)
        blocks = table[first : (past + length - 1) // block_size + 1]
        keys = past + length - first * block_size
        if length == 1:
            singles.append(_Single(start, blocks, keys))
        elif past == 0:
            chunks.append(Chunk(start, length, None, length))
        else:
            chunks.append(Chunk(start, length, torch.tensor([blocks], device=device), keys))
    decodes = [
        _decode_batch(batch, group.window, whole=len(batch) == rows, device=device) for batch in _like_lengths(singles)
    ]
    return GroupLayout(group.window, torch.tensor(slots, device=device), decodes, chunks)


class _Single(NamedTuple):
    row: int
    blocks: list[int]
    keys: int


def _like_lengths(singles: list[_Single]) -> list[list[_Single]]:
    """Batches in which the longest has at most twice the blocks of the shortest, and four more."""
    batches: list[list[_Single]] = []
    most = 0
    for single in sorted(singles, key=lambda single: (len(single.blocks), single.row)):
        if not batches or len(single.blocks) > most:
            batches.append([])
            most = 2 * len(single.blocks) + 4
        batches[-1].append(single)
    return [sorted(batch, key=lambda single: single.row) for batch in batches]


def _decode_batch(batch: list[_Single], window: int | None, *, whole: bool, device: torch.device) -> DecodeBatch:
    longest = max(len(single.blocks) for single in batch)
    table = [single.blocks + [NOTHING] * (longest - len(single.blocks)) for single in batch]
    keys = max(single.keys for single in batch)
    firsts = [0 if window is None else max(0, single.keys - window) for single in batch]
    spans = torch.tensor([[first, single.keys] for first, single in zip(firsts, batch, strict=True)])
    hidden = None
    if int(spans[:, 0].max()) or int(spans[:, 1].min()) < keys:
        at = torch.arange(keys)
        hidden = ((at < spans[:, :1]) | (at >= spans[:, 1:])).to(device)
    rows = None if whole else torch.tensor([single.row for single in batch], device=device)
    blocks = torch.tensor(table)
    return DecodeBatch(rows, blocks.to(device), keys, hidden, Pages(blocks, spans))
