"""What the pipeline calls: a folder or a model of the Hub in, a checkpoint and its origin out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkpoints import random_checkpoint
from hub_stub import Body, Drop, HubStub, Status, model_files, shard
from recording_sink import RecordingSink

from mfs_decompose.errors import MfsError, NetworkFailure, SourceIncompatible, SourceNotFound, UsageError
from mfs_decompose.source import hub_headers
from mfs_decompose.source.checkpoint import TensorReader, open_checkpoint
from mfs_decompose.source.header import MAX_HEADER_BYTES
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.source.resolve import Resolved, open_source, resolve

if TYPE_CHECKING:
    from checkpoints import Family

INDEX = "model.safetensors.index.json"


class TestFolders:
    def test_a_folder_is_itself(self, family: Family) -> None:
        assert resolve(SourceRef.parse(str(family.base))) == Resolved(family.base)
        for headers_only in (False, True):
            checkpoint = open_source(str(family.base), "base", headers_only=headers_only)
            repo, revision = checkpoint.repo, checkpoint.revision
            assert (repo, revision) == (None, None)
            assert checkpoint == open_checkpoint(family.base, "base")

    def test_its_pin_is_an_absolute_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert resolve(SourceRef.parse("base")).pinned == str(tmp_path / "base")

    def test_offline_or_not_does_not_matter(self, family: Family) -> None:
        assert open_source(str(family.base), "base", offline=True).tensors

    def test_one_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(SourceNotFound, match="no such folder"):
            open_source(str(tmp_path / "nothing"), "base")

    def test_a_folder_wins_over_a_model_of_the_same_name(
        self, hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        monkeypatch.chdir(tmp_path)
        random_checkpoint(tmp_path / "org" / "name", {"here": torch.zeros(3, 5)})
        hub.commit("org/name", model_files())
        assert list(open_source("org/name", "x").tensors) == ["here"]
        assert hub.seen == []
        assert "layers.0.weight" in open_source("hf://org/name", "x").tensors

    def test_nothing_of_an_http_client_is_imported_for_one(self, family: Family) -> None:
        program = "import sys; from mfs_decompose.source.resolve import open_source; open_source(sys.argv[1], 'x'); "
        program += "print({'huggingface_hub', 'httpx2', 'torch'} & set(sys.modules))"
        words = [sys.executable, "-c", program, str(family.base)]
        assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "set()\n"

    def test_what_is_no_reference(self) -> None:
        with pytest.raises(UsageError):
            open_source("hf://name", "x")


class TestModels:
    def test_a_real_checkpoint_comes_through_whole(self, hub: HubStub, family: Family) -> None:
        """A sharded variant of the tests' family: every tensor as in the folder it came from."""
        place = family.variants["math"]
        commit = hub.commit("org/math", {path.name: path.read_bytes() for path in place.iterdir()})
        checkpoint = open_source("hf://org/math", "math")
        repo, revision = checkpoint.repo, checkpoint.revision
        local = open_checkpoint(place, "math")
        assert (repo, revision) == ("org/math", commit)
        assert (checkpoint.sidecars, checkpoint.index, checkpoint.config) == (local.sidecars, local.index, local.config)
        assert [header.raw for header in checkpoint.shards] == [header.raw for header in local.shards]
        with TensorReader(checkpoint) as remote, TensorReader(local) as reader:
            assert all(remote.raw(name).equal(reader.raw(name)) for name in local.tensors)

    def test_a_snapshot_is_left_as_it_was(self, hub: HubStub) -> None:
        hub.commit("org/name", model_files())
        checkpoint = open_source("hf://org/name", "x")
        before = {path: (path.lstat().st_ino, path.stat().st_mtime_ns) for path in checkpoint.root.iterdir()}
        with TensorReader(checkpoint) as reader:
            reader.rows("layers.0.weight")
        open_source("hf://org/name", "x")
        assert {path: (path.lstat().st_ino, path.stat().st_mtime_ns) for path in checkpoint.root.iterdir()} == before

    def test_what_other_tools_fetched_of_it_changes_nothing(self, hub: HubStub) -> None:
        """The cache of one machine holds more than that of another; both artifacts must come out the same."""
        from huggingface_hub import snapshot_download

        hub.commit("org/name", model_files())
        before = open_source("hf://org/name", "x")
        snapshot_download("org/name")
        assert (before.root / "pytorch_model.bin").exists()
        for offline in (False, True):
            assert open_source("hf://org/name", "x", offline=offline) == before


