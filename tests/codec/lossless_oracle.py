"""Chunks of the lossless codec read by the letter of docs/format.md: lists of whole numbers, one element at a time."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import zstandard


def read_chunk(data: bytes, count: int, base: Sequence[int] | None, size: int, exponent: int) -> list[int]:
    """The words of one chunk: `size` bytes each, `exponent` bits of exponent below the sign, 0 for what is no float."""
    way, body = data[0], data[2:]
    if way == 0:
        return [int.from_bytes(data[at : at + size], "little") for at in range(1, len(data), size)]
    dropped = data[1]
    bits = 8 * size - dropped
    left = next(size for size in (1, 2, 4, 8) if 8 * size >= bits)
    known = None if base is None else [word >> dropped for word in base]
    if way == 1:
        words = _plane_frames(body, count, left)
        if exponent:
            words = [word >> 1 | (word & 1) << (bits - 1) for word in words]
    else:
        assert known is not None
        numbers = _plane_frames(body, count, left) if way == 2 else _grouped(body, known, bits, exponent, left)
        words = [(word + _signed(n)) % 256**left for word, n in zip(known, numbers, strict=True)]
    return [word << dropped for word in words]


def _grouped(body: bytes, known: Sequence[int], bits: int, exponent: int, size: int) -> list[int]:
    classes, aside, beyond, low_bytes, beyond_bytes = struct.unpack_from("<BBIII", body)
    rows = [struct.unpack_from("<HBII", body, 14 + 11 * at) for at in range(classes)]
    frames, at = [], 14 + 11 * classes
    for length in (low_bytes, beyond_bytes, *(row[3] for row in rows)):
        frames.append(_frame(body[at : at + length]))
        at += length
    assert at == len(body)
    low, escaped = frames[0], iter(_planes(frames[1], beyond, size))
    streams = [iter(_digits(frame, width, count)) for frame, (_, width, count, _) in zip(frames[2:], rows, strict=True)]
    numbers: list[int] = []
    for start in range(0, len(known), 1 << 18):
        block = known[start : start + (1 << 18)]
        fields = [word >> (bits - 1 - exponent) & ((1 << exponent) - 1) for word in block]
        of = [sum(field > row[0] for row in rows[:-1]) for field in fields] + [0] * (-len(block) % 4)
        keys = [tuple(reversed(of[four : four + 4])) for four in range(0, len(of), 4)]
        order = sorted(range(len(keys)), key=lambda four: keys[four])
        symbols = [0] * len(of)
        for lane in range(4):
            for four in order:
                symbols[4 * four + lane] = next(streams[of[4 * four + lane]])
        for offset in range(len(block)):
            top = symbols[offset] if symbols[offset] < 255 else next(escaped)
            noise = sum(low[plane * len(known) + start + offset] << (8 * plane) for plane in range(aside))
            numbers.append((top << (8 * aside)) + noise)
    assert [next(rest, None) for rest in (escaped, *streams)] == [None] * (classes + 1)
    return numbers


def _plane_frames(body: bytes, count: int, size: int) -> list[int]:
    lengths = struct.unpack_from(f"<{size}I", body)
    starts = [4 * size + sum(lengths[:at]) for at in range(size)]
    assert starts[-1] + lengths[-1] == len(body)
    planes = [_frame(body[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
    return _planes(b"".join(planes), count, size)


def _digits(packed: bytes, width: int, count: int) -> list[int]:
    mask = (1 << width) - 1
    digits = [packed[at % len(packed)] >> (width * (at // len(packed))) & mask for at in range(count)]
    return [255 if digit == mask else digit for digit in digits]


def _planes(data: bytes, count: int, size: int) -> list[int]:
    assert len(data) == count * size
    return [sum(data[plane * count + at] << (8 * plane) for plane in range(size)) for at in range(count)]


def _signed(number: int) -> int:
    return -(number + 1) // 2 if number & 1 else number // 2


def _frame(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data) if data else b""
