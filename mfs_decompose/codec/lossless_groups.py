"""Differences coded given the exponent of the base's weight: every class of exponents is a stream of digits.

A header says where exponents are cut and how each class is written; the streams follow, each a zstd frame whose Huffman
code is the table of its class, renewed every 128 KiB.
"""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise

import numpy as np

from mfs_decompose.codec.zstd_frames import compress_symbols, decompress
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.classes import BLOCK, CLASSES, Cuts, Symbols, classify, gather, padded, scatter, sort_fours
from mfs_decompose.linalg.cuts import choose_scheme
from mfs_decompose.linalg.digits import ESCAPE, WIDTHS, most, pack, packed_size, unpack
from mfs_decompose.linalg.words import Words, from_planes, to_planes, undo_zigzag, unzigzag, zigzag_difference

_HEAD = struct.Struct("<BBIII")
"""Classes; bytes set aside; numbers that escape; bytes of the frames of what is aside and of what escapes."""
_CLASS = struct.Struct("<HBII")
"""The highest exponent of the class (0 for the last); bits of a digit; numbers; bytes of their frame."""


def encode_groups(own: Words, base: Words, shift: int, exponent: int) -> bytes:
    """Code `own` given `base`, both of one size, whose exponents of `exponent` bits begin at bit `shift`."""
    scheme = choose_scheme(own, base, shift, (1 << exponent) - 1)
    limits = [most(width) for width in scheme.widths]
    found: list[list[memoryview]] = [[] for _ in limits]
    low, escaped = [], []
    for start in range(0, own.size, BLOCK):
        known = base[start : start + BLOCK]
        numbers = zigzag_difference(own[start : start + BLOCK], known)
        if scheme.aside:
            low.append(numbers)
            numbers = np.right_shift(numbers, 8 * scheme.aside)
        classes = classify(known, scheme.cuts)
        symbols = np.zeros(classes.size, np.uint8)
        symbols[: known.size] = np.clip(numbers, 0, ESCAPE)
        where = np.flatnonzero(symbols >= _limit(classes, limits))
        symbols[where] = ESCAPE
        escaped.append(numbers.take(where))
        gather(symbols, sort_fours(classes), found)
    aside = np.concatenate(low).view(np.uint8).reshape(-1, own.itemsize)[:, : scheme.aside].T.tobytes() if low else b""
    beyond = np.concatenate(escaped)
    frames = [_packed(aside), _packed(to_planes(beyond))]
    header = _HEAD.pack(scheme.cuts.classes, scheme.aside, beyond.size, *map(len, frames))
    for above, width, pieces in zip((*scheme.cuts.above, 0), scheme.widths, found, strict=True):
        symbols = np.frombuffer(b"".join(pieces), np.uint8)
        frames.append(_packed(pack(symbols, width).data))
        header += _CLASS.pack(above, width, symbols.size, len(frames[-1]))
    return header + b"".join(frames)


def decode_groups(data: bytes, base: Words, shift: int, exponent: int) -> Words:
    """Undo `encode_groups`.

    Raises:
        ArtifactInvalid: the header does not fit the chunk, or the streams fit neither header nor base.
    """
    cuts, aside, streams, low, escaped = _read(data, base, shift, (1 << exponent) - 1)
    own, used, taken = np.empty(base.size, base.dtype), 0, np.zeros(CLASSES, np.int64)
    for start in range(0, base.size, BLOCK):
        known, numbers = base[start : start + BLOCK], own[start : start + BLOCK]
        symbols = scatter(streams, taken, sort_fours(classify(known, cuts)))
        if symbols is None:
            raise _unfit("it was coded against another base")
        symbols = symbols[: known.size]
        where = np.flatnonzero(symbols == ESCAPE)
        beyond = escaped[used : used + where.size]
        if beyond.size != where.size:
            raise _unfit("more numbers escape than there are")
        used += where.size
        if aside:
            np.copyto(numbers, symbols)
            numbers[where] = beyond
            np.left_shift(numbers, 8 * aside, out=numbers)
            numbers.view(np.uint8).reshape(-1, base.itemsize)[:, :aside] = low[:, start : start + BLOCK].T
            undo_zigzag(numbers, known)
        else:
            unzigzag(symbols)  # as bytes: half the time, and no symbol is too large
            np.copyto(numbers.view(f"<i{base.itemsize}"), symbols.view(np.int8))
            np.add(numbers, known, out=numbers)
            undo_zigzag(beyond, known[where])
            numbers[where] = beyond
    if used != escaped.size:
        raise _unfit("it holds more numbers than the base")
    return own


def _limit(classes: Symbols, limits: list[int]) -> Symbols:
    """The limit of every element's class; arithmetic, since a table look-up is slower."""
    limit = np.full(classes.size, limits[0], np.uint8)
    for at in range(1, len(limits)):
        if limits[at] != limits[at - 1]:
            step = (classes >= at).view(np.uint8)
            np.multiply(step, (limits[at] - limits[at - 1]) % 256, out=step)
            np.add(limit, step, out=limit)
    return limit


def _read(data: bytes, base: Words, shift: int, mask: int) -> tuple[Cuts, int, list[memoryview], Symbols, Words]:
    """What is in a chunk: cuts, bytes aside, symbols by class, the bytes aside [aside, n], and what escaped."""
    if len(data) < _HEAD.size:
        raise _unfit("it has no header")
    classes, aside, beyond, *sizes = _HEAD.unpack_from(data)
    end = _HEAD.size + _CLASS.size * classes
    if not 1 <= classes <= CLASSES or aside >= base.itemsize or len(data) < end:
        raise _unfit("it has no header")
    rows = [_CLASS.unpack_from(data, _HEAD.size + _CLASS.size * at) for at in range(classes)]
    edges = list(accumulate([*sizes, *(row[3] for row in rows)], initial=end))
    above = tuple(row[0] for row in rows[:-1])
    counts = padded(base.size) == sum(row[2] for row in rows) and beyond <= base.size
    if edges[-1] != len(data) or not counts or list(above) != sorted(set(above)):
        raise _unfit("its streams do not add up")
    frames = [data[low:high] for low, high in pairwise(edges)]
    low = np.frombuffer(_unpacked(frames[0], base.size * aside), np.uint8).reshape(aside, base.size)
    escaped = from_planes(_unpacked(frames[1], beyond * base.itemsize), base.itemsize)
    streams = [_symbols(row, frame) for row, frame in zip(rows, frames[2:], strict=True)]
    return Cuts(shift, mask, above), aside, streams, low, escaped


def _symbols(row: tuple[int, ...], frame: bytes) -> memoryview:
    _, width, count, _ = row
    if width not in WIDTHS:
        raise _unfit(f"it has digits of {width} bits")
    packed = np.frombuffer(_unpacked(frame, packed_size(count, width)), np.uint8)
    return unpack(packed, width, count).data


def _packed(data: bytes | memoryview) -> bytes:
    return compress_symbols(data) if len(data) else b""


def _unpacked(frame: bytes, expected: int) -> bytes:
    return decompress(frame, expected) if frame or expected else b""


def _unfit(what: str) -> ArtifactInvalid:
    return ArtifactInvalid(f"codec 'lossless': a chunk of classes is damaged: {what}")
