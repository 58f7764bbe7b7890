"""Fixed: a low-rank delta whose factors are integers, as coarse as the fit that they are part of allows.

The delta under a correction: a product that is exact everywhere (linalg/fixed_point.py), its codes entropy-coded.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from mfs_decompose.codec.base import Emit, Fetch
from mfs_decompose.codec.tree import CodecNode, Part, shown
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.fixed_point import LARGEST_CODE, MAX_RANK, FixedFactors, is_exact
from mfs_decompose.linalg.grid import Longs
from mfs_decompose.linalg.integer_coder import decode_integers, encode_integers

_SCALES = 5  # classes of directions by the octave of their mean code; above it their lowest bits are split off
_HEAD = np.dtype([("exponent", "<i2"), ("left", "u1"), ("right", "u1")])


def encode_fixed(factors: FixedFactors, emit: Emit) -> CodecNode:
    """Write integer factors, of fewer values than their product."""
    rows, columns = factors.left.shape[1], factors.right.shape[1]
    assert is_exact(factors), "factors whose product could round"
    assert factors.rank * (rows + columns) <= rows * columns, f"rank {factors.rank} of [{rows}, {columns}]"
    sides = (factors.left.numpy().astype(np.int64), factors.right.numpy().astype(np.int64))
    octaves = [_octaves(codes) for codes in sides]
    head = np.zeros(factors.rank, _HEAD)
    head["exponent"], head["left"], head["right"] = factors.exponents, *octaves
    chunks = [_encode_side(codes, octave) for codes, octave in zip(sides, octaves, strict=True)]
    parts, offset = [], 0
    for name, data in zip(("directions", "left", "right"), (head.tobytes(), *chunks), strict=True):
        emit(data)
        parts.append(Part(name, "U8", (len(data),), offset, len(data)))
        offset += len(data)
    return CodecNode("fixed", params={"rank": factors.rank, "shape": [rows, columns]}, parts=tuple(parts))


class StoredFixed:
    """A stored delta whose factors are read when its first rows are.

    Not before: codes of one value cost no bytes, so a hostile shape asks for any memory. Whoever adds the delta to a
    base has read the base's rows by then.
    """

    def __init__(self, node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> None:
        self._open = partial(open_fixed, node, fetch, shape)
        self._factors: FixedFactors | None = None

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Raises as `open_fixed` does."""
        if self._factors is None:
            self._factors = self._open()
        return self._factors.rows(start, stop)


def open_fixed(node: CodecNode, fetch: Fetch, shape: tuple[int, int]) -> FixedFactors:
    """Read integer factors of an [O, I] delta, whose `rows` are exact.

    Raises:
        ArtifactInvalid: they are damaged, or their product could round.
    """
    rank = node.integer("rank")
    # More values than the matrix has would be a small file that fills the memory.
    if node.params.get("shape") != list(shape) or rank > MAX_RANK or rank * sum(shape) > shape[0] * shape[1]:
        found = f"{shown(node.params.get('shape'))} of rank {rank}"
        raise ArtifactInvalid(f"codec 'fixed': expected factors of a delta {list(shape)}, found {found}")
    data = _read(node, "directions", fetch)
    if len(data) != rank * _HEAD.itemsize:
        raise ArtifactInvalid(f"codec 'fixed': expected {rank} directions, found {len(data)} bytes")
    head = np.frombuffer(data, _HEAD)
    sides = [
        _decode_side(_read(node, side, fetch), head[side].astype(np.int64), length)
        for side, length in zip(("left", "right"), shape, strict=True)
    ]
    factors = FixedFactors(sides[0], sides[1], tuple(int(e) for e in head["exponent"]))
    if not is_exact(factors):
        raise ArtifactInvalid("codec 'fixed': factors whose product could round")
    return factors


def _octaves(codes_RN: Longs) -> list[int]:
    if not codes_RN.shape[1]:
        return [0] * codes_RN.shape[0]
    mean = np.abs(codes_RN).mean(axis=1)
    return [int(octave) for octave in np.ceil(np.log2(np.maximum(mean, 1.0)))]


def _split(octaves: Longs, length: int) -> tuple[Longs, npt.NDArray[np.uint8]]:
    """For each direction the number of low bits that are split off, and for each of its codes its class."""
    shift = np.maximum(octaves - (_SCALES - 1), 0)
    return shift, np.repeat(np.minimum(octaves, _SCALES - 1).astype(np.uint8), length)


def _encode_side(codes_RN: Longs, octaves: list[int]) -> bytes:
    shift, classes = _split(np.array(octaves, np.int64), codes_RN.shape[1])
    high = codes_RN >> shift[:, None]
    values = np.where(high < 0, -2 * high - 1, 2 * high).astype(np.uint64).reshape(-1)
    coded = encode_integers(values, classes, _SCALES)
    bits = [
        ((codes >> plane) & 1).astype(np.uint8)
        for codes, count in zip(codes_RN, shift.tolist(), strict=True)
        for plane in range(count)
    ]
    low = np.packbits(np.concatenate(bits)).tobytes() if bits else b""
    return len(coded).to_bytes(4, "little") + coded + low


def _decode_side(data: bytes, octaves: Longs, length: int) -> torch.Tensor:
    if octaves.size and int(octaves.max()) > LARGEST_CODE.bit_length():
        raise ArtifactInvalid("codec 'fixed': codes are too large")
    shift, classes = _split(octaves, length)
    size = 4 + int.from_bytes(data[:4], "little")
    expected = size + -(-int(shift.sum()) * length // 8)
    if len(data) != expected:
        raise ArtifactInvalid(f"codec 'fixed': expected {expected} bytes of codes, found {len(data)}")
    values = decode_integers(data[4:size], classes, _SCALES)
    if values.size and int(values.max()) > 4 * LARGEST_CODE:
        raise ArtifactInvalid("codec 'fixed': codes are too large")
    half = (values >> np.uint64(1)).astype(np.int64)
    high = np.where(values & np.uint64(1), -half - 1, half).reshape(octaves.size, length)
    codes = high << shift[:, None]
    stream, at = np.unpackbits(np.frombuffer(data[size:], np.uint8)), 0
    for row, count in zip(codes, shift.tolist(), strict=True):
        for plane in range(count):
            row |= stream[at : at + length].astype(np.int64) << plane
            at += length
    if codes.size and int(np.abs(codes).max()) > LARGEST_CODE:
        raise ArtifactInvalid("codec 'fixed': codes are too large")
    return torch.from_numpy(codes.astype(np.int32))


def _read(node: CodecNode, name: str, fetch: Fetch) -> bytes:
    part = node.part(name)
    if part.dtype != "U8" or part.shape != (part.nbytes,):
        raise ArtifactInvalid(f"array {name!r} of codec 'fixed': found {part.dtype} {list(part.shape)}")
    data = fetch(part.offset, part.nbytes)
    if len(data) != part.nbytes:
        raise ArtifactInvalid(f"array {name!r} of codec 'fixed': expected {part.nbytes} bytes, found {len(data)}")
    return data
