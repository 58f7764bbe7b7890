"""A model of the Hub as a folder of the local cache: pinned to a commit, and every byte hashed before it is used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from huggingface_hub import constants

from mfs_decompose.errors import NetworkFailure, ResourceShortage, SourceIncompatible, SourceNotFound
from mfs_decompose.events import ProgressSink
from mfs_decompose.provenance import free_disk
from mfs_decompose.source.folder import MAX_SIDECAR_BYTES, WEIGHT_INDEX, list_folder, resolve_inside
from mfs_decompose.source.hub_cache import HubCache, is_intact, was_hashed
from mfs_decompose.source.hub_choice import as_folder, choose_names, require_safetensors
from mfs_decompose.source.hub_client import HubClient, HubFile, Listing, Stopped
from mfs_decompose.source.hub_fetch import fetch, show
from mfs_decompose.source.hub_logging import quiet_libraries
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.source.weights import choose_contents, read_weight_map
from mfs_decompose.units import format_bytes

T = TypeVar("T")

CONNECTIONS = 4
"""Files worked on at the same time: one connection seldom fills the line, one core seldom reads as fast as the disk."""


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask the Hub."""
    return constants.is_offline_mode()


def fetch_snapshot(
    ref: SourceRef, progress: ProgressSink, *, token_env: str | None = None, cache_dir: Path | None = None
) -> tuple[Path, str]:
    """The folder of a model's checkpoint, fetched as far as it is not there already, and its commit.

    Weights are linked into the snapshot after everything else: a snapshot that has its weights is whole.

    Raises:
        SourceNotFound: no such model, revision or file, no access, or no safetensors.
        SourceIncompatible: its weight index is unsafe or contradicts itself.
        NetworkFailure: the Hub cannot be reached, or does not send what it lists.
        ResourceShortage: the disk cannot hold it.
    """
    with quiet_libraries():
        client = HubClient(ref, progress, token_env)
        cache = HubCache(client.repo, cache_dir)
        listing = client.list_files()
        beside, shards = _choose(client, cache, listing)
        intact = _check_cached(client, cache, listing.commit, [*beside, *shards])
        missing = [file for file in (*beside, *shards) if file not in intact]
        _require_room(client, cache, listing.commit, missing)
        if missing:
            progress.start(f"fetching {ref.label}", sum(file.size for file in missing))
        for files in (beside, shards):
            _bring_all(client, cache, listing.commit, files, intact)
        if missing:
            progress.finish()
        cache.remember(ref.revision, listing.commit)
    return cache.snapshot(listing.commit), listing.commit


def cached_snapshot(
    ref: SourceRef, progress: ProgressSink, *, hashed: bool = True, cache_dir: Path | None = None
) -> tuple[Path, str]:
    """The same without asking the Hub, from what an earlier run or another tool left in the cache.

    Raises:
        SourceNotFound: it is not there, or not whole.
        SourceIncompatible: a file is not what its name in the cache promises; looked at only if `hashed`.
    """
    assert ref.repo is not None
    cache = HubCache(ref.repo, cache_dir)
    commit = cache.commit_of(ref.revision)
    if commit is None or not cache.snapshot(commit).is_dir():
        taken = "No folder has that name, so it was taken for a model of the Hub. " if ref.is_bare else ""
        raise SourceNotFound(
            f"{ref.label} is not in the cache {cache.root}, and offline nothing is fetched",
            hint=f"{taken}Run once without --offline and HF_HUB_OFFLINE, or set HF_HOME to the cache that has it.",
        )
    names = _cached_names(ref, cache, commit)
    if hashed:
        _check_offline(ref, cache, commit, names, progress)
    return cache.snapshot(commit), commit


