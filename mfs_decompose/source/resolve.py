"""From what a user wrote to a folder with a checkpoint in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.source.checkpoint import Checkpoint, open_checkpoint
from mfs_decompose.source.ref import SourceRef


@dataclass(frozen=True, slots=True)
class Resolved:
    """A folder. For a model of the Hub it is a snapshot in the cache: `repo` is org/name, `revision` the commit."""

    folder: Path
    repo: str | None = None
    revision: str | None = None

    @property
    def pinned(self) -> str:
        """A reference that means the same tomorrow: the commit of a model, the absolute path of a folder."""
        return f"hf://{self.repo}@{self.revision}" if self.repo else str(self.folder.absolute())


def resolve(
    ref: SourceRef,
    *,
    offline: bool = False,
    token_env: str | None = None,
    progress: ProgressSink | None = None,
    cache_dir: Path | None = None,
) -> Resolved:
    """The folder that a reference means. A model of the Hub is pinned to a commit, fetched and hashed.

    `offline`, like HF_HUB_OFFLINE, takes it from the cache. `token_env` names an environment variable that holds the
    access token; without it huggingface_hub looks for HF_TOKEN and for a login.

    Raises:
        SourceNotFound: it is not there, or there is no access to it.
        SourceIncompatible: it is unsafe, or a cached file is damaged.
        NetworkFailure: the Hub cannot be reached, or does not send what it lists.
        ResourceShortage: the disk cannot hold it.
    """
    if ref.repo is None:
        assert ref.folder is not None
        return Resolved(ref.folder)
    from mfs_decompose.source import hub  # imports an HTTP client, which folders do not need

    sink = progress or NullSink()
    if offline or hub.is_offline():
        folder, commit = hub.cached_snapshot(ref, sink, cache_dir=cache_dir)
    else:
        folder, commit = hub.fetch_snapshot(ref, sink, token_env=token_env, cache_dir=cache_dir)
    _say_commit(ref, commit, sink)
    return Resolved(folder, ref.repo, commit)


def open_source(
    text: str,
    id: str,
    *,
    offline: bool = False,
    progress: ProgressSink | None = None,
    headers_only: bool = False,
    token_env: str | None = None,
    cache_dir: Path | None = None,
) -> Checkpoint:
    """Open the checkpoint that `text` means, with its repository and commit where it comes from the Hub.

    With `headers_only`, for a dry run, no weights of the Hub are fetched or hashed; they cannot be read afterwards.
    Of a model of the Hub nothing counts as left out: what else lies in the cache is not its doing.

    Raises:
        UsageError: the text is no reference.
        MfsError: as resolve and open_checkpoint do.
    """
    ref, sink = SourceRef.parse(text), progress or NullSink()
    if ref.repo is not None and headers_only:
        from mfs_decompose.source import hub
        from mfs_decompose.source.hub_headers import read_remote_headers

        if offline or hub.is_offline():
            folder, commit = hub.cached_snapshot(ref, sink, hashed=False, cache_dir=cache_dir)
            checkpoint = open_checkpoint(folder, id, take=ref.take)
        else:
            checkpoint, commit = read_remote_headers(ref, id, sink, token_env=token_env, cache_dir=cache_dir)
        _say_commit(ref, commit, sink)
        return replace(checkpoint, left_out=(), repo=ref.repo, revision=commit)
    found = resolve(ref, offline=offline, token_env=token_env, progress=sink, cache_dir=cache_dir)
    checkpoint = open_checkpoint(found.folder, id, take=ref.take)
    if found.repo is None:
        return checkpoint
    return replace(checkpoint, left_out=(), repo=found.repo, revision=found.revision)


def _say_commit(ref: SourceRef, commit: str, progress: ProgressSink) -> None:
    if ref.revision != commit:
        progress.note(f"{ref.label} is at commit {commit}")
