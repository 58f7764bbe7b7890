"""Models of the Hub, against a stub that speaks its HTTP: what is fetched, where it lies, what it means tomorrow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hub_stub import HubStub, digest_of, model_files, sha256
from recording_sink import RecordingSink

from mfs_decompose.errors import MfsError, NetworkFailure, ResourceShortage, SourceIncompatible, SourceNotFound
from mfs_decompose.source import hub as hub_module
from mfs_decompose.source import hub_cache
from mfs_decompose.source.checkpoint import open_checkpoint
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.source.resolve import Resolved, resolve

BESIDE = ["README.md", "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"]
INDEX = "model.safetensors.index.json"


def get(text: str, sink: RecordingSink | None = None) -> Resolved:
    return resolve(SourceRef.parse(text), progress=sink)


def shards_of(files: dict[str, bytes]) -> list[str]:
    return sorted(name for name in files if name.endswith(".safetensors"))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_becomes_a_folder_at_its_commit_with_what_is_needed(hub: HubStub, tmp_path: Path, shards: int) -> None:
    files = model_files(seed=5, shards=shards)
    commit = hub.commit("org/name", files)
    sink = RecordingSink()
    found = get("org/name", sink)
    needed = [*BESIDE, *shards_of(files), *([INDEX] if shards > 1 else [])]
    assert (found.repo, found.revision, found.pinned) == ("org/name", commit, f"hf://org/name@{commit}")
    assert found.folder == tmp_path / "hub" / "models--org--name" / "snapshots" / commit
    assert sorted(path.name for path in found.folder.iterdir()) == sorted(needed)
    assert all((found.folder / name).read_bytes() == files[name] for name in needed)
    assert hub.bodies() == sorted(needed)
    assert len([seen for seen in hub.seen if seen.path.startswith("/api/")]) == 1
    (stage,) = sink.stages
    assert (stage.name, stage.finished) == ("fetching org/name", True)
    assert stage.total == stage.done == sum(len(files[name]) for name in needed if name != INDEX)
    assert sink.notes == [("info", f"org/name is at commit {commit}")]


def test_the_snapshot_opens_as_any_folder(hub: HubStub) -> None:
    files = model_files()
    hub.commit("org/name", files)
    checkpoint = open_checkpoint(get("org/name").folder, "math")
    assert list(checkpoint.tensors) == [f"layers.{n}.{kind}" for n in (0, 1) for kind in ("bias", "weight")]
    assert [sidecar.name for sidecar in checkpoint.sidecars] == BESIDE
    assert checkpoint.config == {"model_type": "llama", "seed": 0}
    assert checkpoint.left_out == ()


def test_the_cache_is_the_one_of_huggingface_hub(hub: HubStub, tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download

    files = model_files()
    commit = hub.commit("org/name", files)
    folder = get("org/name").folder
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        blob = (folder / name).resolve()
        assert blob == tmp_path / "hub" / "models--org--name" / "blobs" / digest_of(name, files[name])
        assert (folder / name).readlink() == Path("../../blobs") / blob.name
        assert hf_hub_download("org/name", name, local_files_only=True) == str(folder / name)
    assert snapshot_download("org/name", local_files_only=True) == str(folder)
    report = scan_cache_dir(tmp_path / "hub")
    assert not report.warnings
    ((repo,), (revision,)) = (report.repos, next(iter(report.repos)).revisions)
    assert (repo.repo_id, revision.commit_hash, set(revision.refs)) == ("org/name", commit, {"main"})
    assert revision.nb_files == 8


def test_what_huggingface_hub_fetched_is_hashed_and_not_fetched_again(hub: HubStub) -> None:
    from huggingface_hub import snapshot_download

    files = model_files()
    hub.commit("org/name", files)
    theirs = snapshot_download("org/name", allow_patterns=["*.json", "*.safetensors"])
    hub.seen.clear()
    sink = RecordingSink()
    assert str(get("org/name", sink).folder) == theirs
    assert hub.bodies() == ["README.md", "chat_template.jinja"]
    assert [stage.name for stage in sink.stages] == ["checking org/name", "fetching org/name"]
    assert sink.stages[0].done == sink.stages[0].total


def test_a_second_run_asks_only_what_the_name_means_now(hub: HubStub) -> None:
    hub.commit("org/name", model_files())
    first = get("org/name")
    hub.seen.clear()
    hub_cache._known.clear()  # as in another process
    sink = RecordingSink()
    assert get("org/name", sink) == first
    assert len(hub.seen) == 1
    (stage,) = sink.stages
    assert (stage.name, stage.finished) == ("checking org/name", True)
    assert (
        stage.total == stage.done == sum(path.stat().st_size for path in first.folder.iterdir() if path.name != INDEX)
    )


def test_files_are_hashed_once_a_process_unless_they_change(hub: HubStub) -> None:
    files = model_files()
    hub.commit("org/name", files)
    folder = get("org/name").folder
    sink = RecordingSink()
    get("org/name", sink)
    assert sink.stages == []
    os.utime(folder / "model-00001-of-00002.safetensors", ns=(1, 1))
    get("org/name", sink)
    assert [stage.done for stage in sink.stages] == [len(files["model-00001-of-00002.safetensors"])]


class TestPins:
    """A branch is looked up once; from then on everything is of that commit."""

    def test_a_branch_that_moves_in_the_middle_of_a_download(
        self, hub: HubStub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from mfs_decompose.source.hub_client import HubClient

        old, new = model_files(seed=1), model_files(seed=2)
        commit = hub.commit("org/name", old)
        list_files = HubClient.list_files

        def then_move(client: HubClient) -> object:
            listing = list_files(client)
            hub.commit("org/name", new)
            return listing

        monkeypatch.setattr(HubClient, "list_files", then_move)
        found = get("org/name")
        assert found.revision == commit
        assert all(path.read_bytes() == old[path.name] for path in found.folder.iterdir())

    def test_a_branch_that_moves_between_runs(self, hub: HubStub) -> None:
        old, new = model_files(seed=1), model_files(seed=1) | {"config.json": b'{"seed": 2}'}
        first = hub.commit("org/name", old)
        before = get("org/name")
        second = hub.commit("org/name", new)
        hub.seen.clear()
        assert get(before.pinned) == before
        assert hub.bodies() == []
        after = get("org/name")
        assert (before.revision, after.revision) == (first, second)
        assert hub.bodies() == ["config.json"]
        assert (before.folder / "config.json").read_bytes() == old["config.json"]
        assert (after.folder / "config.json").read_bytes() == new["config.json"]
        assert (after.folder / INDEX).samefile(before.folder / INDEX)

    @pytest.mark.parametrize("revision", ["v1.0", "refs/pr/3", "feature/quick+dirty"])
    def test_branches_and_tags(self, hub: HubStub, revision: str) -> None:
        main = hub.commit("org/name", model_files(seed=1))
        other = hub.commit("org/name", model_files(seed=2), branch=revision)
        hub.refs["org/name"]["main"] = main
        found = get(f"hf://org/name@{revision}")
        assert (found.revision, get("org/name").revision) == (other, main)
        assert b'"seed": 2' in (found.folder / "config.json").read_bytes()

    def test_a_commit_says_nothing_new(self, hub: HubStub, tmp_path: Path) -> None:
        commit = hub.commit("org/name", model_files())
        sink = RecordingSink()
        get(f"org/name@{commit}", sink)
        assert sink.notes == []
        assert not (tmp_path / "hub" / "models--org--name" / "refs").exists()


class TestWhatIsNotACheckpoint:
    def refused(self, hub: HubStub, files: dict[str, bytes], kind: type[MfsError]) -> MfsError:
        commit = hub.commit("org/name", files)
        with pytest.raises(kind) as caught:
            get("org/name")
        assert f"org/name@{commit[:12]}" in caught.value.message
        assert hub.bodies() in ([], [INDEX])
        return caught.value

    def test_weights_of_another_format(self, hub: HubStub) -> None:
        files = {name: text for name, text in model_files().items() if "safetensors" not in name}
        error = self.refused(hub, files, SourceNotFound)
        assert error.message.endswith("found figure.png, flax_model.msgpack, model.gguf and 3 more")
        assert "save_pretrained" in (error.hint or "")
        error = self.refused(hub, {"pytorch_model.bin": b"x", "config.json": b"{}"}, SourceNotFound)
        assert error.message.endswith("found pytorch_model.bin")

    def test_no_weights_at_all(self, hub: HubStub) -> None:
        assert "found config.json" in self.refused(hub, {"config.json": b"{}"}, SourceNotFound).message
        assert "found no files" in self.refused(hub, {".gitattributes": b""}, SourceNotFound).message

    def test_a_model_of_several_parts(self, hub: HubStub) -> None:
        files = {"unet/model.safetensors": b"x", "vae/model.safetensors": b"y", "model_index.json": b"{}"}
        error = self.refused(hub, files, SourceNotFound)
        assert "found unet/model.safetensors, vae/model.safetensors" in error.message

    def test_an_adapter_beside_whole_weights(self, hub: HubStub) -> None:
        files = model_files(shards=1) | {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
        error = self.refused(hub, files, SourceIncompatible)
        assert "found whole weights (model.safetensors) and an adapter (adapter_model.safetensors)" in error.message
        assert "::adapter" in (error.hint or "")

    def test_an_adapter_as_a_pickle(self, hub: HubStub) -> None:
        files = {"adapter_config.json": b"{}", "adapter_model.bin": b"x"}
        assert "found adapter_model.bin, a pickle" in self.refused(hub, files, SourceIncompatible).message

    def test_a_shard_that_is_not_listed(self, hub: HubStub) -> None:
        files = model_files(shards=3)
        del files["model-00002-of-00003.safetensors"]
        error = self.refused(hub, files, SourceNotFound)
        assert "model-00002-of-00003.safetensors missing" in error.message

    @pytest.mark.parametrize("place", ["../../../etc/passwd.safetensors", "/x.safetensors", "sub/x.safetensors"])
    def test_an_index_that_leads_elsewhere(self, hub: HubStub, place: str) -> None:
        files = model_files() | {INDEX: b'{"weight_map": {"w": "%s"}}' % place.encode()}
        assert "expected the plain name of a file" in self.refused(hub, files, SourceIncompatible).message

    def test_names_that_could_lie_elsewhere_are_never_used(self, hub: HubStub, tmp_path: Path) -> None:
        hostile = ["../evil.json", "..", "/etc/evil.json", "a\\b.json", "x/../../evil.json", ".hidden.json"]
        files = model_files(shards=1)
        hub.commit("org/name", files | dict.fromkeys(hostile, b"evil"))
        assert sorted(path.name for path in get("org/name").folder.iterdir()) == sorted([*BESIDE, "model.safetensors"])
        assert set(hostile).isdisjoint(hub.bodies())


class TestListings:
    """The listing is the word of a stranger: its digests become file names."""

    @pytest.mark.parametrize(
        "change",
        [
            {"sha": "../../../evil"},
            {"sha": None},
            {"siblings": [{"rfilename": "model.safetensors", "size": 4, "blobId": "../../evil"}]},
            {"siblings": [{"rfilename": "model.safetensors", "size": -1, "blobId": "a" * 40}]},
            {"siblings": [{"rfilename": "model.safetensors", "size": 4}]},
            {"siblings": [{"rfilename": "m.safetensors", "lfs": {"sha256": "x/y", "size": 1, "pointerSize": 1}}]},
            {"siblings": [{"size": 4}]},
            {"siblings": "none"},
        ],
        ids=str,
    )
    def test_malformed_ones(self, hub: HubStub, tmp_path: Path, change: dict[str, object]) -> None:
        hub.commit("org/name", model_files())
        hub.listing = {"id": "org/name", "sha": "a" * 40, "siblings": []} | change
        with pytest.raises(NetworkFailure, match="something that is no listing of org/name") as caught:
            get("org/name")
        assert "HF_ENDPOINT" in (caught.value.hint or "")
        assert not (tmp_path / "hub").exists()

    @pytest.mark.parametrize("page", [[], "text", 3, {"error": "x"}])
    def test_answers_of_something_else(self, hub: HubStub, page: object) -> None:
        hub.listing = page
        with pytest.raises(NetworkFailure, match="no listing"):
            get("org/name")

    def test_a_page_of_html(self, hub: HubStub) -> None:
        from hub_stub import Status

        hub.fail("listing", Status(200, "", {"Content-Type": "text/html"}, b"<html>log in first</html>"))
        with pytest.raises(NetworkFailure, match="no listing"):
            get("org/name")


class TestRoom:
    def test_a_disk_that_is_too_small(self, hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.commit("org/name", model_files())
        monkeypatch.setattr(hub_module, "free_disk", lambda _: 40_000)
        with pytest.raises(ResourceShortage, match=r"org/name needs 51 kB more in the cache .*, and 40 kB is free"):
            get("org/name")
        assert hub.bodies() == [INDEX]

    def test_what_has_arrived_needs_no_room(
        self, hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = model_files()
        hub.commit("org/name", files)
        for name in shards_of(files):
            place = tmp_path / "hub" / "models--org--name" / "blobs" / f"{sha256(files[name])}.incomplete"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(files[name][:20_000])
        monkeypatch.setattr(hub_module, "free_disk", lambda _: 40_000)
        assert open_checkpoint(get("org/name").folder, "x").tensor_bytes == 2 * 4 * (97 * 65 + 7)

    def test_a_file_that_http_does_not_carry(self, hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        commit = hub.commit("org/name", model_files())
        monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 20_000)
        with pytest.raises(NetworkFailure, match=r"has 25\.5 kB, more than the Hub sends over HTTP") as caught:
            get("org/name")
        command = f"hf download org/name model-00001-of-00002.safetensors --revision {commit}"
        assert command in (caught.value.hint or "")

    def test_a_disk_that_fills_up(self, hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
        import errno

        from mfs_decompose.source import hub_fetch

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        hub.commit("org/name", model_files())
        monkeypatch.setattr(hub_fetch._Arrival, "add", full)
        with pytest.raises(ResourceShortage, match=r"the disk of .* is full") as caught:
            get("org/name")
        assert "what has arrived is kept" in (caught.value.hint or "")

    def test_a_cache_that_is_a_file(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", model_files())
        (tmp_path / "hub").write_text("no folder")
        with pytest.raises(SourceNotFound, match=r"cannot use the cache .*/hub: Not a directory|File exists") as caught:
            get("org/name")
        assert "HF_HOME" in (caught.value.hint or "")


def test_where_links_cannot_be_made_the_snapshot_holds_copies(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    files = model_files()
    hub.commit("org/name", files)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = get("org/name").folder
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert all(path.read_bytes() == files[path.name] for path in folder.iterdir())
    hub.seen.clear()
    get("org/name")
    assert hub.bodies() == []


def test_two_at_once_fetch_a_file_once(hub: HubStub, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    files = model_files()
    hub.commit("org/name", files)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(get, ["org/name"] * 3))
    assert len(set(found)) == 1
    assert all(hub.bodies().count(name) == 1 for name in shards_of(files))


def test_a_wait_for_another_process_is_said(hub: HubStub, tmp_path: Path) -> None:
    import threading

    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    files = model_files(shards=1)
    hub.commit("org/name", files)
    lock = tmp_path / "hub" / ".locks" / "models--org--name" / f"{sha256(files['model.safetensors'])}.lock"
    lock.parent.mkdir(parents=True)
    sink = RecordingSink()
    done = threading.Thread(target=get, args=("org/name", sink))
    with WeakFileLock(lock):
        done.start()
        done.join(0.3)
        assert done.is_alive()
    done.join(10)
    assert ("info", "waiting for another process that fetches model.safetensors") in sink.notes
    assert (tmp_path / "hub" / "models--org--name" / "refs" / "main").exists()