def side_by_side(work: Callable[[HubFile], T], files: Sequence[HubFile], stop: threading.Event) -> list[T]:
    """The results of `work` in the order of `files`; the first failure, or Ctrl-C, sets `stop` and is raised."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        jobs = [pool.submit(work, file) for file in files]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [job.result() for job in jobs]


def _choose(client: HubClient, cache: HubCache, listing: Listing) -> tuple[list[HubFile], list[HubFile]]:
    """The side files and the shards that are needed; fetches the weight index, which names the shards."""
    files = {file.name: file for file in listing.files}
    folder = as_folder(listing.files, Path(f"{client.repo}@{listing.commit[:12]}"))
    folder, _ = choose_contents(folder, client.ref.take)
    require_safetensors(folder, listing.files)
    if folder.index is not None and folder.index.size <= MAX_SIDECAR_BYTES:
        index = files[WEIGHT_INDEX]
        place = cache.find(listing.commit, index)
        if place is not None and _is_sound(place, index, lambda _: None):
            show(client, cache, listing.commit, index)
        else:
            fetch(client, cache, listing.commit, index, lambda _: None)
    weight_map = read_weight_map(replace(folder, root=cache.snapshot(listing.commit)))
    beside, shards = choose_names(folder, weight_map)
    return [files[name] for name in beside], [files[name] for name in shards]


def _check_cached(client: HubClient, cache: HubCache, commit: str, files: Sequence[HubFile]) -> set[HubFile]:
    """Those of `files` that need not be fetched: their bytes are in the cache and hash to what is listed."""
    places = {file: place for file in files if (place := cache.find(commit, file)) is not None}
    if not places:
        return set()

    def check(file: HubFile) -> bool:
        def on_bytes(count: int) -> None:
            if client.stop.is_set():
                raise Stopped
            client.progress.advance(count)

        return _is_sound(places[file], file, on_bytes)

    with _checking(client.ref, places, client.progress):
        sound = side_by_side(check, list(places), client.stop)
    for file, is_sound in zip(places, sound, strict=True):
        if not is_sound:
            client.progress.note(
                f"the cached copy of {file.name} of {client.ref.label} is damaged: fetching it again", "warning"
            )
    return {file for file, is_sound in zip(places, sound, strict=True) if is_sound}


def _bring_all(client: HubClient, cache: HubCache, commit: str, files: Sequence[HubFile], intact: set[HubFile]) -> None:
    missing = [file for file in files if file not in intact]
    side_by_side(lambda file: fetch(client, cache, commit, file, client.progress.advance), missing, client.stop)
    for file in files:
        if file in intact:
            show(client, cache, commit, file)


def _is_sound(place: Path, file: HubFile, on_bytes: Callable[[int], None]) -> bool:
    try:
        return is_intact(place, file, on_bytes)
    except OSError:
        return False


def _require_room(client: HubClient, cache: HubCache, commit: str, missing: Sequence[HubFile]) -> None:
    for file in missing:
        if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise NetworkFailure(
                f"{file.name} of {client.ref.label} has {format_bytes(file.size)}, more than the Hub sends over HTTP",
                hint=f"Run `hf download {client.repo} {file.name} --revision {commit}`, then this command again.",
            )
    needed = sum(file.size - cache.arrived(file) for file in missing)
    free = free_disk(cache.root)
    if needed > free:
        raise ResourceShortage(
            f"{client.ref.label} needs {format_bytes(needed)} more in the cache {cache.root}, "
            f"and {format_bytes(free)} is free",
            hint="Free some space (`hf cache prune`), or set HF_HOME to a folder on another disk.",
        )


def _cached_names(ref: SourceRef, cache: HubCache, commit: str) -> list[str]:
    """What a snapshot must hold: by its own headers, and by the listing that other tools may have left."""
    place = cache.snapshot(commit)
    try:
        folder, _ = choose_contents(list_folder(place), ref.take)
        beside, shards = choose_names(folder, read_weight_map(folder))
        listed = as_folder(cache.listed(commit), place)
        if listed.weights:
            listed, _ = choose_contents(listed, ref.take)
        wanted = {sidecar.name for sidecar in listed.sidecars} | ({listed.index.name} if listed.index else set())
        if lacking := sorted(wanted - set(beside)):
            raise SourceNotFound(f"{lacking[0]} is missing")
        for name in (*beside, *shards):
            resolve_inside(place, name)
    except SourceNotFound as error:
        raise SourceNotFound(
            f"only a part of {ref.label} is in the cache: {error.message}",
            hint="Run once without --offline and HF_HUB_OFFLINE to fetch the rest.",
        ) from None
    return [*beside, *shards]


def _check_offline(ref: SourceRef, cache: HubCache, commit: str, names: Sequence[str], progress: ProgressSink) -> None:
    folder = cache.snapshot(commit)
    promised = [file for name in names if (file := cache.promised(commit, name)) is not None]
    places = {file: folder / file.name for file in promised}
    unknown = sorted(set(names) - {file.name for file in promised})
    if unknown:
        progress.note(f"{ref.label}: nothing in the cache says what {first_few(unknown)} should hash to", "warning")
    with _checking(ref, places, progress):
        sound = side_by_side(lambda file: is_intact(places[file], file, progress.advance), promised, threading.Event())
    for file, is_sound in zip(promised, sound, strict=True):
        if not is_sound:
            raise SourceIncompatible(
                f"the cached copy of {file.name} of {ref.label} is damaged: its bytes do not hash to its name",
                hint=f"Run once without --offline, which fetches it again; it is {places[file].resolve()}",
            )


@contextmanager
def _checking(ref: SourceRef, places: Mapping[HubFile, Path], progress: ProgressSink) -> Iterator[None]:
    """A stage of progress for what must be hashed, none where all of it was."""
    unknown = [file.size for file, place in places.items() if not was_hashed(place, file)]
    if unknown:
        progress.start(f"checking {ref.label}", sum(unknown))
    yield
    if unknown:
        progress.finish()
