"""Entropy coding of integers whose class is known to both sides.

An integer is a bucket and, above 31, its low bits: sixteen buckets an octave, so that within one the bits are as good
as random. Buckets go through a range coder (constriction) under one static model a class, low bits are packed as they
are. Models are rounded to three bits of mantissa, one byte a bucket.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.range_coder import categorical, coded_words, decode_symbols, range_decoder, range_encoder

Integers = npt.NDArray[np.uint64]
Buckets = npt.NDArray[np.int32]
Classes = npt.NDArray[np.unsignedinteger[Any]]

_DIRECT = 5  # bits of an integer that is its own bucket
_FINE = _DIRECT - 1
BUCKETS = (64 - _DIRECT) * (1 << _FINE) + (1 << _DIRECT)
_HEAD = struct.Struct("<III")
_SCALE = 1 << 26


def encode_integers(values: Integers, classes: Classes, count: int) -> bytes:
    """Code unsigned integers, each of a class below `count`."""
    buckets = to_buckets(values)
    ordered, ends = _sort(classes, count)
    sorted_buckets = buckets[ordered]
    tables, words = bytearray(), range_encoder()
    for first, last in pairwise(ends):
        part = sorted_buckets[first:last]
        table = _table(part)
        tables += struct.pack("<H", len(table)) + table
        present, model = _model(table)
        if model is not None:
            index = np.zeros(BUCKETS, np.int32)
            index[present] = np.arange(present.size, dtype=np.int32)
            words.encode(index[part], model)
    coded = coded_words(words)
    packed, low = _squeeze(bytes(tables)), _pack_low(values, buckets)
    return b"".join((_HEAD.pack(len(packed), len(coded), len(low)), packed, coded, low))


def decode_integers(data: bytes, classes: Classes, count: int) -> Integers:
    """The integers of `encode_integers`, given their classes.

    Raises:
        ArtifactInvalid: the bytes are no such code.
    """
    if len(data) < _HEAD.size:
        raise ArtifactInvalid(f"coded integers: expected at least {_HEAD.size} bytes, found {len(data)}")
    sizes = _HEAD.unpack_from(data)
    if _HEAD.size + sum(sizes) != len(data) or sizes[1] % 4:
        raise ArtifactInvalid(f"coded integers: expected {_HEAD.size + sum(sizes)} bytes, found {len(data)}")
    first, second = _HEAD.size + sizes[0], _HEAD.size + sizes[0] + sizes[1]
    tables = _read_tables(_expand(data[_HEAD.size : first], count), count)
    ordered, ends = _sort(classes, count)
    sorted_buckets = np.empty(classes.size, np.int32)
    decoder = range_decoder(data[first:second])
    for table, start, stop in zip(tables, ends[:-1], ends[1:], strict=True):
        if start == stop:
            continue
        present, model = _model(table)
        if not present.size:
            raise ArtifactInvalid("coded integers: a class with members has no model")
        index = np.zeros(stop - start, np.int32) if model is None else decode_symbols(decoder, model, stop - start)
        sorted_buckets[start:stop] = present[index]
    buckets = np.empty(classes.size, np.int32)
    buckets[ordered] = sorted_buckets
    return _unpack_low(buckets, data[second:])


def to_buckets(values: Integers) -> Buckets:
    """The bucket of each integer, below BUCKETS."""
    shift = _shifts(values)
    return (shift * (1 << _FINE) + (values >> shift.astype(np.uint64)).astype(np.int64)).astype(np.int32)


def coded_bits(buckets: Buckets, classes: Classes, count: int) -> float:
    """About how many bits buckets and their models take."""
    if not buckets.size:
        return 0.0
    width = int(buckets.max()) + 1
    table = np.bincount(classes.astype(np.int64) * width + buckets, minlength=count * width).reshape(count, width)
    total = table.sum(axis=1, keepdims=True)
    share = np.where(table > 0, table / np.maximum(total, 1), 1.0)
    return float(-(table * np.log2(share)).sum()) + 8.0 * int((table > 0).sum())


def _shifts(values: Integers) -> npt.NDArray[np.int64]:
    """Low bits of each integer: bit length less _DIRECT, at least 0."""
    shift = np.zeros(values.size, np.int64)
    large = np.flatnonzero(values >> np.uint64(_DIRECT))
    for bit in (32, 16, 8, 4, 2, 1):  # bit lengths without floats: exact above 2^53
        if not large.size:
            break
        rest = values[large] >> (shift[large] + _FINE).astype(np.uint64)
        shift[large] += np.where(rest >> np.uint64(bit), bit, 0)
    return shift


def _low_bits(buckets: Buckets) -> npt.NDArray[np.int64]:
    bits: npt.NDArray[np.int64] = np.maximum((buckets.astype(np.int64) >> _FINE) - 1, 0)
    return bits


def _pack_low(values: Integers, buckets: Buckets) -> bytes:
    chosen = np.flatnonzero(buckets >= 1 << _DIRECT)
    if not chosen.size:
        return b""
    bits, rest = _low_bits(buckets[chosen]), values[chosen]
    planes = [
        ((rest[bits > plane] >> np.uint64(plane)) & np.uint64(1)).astype(np.uint8) for plane in range(int(bits.max()))
    ]
    return np.packbits(np.concatenate(planes)).tobytes()


def _unpack_low(buckets: Buckets, data: bytes) -> Integers:
    values = buckets.astype(np.uint64)
    chosen = np.flatnonzero(buckets >= 1 << _DIRECT)
    bits = _low_bits(buckets[chosen])
    if len(data) != -(-int(bits.sum()) // 8):
        raise ArtifactInvalid(f"coded integers: expected {-(-int(bits.sum()) // 8)} bytes of low bits")
    if not chosen.size:
        return values
    high = buckets[chosen].astype(np.int64) - bits * (1 << _FINE)
    found = high.astype(np.uint64) << bits.astype(np.uint64)
    stream = np.unpackbits(np.frombuffer(data, np.uint8))
    at = 0
    for plane in range(int(bits.max())):
        members = np.flatnonzero(bits > plane)
        found[members] |= stream[at : at + members.size].astype(np.uint64) << np.uint64(plane)
        at += members.size
    values[chosen] = found
    return values


def _sort(classes: Classes, count: int) -> tuple[npt.NDArray[np.intp], list[int]]:
    """An order by class, stable, and where each class begins and ends in it."""
    sizes = np.bincount(classes, minlength=count)
    return np.argsort(classes, kind="stable"), [0, *np.cumsum(sizes).tolist()]


def _table(buckets: Buckets) -> bytes:
    """One byte a bucket up to the last that occurs: 0, or about eight times the octave of its share."""
    if not buckets.size:
        return b""
    counts = np.bincount(buckets)
    share = np.maximum(counts * (_SCALE / buckets.size), 8.0)
    octave = np.floor(np.log2(share)).astype(np.int64)
    mantissa = np.rint(share / np.exp2(octave - 3.0)).astype(np.int64)  # 8..16: 16 is the next octave's 8
    return np.where(counts > 0, (octave - 3) * 8 + mantissa - 7, 0).astype(np.uint8).tobytes()


def _model(table: bytes) -> tuple[npt.NDArray[np.int64], Any]:
    """The buckets that occur and, where they are several, a model of them."""
    codes = np.frombuffer(table, np.uint8).astype(np.int64)
    present = np.flatnonzero(codes)
    if present.size < 2:
        return present, None
    code = codes[present] - 1
    shares = (8 + (code & 7)) << (code >> 3)
    return present, categorical(shares)


def _read_tables(data: bytes, count: int) -> list[bytes]:
    tables, at = [], 0
    for _ in range(count):
        length = int.from_bytes(data[at : at + 2], "little")
        if at + 2 + length > len(data) or length > BUCKETS:
            raise ArtifactInvalid("coded integers: the models are cut off")
        tables.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    if at != len(data):
        raise ArtifactInvalid("coded integers: more models than classes")
    return tables


def _squeeze(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=9, write_content_size=True).compress(data)


def _expand(data: bytes, count: int) -> bytes:
    import zstandard

    try:
        declared = zstandard.frame_content_size(data)
        if not 0 <= declared <= count * (BUCKETS + 2):
            raise ArtifactInvalid(f"coded integers: models of {declared} bytes")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ArtifactInvalid(f"coded integers: the models do not decompress ({error})") from error
