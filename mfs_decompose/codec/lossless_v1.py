"""Chunks of version 1 of the lossless codec, which is read and no longer written.

Words of floats were mapped so that their order as integers is the order of the values; their zigzag difference from the
base's, or they themselves, lay in byte planes in one zstd frame.
"""

from __future__ import annotations

import numpy as np

from mfs_decompose.codec.lossless_chunk import Layout
from mfs_decompose.codec.zstd_frames import decompress
from mfs_decompose.linalg.words import Words, from_planes, undo_zigzag


def decode_chunk_v1(data: bytes, count: int, base: Words | None, layout: Layout) -> Words:
    """The `count` words of one chunk.

    Raises:
        ArtifactInvalid: it does not hold as many.
    """
    words = from_planes(decompress(data, count * layout.size), layout.size)
    if base is not None:
        undo_zigzag(words, _ordered(base) if layout.exponent else base)
    return _unordered(words) if layout.exponent else words


def _ordered(words: Words) -> Words:
    sign = _sign(words)
    return np.where(words & sign, ~words, words | sign)


def _unordered(words: Words) -> Words:
    sign = _sign(words)
    return np.where(words & sign, words & ~sign, ~words)


def _sign(words: Words) -> np.unsignedinteger:
    sign: np.unsignedinteger = words.dtype.type(1 << (8 * words.itemsize - 1))
    return sign
