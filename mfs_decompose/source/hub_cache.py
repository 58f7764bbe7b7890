"""The cache that huggingface_hub shares with every tool on the machine, read and written in its own layout.

    models--org--name/
      blobs/<digest>                        the bytes, named by what they must hash to
      snapshots/<commit>/<file>             links to blobs
      refs/<branch or tag>                  the commit it meant when it was last fetched

A name is a promise that nobody checks: huggingface_hub compares sizes only
(https://github.com/huggingface/huggingface_hub/issues/3643). Here no file is used before its bytes were hashed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import Timeout
from huggingface_hub import constants, get_cached_repo_tree
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from mfs_decompose.events import ProgressSink
from mfs_decompose.source.hub_client import HubFile
from mfs_decompose.source.ref import is_commit

LOCK_PATIENCE = 2.0  # seconds until a wait for another process is said aloud
_CHUNK = 2**20

_known: dict[tuple[int, int, int, int, int], str] = {}
"""Digests of files hashed by this process, by device, inode, size, mtime and length of the digest."""


class HubCache:
    """One model's part of the cache; `root` is the folder of all models, by default HF_HUB_CACHE."""

    def __init__(self, repo: str, root: Path | None = None) -> None:
        self.repo = repo
        self.root = Path(constants.HF_HUB_CACHE if root is None else root).expanduser().absolute()
        self.folder = self.root / repo_folder_name(repo_id=repo, repo_type="model")

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit's files, whether it is there or not."""
        return self.folder / "snapshots" / commit

    def blob(self, file: HubFile) -> Path:
        """Where a file's bytes belong."""
        return self.folder / "blobs" / file.digest

    def partial(self, file: HubFile) -> Path:
        """Where they lie until all of them are there."""
        return self.folder / "blobs" / f"{file.digest}.incomplete"

    def commit_of(self, revision: str | None) -> str | None:
        """The commit that a revision meant when it was last fetched."""
        if revision is not None and is_commit(revision):
            return revision
        try:
            commit = (self.folder / "refs" / (revision or "main")).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        return commit if is_commit(commit) else None

    def remember(self, revision: str | None, commit: str) -> None:
        """Note what a branch or tag means now; a cache that cannot be written to is none the worse for it."""
        if self.commit_of(revision) == commit:  # a commit means itself
            return
        place = self.folder / "refs" / (revision or "main")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with _replacing(place) as fresh:
                fresh.write_text(commit)
        except OSError:
            return

    def find(self, commit: str, file: HubFile) -> Path | None:
        """Where the bytes of a file seem to be: right size, not hashed."""
        shown, blob = self.snapshot(commit) / file.name, self.blob(file)
        places = [blob] if shown.is_symlink() and _names(shown) != file.digest else [shown, blob]
        for place in places:
            with suppress(OSError):
                if place.stat().st_size == file.size:
                    return place
        return None

    def arrived(self, file: HubFile) -> int:
        """How many bytes of a file an unfinished download left."""
        try:
            return min(self.partial(file).stat().st_size, file.size)
        except OSError:
            return 0

    def listed(self, commit: str) -> list[HubFile]:
        """The files of a commit by the listing that huggingface_hub stores, which has no digests; empty without one."""
        try:
            tree = get_cached_repo_tree(self.repo, revision=commit, cache_dir=self.root)
        except CachedRepoTreeNotFoundError:
            return []
        return [HubFile(file.path, file.size, "") for file in tree]

    def promised(self, commit: str, name: str) -> HubFile | None:
        """What a file of a snapshot must hash to by the name of its blob; None for a copy, which has no such name."""
        place = self.snapshot(commit) / name
        try:
            return HubFile.checked(name, place.stat().st_size, _names(place))
        except (OSError, ValueError):
            return None

    def link(self, commit: str, file: HubFile) -> None:
        """Let the snapshot show the blob of `file`; where links cannot be made, a copy."""
        place = self.snapshot(commit) / file.name
        if not self.blob(file).exists() or (place.is_symlink() and place.exists() and _names(place) == file.digest):
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(place) as fresh:
            try:
                fresh.symlink_to(os.path.relpath(self.blob(file), place.parent))
            except OSError:
                shutil.copyfile(self.blob(file), fresh)

    @contextmanager
    def locked(self, file: HubFile, progress: ProgressSink) -> Iterator[None]:
        """Hold the lock that huggingface_hub takes to fetch the same blob."""
        lock = self.root / ".locks" / self.folder.name / f"{file.digest}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(WeakFileLock(lock, timeout=LOCK_PATIENCE))
            except Timeout:
                progress.note(f"waiting for another process that fetches {file.name}")
                stack.enter_context(WeakFileLock(lock))
            yield


def is_intact(place: Path, file: HubFile, on_bytes: Callable[[int], None]) -> bool:
    """Whether the bytes at `place` are those of `file`; they are hashed at most once a process, told to `on_bytes`.

    Raises:
        OSError: they cannot be read.
    """
    with open(place, "rb", buffering=0) as stream:
        key = _identity(os.fstat(stream.fileno()), file)
        if key not in _known:
            hasher = Hasher(file)
            while chunk := stream.read(_CHUNK):
                hasher.update(chunk)
                on_bytes(len(chunk))
            _known[key] = hasher.hexdigest()
    return _known[key] == file.digest


def was_hashed(place: Path, file: HubFile) -> bool:
    """Whether this process knows the digest of what lies at `place`."""
    try:
        return _identity(place.stat(), file) in _known
    except OSError:
        return False


def note_intact(place: Path, file: HubFile) -> None:
    """Spare a file that was hashed while it arrived the second reading."""
    _known[_identity(place.stat(), file)] = file.digest


def _identity(status: os.stat_result, file: HubFile) -> tuple[int, int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, len(file.digest)


class Hasher:
    """The digest that the cache names a file by: sha256, or git's sha1 over a header and the bytes."""

    def __init__(self, file: HubFile) -> None:
        self._hash = hashlib.sha256()
        if len(file.digest) == 40:
            self._hash = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)

    def update(self, chunk: bytes) -> None:
        self._hash.update(chunk)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _names(link: Path) -> str:
    """The name of the blob that a link of a snapshot leads to; of two links in a row the first."""
    return os.path.basename(os.readlink(link))  # noqa: PTH119, PTH115 (no path: a text with slashes)


@contextmanager
def _replacing(place: Path) -> Iterator[Path]:
    """A path beside `place` to make the new one at; it takes the name of the old one at once."""
    fresh = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield fresh
        fresh.replace(place)
    finally:
        fresh.unlink(missing_ok=True)
