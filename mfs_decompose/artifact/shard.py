"""Safetensors files written as a stream: the header is known before the first byte, and the file is hashed on its way.

The layout is the library's own (header padded with spaces to a multiple of 8, offsets without holes), so any
safetensors reader opens a shard.  The library's writer is not used: it wants every tensor in memory, does not fsync,
and makes files that only their owner can read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from mfs_decompose.artifact.atomic import atomic_output
from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.artifact.layout import MAX_HEADER_BYTES
from mfs_decompose.errors import UsageError
from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.source import dtypes
from mfs_decompose.source.header import MAX_HEADER_BYTES as MAX_READ_HEADER_BYTES

_ALIGNMENT: Final = 8
# Of one entry beyond its name, dtype and shape: fixed text plus two offsets of at most 20 digits.
_ENTRY_TEXT: Final = 96


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a shard to be written; `nbytes` is the size of its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of_bytes(cls, name: str, nbytes: int) -> Entry:
        """A blob: `nbytes` uninterpreted bytes."""
        return cls(name, "U8", (nbytes,), nbytes)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The entries of one shard in the order of their data, and the text that goes into `__metadata__`."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]

    @property
    def data_bytes(self) -> int:
        """Bytes of all entries together."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header()) + self.data_bytes

    def header(self) -> bytes:
        """The exact first bytes of the file: the length field and the padded JSON.

        `format` stands first and says `pt`: transformers refuses a file without it.
        """
        table: dict[str, object] = {"__metadata__": {"format": "pt", **dict(sorted(self.metadata.items()))}}
        start = 0
        for entry in self.entries:
            _check(entry)
            assert entry.name not in table, f"two entries are called {entry.name}"
            end = start + entry.nbytes
            table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
            start = end
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def library_order(entries: Iterable[Entry]) -> list[Entry]:
    """Widest elements first, then by name; the safetensors library does so too, and orders types of one width besides.

    Every tensor then starts at a multiple of its element size: readers view the bytes in place, and torch refuses a
    view that is not aligned.
    """
    return sorted(entries, key=lambda entry: (-dtypes.item_size(entry.dtype), entry.name))


def split_into_shards(
    entries: Sequence[Entry], shard_size: int, *, header_limit: int | None = None
) -> list[tuple[Entry, ...]]:
    """Cut a sequence of entries into shards, in order.

    A shard ends before the entry that would push its data above `shard_size` bytes or its header near `header_limit`
    bytes (by default MAX_HEADER_BYTES); an entry larger than `shard_size` gets a shard of its own. The cut depends on
    the entries alone.
    """
    header_limit = MAX_HEADER_BYTES if header_limit is None else header_limit
    shards: list[tuple[Entry, ...]] = []
    current: list[Entry] = []
    data = header = 0
    for entry in entries:
        text = len(json.dumps([entry.name, entry.shape], ensure_ascii=False).encode("utf-8")) + _ENTRY_TEXT
        if current and (data + entry.nbytes > shard_size or header + text > header_limit - 4096):
            shards.append(tuple(current))
            current, data, header = [], 0, 0
        current.append(entry)
        data, header = data + entry.nbytes, header + text
    if current:
        shards.append(tuple(current))
    return shards


def write_shard(
    path: Path,
    entries: Sequence[Entry],
    chunks: Iterable[bytes | memoryview],
    metadata: Mapping[str, str],
    *,
    header: bytes | None = None,
    progress: ProgressSink | None = None,
) -> FileRecord:
    """Write a shard whose data arrives in pieces of any size, and hash it on the way.

    Args:
        path: the final name; nothing is there until the file is whole and synced.
        entries: what the shard holds, in the order in which `chunks` delivers the bytes.
        chunks: the data of all entries, one after the other; each piece is used before the next one is asked for.
        metadata: text for `__metadata__` beside `format`.
        header: the first bytes of the file, to be written as they stand: those of an original that is written again.

    Raises:
        ResourceShortage: the disk is full; nothing is left under `path`.
        UsageError: the file would need a header that no reader accepts; nothing is written.
    """
    sink = progress or NullSink()
    plan = ShardPlan(tuple(entries), metadata)
    header = plan.header() if header is None else header
    if len(header) - 8 > MAX_READ_HEADER_BYTES:
        raise UsageError(
            f"expected a header of at most {MAX_READ_HEADER_BYTES} bytes in {path.name}, found {len(header) - 8} for "
            f"{len(plan.entries)} tensors: a safetensors file that could be written and never read",
            hint="Leave --layout single out: several files hold them.",
        )
    size = len(header) + plan.data_bytes
    digest = sha256(header)
    with atomic_output(path, size) as output:
        output.write(header)
        for chunk in chunks:
            output.write(chunk)
            digest.update(chunk)
            sink.advance(memoryview(chunk).nbytes)
        assert output.written == size, f"{path.name}: {size} bytes were planned, {output.written} came"
    return FileRecord(path.name, size, digest.hexdigest())


def _check(entry: Entry) -> None:
    expected = math.prod(entry.shape) * dtypes.item_size(entry.dtype)
    assert entry.nbytes == expected, f"{entry.name}: {entry.nbytes} bytes planned, its shape needs {expected}"
    assert entry.name != "__metadata__", "a tensor may not have the name of the metadata"
