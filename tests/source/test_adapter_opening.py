"""Folders and models of the Hub that are adapters, and those that hold both an adapter and whole weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from adapters import write_adapter
from checkpoints import random_checkpoint
from hub_stub import HubStub, model_files, shard
from recording_sink import RecordingSink
from safetensors.torch import save_file

from mfs_decompose.errors import MfsError, SourceIncompatible, SourceNotFound
from mfs_decompose.source.checkpoint import TensorReader, open_checkpoint, read_sidecar
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.source.resolve import open_source

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 5}
TENSORS = {"m.q.lora_A.weight": torch.arange(6.0).reshape(2, 3), "m.q.lora_B.weight": torch.ones(5, 2)}


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A folder with whole weights in one file, an adapter, and a file that belongs to either."""
    random_checkpoint(tmp_path / "both", {"w": torch.ones(3, 4)})
    write_adapter(tmp_path / "both", TENSORS, CONFIG)
    (tmp_path / "both" / "tokenizer.json").write_text("{}")
    return tmp_path / "both"


class TestFolders:
    def test_an_adapter_alone(self, tmp_path: Path) -> None:
        write_adapter(tmp_path, TENSORS, CONFIG)
        (tmp_path / "README.md").write_text("card")
        (tmp_path / "training_args.bin").write_bytes(b"x")
        found = open_checkpoint(tmp_path, "x")
        assert found.adapter == CONFIG
        assert [header.file for header in found.shards] == ["adapter_model.safetensors"]
        assert {name: info.shape for name, info in found.tensors.items()} == {
            "m.q.lora_A.weight": (2, 3),
            "m.q.lora_B.weight": (5, 2),
        }
        assert [sidecar.name for sidecar in found.sidecars] == ["README.md", "adapter_config.json"]
        assert (found.left_out, found.config, found.index) == (("training_args.bin",), {}, None)
        with TensorReader(found) as reader:
            assert torch.equal(reader.rows("m.q.lora_A.weight", 1, 2), TENSORS["m.q.lora_A.weight"][1:])
        assert json.loads(read_sidecar(found, found.sidecars[1])) == CONFIG

    def test_whole_weights_are_no_adapter(self, tmp_path: Path) -> None:
        assert open_checkpoint(random_checkpoint(tmp_path, {"w": torch.ones(3)}), "x").adapter is None

    def test_an_adapter_in_shards(self, tmp_path: Path) -> None:
        write_adapter(tmp_path, {}, CONFIG)
        (tmp_path / "adapter_model.safetensors").unlink()
        for number, (name, value) in enumerate(TENSORS.items()):
            save_file({name: value}, tmp_path / f"adapter_model-{number + 1:05d}-of-00002.safetensors")
        assert list(open_checkpoint(tmp_path, "x").tensors) == sorted(TENSORS)
        (tmp_path / "adapter_model-00001-of-00002.safetensors").unlink()
        with pytest.raises(SourceNotFound, match="expected 2 shards"):
            open_checkpoint(tmp_path, "x")

    def test_the_index_of_its_shards_is_its_own(self, both: Path) -> None:
        (both / "adapter_model.safetensors.index.json").write_text('{"weight_map": {}}')
        weights, adapter = open_checkpoint(both, "x", take="weights"), open_checkpoint(both, "x", take="adapter")
        assert "adapter_model.safetensors.index.json" in [sidecar.name for sidecar in adapter.sidecars]
        assert "adapter_model.safetensors.index.json" not in [sidecar.name for sidecar in weights.sidecars]
        assert "adapter_model.safetensors.index.json" in weights.left_out

    def test_both_are_refused_until_one_is_named(self, both: Path) -> None:
        with pytest.raises(
            SourceIncompatible, match=r"found whole weights \(model\.safetensors\) and an adapter"
        ) as caught:
            open_checkpoint(both, "x")
        assert caught.value.exit_code == 12
        assert "::weights or ::adapter" in (caught.value.hint or "")
        weights, adapter = open_checkpoint(both, "x", take="weights"), open_checkpoint(both, "x", take="adapter")
        assert (list(weights.tensors), weights.adapter) == (["w"], None)
        assert weights.left_out == ("adapter_config.json", "adapter_model.safetensors")
        assert [sidecar.name for sidecar in weights.sidecars] == ["tokenizer.json"]
        assert (sorted(adapter.tensors), adapter.adapter) == (sorted(TENSORS), CONFIG)
        assert adapter.left_out == ("model.safetensors",)
        assert [sidecar.name for sidecar in adapter.sidecars] == ["adapter_config.json", "tokenizer.json"]

    def test_sharded_weights_beside_an_adapter(self, both: Path) -> None:
        (both / "model.safetensors").rename(both / "model-00001-of-00001.safetensors")
        index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
        (both / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(SourceIncompatible, match="and an adapter"):
            open_checkpoint(both, "x")
        assert open_checkpoint(both, "x", take="weights").index is not None
        found = open_checkpoint(both, "x", take="adapter")
        assert found.left_out == ("model-00001-of-00001.safetensors", "model.safetensors.index.json")
        assert found.index is None

    @pytest.mark.parametrize(
        ("lacking", "gist"),
        [
            ("adapter_config.json", "an adapter without adapter_config.json"),
            ("adapter_model.safetensors", "an adapter without adapter_model.safetensors"),
        ],
    )
    def test_half_an_adapter(self, tmp_path: Path, lacking: str, gist: str) -> None:
        (write_adapter(tmp_path, TENSORS, CONFIG) / lacking).unlink()
        with pytest.raises(SourceNotFound, match=gist):
            open_checkpoint(tmp_path, "x")

    def test_a_forgotten_config_beside_whole_weights(self, both: Path) -> None:
        (both / "adapter_model.safetensors").unlink()
        found = open_checkpoint(both, "x")
        assert (list(found.tensors), found.left_out) == (["w"], ("adapter_config.json",))

    def test_a_pickle(self, tmp_path: Path) -> None:
        write_adapter(tmp_path, TENSORS, CONFIG)
        (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
        with pytest.raises(SourceIncompatible, match=r"found adapter_model\.bin, a pickle") as caught:
            open_checkpoint(tmp_path, "x")
        assert "save_pretrained" in (caught.value.hint or "")

    def test_what_is_asked_for_and_not_there(self, tmp_path: Path) -> None:
        write_adapter(tmp_path / "a", TENSORS, CONFIG)
        random_checkpoint(tmp_path / "w", {"w": torch.ones(3)})
        with pytest.raises(SourceNotFound, match=r"expected whole weights in .*, found an adapter"):
            open_checkpoint(tmp_path / "a", "x", take="weights")
        with pytest.raises(SourceNotFound, match=r"expected an adapter in .*, found none"):
            open_checkpoint(tmp_path / "w", "x", take="adapter")

    def test_a_broken_config(self, tmp_path: Path) -> None:
        write_adapter(tmp_path, TENSORS, CONFIG)
        (tmp_path / "adapter_config.json").write_text("[1]")
        with pytest.raises(SourceIncompatible, match=r"expected an object in .*adapter_config\.json"):
            open_checkpoint(tmp_path, "x")


class TestReferences:
    def test_a_suffix_says_what_is_taken(self, both: Path) -> None:
        for take, names in (("weights", ["w"]), ("adapter", sorted(TENSORS))):
            found = open_source(f"{both}::{take}", "x")
            assert sorted(found.tensors) == names
            assert found.pinned == f"{both}::{take}"
            assert sorted(open_source(found.pinned, "y").tensors) == names

    def test_it_is_no_part_of_the_name(self, both: Path) -> None:
        ref = SourceRef.parse(f"{both}::adapter")
        assert (ref.folder, ref.name, ref.take) == (both, "both", "adapter")
        ref = SourceRef.parse("hf://org/name@v1::weights")
        assert (ref.repo, ref.revision, ref.take, ref.label) == ("org/name", "v1", "weights", "org/name@v1")
        assert SourceRef.parse("org/name::adapter").repo == "org/name"
        assert SourceRef.parse(str(both)).take is None

    def test_a_folder_of_that_very_name_is_a_folder(self, tmp_path: Path) -> None:
        folder = random_checkpoint(tmp_path / "x::adapter", {"w": torch.ones(3)})
        assert (SourceRef.parse(str(folder)).folder, SourceRef.parse(str(folder)).take) == (folder, None)

    @pytest.mark.parametrize("text", ["x::other", "x::", "x::Adapter"])
    def test_other_suffixes_are_none(self, text: str) -> None:
        assert SourceRef.parse(text).take is None


class TestTheHub:
    files: ClassVar = {
        "adapter_config.json": json.dumps(CONFIG).encode(),
        "adapter_model.safetensors": shard({"m.q.lora_A.weight": (2, 3), "m.q.lora_B.weight": (5, 2)}, 1),
        "README.md": b"card",
        "tokenizer.json": b"{}",
        "training_args.bin": b"pickle",
        "checkpoint-100/adapter_model.safetensors": b"old",
    }

    def test_an_adapter_is_fetched_with_what_belongs_to_it(self, hub: HubStub, tmp_path: Path) -> None:
        commit = hub.commit("org/lora", self.files)
        found = open_source("org/lora", "x")
        wanted = ["README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
        assert hub.bodies() == wanted
        assert sorted(path.name for path in found.root.iterdir()) == wanted
        assert (found.adapter, found.repo, found.revision, found.left_out) == (CONFIG, "org/lora", commit, ())
        assert found.pinned == f"hf://org/lora@{commit}"
        seen = len(hub.seen)
        assert open_source("org/lora", "x", offline=True) == found
        assert open_source("org/lora", "x", offline=True, headers_only=True).tensors == found.tensors
        assert len(hub.seen) == seen

    def test_a_dry_run_reads_its_header_and_config_alone(self, hub: HubStub) -> None:
        hub.commit("org/lora", self.files)
        dry = open_source("org/lora", "x", headers_only=True)
        assert hub.bodies() == ["adapter_config.json", "adapter_model.safetensors"]
        wet = open_source("org/lora", "x")
        assert (dry.tensors, dry.adapter, dry.sidecars) == (wet.tensors, wet.adapter, wet.sidecars)

    @pytest.mark.parametrize("headers_only", [False, True])
    def test_both(self, hub: HubStub, headers_only: bool) -> None:
        commit = hub.commit("org/lora", self.files | model_files(shards=1))
        with pytest.raises(SourceIncompatible, match="and an adapter"):
            open_source("org/lora", "x", headers_only=headers_only)
        assert hub.bodies() == []
        adapter = open_source("hf://org/lora::adapter", "x", headers_only=headers_only)
        assert "model.safetensors" not in hub.bodies()
        assert (adapter.adapter, adapter.pinned) == (CONFIG, f"hf://org/lora@{commit}::adapter")
        weights = open_source("org/lora::weights", "x", headers_only=headers_only)
        assert (list(weights.tensors), weights.adapter) == (["a.weight", "b.weight"], None)
        assert "adapter_config.json" not in [sidecar.name for sidecar in weights.sidecars]

    def test_what_was_fetched_of_both_is_found_offline(self, hub: HubStub) -> None:
        hub.commit("org/lora", self.files | model_files(shards=1))
        for take in ("adapter", "weights"):
            found = open_source(f"org/lora::{take}", "x")
            assert open_source(f"org/lora::{take}", "x", offline=True) == found
        with pytest.raises(SourceIncompatible, match="and an adapter"):
            open_source("org/lora", "x", offline=True)

    @pytest.mark.parametrize("headers_only", [False, True])
    def test_a_pickle(self, hub: HubStub, headers_only: bool) -> None:
        hub.commit("org/lora", {"adapter_config.json": b"{}", "adapter_model.bin": b"x"})
        with pytest.raises(SourceIncompatible, match=r"org/lora@.*found adapter_model.bin, a pickle"):
            open_source("org/lora", "x", headers_only=headers_only)

    def test_a_damaged_copy_in_the_cache_is_fetched_again(self, hub: HubStub) -> None:
        hub.commit("org/lora", self.files)
        place = (open_source("org/lora", "x").root / "adapter_model.safetensors").resolve()
        content = bytearray(place.read_bytes())
        content[-1] ^= 1
        place.chmod(0o644)
        place.write_bytes(content)
        sink = RecordingSink()
        assert open_source("org/lora", "x", progress=sink).tensors
        assert any("is damaged" in warning for warning in sink.warnings)
        assert place.read_bytes() == self.files["adapter_model.safetensors"]

    def test_a_pinned_reference_opens_the_same_again(self, hub: HubStub) -> None:
        hub.commit("org/lora", self.files | model_files(shards=1))
        first = open_source("org/lora::adapter", "x")
        hub.commit("org/lora", {"README.md": b"gone"})
        assert open_source(first.pinned, "x") == first


def test_every_refusal_says_what_to_do(both: Path) -> None:
    with pytest.raises(MfsError) as caught:
        open_checkpoint(both, "x")
    assert caught.value.hint
