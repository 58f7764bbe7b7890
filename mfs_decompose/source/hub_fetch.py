"""One file from the Hub into the cache: goes on where it was, and is hashed before it gets its name.

huggingface_hub would start a killed download again from nothing, and compare its size only.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from mfs_decompose.errors import NetworkFailure, ResourceShortage, SourceNotFound
from mfs_decompose.source.hub_cache import Hasher, HubCache, is_intact, note_intact
from mfs_decompose.source.hub_client import HubClient, HubFile, Patience, Stopped
from mfs_decompose.source.hub_errors import FAILURES, ConnectionBroken, response_of

_CHUNK = 2**20


def fetch(client: HubClient, cache: HubCache, commit: str, file: HubFile, on_bytes: Callable[[int], None]) -> None:
    """Bring `file` into the cache and into the snapshot of `commit`.

    `on_bytes` hears of every byte once, also of those that an earlier try left behind.

    Raises:
        SourceNotFound: no access, or the cache cannot be used.
        NetworkFailure: the Hub cannot be reached, or sends other bytes than it lists.
        ResourceShortage: the disk is full.
    """
    blob = cache.blob(file)
    with _disk_errors(client, cache, file):
        blob.parent.mkdir(parents=True, exist_ok=True)
        with cache.locked(file, client.progress):
            if blob.exists() and blob.stat().st_size == file.size and is_intact(blob, file, lambda _: None):
                on_bytes(file.size)  # another process was faster
            else:
                _fetch_blob(client, cache, commit, file, on_bytes)
        cache.link(commit, file)


def show(client: HubClient, cache: HubCache, commit: str, file: HubFile) -> None:
    """Let the snapshot of `commit` show a file whose bytes are in the cache and were hashed.

    Raises:
        SourceNotFound: the cache cannot be written to.
    """
    if cache.find(commit, file) == cache.blob(file):
        with _disk_errors(client, cache, file):
            cache.link(commit, file)


@contextmanager
def _disk_errors(client: HubClient, cache: HubCache, file: HubFile) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceShortage(
                f"the disk of {cache.root} is full: cannot hold {file.name} of {client.ref.label}",
                hint="Free some space, or set HF_HOME to a folder on another disk; what has arrived is kept.",
            ) from None
        raise SourceNotFound(
            f"cannot use the cache {cache.root}: {error.strerror or type(error).__name__}",
            hint="Set HF_HOME to a folder that can be read and written.",
        ) from None


def _fetch_blob(
    client: HubClient, cache: HubCache, commit: str, file: HubFile, on_bytes: Callable[[int], None]
) -> None:
    blob, partial = cache.blob(file), cache.partial(file)
    counted = _Counter(on_bytes)
    for is_last in (False, True):
        with open(partial, "a+b") as stream:
            arrival = _Arrival(file, stream, counted)
            _receive(client, commit, file, arrival)
        if arrival.is_whole:
            partial.replace(blob)
            note_intact(blob, file)
            return
        partial.unlink()
        if not is_last:
            client.progress.note(f"{file.name} arrived with other bytes than the Hub lists: once more", "warning")
    raise NetworkFailure(
        f"{file.name} of {client.ref.label} arrived twice with other bytes than the Hub lists (its hash differs)",
        hint="Nothing of it was kept. Check for a proxy that changes files, or set HF_ENDPOINT to another mirror.",
    )


def _receive(client: HubClient, commit: str, file: HubFile, arrival: _Arrival) -> None:
    """Ask until as many bytes have come as the file has."""
    patience = Patience(client, file.name)
    while arrival.size < file.size:
        before = arrival.furthest
        try:
            with client.get(commit, file.name, arrival.size) as answer:
                if answer.start != arrival.size:
                    arrival.restart()
                if answer.start != arrival.size:
                    raise ConnectionBroken
                for chunk in answer.chunks:
                    if client.stop.is_set():
                        raise Stopped
                    arrival.add(chunk)
                    if arrival.size > file.size:
                        return
            if arrival.size < file.size:
                raise ConnectionBroken
        except FAILURES as error:
            arrival.flush()
            if arrival.furthest > before:
                patience.reset()
            patience.after(error)
            if (response := response_of(error)) is not None and response.status_code == 416:
                arrival.restart()


class _Counter:
    """Passes on how far a file has come, never the same byte twice."""

    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        self._on_bytes = on_bytes
        self._furthest = 0

    def reach(self, size: int) -> None:
        if size > self._furthest:
            self._on_bytes(size - self._furthest)
            self._furthest = size


class _Arrival:
    """The part of a file that is there, and its hash; `furthest` is the most bytes that ever were there.

    An unfinished file of an earlier run is taken over.
    """

    def __init__(self, file: HubFile, stream: BinaryIO, counted: _Counter) -> None:
        self._file, self._stream, self._counted = file, stream, counted
        self._hasher = Hasher(file)
        self.size = 0
        stream.seek(0)
        while chunk := stream.read(_CHUNK):
            self._hasher.update(chunk)
            self.size += len(chunk)
        if self.size > file.size:
            self.restart()
        self.furthest = self.size
        counted.reach(self.size)

    @property
    def is_whole(self) -> bool:
        """Whether the bytes are those that were listed."""
        return self._hasher.hexdigest() == self._file.digest

    def add(self, chunk: bytes) -> None:
        self._stream.write(chunk)
        self._hasher.update(chunk)
        self.size += len(chunk)
        self.furthest = max(self.furthest, self.size)
        self._counted.reach(min(self.size, self._file.size))

    def flush(self) -> None:
        """Leave nothing in memory that a kill during a wait would lose."""
        self._stream.flush()

    def restart(self) -> None:
        self._stream.truncate(0)
        self._hasher = Hasher(self._file)
        self.size = 0
