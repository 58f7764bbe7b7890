"""Paged keys and values: blocks of a few tokens, counted references, one table of blocks a sequence.

Layers with the same sliding window form a group with blocks of its own, so that such a layer gives back what its window
has left behind. Only full blocks are shared and a full block is never written again, hence no copy on write: sharing
ends at a block's edge, and the tokens behind it go to blocks of their own (asserted in `reserve`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mfs_decompose.errors import ResourceShortage, UsageError
from mfs_decompose.runtime.prefix import PrefixIndex, extend_links

NOTHING = 0
"""The block that holds zeros and no token: padding of tables, and what a window has left behind."""


@dataclass(frozen=True)
class LayerShape:
    """The keys and values of one attention layer: [heads, key_size] and [heads, value_size] a token."""

    heads: int
    key_size: int
    value_size: int
    window: int | None
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class LayerStore:
    """keys [blocks, block_size, heads, key_size], values alike; `group` is the index of the layer's KvGroup."""

    keys: torch.Tensor
    values: torch.Tensor
    group: int


@dataclass
class SequenceKv:
    """The blocks of one sequence, of one digest and growing tokens: a table for each group, the names of its full
    blocks, and how far both are."""

    tables: list[list[int]]
    links: list[bytes] = field(default_factory=list)
    published: int = 0
    trimmed: list[int] = field(default_factory=list)


