"""Copying, linking and hashing whole files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from mfs_decompose.artifact import files
from mfs_decompose.artifact.files import copy_file, hardlink_file, hash_file, open_regular, read_small_file
from mfs_decompose.errors import ResourceShortage, SourceIncompatible, SourceNotFound, UsageError
from mfs_decompose.events import NullSink

DATA = bytes(range(256)) * 41


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "CHUNK", 1000)
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    return path


class Counter(NullSink):
    def __init__(self) -> None:
        self.pieces: list[int] = []

    def advance(self, nbytes: int) -> None:
        self.pieces.append(nbytes)


def test_a_copy_is_hashed_and_reported(tmp_path: Path, source: Path) -> None:
    counter = Counter()
    record = copy_file(source, tmp_path / "copy", counter)
    assert (tmp_path / "copy").read_bytes() == DATA
    assert record.path == "copy"
    assert (record.size, record.sha256) == (len(DATA), hashlib.sha256(DATA).hexdigest())
    assert sum(counter.pieces) == len(DATA)
    assert max(counter.pieces) == 1000


def test_a_link_shares_the_inode_and_is_hashed(tmp_path: Path, source: Path) -> None:
    record = hardlink_file(source, tmp_path / "link")
    assert source.samefile(tmp_path / "link")
    assert record == files.FileRecord("link", len(DATA), hashlib.sha256(DATA).hexdigest())
    assert hardlink_file(source, tmp_path / "link") == record  # again, as a resumed run does


def test_a_link_to_a_symbolic_link_is_one_to_the_file(tmp_path: Path, source: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.symlink_to(source)
    hardlink_file(snapshot, tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").stat().st_nlink == 2


def test_hash_file_of_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert hash_file(tmp_path / "empty", lambda _: None).sha256 == hashlib.sha256().hexdigest()


@pytest.mark.parametrize("put", [copy_file, hardlink_file])
def test_an_absent_source_is_named(tmp_path: Path, put: Any) -> None:
    with pytest.raises(SourceNotFound, match=r"cannot read .*absent"):
        put(tmp_path / "absent", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("put", [copy_file, hardlink_file])
def test_a_source_that_changes_meanwhile_is_refused(
    tmp_path: Path, source: Path, put: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Meddler(NullSink):
        done = False

        def advance(self, nbytes: int) -> None:
            if not self.done:
                self.done = True
                with source.open("ab") as stream:
                    stream.write(b"more")

    with pytest.raises(SourceIncompatible, match="changed while"):
        put(source, tmp_path / "copy", Meddler())
    assert not (tmp_path / "copy").exists()


def test_a_source_that_cannot_be_read_on_is_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(SourceNotFound, match="Input/output error"):
        copy_file(source, tmp_path / "copy")
    monkeypatch.undo()
    assert not (tmp_path / "copy").exists()


def test_a_full_disk_names_the_copy(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(ResourceShortage, match=r"base-00001.*10\.5 kB"):
        copy_file(source, tmp_path / "base-00001-of-00001.safetensors")


def test_no_hard_links_here_is_said_with_the_way_out(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UsageError, match="cross-device") as caught:
        hardlink_file(source, tmp_path / "link")
    assert caught.value.hint == "use --base-store copy"


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)


def test_small_files_stop_one_byte_behind_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    assert read_small_file(tmp_path / "a", 10) == b"0123456789"
    assert read_small_file(tmp_path / "a", 4) == b"01234"
