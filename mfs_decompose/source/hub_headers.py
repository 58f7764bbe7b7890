"""A checkpoint of the Hub from headers alone, for a dry run: of a shard, only its first bytes are fetched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mfs_decompose.errors import NetworkFailure, SourceIncompatible
from mfs_decompose.events import ProgressSink
from mfs_decompose.source.checkpoint import CONFIG, MAX_CONFIG_BYTES, Checkpoint, join_checkpoint, parse_config
from mfs_decompose.source.folder import MAX_SIDECAR_BYTES, WEIGHT_INDEX
from mfs_decompose.source.header import HEAD_BYTES, ShardHeader, header_length, read_shard_header, shard_header
from mfs_decompose.source.hub import side_by_side
from mfs_decompose.source.hub_cache import Hasher, HubCache
from mfs_decompose.source.hub_choice import as_folder, choose_names, require_safetensors
from mfs_decompose.source.hub_client import HubClient, HubFile
from mfs_decompose.source.hub_logging import quiet_libraries
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.source.weights import ADAPTER_CONFIG, choose_contents, parse_weight_map

_FIRST_BYTES = 64 * 2**10
"""Asked for at first: headers of common shards are smaller, and a round trip costs more than these bytes."""


def read_remote_headers(
    ref: SourceRef, id: str, progress: ProgressSink, *, token_env: str | None = None, cache_dir: Path | None = None
) -> tuple[Checkpoint, str]:
    """A checkpoint to plan with, and its commit. Nothing is written; `root` is where the files would be.

    Raises:
        MfsError: as fetch_snapshot and open_checkpoint do.
    """
    with quiet_libraries():
        client = HubClient(ref, progress, token_env)
        cache = HubCache(client.repo, cache_dir)
        listing = client.list_files()
        commit, files = listing.commit, {file.name: file for file in listing.files}
        folder = as_folder(listing.files, Path(f"{client.repo}@{commit[:12]}"))
        folder, is_adapter = choose_contents(folder, ref.take)
        require_safetensors(folder, listing.files)
        weight_map = None
        if folder.index is not None:
            raw = _small_file(client, cache, commit, files[WEIGHT_INDEX], MAX_SIDECAR_BYTES)
            weight_map = parse_weight_map(folder.root / WEIGHT_INDEX, raw)
        _, shards = choose_names(folder, weight_map)

        def read_config(name: str) -> dict[str, object]:
            raw = _small_file(client, cache, commit, files[name], MAX_CONFIG_BYTES)
            return parse_config(folder.root / name, raw)

        config = read_config(CONFIG) if CONFIG in files else {}
        adapter = read_config(ADAPTER_CONFIG) if is_adapter else None
        progress.start(f"reading headers of {ref.label}", None)
        wanted = [files[name] for name in shards]
        headers = side_by_side(lambda file: _header(client, cache, commit, file), wanted, client.stop)
        progress.finish()
    folder = replace(folder, root=cache.snapshot(commit))
    return join_checkpoint(id, folder, weight_map, tuple(headers), config, adapter, ref.take), commit


def _header(client: HubClient, cache: HubCache, commit: str, file: HubFile) -> ShardHeader:
    place = cache.snapshot(commit) / file.name
    if cache.find(commit, file) == place:
        return read_shard_header(place)
    named = Path(f"{client.repo}@{commit[:12]}") / file.name
    head = client.read(commit, file.name, 0, min(_FIRST_BYTES, file.size))
    length = 8 + header_length(named, head[:HEAD_BYTES], file.size)
    head += client.read(commit, file.name, len(head), length)
    client.progress.advance(length)
    return shard_header(named, head[:length], file.size, mtime_ns=0)


def _small_file(client: HubClient, cache: HubCache, commit: str, file: HubFile, limit: int) -> bytes:
    """All bytes of a side file, hashed; from the cache where they are there."""
    if file.size > limit:
        raise SourceIncompatible(
            f"expected at most {limit} bytes, found {file.size}: {file.name} of {client.ref.label}",
            hint=f"Look at {client.asked(file.name).page}",
        )
    place = cache.find(commit, file)
    found = place.read_bytes() if place is not None else b""
    if _hash(file, found) != file.digest:
        found = client.read(commit, file.name, 0, file.size)
    if _hash(file, found) != file.digest:
        raise NetworkFailure(
            f"{file.name} of {client.ref.label} arrived with other bytes than the Hub lists (its hash differs)",
            hint="Check for a proxy that changes files, or set HF_ENDPOINT to another mirror.",
        )
    return found


def _hash(file: HubFile, content: bytes) -> str:
    hasher = Hasher(file)
    hasher.update(content)
    return hasher.hexdigest()
