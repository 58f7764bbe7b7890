"""The header of a safetensors file, read without the safetensors library.

The library accepts duplicate keys and control characters in names; files from strangers must not get that far. The
rules are those of the format's README (https://github.com/huggingface/safetensors) taken literally: a header of at most
100 MB, tensors that follow each other from byte 0 without holes or overlaps, and nothing behind the last one.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from mfs_decompose.errors import SourceIncompatible, SourceNotFound
from mfs_decompose.source import dtypes
from mfs_decompose.source.foreign_file import recognise
from mfs_decompose.source.strict_json import parse_strict_object

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1_000_000
MAX_ELEMENTS = 2**40
MAX_DIMS = 64  # torch's own limit
MAX_NAME = 1024  # characters
HEAD_BYTES = 512
_FRESH_COPY = "Fetch the file again, or write it again from the original weights."


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, without where it lies. `dtype` is the name safetensors uses, such as "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * dtypes.item_size(self.dtype)

    @property
    def rows(self) -> int:
        """Length of the first dimension; a 0-d tensor is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: everything behind the first dimension."""
        return math.prod(self.shape[1:]) * dtypes.item_size(self.dtype)


@dataclass(frozen=True, slots=True)
class TensorInfo(TensorSpec):
    """A tensor and its place: `start` is the absolute byte offset in the shard named `file`."""

    file: str
    start: int

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """All that stands in a shard before its weights.

    `raw` is the length field and the JSON as they stand in the file, `sha256` the hex digest of `raw`; `size` is that
    of the file in bytes, `tensors` are in the order of their offsets.
    """

    file: str
    size: int
    mtime_ns: int
    raw: bytes
    sha256: str
    metadata: Mapping[str, str]
    tensors: tuple[TensorInfo, ...]


def read_shard_header(path: Path) -> ShardHeader:
    """Read and check the header of one safetensors file; no weight is read.

    Raises:
        SourceNotFound: the file is not there, may not be read, or is shorter than its header says.
        SourceIncompatible: it is no safetensors file, or one that is unsafe to read.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SourceIncompatible(f"expected a regular file of weights, found something else: {path}")
            head = stream.read(HEAD_BYTES)
            length = header_length(path, head, status.st_size)
            raw = (head + stream.read(max(0, 8 + length - len(head))))[: 8 + length]
    except OSError as error:
        raise SourceNotFound(f"cannot read {path}: {error.strerror}") from None
    if len(raw) != 8 + length:
        raise SourceIncompatible(f"{path} changed while it was being read", hint="Run again once it is whole.")
    return shard_header(path, raw, status.st_size, status.st_mtime_ns)


def shard_header(path: Path, raw: bytes, size: int, mtime_ns: int) -> ShardHeader:
    """The header whose bytes are `raw`, of a shard of `size` bytes; raises as parse_header does."""
    metadata, tensors = parse_header(path, raw, size)
    return ShardHeader(path.name, size, mtime_ns, raw, hashlib.sha256(raw).hexdigest(), metadata, tensors)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO would block until somebody writes


def header_length(path: Path, head: bytes, size: int) -> int:
    """The length of the JSON, judged by the first bytes (HEAD_BYTES of them) and the size of the file alone.

    Raises:
        SourceNotFound: the file is shorter than that.
        SourceIncompatible: it does not begin as a safetensors file does.
    """
    length = int.from_bytes(head[:8], "little")
    begins_well = size >= 8 and length <= MAX_HEADER_BYTES and head[8:9] in (b"{", b"")
    if not begins_well and (known := recognise(head)):
        raise SourceIncompatible(f"expected a safetensors file, found {known[0]}: {path}", hint=known[1])
    if size < 8:
        raise SourceNotFound(f"{path} is cut off: it has {size} bytes, too few for any header", hint=_FRESH_COPY)
    if length > MAX_HEADER_BYTES:
        found = f"its first 8 bytes announce a header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed"
        raise SourceIncompatible(f"{path} is not a safetensors file: {found}", hint=_FRESH_COPY)
    if head[8:9] not in (b"{", b""):
        raise _unsafe(path, f"its header begins with {head[8:9]!r} where '{{' must stand")
    if 8 + length > size:
        raise SourceNotFound(
            f"{path} is cut off inside its header: expected at least {8 + length} bytes, found {size}", hint=_FRESH_COPY
        )
    return length


def parse_header(path: Path, raw: bytes, size: int) -> tuple[dict[str, str], tuple[TensorInfo, ...]]:
    """The metadata, and the tensors in the order of their offsets, from the first bytes of a shard of `size` bytes.

    Raises:
        SourceNotFound: the shard is shorter than its header says.
        SourceIncompatible: the header is none, or unsafe.
    """
    try:
        header = parse_strict_object(raw[8:])
        metadata = _read_metadata(header.pop("__metadata__", {}))
        if len(header) > MAX_TENSORS:
            raise ValueError(f"it lists {len(header)} tensors, more than the {MAX_TENSORS} allowed")
        entries = sorted((*_read_entry(name, entry), name) for name, entry in header.items())
        end = _check_contiguous(entries)
    except ValueError as error:
        raise _unsafe(path, str(error)) from None
    expected = len(raw) + end
    if size < expected:
        found = f"expected {expected} bytes by its header, found {size}"
        raise SourceNotFound(f"{path} is cut off (an incomplete download or copy): {found}", hint=_FRESH_COPY)
    if size > expected:
        raise _unsafe(path, f"{size - expected} bytes follow its last tensor")
    infos = (TensorInfo(name, dtype, shape, path.name, len(raw) + start) for start, _, dtype, shape, name in entries)
    return metadata, tuple(infos)


def _unsafe(path: Path, why: str) -> SourceIncompatible:
    return SourceIncompatible(f"{path} is not a valid safetensors file: {why}", hint=_FRESH_COPY)


def _read_metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("its __metadata__ is not a map from text to text")
    return value


def _read_entry(name: str, entry: object) -> tuple[int, int, str, tuple[int, ...]]:
    """Check one tensor by itself: (start, end, dtype, shape), offsets counted from the end of the header."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise ValueError(f"expected a printable tensor name of 1 to {MAX_NAME} characters, found {name[:80]!r}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not dtypes.is_known(dtype):
        raise ValueError(f"tensor {name!r} has the type {str(dtype)[:40]!r}, which this version does not read")
    if not _is_naturals(shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"tensor {name!r} has the shape {str(shape)[:80]}, expected whole numbers from 0 up")
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {name!r} has the offsets {str(offsets)[:80]}, expected a start and an end")
    # A zero beside a huge dimension has no elements, and still overflows whoever multiplies the rest.
    if math.prod(max(1, length) for length in shape) > MAX_ELEMENTS:
        raise ValueError(f"tensor {name!r} has the shape {str(shape)[:80]}, more than the 2^40 elements allowed")
    spec = TensorSpec(name, dtype, tuple(shape))
    if offsets[1] - offsets[0] != spec.nbytes:
        raise ValueError(f"tensor {name!r} needs {spec.nbytes} bytes, its offsets span {offsets[1] - offsets[0]}")
    return offsets[0], offsets[1], dtype, spec.shape


def _is_naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)  # bool is an int too


def _check_contiguous(entries: Sequence[tuple[int, int, str, tuple[int, ...], str]]) -> int:
    """Check that the tensors cover the data without holes or overlaps; the end of the last one."""
    end = 0
    for start, stop, _, _, name in entries:
        if start != end:
            where = "a hole" if start > end else "an overlap"
            raise ValueError(f"tensor {name!r} starts at byte {start} of the data, expected {end}: {where}")
        end = stop
    return end
