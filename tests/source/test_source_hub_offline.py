"""Without the Hub: what the cache holds is hashed all the same, and what it lacks is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hub_stub import Drop, HubStub, model_files, sha256
from recording_sink import RecordingSink

from mfs_decompose.errors import NetworkFailure, SourceIncompatible, SourceNotFound
from mfs_decompose.source import hub_cache
from mfs_decompose.source.checkpoint import open_checkpoint
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.source.resolve import Resolved, open_source, resolve

FILES = model_files()
FIRST = "model-00001-of-00002.safetensors"


def offline(text: str = "org/name", sink: RecordingSink | None = None) -> Resolved:
    return resolve(SourceRef.parse(text), offline=True, progress=sink)


@pytest.fixture
def cached(hub: HubStub) -> Resolved:
    """The model, fetched by us; requests and known digests are forgotten."""
    hub.commit("org/name", FILES)
    found = resolve(SourceRef.parse("org/name"))
    hub.seen.clear()
    hub_cache._known.clear()
    return found


@pytest.mark.parametrize("by", ["name", "branch", "commit", "pin"])
def test_what_was_fetched_is_found_and_hashed(hub: HubStub, cached: Resolved, by: str) -> None:
    texts = {
        "name": "org/name",
        "branch": "org/name@main",
        "commit": f"org/name@{cached.revision}",
        "pin": cached.pinned,
    }
    sink = RecordingSink()
    assert offline(texts[by], sink) == cached
    assert hub.seen == []
    (stage,) = sink.stages
    assert (stage.name, stage.finished) == (f"checking {texts[by].removeprefix('hf://')}", True)
    assert stage.total == stage.done == sum(path.stat().st_size for path in cached.folder.iterdir())
    assert sink.warnings == []


def test_the_environment_can_say_so(hub: HubStub, cached: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(SourceRef.parse("org/name")) == cached
    checkpoint = open_source("org/name", "math", headers_only=True)
    repo, revision = checkpoint.repo, checkpoint.revision
    assert (checkpoint.root, repo, revision) == (cached.folder, "org/name", cached.revision)
    assert hub.seen == []


def test_a_name_means_what_it_meant_when_it_was_last_fetched(hub: HubStub, cached: Resolved) -> None:
    hub.commit("org/name", model_files(seed=9))
    assert offline() == cached
    newer = resolve(SourceRef.parse("org/name"))
    assert offline() == newer != cached
    assert offline(cached.pinned) == cached


class TestMissing:
    @pytest.mark.parametrize("text", ["hf://org/other", "hf://org/name@v2", "hf://org/name@" + "a" * 40])
    def test_what_was_never_fetched(self, cached: Resolved, text: str) -> None:
        with pytest.raises(
            SourceNotFound, match=r"is not in the cache .*/hub, and offline nothing is fetched"
        ) as caught:
            offline(text)
        assert caught.value.exit_code == 11
        assert (caught.value.hint or "").startswith("Run once without --offline and HF_HUB_OFFLINE")

    def test_a_bare_name_might_have_been_a_path(self, hub: HubStub, tmp_path: Path) -> None:
        with pytest.raises(SourceNotFound) as caught:
            offline("runs/codee")
        assert (caught.value.hint or "").startswith("No folder has that name, so it was taken for a model of the Hub.")

    @pytest.mark.parametrize("content", [b"not a commit", b"../../..", b"\xff" * 40])
    def test_a_branch_that_means_nothing(self, cached: Resolved, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "hub" / "models--org--name" / "refs" / "main").write_bytes(content)
        with pytest.raises(SourceNotFound, match="is not in the cache"):
            offline()

    @pytest.mark.parametrize("name", [FIRST, "model.safetensors.index.json"])
    def test_a_part(self, cached: Resolved, name: str) -> None:
        (cached.folder / name).unlink()
        if name == FIRST:
            with pytest.raises(SourceNotFound, match=rf"only a part of org/name .*{FIRST} missing") as caught:
                offline()
            assert caught.value.hint == "Run once without --offline and HF_HUB_OFFLINE to fetch the rest."
        else:  # nothing but its name says that it was there
            assert len(open_checkpoint(offline().folder, "x").shards) == 2

    @pytest.mark.parametrize("name", [FIRST, "config.json"])
    def test_a_link_that_leads_nowhere(self, cached: Resolved, name: str) -> None:
        (cached.folder / name).resolve().unlink()
        with pytest.raises(SourceNotFound, match=r"only a part of org/name .*link that leads nowhere"):
            offline()

    def test_a_side_file_of_a_download_that_was_cut_short(self, hub: HubStub) -> None:
        """huggingface_hub leaves a listing behind, which says what a snapshot should hold."""
        from huggingface_hub import snapshot_download

        hub.commit("org/name", FILES)
        snapshot_download("org/name", allow_patterns=["*.safetensors", "*.index.json", "config.json"])
        with pytest.raises(SourceNotFound, match=r"only a part of org/name .*README.md is missing"):
            offline()

    def test_weights_come_last_so_whoever_has_them_has_everything(self, hub: HubStub) -> None:
        commit = hub.commit("org/name", FILES)
        hub.fail("tokenizer.json", *[Drop(0)] * 9)
        with pytest.raises(NetworkFailure):
            resolve(SourceRef.parse("org/name"))
        assert FIRST not in hub.bodies()
        with pytest.raises(SourceNotFound, match="only a part of org/name@"):
            offline(f"org/name@{commit}")

    def test_a_listing_that_cannot_be_read_is_none(self, cached: Resolved, tmp_path: Path) -> None:
        place = tmp_path / "hub" / "models--org--name" / "trees" / f"{cached.revision}.json"
        place.parent.mkdir()
        for text in ("no JSON", '{"format_version": 9, "files": {"extra.json": {"size": 3, "blob_id": "x"}}}'):
            place.write_text(text)
            assert offline() == cached


class TestDamage:
    """B64: the name of a blob is a promise that is kept here."""

    @pytest.mark.parametrize("name", [FIRST, "config.json", "tokenizer.json", "model.safetensors.index.json"])
    def test_b64_wrong_bytes_of_the_same_size(self, cached: Resolved, name: str) -> None:
        blob = (cached.folder / name).resolve()
        content = bytearray(blob.read_bytes())
        content[-3] ^= 1  # in JSON a letter or a brace
        blob.write_bytes(content)
        with pytest.raises(
            SourceIncompatible, match=rf"the cached copy of {name} of org/name is damaged|is not"
        ) as caught:
            offline()
        assert caught.value.exit_code == 12
        if name == FIRST:
            expected = f"Run once without --offline, which fetches it again; it is {blob}"
            assert caught.value.hint == expected

    @pytest.mark.parametrize("length", [0, 9_000])
    def test_b64_a_file_that_is_cut_off(self, cached: Resolved, length: int) -> None:
        os.truncate((cached.folder / FIRST).resolve(), length)
        with pytest.raises(SourceIncompatible, match="is damaged"):
            offline()

    def test_b64_a_blob_under_the_name_of_another(self, cached: Resolved) -> None:
        one, other = ((cached.folder / FIRST.replace("00001", f"0000{n}")).resolve() for n in (1, 2))
        shutil.copyfile(other, one)
        with pytest.raises(SourceIncompatible, match=f"{FIRST} of org/name is damaged"):
            offline()

    def test_online_it_is_repaired(self, hub: HubStub, cached: Resolved) -> None:
        blob = (cached.folder / FIRST).resolve()
        blob.write_bytes(bytes(blob.stat().st_size))
        sink = RecordingSink()
        assert resolve(SourceRef.parse("org/name"), progress=sink) == cached
        assert sink.warnings == [f"the cached copy of {FIRST} of org/name is damaged: fetching it again"]
        assert hub.bodies() == [FIRST]
        hub_cache._known.clear()
        assert offline() == cached


class TestCachesOfOthers:
    def test_copies_instead_of_links_cannot_be_checked_and_that_is_said(self, cached: Resolved) -> None:
        path = cached.folder / FIRST
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        sink = RecordingSink()
        assert offline(sink=sink) == cached
        assert sink.warnings == [f"org/name: nothing in the cache says what {FIRST} should hash to"]

    def test_blobs_that_several_models_share(self, cached: Resolved, tmp_path: Path) -> None:
        """What huggingface_hub fetches from Xet storage: a link to a link to blobs/<2 digits>/<hash>."""
        blob = (cached.folder / FIRST).resolve()
        shared = tmp_path / "hub" / "blobs" / "ab" / ("ab" * 32)
        shared.parent.mkdir(parents=True)
        blob.rename(shared)
        blob.symlink_to(os.path.relpath(shared, blob.parent))
        assert offline() == cached
        assert resolve(SourceRef.parse("org/name")) == cached
        assert open_checkpoint(cached.folder, "x").tensor_bytes == 2 * 4 * (97 * 65 + 7)
        hub_cache._known.clear()
        shared.write_bytes(bytes(shared.stat().st_size))
        with pytest.raises(SourceIncompatible, match="is damaged"):
            offline()

    def test_a_cache_that_cannot_be_written_to(self, hub: HubStub, cached: Resolved, tmp_path: Path) -> None:
        """Read-only caches on shared disks: whole ones need no writing."""
        from unittest import mock

        shutil.rmtree(tmp_path / "hub" / "models--org--name" / "refs")

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        with mock.patch.object(Path, "mkdir", refuse), mock.patch.object(Path, "symlink_to", refuse):
            assert resolve(SourceRef.parse("org/name")) == cached
            (cached.folder / FIRST).resolve().unlink()
            with pytest.raises(SourceNotFound, match=r"cannot use the cache .*/hub: Permission denied"):
                resolve(SourceRef.parse("org/name"))

    def test_another_cache(self, hub: HubStub, cached: Resolved, tmp_path: Path) -> None:
        moved = tmp_path / "elsewhere"
        (tmp_path / "hub").rename(moved)
        found = resolve(SourceRef.parse("org/name"), offline=True, cache_dir=moved)
        assert found.folder.is_relative_to(moved)
        assert sha256((found.folder / FIRST).read_bytes()) == sha256(FILES[FIRST])


def test_side_files_that_are_not_json_are_hashed_before_they_are_read(hub: HubStub, cached: Resolved) -> None:
    config = (cached.folder / "config.json").resolve()
    config.write_bytes(b"x" * config.stat().st_size)
    with pytest.raises(SourceIncompatible, match=r"the cached copy of config.json of org/name is damaged"):
        open_source("org/name", "math", offline=True)
