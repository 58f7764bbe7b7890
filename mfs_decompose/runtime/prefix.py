"""Which full blocks of keys and values are known: by the variant's digest and every token up to the block's end.

The digest is that of the weights, not a display name: two variants, or one id loaded twice with other weights, share
no block even under one prompt. Keys and values of one prompt differ between variants, and a cache that looks at tokens
alone gives wrong text without a word (vllm issues 3264, 30931 and 42125; transformers' own continuous batching).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

_TAG = b"mfs.kv/1"


def first_link(variant_digest: bytes) -> bytes:
    """What the chain of one variant begins with; the length of the digest is part of it, so no two run together."""
    return hashlib.blake2b(_TAG + len(variant_digest).to_bytes(4, "little") + variant_digest, digest_size=32).digest()


def next_link(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the block with these tokens behind the block, or the beginning, named `parent`."""
    packed = b"".join(int(token).to_bytes(8, "little") for token in tokens)
    return hashlib.blake2b(parent + packed, digest_size=32).digest()


def extend_links(links: list[bytes], variant_digest: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append the names of the full blocks of `tokens` that `links` does not hold yet."""
    for at in range(len(links), len(tokens) // block_size):
        parent = links[-1] if links else first_link(variant_digest)
        links.append(next_link(parent, tokens[at * block_size : (at + 1) * block_size]))


class PrefixIndex:
    """Full blocks by name, and which of them nobody uses: those are kept, and given up least recently used first."""

    def __init__(self) -> None:
        self._block: dict[bytes, int] = {}
        self._name: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """Blocks that are known and unused."""
        return len(self._idle)

    def find(self, name: bytes) -> int | None:
        return self._block.get(name)

    def add(self, name: bytes, block: int) -> None:
        """Make a full block findable; where the name is taken, the other block stays the one to be found."""
        assert block not in self._name or self._name[block] == name, "a full block never changes"
        if name not in self._block:
            self._block[name] = block
            self._name[block] = name

    def knows(self, block: int) -> bool:
        return block in self._name

    def rest(self, block: int) -> None:
        """The last user of a known block left."""
        self._idle[block] = None

    def wake(self, block: int) -> None:
        """A known block without users got one."""
        del self._idle[block]

    def give_up(self) -> int:
        """The block unused for the longest, forgotten.  Raises KeyError where none is idle."""
        block, _ = self._idle.popitem(last=False)
        del self._block[self._name.pop(block)]
        return block

    def forget_idle(self) -> list[int]:
        """Give up all idle blocks."""
        return [self.give_up() for _ in range(len(self._idle))]
