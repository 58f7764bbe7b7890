"""Writes are whole or absent, whatever fails and when."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial as partial_call
from pathlib import Path
from typing import Any

import pytest

from mfs_decompose.artifact.atomic import (
    atomic_output,
    fsync_dir,
    publish_dir,
    recover_replaced,
    remove_temporaries,
    replace_dir,
    set_aside_name,
    write_file,
)
from mfs_decompose.errors import OutputBusy, ResourceShortage


class Crash(BaseException):
    """A kill: nothing may catch it to go on."""


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o022)
    yield lambda mask: void(os.umask(mask))
    os.umask(before)


def void(_: object) -> None:
    return None


def test_content_arrives_and_no_temporary_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_file(path, b"one")
    write_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_the_umask_decides_who_may_read(tmp_path: Path, umask: Callable[[int], None], mask: int, mode: int) -> None:
    umask(mask)
    write_file(tmp_path / "a", b"x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def test_any_buffer_is_written_whole(tmp_path: Path) -> None:
    import numpy as np

    values = np.arange(7, dtype=np.float32)
    with atomic_output(tmp_path / "a", 28) as output:
        output.write(values.data)
        output.write(b"")
    assert (tmp_path / "a").read_bytes() == values.tobytes()
    assert output.written == 28


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    write_file(tmp_path / "a", b"0123456789")
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"0123456789"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_names_path_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, b"old")

    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(ResourceShortage, match=r"a\.safetensors \(1\.23 kB\)") as caught:
        write_file(path, b"x" * 1234)
    monkeypatch.undo()
    assert caught.value.exit_code == 13
    assert "run the same command again" in (caught.value.hint or "")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_other_errors_keep_their_kind(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "absent" / "a", b"x")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, Crash, ValueError])
def test_an_interrupted_block_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    with pytest.raises(failure), atomic_output(tmp_path / "a", 9) as output:
        output.write(b"half")
        raise failure
    assert list(tmp_path.iterdir()) == []


def test_data_is_synced_before_the_rename_and_the_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, replace = os.fsync, Path.replace

    def spy_sync(fd: int) -> None:
        calls.append("sync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
        sync(fd)

    def spy_replace(self: Path, target: Path) -> Path:
        calls.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", spy_sync)
    monkeypatch.setattr(Path, "replace", spy_replace)
    write_file(tmp_path / "a", b"x")
    assert calls == ["sync file", "rename", "sync folder"]


def test_folders_that_cannot_be_synced_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EINVAL, "no fsync here")

    monkeypatch.setattr(os, "fsync", refuse)
    fsync_dir(tmp_path)


def test_publishing_gives_the_final_name(tmp_path: Path) -> None:
    partial = make_folder(tmp_path / "partial", "new")
    publish_dir(partial, tmp_path / "out")
    assert content(tmp_path / "out") == "new"
    assert not partial.exists()


@pytest.mark.parametrize("kind", ["file", "empty folder", "full folder", "dangling link"])
def test_publishing_never_replaces(tmp_path: Path, kind: str) -> None:
    partial, out = make_folder(tmp_path / "partial", "new"), tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "dangling link":
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.mkdir()
        if kind == "full folder":
            (out / "mine").write_text("x")
    with pytest.raises(OutputBusy) as caught:
        publish_dir(partial, out)
    assert caught.value.exit_code == 14
    assert content(partial) == "new"


def test_a_folder_that_appears_at_the_last_moment_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, out = make_folder(tmp_path / "partial", "new"), make_folder(tmp_path / "out", "theirs")
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    with pytest.raises(OutputBusy):
        publish_dir(partial, out)
    assert content(out) == "theirs"


def test_replacing_leaves_only_the_new_folder(tmp_path: Path) -> None:
    out = make_folder(tmp_path / "out", "old")
    (out / "leftover").write_text("must not survive")
    replace_dir(make_folder(tmp_path / "partial", "new"), out)
    assert content(out) == "new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]
    assert not (out / "leftover").exists()


def test_replacing_nothing_publishes(tmp_path: Path) -> None:
    replace_dir(make_folder(tmp_path / "partial", "new"), tmp_path / "out")
    assert content(tmp_path / "out") == "new"


def test_replacing_a_file_or_a_link_deletes_only_that(tmp_path: Path) -> None:
    elsewhere = make_folder(tmp_path / "elsewhere", "kept")
    (tmp_path / "out").symlink_to(elsewhere)
    replace_dir(make_folder(tmp_path / "partial", "new"), tmp_path / "out")
    assert content(tmp_path / "out") == "new"
    assert content(elsewhere) == "kept"


def test_a_failed_second_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, partial = make_folder(tmp_path / "out", "old"), make_folder(tmp_path / "partial", "new")
    real = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self == partial:
            raise OSError(errno.EIO, "broken")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="broken"):
        replace_dir(partial, out)
    assert content(out) == "old"
    assert content(partial) == "new"


def test_a_kill_at_any_moment_of_replacing_can_be_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop before the n-th change of the file system, for all n; afterwards `out` is the old or the new one, whole."""
    seen = set()
    for number in range(20):
        root = tmp_path / str(number)
        out, partial = make_folder(root / "out", "old"), make_folder(root / "partial", "new")
        finished = kill_before(number, monkeypatch, partial_call(replace_dir, partial, out))
        recover_replaced(out)
        seen.add(content(out))
        assert {entry.name for entry in root.iterdir()} <= {"out", "partial"}
        if finished:
            break
        if partial.exists():
            replace_dir(partial, out)
        assert content(out) == "new"
    assert finished
    assert seen == {"old", "new"}


def test_recovering_without_a_crash_does_nothing(tmp_path: Path) -> None:
    out = make_folder(tmp_path / "out", "x")
    assert recover_replaced(out) is False
    assert recover_replaced(tmp_path / "never") is False
    assert content(out) == "x"


def test_recovering_tells_when_it_put_the_old_folder_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_folder(set_aside_name(out), "old")
    assert recover_replaced(out) is True
    assert content(out) == "old"


def test_temporaries_of_killed_runs_are_removed(tmp_path: Path) -> None:
    make_folder(tmp_path / "files", "kept")
    for name in (".tmp-1-0", "files/.tmp-99-7"):
        (tmp_path / name).write_text("half")
    (tmp_path / "kept.tmp-").write_text("mine")
    assert remove_temporaries(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["content", "files", "kept.tmp-"]


def make_folder(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    (path / "content").write_text(text)
    return path


def content(path: Path) -> str:
    return (path / "content").read_text()


def kill_before(number: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> bool:
    """Run `work`, but let everything fail from its `number`-th rename or unlink on; whether it got through."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count > number:  # from here on the process is dead: clean-up code does nothing either
                raise Crash
            return real(*args, **keywords)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(os, "unlink", counted(os.unlink))
        patch.setattr(os, "rmdir", counted(os.rmdir))
        with contextlib.suppress(Crash):
            work()
            return True
    return False
