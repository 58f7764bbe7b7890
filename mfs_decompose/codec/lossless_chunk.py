"""One chunk of the lossless codec: some words of a tensor, in the cheapest of four ways.

A chunk begins with a byte that says which way. The others than raw drop the lowest bits if those are zero in every word
(a second byte counts them), so that fp32 weights that came from bf16 cost what bf16 costs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from mfs_decompose.codec.lossless_groups import decode_groups, encode_groups
from mfs_decompose.codec.zstd_frames import compress_text, decompress
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.words import (
    Words,
    from_planes,
    narrow,
    narrow_size,
    rotate,
    to_planes,
    trailing_zeros,
    undo_zigzag,
    widen,
    word_type,
    zigzag_difference,
)

RAW, OWN, DIFFERENCE, GROUPED = range(4)

_TINY = 1024  # words: below this groups cost more time than they save bytes
_SMALL = 8192  # words: below this headers weigh, and every other way is tried
_SPARSE = 1 / 16  # of the raw bytes: below this few words differ, and zstd may find more than an order
_FOREIGN = 1 / 2  # above this the base may be of no help


@dataclass(frozen=True)
class Layout:
    """What a word is made of: bytes, and bits of the exponent below the sign; 0 for what is no float."""

    size: int
    exponent: int


def encode_chunk(own: Words, base: Words | None, layout: Layout) -> bytes:
    """Code words, given those of the base; at most one byte longer than they are.

    Which ways are tried depends on the words alone: grouped by exponent where there is a base, the difference by plain
    zstd for small chunks and where little differs, the words themselves where there is no base or it helps little.
    """
    raw = own.nbytes
    dropped = trailing_zeros(own)
    bits = 8 * layout.size - dropped
    own_left = narrow(own, dropped)
    found: list[bytes] = []
    if base is not None and own.size:
        base_left = narrow(base, dropped)
        if 0 < layout.exponent < bits and own.size >= _TINY:
            shift = bits - 1 - layout.exponent
            found.append(bytes((GROUPED, dropped)) + encode_groups(own_left, base_left, shift, layout.exponent))
        if not found or own.size < _SMALL or len(found[0]) < _SPARSE * raw:
            found.append(bytes((DIFFERENCE, dropped)) + _write_planes(zigzag_difference(own_left, base_left)))
    if not found or own.size < _SMALL or min(map(len, found)) > _FOREIGN * raw:
        turned = rotate(own_left, bits, 1) if layout.exponent else own_left
        found.append(bytes((OWN, dropped)) + _write_planes(turned))
    shortest = min(found, key=len)
    return shortest if len(shortest) <= raw else bytes((RAW,)) + own.tobytes()


def decode_chunk(data: bytes, count: int, base: Words | None, layout: Layout) -> Words:
    """Undo `encode_chunk`, for `count` words.

    Raises:
        ArtifactInvalid: `data` is no such chunk, or was coded against a base and there is none.
    """
    way = data[0] if data else None
    if way == RAW:
        if len(data) - 1 != count * layout.size:
            expected = count * layout.size
            raise ArtifactInvalid(f"codec 'lossless': expected a chunk of {expected} bytes, found {len(data) - 1}")
        return np.frombuffer(data, word_type(layout.size), offset=1)
    if way not in (OWN, DIFFERENCE, GROUPED) or len(data) < 2 or data[1] >= 8 * layout.size:
        raise ArtifactInvalid(f"codec 'lossless': a chunk begins with {data[:2].hex()!r}, which no writer writes")
    dropped = data[1]
    bits, size = 8 * layout.size - dropped, narrow_size(layout.size, dropped)
    if way == OWN:
        words = _read_planes(data[2:], count, size)
        return widen(rotate(words, bits, bits - 1) if layout.exponent else words, dropped, layout.size)
    if base is None:
        raise ArtifactInvalid("codec 'lossless': a chunk was coded against a base tensor that is not there")
    known = narrow(base, dropped)
    if way == DIFFERENCE:
        words = _read_planes(data[2:], count, size)
        undo_zigzag(words, known)
    elif 0 < layout.exponent < bits:
        words = decode_groups(data[2:], known, bits - 1 - layout.exponent, layout.exponent)
    else:
        raise ArtifactInvalid("codec 'lossless': a chunk is grouped by exponents that its words do not have")
    return widen(words, dropped, layout.size)


def _write_planes(words: Words) -> bytes:
    """A frame a plane of bytes, lowest first, and before them their lengths: planes want a Huffman code each."""
    planes, count = memoryview(to_planes(words)), words.size
    frames = [compress_text(planes[at * count : (at + 1) * count]) for at in range(words.itemsize)]
    return struct.pack(f"<{len(frames)}I", *map(len, frames)) + b"".join(frames)


def _read_planes(data: bytes, count: int, size: int) -> Words:
    head = 4 * size
    lengths = struct.unpack_from(f"<{size}I", data) if len(data) >= head else ()
    if head + sum(lengths) != len(data) or not lengths:
        raise ArtifactInvalid("codec 'lossless': the planes of a chunk do not add up")
    edges = accumulate(lengths, initial=head)
    return from_planes(b"".join(decompress(data[low:high], count) for low, high in pairwise(edges)), size)
