"""Chunks nobody wrote, and chunks that were damaged: refused, or the words that were asked for; nothing else."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import zstandard
from codec_entries import generator
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_decompose.codec.lossless_chunk import DIFFERENCE, GROUPED, OWN, RAW, Layout, decode_chunk, encode_chunk
from mfs_decompose.codec.predictor import layout_of, words_of
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.words import Words

_COUNT = 9002
_BF16 = layout_of("BF16")


@dataclass(frozen=True)
class Chunk:
    """A grouped chunk of BF16 words in pieces: `head` and `rows` are the fields of its header."""

    head: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    frames: tuple[bytes, ...]

    def data(self) -> bytes:
        rows = b"".join(struct.pack("<HBII", *row) for row in self.rows)
        return bytes((GROUPED, 0)) + struct.pack("<BBIII", *self.head) + rows + b"".join(self.frames)

    def with_head(self, at: int, value: int) -> Chunk:
        return Chunk((*self.head[:at], value, *self.head[at + 1 :]), self.rows, self.frames)

    def with_row(self, row: int, at: int, value: int) -> Chunk:
        changed = (*self.rows[row][:at], value, *self.rows[row][at + 1 :])
        return Chunk(self.head, (*self.rows[:row], changed, *self.rows[row + 1 :]), self.frames)

    def with_frame(self, at: int, frame: bytes) -> Chunk:
        """Another frame, its length as the header says it."""
        frames = (*self.frames[:at], frame, *self.frames[at + 1 :])
        changed = Chunk(self.head, self.rows, frames)
        return changed.with_head(3 + at, len(frame)) if at < 2 else changed.with_row(at - 2, 3, len(frame))


def pair() -> tuple[Words, Words]:
    draw = generator(1)
    base = torch.randn(_COUNT, generator=draw) * 0.1
    own = base + torch.randn(_COUNT, generator=draw) * 1e-3
    return words_of(own.to(torch.bfloat16)), words_of(base.to(torch.bfloat16))


@pytest.fixture(scope="module")
def base() -> Words:
    return pair()[1]


@pytest.fixture(scope="module")
def chunk() -> Chunk:
    data = encode_chunk(*pair(), _BF16)
    assert data[:2] == bytes((GROUPED, 0))
    head = struct.unpack_from("<BBIII", data, 2)
    rows = tuple(struct.unpack_from("<HBII", data, 16 + 11 * at) for at in range(head[0]))
    frames, at = [], 16 + 11 * head[0]
    for length in (head[3], head[4], *(row[3] for row in rows)):
        frames.append(data[at : at + length])
        at += length
    found = Chunk(head, rows, tuple(frames))
    assert found.data() == data and head[0] == 4 and head[2] > 0
    return found


def refused(data: bytes, base: Words | None, match: str, layout: Layout = _BF16) -> None:
    with pytest.raises(ArtifactInvalid, match=match):
        decode_chunk(data, _COUNT, base, layout)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x04\x00abc", b"\x01\x10", b"\x02\xff(", b"\xff" * 9])
def test_no_chunk_at_all(data: bytes, base: Words) -> None:
    refused(data, base, "a chunk begins with")


@pytest.mark.parametrize("length", [0, 2 * _COUNT - 1, 2 * _COUNT + 1])
def test_raw_words_too_few_or_too_many(length: int, base: Words) -> None:
    refused(bytes((RAW,)) + bytes(length), base, f"expected a chunk of {2 * _COUNT} bytes, found {length}")


@pytest.mark.parametrize("way", [DIFFERENCE, GROUPED])
def test_a_difference_needs_a_base(way: int) -> None:
    refused(bytes((way, 0)) + bytes(50), None, "a base tensor that is not there")


def test_groups_need_an_exponent(base: Words, chunk: Chunk) -> None:
    refused(chunk.data(), base, "exponents that its words do not have", Layout(2, 0))
    refused(bytes((GROUPED, 8)) + chunk.data()[2:], base, "exponents that its words do not have")


def planes(way: int, *frames: bytes) -> bytes:
    return bytes((way, 0)) + struct.pack(f"<{len(frames)}I", *map(len, frames)) + b"".join(frames)


@pytest.mark.parametrize("way", [OWN, DIFFERENCE])
@pytest.mark.parametrize("count", [0, _COUNT - 1, 2 * _COUNT, 1 << 24])
def test_planes_of_another_size_are_not_unpacked(way: int, count: int, base: Words) -> None:
    sound, other = (zstandard.ZstdCompressor().compress(bytes(size)) for size in (_COUNT, count))
    refused(planes(way, sound, other), base, f"expected a chunk of {_COUNT} bytes, found {count}")


def test_a_frame_of_unknown_size_is_not_unpacked(base: Words) -> None:
    sound = zstandard.ZstdCompressor().compress(bytes(_COUNT))
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 24))
    refused(planes(OWN, sound, frame), base, "expected a chunk of")


def test_planes_too_few_or_too_many(base: Words) -> None:
    sound = zstandard.ZstdCompressor().compress(bytes(_COUNT))
    for data in (planes(OWN, sound), planes(OWN, sound, sound, sound), planes(OWN, sound, sound)[:-1], b"\x01\0abc"):
        refused(data, base, "planes of a chunk do not add up")


def test_bytes_behind_a_frame_are_refused(base: Words, chunk: Chunk) -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(_COUNT))
    refused(planes(OWN, frame, frame + b"more"), base, "does not decompress")
    refused(chunk.with_frame(3, chunk.frames[3] + b"more").data(), base, "does not decompress")
    refused(chunk.data() + b"more", base, "do not add up")


def test_counts_that_do_not_add_up(base: Words, chunk: Chunk) -> None:
    for classes in (0, 5, 255):
        refused(chunk.with_head(0, classes).data(), base, "has no header")
    refused(chunk.with_head(0, 3).data(), base, "do not add up")
    refused(chunk.with_head(1, 2).data(), base, "has no header")
    refused(chunk.with_head(1, 1).data(), base, "does not decompress")
    for beyond in (_COUNT + 1, 2**32 - 1):
        refused(chunk.with_head(2, beyond).data(), base, "do not add up")
    for size in (0, 2**32 - 1):
        refused(chunk.with_head(4, size).data(), base, "do not add up")
        refused(chunk.with_row(1, 3, size).data(), base, "do not add up")
    for count in (0, chunk.rows[2][2] + 4, 2**32 - 1):
        refused(chunk.with_row(2, 2, count).data(), base, "do not add up")
    for width in (0, 3, 16):
        refused(chunk.with_row(0, 1, width).data(), base, f"digits of {width} bits")
    refused(chunk.data()[:20], base, "has no header")


def test_cuts_out_of_order_are_refused(base: Words, chunk: Chunk) -> None:
    for above in (chunk.rows[1][0], chunk.rows[2][0]):
        refused(chunk.with_row(0, 0, above).data(), base, "do not add up")


def test_other_cuts_or_another_base_need_other_counts(base: Words, chunk: Chunk) -> None:
    refused(chunk.with_row(0, 0, 0).data(), base, "another base")
    refused(chunk.with_row(2, 0, 65535).data(), base, "another base")
    refused(chunk.data(), np.roll(base, 1) * 2, "another base")


def test_counts_moved_between_classes_are_refused(base: Words, chunk: Chunk) -> None:
    first, second = chunk.rows[0][2], chunk.rows[1][2]
    width = {row: chunk.rows[row][1] for row in (0, 1)}
    moved = chunk.with_row(0, 2, first + 8).with_row(1, 2, second - 8)
    for row, count in ((0, first + 8), (1, second - 8)):
        frame = zstandard.ZstdCompressor().compress(bytes(-(-count * width[row] // 8)))
        moved = moved.with_frame(row + 2, frame)
    refused(moved.data(), base, "another base")


def test_escapes_that_are_not_there_are_refused(base: Words, chunk: Chunk) -> None:
    words = zstandard.ZstdCompressor().compress(bytes(2 * (chunk.head[2] - 1)))
    refused(chunk.with_frame(1, words).with_head(2, chunk.head[2] - 1).data(), base, "more numbers escape")
    words = zstandard.ZstdCompressor().compress(bytes(2 * (chunk.head[2] + 1)))
    refused(chunk.with_frame(1, words).with_head(2, chunk.head[2] + 1).data(), base, "more numbers than the base")


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(0, 255), st.integers(0, 10**6))
def test_damage_is_refused_or_gives_words(at: int, byte: int, cut: int) -> None:
    own, known = pair()
    data = bytearray(encode_chunk(own[:1500], known[:1500], _BF16))
    data[at % len(data)] = byte
    for damaged in (bytes(data), bytes(data[: cut % len(data)])):
        try:
            words = decode_chunk(damaged, 1500, known[:1500], _BF16)
        except ArtifactInvalid:
            continue
        assert words.size == 1500 and words.itemsize == 2