class BlockPool:
    """Numbers of blocks 1 .. blocks - 1 with counted references; block NOTHING belongs to nobody."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.index = PrefixIndex()
        self._free = list(range(blocks - 1, NOTHING, -1))
        self._users = [0] * blocks

    @property
    def available(self) -> int:
        return len(self._free) + self.index.idle

    @property
    def used(self) -> int:
        """Blocks with at least one user."""
        return self.blocks - 1 - self.available

    def users(self, block: int) -> int:
        return self._users[block]

    def take(self) -> int:
        """A block for one user: a free one, else the known one unused for the longest."""
        block = self._free.pop() if self._free else self.index.give_up()
        assert self._users[block] == 0
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        if self._users[block] == 0:
            self.index.wake(block)
        self._users[block] += 1

    def release(self, block: int) -> None:
        assert self._users[block] > 0, f"block {block} released too often"
        self._users[block] -= 1
        if self._users[block]:
            return
        if self.index.knows(block):
            self.index.rest(block)
        else:
            self._free.append(block)

    def forget(self) -> None:
        """Drop every block that only waits to be found again."""
        self._free += self.index.forget_idle()


@dataclass(frozen=True)
class KvGroup:
    window: int | None
    pool: BlockPool
    layers: tuple[int, ...]

    def first_needed(self, computed: int, block_size: int) -> int:
        """The first block that a query at position `computed` or later can see."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // block_size

    def most_blocks(self, tokens: int, chunk: int, block_size: int) -> int:
        """Blocks a sequence of `tokens` tokens can hold at a time, computed at most `chunk` tokens a step."""
        whole = -(-tokens // block_size)
        return whole if self.window is None else min(whole, -(-(self.window + chunk) // block_size) + 1)


class KvCache:
    """Keys and values of all sequences and layers.

    Args:
        shapes: by layer index.
        tokens: room for so many tokens of sequences whose layers see everything.
        block_size: tokens a block.
        sequences, chunk: most sequences at a time and most tokens of one a step; both bound what layers with a
            sliding window can need.
        share_prefixes: find full blocks again under the same digest and tokens.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        *,
        tokens: int,
        block_size: int = 16,
        sequences: int = 64,
        chunk: int = 512,
        share_prefixes: bool = True,
    ) -> None:
        self.block_size = block_size
        self.chunk = chunk
        self.share_prefixes = share_prefixes
        whole = max(1, tokens // block_size)
        groups: list[KvGroup] = []
        for window in sorted({shape.window for shape in shapes.values()}, key=lambda w: (w is not None, w)):
            layers = tuple(index for index, shape in shapes.items() if shape.window == window)
            group = KvGroup(window, BlockPool(2), layers)
            blocks = min(whole, sequences * group.most_blocks(whole * block_size, chunk, block_size))
            groups.append(KvGroup(window, BlockPool(blocks + 1), layers))
        self.groups = tuple(groups)
        self.layers = {
            index: _allocate(shapes[index], at, group.pool.blocks, block_size)
            for at, group in enumerate(self.groups)
            for index in group.layers
        }
        self._fresh: list[list[int]] = [[] for _ in groups]

    @property
    def bytes_reserved(self) -> int:
        return sum(store.keys.nbytes + store.values.nbytes for store in self.layers.values())

    @property
    def bytes_used(self) -> int:
        """Of blocks that sequences hold; a shared block counts once."""
        return sum(
            (store.keys[0].nbytes + store.values[0].nbytes) * self.groups[store.group].pool.used
            for store in self.layers.values()
        )

    def open(self) -> SequenceKv:
        return SequenceKv([[] for _ in self.groups], trimmed=[0] * len(self.groups))

    def check_fits(self, tokens: int) -> None:
        """Raises UsageError where a sequence of `tokens` tokens has no room even alone."""
        for group in self.groups:
            needed = group.most_blocks(tokens, self.chunk, self.block_size)
            if needed > group.pool.blocks - 1:
                room = (group.pool.blocks - 1) * self.block_size
                raise UsageError(
                    f"expected prompt and answer of at most {room} tokens, found {tokens}",
                    hint="give the engine a larger kv_tokens, or ask for less",
                )

    def missing(self, sequence: SequenceKv, tokens: int) -> int:
        """How many blocks are lacking, of the group that lacks most, to hold `tokens` tokens; 0 or less is enough."""
        whole = -(-tokens // self.block_size)
        pairs = zip(self.groups, sequence.tables, strict=True)
        return max(whole - len(table) - group.pool.available for group, table in pairs)

    def reserve(self, sequence: SequenceKv, tokens: int) -> bool:
        """Make room for `tokens` tokens in all; False, and nothing taken, where blocks are short."""
        if self.missing(sequence, tokens) > 0:
            return False
        whole = -(-tokens // self.block_size)
        for at, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            while len(table) < whole:
                table.append(group.pool.take())
                self._fresh[at].append(table[-1])
        return True

    def clean(self) -> None:
        """Zero the blocks taken since the last call: what another sequence left there may be no number, and a masked
        NaN is still one."""
        for at, (group, fresh) in enumerate(zip(self.groups, self._fresh, strict=True)):
            if fresh:
                for index in group.layers:
                    store = self.layers[index]
                    blocks = torch.tensor(fresh, device=store.keys.device)
                    store.keys.index_fill_(0, blocks, 0)
                    store.values.index_fill_(0, blocks, 0)
                self._fresh[at] = []

    def adopt(self, sequence: SequenceKv, digest: bytes, tokens: list[int]) -> int:
        """Share the known blocks that `tokens` begin with, all but the last token at most; how many tokens that is."""
        assert not any(sequence.tables), "only a sequence without blocks can adopt some"
        most = (len(tokens) - 1) // self.block_size if self.share_prefixes else 0
        if not most:
            return 0
        extend_links(sequence.links, digest, tokens, self.block_size)
        count = self._longest_known(sequence.links[:most])
        if not count:
            return 0
        computed = count * self.block_size
        for at, group in enumerate(self.groups):
            first = group.first_needed(computed, self.block_size)
            table = sequence.tables[at]
            for link_at, name in enumerate(sequence.links[:count]):
                block = group.pool.index.find(name) if link_at >= first else NOTHING
                assert block is not None
                if block != NOTHING:
                    group.pool.share(block)
                table.append(block)
            sequence.trimmed[at] = first
        sequence.published = count
        return computed

    def _longest_known(self, links: list[bytes]) -> int:
        """The most blocks, counted from the first, after which every group finds all that a next token can see."""
        fits = [True] * (len(links) + 1)
        for group in self.groups:
            run = 0
            for at, name in enumerate(links):
                run = run + 1 if group.pool.index.find(name) is not None else 0
                count = at + 1
                needed = count - group.first_needed(count * self.block_size, self.block_size)
                fits[count] = fits[count] and run >= needed
        return max(count for count, known in enumerate(fits) if known)

    def publish(self, sequence: SequenceKv, digest: bytes, tokens: list[int], computed: int) -> None:
        """Make the blocks that became full findable, and give back what every window has left behind."""
        full = computed // self.block_size
        if self.share_prefixes and full > sequence.published:
            extend_links(sequence.links, digest, tokens[: full * self.block_size], self.block_size)
            for group, table in zip(self.groups, sequence.tables, strict=True):
                for at in range(sequence.published, full):
                    group.pool.index.add(sequence.links[at], table[at])
            sequence.published = full
        for at, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            needed = group.first_needed(computed, self.block_size)
            for gone in range(sequence.trimmed[at], needed):
                group.pool.release(table[gone])
                table[gone] = NOTHING
            sequence.trimmed[at] = max(needed, sequence.trimmed[at])

    def close(self, sequence: SequenceKv) -> None:
        """Give everything back, the end of the sequence first: beginnings are more often asked for again."""
        for at, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            for block in reversed(table):
                if block != NOTHING:
                    group.pool.release(block)
            table.clear()
            sequence.trimmed[at] = 0
        sequence.published = 0


def _allocate(shape: LayerShape, group: int, blocks: int, block_size: int) -> LayerStore:
    try:
        keys, values = (
            torch.zeros(blocks, block_size, shape.heads, size, dtype=shape.dtype, device=shape.device)
            for size in (shape.key_size, shape.value_size)
        )
    except RuntimeError as error:  # torch's out of memory, of any device
        raise ResourceShortage(
            f"expected memory on {shape.device} for {blocks} blocks of {block_size} tokens, found none: {error}",
            hint="give the engine a smaller kv_tokens",
        ) from error
    return LayerStore(keys, values, group)