class TestHeadersOnly:
    """What a dry run reads: the first bytes of shards, the index, the config; no file is written."""

    @pytest.mark.parametrize("shards", [1, 3])
    def test_the_same_checkpoint_from_its_first_bytes(self, hub: HubStub, tmp_path: Path, shards: int) -> None:
        files = model_files(shards=shards, rows=5_003)
        commit = hub.commit("org/name", files)
        sink = RecordingSink()
        planned = open_source("hf://org/name", "x", headers_only=True, progress=sink)
        repo, revision = planned.repo, planned.revision
        assert (repo, revision) == ("org/name", commit)
        assert not (tmp_path / "hub").exists()
        names = sorted(name for name in files if name.endswith(".safetensors"))
        assert hub.bodies() == sorted([*names, "config.json", *([INDEX] if shards > 1 else [])])
        assert [hub.ranges(name) for name in names] == [["bytes=0-65535"]] * shards
        assert [(stage.name, stage.finished) for stage in sink.stages] == [("reading headers of org/name", True)]
        whole = open_source("hf://org/name", "x")
        assert planned.root == whole.root
        assert (planned.tensors, planned.sidecars, planned.index) == (whole.tensors, whole.sidecars, whole.index)
        assert planned.config == whole.config
        assert [(h.file, h.size, h.raw, h.sha256, h.metadata) for h in planned.shards] == [
            (h.file, h.size, h.raw, h.sha256, h.metadata) for h in whole.shards
        ]
        assert planned.left_out == whole.left_out == ()

    def test_a_long_header_takes_a_second_request(self, hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub_headers, "_FIRST_BYTES", 700)
        tensors = {f"a.very.long.name.of.a.tensor.{number}.weight": (3, 5) for number in range(40)}
        content = shard(tensors, seed=1)
        length = 8 + int.from_bytes(content[:8], "little")
        hub.commit("org/name", {"model.safetensors": content})
        checkpoint = open_source("hf://org/name", "x", headers_only=True)
        assert set(checkpoint.tensors) == set(tensors)
        assert hub.ranges("model.safetensors") == ["bytes=0-699", f"bytes=700-{length - 1}"]

    @pytest.mark.parametrize(
        "faults",
        [
            [Body(ignore_range=True)],
            [Body(ignore_range=True)] * 2,
            [Drop(100)],
            [Drop(100), Drop(300), Status(503)],
            [Body(shift=40)],
            [Status(429, "", {"Retry-After": "0"})],
        ],
        ids=str,
    )
    def test_servers_that_misbehave(
        self, hub: HubStub, monkeypatch: pytest.MonkeyPatch, faults: list[Body | Drop | Status]
    ) -> None:
        monkeypatch.setattr(hub_headers, "_FIRST_BYTES", 700)
        tensors = {f"a.very.long.name.of.a.tensor.{number}.weight": (3, 5) for number in range(40)}
        hub.commit("org/name", {"model.safetensors": shard(tensors, seed=1)})
        hub.fail("model.safetensors", *faults)
        assert set(open_source("hf://org/name", "x", headers_only=True).tensors) == set(tensors)

    def test_what_is_in_the_cache_is_not_asked_for(self, hub: HubStub) -> None:
        hub.commit("org/name", model_files())
        whole = open_source("hf://org/name", "x")
        hub.seen.clear()
        assert open_source("hf://org/name", "x", headers_only=True).tensors == whole.tensors
        assert hub.bodies() == []

    @pytest.mark.parametrize("name", ["config.json", INDEX])
    def test_side_files_are_hashed(self, hub: HubStub, name: str) -> None:
        hub.commit("org/name", model_files())
        hub.fail(name, Body(flip=5))  # of a file that small, no second copy is asked for
        with pytest.raises(NetworkFailure, match=f"{name} of org/name arrived with other bytes"):
            open_source("hf://org/name", "x", headers_only=True)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"<!DOCTYPE html><html>" + b" " * 600, "found an HTML page"),
            (b"version https://git-lfs.github.com/spec/v1\n" + b"x" * 600, "found a Git LFS pointer"),
            ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{" + b" " * 600, "announce a header of 100000001 bytes"),
            (b"\x05", "is cut off"),
            ((50).to_bytes(8, "little") + b"{" + b" " * 49, "is not a valid safetensors file"),
            (shard({"a": (3, 4)}, 0)[:-5], "is cut off"),
            (shard({"a": (3, 4)}, 0) + b"tail", "bytes follow its last tensor"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_shards_that_are_none(self, hub: HubStub, content: bytes, message: str) -> None:
        hub.commit("org/name", {"model.safetensors": content})
        with pytest.raises((SourceIncompatible, SourceNotFound), match=message) as caught:
            open_source("hf://org/name", "x", headers_only=True)
        assert "org/name@" in caught.value.message

    def test_an_index_that_lies(self, hub: HubStub) -> None:
        files = model_files()
        files[INDEX] = files[INDEX].replace(b"layers.1.bias", b"layers.1.bios")
        hub.commit("org/name", files)
        for headers_only in (False, True):
            with pytest.raises(SourceNotFound, match="no shard has it"):
                open_source("hf://org/name", "x", headers_only=headers_only)

    @pytest.mark.parametrize("what", ["gated", "no weights", "large config", "missing"])
    def test_the_same_refusals(self, hub: HubStub, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        files = model_files(shards=1)
        if what == "no weights":
            del files["model.safetensors"]
        monkeypatch.setattr(hub_headers, "MAX_CONFIG_BYTES", 5 if what == "large config" else 10_000)
        if what != "missing":
            hub.commit("org/name", files)
        if what == "gated":
            hub.gated.add("org/name")
        with pytest.raises(MfsError) as caught:
            open_source("hf://org/name", "x", headers_only=True)
        assert caught.value.exit_code == (12 if what == "large config" else 11)

    def test_neither_torch_nor_a_progress_bar_is_needed(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", model_files())
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
        program = "import sys; from mfs_decompose.source.resolve import open_source; "
        program += "print(len(open_source('hf://org/name', 'x', headers_only=True).tensors)); "
        program += "open_source('hf://org/name', 'x'); print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert (done.stdout, done.stderr) == ("4\nset()\n", "")
