"""Opening a folder: what is taken, what is left out, what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import INDEX, Family, make_llama, random_checkpoint, read_weights, shard_bytes
from safetensors.torch import save_file

from mfs_decompose.errors import MfsError, SourceIncompatible, SourceNotFound
from mfs_decompose.source import weights as weights_module
from mfs_decompose.source.checkpoint import Sidecar, open_checkpoint, read_sidecar

SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three shards with their index: tensor t0 to t5, two in each."""
    return write_sharded(tmp_path / "sharded")


def write_sharded(folder: Path) -> Path:
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(SHARDS):
        part = {f"t{2 * number + extra}": torch.full((3 + number, 2), float(extra)) for extra in (0, 1)}
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"hidden_size": 2}')
    return folder


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def refuse(kind: type[MfsError], folder: Path, gist: str) -> MfsError:
    with pytest.raises(kind, match=gist) as caught:
        open_checkpoint(folder, "x")
    assert caught.value.hint
    assert caught.value.exit_code == {SourceNotFound: 11, SourceIncompatible: 12}[kind]
    assert str(folder) in caught.value.message
    return caught.value


class TestWhatIsTaken:
    def test_a_real_checkpoint(self, family: Family) -> None:
        found = open_checkpoint(str(family.base), "base")
        assert (found.id, found.root) == ("base", family.base)
        expected = read_weights(family.base)
        assert list(found.tensors) == sorted(expected)
        assert "lm_head.weight" not in found.tensors
        assert {name: list(info.shape) for name, info in found.tensors.items()} == {
            name: list(weight.shape) for name, weight in expected.items()
        }
        assert found.tensor_bytes == sum(weight.nbytes for weight in expected.values())
        assert [shard.file for shard in found.shards] == ["model.safetensors"]
        assert (found.index, found.left_out) == (None, ())
        assert found.config["model_type"] == "llama"
        names = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"]
        assert [sidecar.name for sidecar in found.sidecars] == [*names, "tokenizer_config.json"]
        for sidecar in found.sidecars:
            assert read_sidecar(found, sidecar) == (family.base / sidecar.name).read_bytes()

    def test_shards_with_an_index(self, family: Family, untied_family: Family) -> None:
        for folder in (family.variants["math"], untied_family.variants["math"]):
            found = open_checkpoint(folder, "math")
            assert [shard.file for shard in found.shards] == [
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
            ]
            assert list(found.tensors) == sorted(read_weights(folder))
            assert found.index == Sidecar(INDEX, (folder / INDEX).stat().st_size)
            assert found.index not in found.sidecars
            assert read_sidecar(found, found.index) == (folder / INDEX).read_bytes()

    def test_shards_as_transformers_cuts_them(self, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        whole = make_llama(tmp_path / "whole", seed=3, vocab=301, layers=3)
        AutoModelForCausalLM.from_pretrained(whole).save_pretrained(tmp_path / "cut", max_shard_size="60KB")
        found = open_checkpoint(tmp_path / "cut", "cut")
        assert len(found.shards) >= 3
        assert list(found.tensors) == sorted(open_checkpoint(whole, "whole").tensors)

    @pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "left": "over"}])
    def test_leftover_metadata(self, tmp_path: Path, metadata: dict[str, str] | None) -> None:
        found = open_checkpoint(random_checkpoint(tmp_path, {"w": torch.ones(3)}, metadata), "x")
        assert found.shards[0].metadata == (metadata or {})
        assert found.config == {}

    @pytest.mark.parametrize("total", [{}, {"metadata": {"total_size": -1, "other": None}}, {"metadata": None}])
    def test_an_index_with_odd_metadata(self, sharded: Path, total: dict[str, object]) -> None:
        weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
        (sharded / INDEX).write_text(json.dumps({**total, "weight_map": weight_map}))
        assert list(open_checkpoint(sharded, "x").tensors) == ["t0", "t1", "t2", "t3", "t4", "t5"]

    def test_shards_without_an_index(self, sharded: Path) -> None:
        (sharded / INDEX).unlink()
        found = open_checkpoint(sharded, "x")
        assert [shard.file for shard in found.shards] == SHARDS
        assert found.index is None

    def test_one_file_of_any_name(self, tmp_path: Path) -> None:
        save_file({"w": torch.ones(3)}, tmp_path / "weights.safetensors")
        assert open_checkpoint(tmp_path, "x").shards[0].file == "weights.safetensors"

    def test_only_the_consolidated_file(self, tmp_path: Path) -> None:
        save_file({"w": torch.ones(3)}, tmp_path / "consolidated.safetensors")
        assert open_checkpoint(tmp_path, "x").shards[0].file == "consolidated.safetensors"

    def test_files_beside_the_weights_are_left_out(self, sharded: Path, tmp_path: Path) -> None:
        save_file({"t0": torch.ones(3)}, sharded / "consolidated.safetensors")
        (sharded / "optimizer.pt").write_bytes(b"")
        (sharded / "original").mkdir()
        expected = ("consolidated.safetensors", "optimizer.pt", "original/")
        assert open_checkpoint(sharded, "x").left_out == expected
        (sharded / INDEX).unlink()
        assert open_checkpoint(sharded, "x").left_out == expected
        single = random_checkpoint(tmp_path / "single", {"w": torch.ones(3)})
        save_file({"w": torch.ones(3)}, single / "model.fp16.safetensors")
        assert open_checkpoint(single, "x").left_out == ("model.fp16.safetensors",)

    def test_an_adapter_beside_the_weights_that_are_asked_for(self, tmp_path: Path) -> None:
        random_checkpoint(tmp_path, {"w": torch.ones(3)})
        save_file({"a": torch.ones(3)}, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text("{}")
        found = open_checkpoint(tmp_path, "x", take="weights")
        assert found.left_out == ("adapter_config.json", "adapter_model.safetensors")
        assert (list(found.tensors), found.sidecars) == (["w"], ())

    def test_a_snapshot_in_the_hub_cache(self, sharded: Path, tmp_path: Path) -> None:
        repo = tmp_path / "models--org--name"
        snapshot = repo / "snapshots" / "0123abc"
        snapshot.mkdir(parents=True)
        (repo / "blobs").mkdir()
        for number, file in enumerate(sorted(sharded.iterdir())):
            shutil.copyfile(file, repo / "blobs" / f"{number:064x}")
            (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
        found = open_checkpoint(snapshot, "x")
        assert [shard.file for shard in found.shards] == SHARDS
        assert found.config == {"hidden_size": 2}

    def test_configs_may_hold_infinity(self, tmp_path: Path) -> None:
        random_checkpoint(tmp_path, {"w": torch.ones(3)})
        (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
        assert open_checkpoint(tmp_path, "x").config == {"time_step_limit": [0.0, float("inf")]}


class TestWhatIsMissing:
    def test_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / ".git").mkdir()
        refuse(SourceNotFound, tmp_path, "the folder is empty")

    def test_no_weights(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        refuse(SourceNotFound, tmp_path, r"expected weights in \*\.safetensors .*, found none")

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.q4.gguf", "consolidated.00.pth"])
    def test_weights_of_another_format(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"x")
        error = refuse(SourceNotFound, tmp_path, f"found only {name}, which this version does not read")
        assert "save_pretrained" in (error.hint or "")

    def test_weights_one_folder_further(self, sharded: Path) -> None:
        error = refuse(SourceNotFound, sharded.parent, "found none")
        assert str(sharded) in (error.hint or "")

    def test_missing_shards_of_an_index(self, sharded: Path) -> None:
        (sharded / SHARDS[1]).unlink()
        refuse(SourceNotFound, sharded, f"expected 3 shards in .*, found 2: {SHARDS[1]} missing")
        (sharded / SHARDS[0]).unlink()
        refuse(SourceNotFound, sharded, f"found 1: {SHARDS[0]}, {SHARDS[1]} missing")

    def test_missing_shards_without_an_index(self, sharded: Path) -> None:
        (sharded / INDEX).unlink()
        (sharded / SHARDS[2]).unlink()
        refuse(SourceNotFound, sharded, f"found 2: {SHARDS[2]} missing")

    def test_a_link_that_leads_nowhere(self, sharded: Path) -> None:
        (sharded / SHARDS[1]).unlink()
        (sharded / SHARDS[1]).symlink_to("nowhere")
        with pytest.raises(SourceNotFound, match="a link that leads nowhere"):
            open_checkpoint(sharded, "x")

    def test_truncated_shard(self, sharded: Path) -> None:
        size = (sharded / SHARDS[1]).stat().st_size
        os.truncate(sharded / SHARDS[1], size - 1)
        refuse(SourceNotFound, sharded, f"{SHARDS[1]} is cut off .* expected {size} bytes .* found {size - 1}")

    def test_an_index_that_names_a_tensor_that_is_not_there(self, sharded: Path) -> None:
        edit_index(sharded, lambda weight_map: weight_map.update({"mtp.fc.weight": SHARDS[2]}))
        refuse(SourceNotFound, sharded, f"'mtp.fc.weight' in {SHARDS[2]}, but no shard has it")

    def test_an_index_that_names_the_wrong_shard(self, sharded: Path) -> None:
        edit_index(sharded, lambda weight_map: weight_map.update({"t0": SHARDS[2]}))
        refuse(SourceNotFound, sharded, f"'t0' in {SHARDS[2]}, but it is in {SHARDS[0]}")

    def test_an_index_that_leaves_out_a_tensor(self, sharded: Path) -> None:
        edit_index(sharded, lambda weight_map: weight_map.pop("t3"))
        refuse(SourceNotFound, sharded, f"does not list t3, found in {SHARDS[1]}")

    def test_an_index_of_nothing(self, sharded: Path) -> None:
        edit_index(sharded, lambda weight_map: weight_map.clear())
        refuse(SourceNotFound, sharded, "names no tensors")

    def test_weights_without_tensors(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(shard_bytes({}))
        refuse(SourceNotFound, tmp_path, "hold no tensors")


class TestWhatIsUnsafe:
    @pytest.mark.parametrize(
        "name", ["../secret.safetensors", "/tmp/x.safetensors", "a/../b.safetensors", "a\0.safetensors"]
    )
    def test_an_index_that_points_elsewhere(self, sharded: Path, name: str) -> None:
        save_file({"t0": torch.ones(3)}, sharded.parent / "secret.safetensors")
        edit_index(sharded, lambda weight_map: weight_map.update({"t0": name}))
        refuse(SourceIncompatible, sharded, "expected the plain name of a file")

    def test_a_shard_that_is_a_link_out(self, sharded: Path) -> None:
        (sharded / SHARDS[1]).rename(sharded.parent / "moved.safetensors")
        (sharded / SHARDS[1]).symlink_to("../moved.safetensors")
        refuse(SourceIncompatible, sharded, "outside of the checkpoint's folder")
        (sharded / INDEX).unlink()
        refuse(SourceIncompatible, sharded, "outside of the checkpoint's folder")

    @pytest.mark.parametrize(
        ("content", "gist"),
        [
            ("[]", "expected a JSON object, found list"),
            ("{}", "its weight_map is not a map"),
            ('{"weight_map": []}', "its weight_map is not a map"),
            ('{"weight_map": {"a": 1}}', "its weight_map is not a map"),
            ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' stands in it twice"),
            ('{"weight_map": {"a": "pytorch_model.bin"}}', "'pytorch_model.bin', which is no safetensors file"),
            ("<html>", "not JSON"),
        ],
    )
    def test_an_index_that_is_none(self, sharded: Path, content: str, gist: str) -> None:
        (sharded / INDEX).write_text(content)
        refuse(SourceIncompatible, sharded, gist)

    def test_a_huge_index(self, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(weights_module, "MAX_SIDECAR_BYTES", 20)
        refuse(SourceIncompatible, sharded, "expected at most 20 bytes, found")

    def test_a_tensor_in_two_shards(self, sharded: Path) -> None:
        save_file({"t4": torch.ones(3), "t1": torch.ones(3)}, sharded / SHARDS[2])
        refuse(SourceIncompatible, sharded, f"'t1' stands in two shards .*: {SHARDS[0]} and {SHARDS[2]}")

    def test_one_file_and_an_index_of_others(self, sharded: Path) -> None:
        save_file({"t4": torch.ones(3)}, sharded / "model.safetensors")
        refuse(SourceIncompatible, sharded, "holds both model.safetensors and a weight index")

    def test_several_sets_of_weights(self, sharded: Path) -> None:
        (sharded / INDEX).unlink()
        save_file({"t4": torch.ones(3)}, sharded / "other.safetensors")
        refuse(SourceIncompatible, sharded, "expected one set of weights .* and 1 more")

    def test_numbers_that_count_nothing(self, tmp_path: Path) -> None:
        for name in ("model-00000-of-00000.safetensors", "b.safetensors"):
            save_file({"t4": torch.ones(3)}, tmp_path / name)
        refuse(SourceIncompatible, tmp_path, "expected one set of weights")

    @pytest.mark.parametrize(
        ("content", "gist"),
        [
            (b"<!DOCTYPE html><html>login</html>", "an HTML page"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n", "a Git LFS pointer"),
        ],
    )
    def test_not_safetensors(self, tmp_path: Path, content: bytes, gist: str) -> None:
        (tmp_path / "model.safetensors").write_bytes(content)
        refuse(SourceIncompatible, tmp_path, gist)

    @pytest.mark.parametrize(
        ("content", "gist"),
        [(b"{", "is not JSON"), (b"[]", "expected an object"), (b"[" * 100_000, "is not JSON"), (b"\xff", "not JSON")],
    )
    def test_a_broken_config(self, tmp_path: Path, content: bytes, gist: str) -> None:
        random_checkpoint(tmp_path, {"w": torch.ones(3)})
        (tmp_path / "config.json").write_bytes(content)
        refuse(SourceIncompatible, tmp_path, gist)

    def test_a_huge_config(self, tmp_path: Path) -> None:
        random_checkpoint(tmp_path, {"w": torch.ones(3)})
        (tmp_path / "config.json").write_bytes(b" " * (4 * 2**20) + b"{}")
        refuse(SourceIncompatible, tmp_path, "expected at most 4194304 bytes")

    def test_too_many_tensors(self, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mfs_decompose.source.checkpoint.MAX_TENSORS", 5)
        refuse(SourceIncompatible, sharded, "expected at most 5 tensors")


@pytest.mark.parametrize("how", ["longer", "gone", "link"])
def test_a_side_file_that_changed(tmp_path: Path, how: str) -> None:
    random_checkpoint(tmp_path, {"w": torch.ones(3)})
    (tmp_path / "vocab.txt").write_text("abc")
    found = open_checkpoint(tmp_path, "x")
    (tmp_path / "vocab.txt").unlink()
    if how == "longer":
        (tmp_path / "vocab.txt").write_text("abcd")
    if how == "link":
        (tmp_path / "vocab.txt").symlink_to("/etc/hostname")
    with pytest.raises(SourceIncompatible, match=r"changed while it was being read|outside of") as caught:
        read_sidecar(found, found.sidecars[0])
    assert caught.value.exit_code == 12
