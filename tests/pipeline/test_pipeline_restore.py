"""Give checkpoints back: folders that transformers loads, with every file but the weights byte for byte."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CHAT_TEMPLATE, EMBEDDING, HEAD, INDEX, Family, make_llama, read_weights
from pipeline_runs import Recording, asked, back, contents, copied, manifest, record, run, same_bits, toys
from transformers import AutoModelForCausalLM, AutoTokenizer

from mfs_decompose.artifact.reader import Family as Artifact
from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import (
    ArtifactInvalid,
    OutputBusy,
    ResourceShortage,
    SourceIncompatible,
    SourceNotFound,
    UsageError,
)
from mfs_decompose.pipeline import restore as restore_module
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.restore import RestoreOptions, restore
from mfs_decompose.source.checkpoint import open_checkpoint


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def beside(folder: Path) -> dict[str, bytes]:
    """Every file but weights and their index."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix != ".safetensors" and path.name != INDEX
    }


def logits(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(3, 63).reshape(2, 30)
    with torch.no_grad():
        found = model.eval()(tokens).logits
    assert isinstance(found, torch.Tensor)
    return found


def divergence(original: torch.Tensor, other: torch.Tensor) -> float:
    """KL(original || other), nats a token."""
    one, two = (torch.log_softmax(values.double(), dim=-1) for values in (original, other[..., : original.shape[-1]]))
    return float((one.exp() * (one - two)).sum(-1).mean())


@pytest.mark.parametrize("id", ["math", "vocab"])
def test_a_restored_folder_loads_and_speaks_like_the_original(
    art: Path, family: Family, tmp_path: Path, id: str
) -> None:
    restored, weights = back(art, id, tmp_path / id)
    original = family.variants[id]
    assert (restored.id, restored.folder, restored.checked, restored.exact) == (id, tmp_path / id, True, False)
    assert beside(tmp_path / id) == beside(original)
    assert sorted(path.name for path in (tmp_path / id).iterdir()) == sorted(path.name for path in original.iterdir())
    assert restored.bytes == sum(path.stat().st_size for path in (tmp_path / id).glob("*.safetensors"))
    assert {name: (w.dtype, w.shape) for name, w in weights.items()} == {
        name: (w.dtype, w.shape) for name, w in read_weights(original).items()
    }
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / id)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(original).get_vocab()
    ours, theirs = logits(tmp_path / id), logits(original)
    assert ours.shape == theirs.shape
    untouched = logits(family.base)
    assert divergence(theirs, ours) < 0.3 * divergence(theirs[..., :257], untouched)


def test_restoring_twice_gives_the_same_bytes(art: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        back(art, "math", tmp_path / str(number))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_digests_in_the_manifest_are_those_of_the_restored_tensors(art: Path, tmp_path: Path) -> None:
    _, weights = back(art, "code", tmp_path / "code")
    for name, tensor in record(art, "code")["tensors"].items():
        data = weights[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(data).hexdigest() == tensor["restored_sha256"]


def test_lossless_gives_every_bit_and_every_file_back(
    lossless_art: Path, untied_family: Family, tmp_path: Path
) -> None:
    for id, original in untied_family.variants.items():
        assert all(tensor["exact"] for tensor in record(lossless_art, id)["tensors"].values())
        restored, weights = back(lossless_art, id, tmp_path / id, exact=True)
        assert restored.exact and restored.checked
        expected = read_weights(original)
        assert weights.keys() == expected.keys()
        assert all(same_bits(weights[name], expected[name]) for name in expected)
        names = sorted(path.name for path in original.iterdir())
        assert sorted(path.name for path in (tmp_path / id).iterdir()) == names
        for name in names:
            assert sha256(tmp_path / id / name) == sha256(original / name)
    assert any(name == INDEX for name in names) or (untied_family.variants["math"] / INDEX).exists()


def test_lossless_saves_something(lossless_art: Path) -> None:
    for variant in manifest(lossless_art)["variants"]:
        assert 0.2 < variant["bytes"] / variant["checkpoint_bytes"] < 0.8


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_new_rows_of_a_grown_vocabulary_are_exact(
    art: Path, tmp_path: Path, family: Family, untied_family: Family, name: str
) -> None:
    chosen, artifact = (family, art) if name == "tied" else (untied_family, tmp_path / "art")
    if name == "untied":
        run(artifact, chosen.base, {"vocab": chosen.variants["vocab"]})
    original = read_weights(chosen.variants["vocab"])
    for dtype in ("original", "float32"):
        _, weights = back(artifact, "vocab", tmp_path / dtype, dtype=dtype)
        for tensor in {EMBEDDING, HEAD} & original.keys():
            assert weights[tensor].shape == (259, 64)
            assert torch.equal(weights[tensor][257:].float(), original[tensor][257:].float())
            assert not torch.equal(weights[tensor][:257].float(), original[tensor][:257].float())
    assert (HEAD in original) == (name == "untied")


def test_the_base_comes_back_as_it_was(art: Path, family: Family, tmp_path: Path) -> None:
    restored, _ = back(art, "base", tmp_path / "base", exact=True)
    assert restored.exact
    assert contents(tmp_path / "base") == contents(family.base)


def test_all_of_them_into_folders_of_their_own(art: Path, tmp_path: Path) -> None:
    sink = Recording()
    with Artifact.open(art) as opened:
        ids = (*opened.variant_ids, "base", "math")
    done = restore(art, ids, tmp_path / "out", progress=sink)
    assert [one.id for one in done] == ["code", "math", "vocab", "base"]
    assert [one.folder for one in done] == [tmp_path / "out" / one.id for one in done]
    weights = sum(w.nbytes for one in done for w in read_weights(one.folder).values())
    assert sink.advanced == weights
    assert sink.stages == ["restoring"]
    (nested,) = restore(art, ["math"], tmp_path / "nested", nested=True)
    assert contents(nested.folder) == contents(tmp_path / "out" / "math")


def test_float32_is_what_is_served(art: Path, family: Family, tmp_path: Path) -> None:
    restored, weights = back(art, "math", tmp_path / "math", dtype="float32")
    assert (restored.checked, restored.exact) == (False, False)
    assert {w.dtype for w in weights.values()} == {torch.float32}
    config = json.loads((tmp_path / "math" / "config.json").read_text())
    original = json.loads((family.variants["math"] / "config.json").read_text())
    key = "dtype" if "dtype" in original else "torch_dtype"
    assert config == {**original, key: "float32"} != original
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "math")
    assert model.dtype == torch.float32
    assert torch.equal(model.state_dict()[EMBEDDING], weights[EMBEDDING])
    index = json.loads((tmp_path / "math" / INDEX).read_text())
    before = json.loads((family.variants["math"] / INDEX).read_text())
    assert index["weight_map"] == before["weight_map"]
    assert (
        index["metadata"]["total_size"]
        == sum(w.nbytes for w in weights.values())
        == 2 * before["metadata"]["total_size"]
    )
    untouched = {name: data for name, data in beside(family.variants["math"]).items() if name != "config.json"}
    assert {name: data for name, data in beside(tmp_path / "math").items() if name != "config.json"} == untouched


def test_a_config_of_the_older_kind(tmp_path: Path) -> None:
    base, variants = toys(tmp_path, "math")
    (variants["math"] / "config.json").write_text('{"torch_dtype": "bfloat16", "model_type": "toy"}')
    run(tmp_path / "art", base, variants, {"objective.rank": 2})
    back(tmp_path / "art", "math", tmp_path / "out", dtype="float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"torch_dtype": "float32", "model_type": "toy"}


def test_rounding_to_nearest(art: Path, tmp_path: Path) -> None:
    restored, nearest = back(art, "code", tmp_path / "nearest", rounding="nearest")
    _, served = back(art, "code", tmp_path / "served", dtype="float32")
    _, stochastic = back(art, "code", tmp_path / "stochastic")
    assert not restored.checked
    assert all(same_bits(nearest[name], served[name].to(nearest[name].dtype)) for name in served)
    name = "model.layers.0.mlp.up_proj.weight"
    away = [(stochastic[name].double() - served[name].double()).abs().max(), (nearest[name] - served[name]).abs().max()]
    assert away[0] > away[1]
    gap = (stochastic[name].double() - served[name].double()).mean().abs()
    assert gap < 0.05 * away[0]  # right in the mean


def test_exact_tensors_have_their_digest_whatever_the_rounding(lossless_art: Path, tmp_path: Path) -> None:
    restored, _ = back(lossless_art, "math", tmp_path / "math", rounding="nearest")
    assert restored.checked and restored.exact


def test_a_single_file(art: Path, family: Family, tmp_path: Path) -> None:
    _, single = back(art, "math", tmp_path / "single", layout="single")
    _, original = back(art, "math", tmp_path / "original")
    assert [path.name for path in (tmp_path / "single").glob("*.safetensors*")] == ["model.safetensors"]
    assert len(list((tmp_path / "original").glob("*.safetensors*"))) == 3
    assert single.keys() == original.keys()
    assert all(same_bits(single[name], original[name]) for name in single)
    assert beside(tmp_path / "single") == beside(family.variants["math"])
    assert torch.equal(logits(tmp_path / "single"), logits(tmp_path / "original"))


def test_exact_is_refused_where_something_was_lost(art: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected all 20 tensors of variant 'math' to be exact, found 15") as caught:
        back(art, "math", tmp_path / "math", exact=True)
    assert caught.value.hint is not None and "lossless" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_no_such_variant(art: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'math'"):
        back(art, "maths", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_places_that_are_taken(art: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for name in ("full", "file", "link"):
        with pytest.raises(OutputBusy, match="absent or empty"):
            back(art, "math", tmp_path / name)
    for inside in (art / "out", art):
        with pytest.raises(OutputBusy, match="inside the artifact"):
            back(art, "math", inside)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link"]
    (tmp_path / "empty").mkdir()
    assert back(art, "math", tmp_path / "empty")[0].checked
    assert back(art, "math", tmp_path / "not" / "there" / "yet")[0].checked


def test_the_folder_one_stands_in(art: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    restored, _ = back(art, "math", Path())
    assert restored.folder == tmp_path / "here"
    assert (tmp_path / "here" / "config.json").exists()


def test_what_a_killed_restore_left_is_swept(art: Path, tmp_path: Path) -> None:
    left = tmp_path / ".math.mfs-restoring"
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    back(art, "math", tmp_path / "math")
    assert [path.name for path in tmp_path.iterdir()] == ["math"]


def test_a_damaged_artifact_restores_nothing(art: Path, tmp_path: Path) -> None:
    copy = copied(art, tmp_path / "art")
    shard = copy / "v0002-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    shard.write_bytes(data)
    with pytest.raises(ArtifactInvalid, match="does not restore to what was recorded") as caught:
        back(copy, "math", tmp_path / "math")
    assert caught.value.hint is not None and "mfs verify" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["art"]
    assert back(copy, "code", tmp_path / "code")[0].checked
    assert {problem.file for problem in verify(copy, "values").problems} == {shard.name}


def test_a_disk_too_small(art: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_module, "free_disk", lambda folder: 1000)
    with pytest.raises(ResourceShortage, match=r"restoring needs 159 kB of disk, and 1 kB is free"):
        back(art, "math", tmp_path / "math")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def referring(tmp_path: Path, family: Family) -> tuple[Path, Path]:
    """An artifact without its base, and the base in a folder that may be moved."""
    base = copied(family.base, tmp_path / "base")
    run(tmp_path / "art", base, {"math": family.variants["math"]}, {"base.store": "reference"})
    return tmp_path / "art", base


def test_a_base_by_reference_costs_nothing_and_is_found_again(referring: tuple[Path, Path], tmp_path: Path) -> None:
    artifact, _ = referring
    assert not list(artifact.glob("base-*"))
    assert manifest(artifact)["base"]["bytes"] == 0
    assert str(tmp_path) not in (artifact / "manifest.json").read_text()
    assert back(artifact, "math", tmp_path / "math")[0].checked
    assert verify(artifact, "values").ok


def test_a_base_that_was_moved_must_be_named(referring: tuple[Path, Path], tmp_path: Path) -> None:
    artifact, base = referring
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(SourceNotFound) as caught:
        back(artifact, "math", tmp_path / "math")
    assert caught.value.exit_code == 11
    assert caught.value.hint is not None and "--base" in caught.value.hint
    assert not (tmp_path / "math").exists()
    with pytest.raises(SourceNotFound):
        verify(artifact, "values")
    assert back(artifact, "math", tmp_path / "math", base=moved)[0].checked
    assert back(artifact, "base", tmp_path / "again", base=moved)[0].exact
    assert contents(tmp_path / "again") == contents(moved)
    assert verify(artifact, "values", base=moved).ok


def test_a_wrong_base_is_refused(referring: tuple[Path, Path], tmp_path: Path) -> None:
    artifact, _ = referring
    other = make_llama(tmp_path / "other", seed=77)
    with pytest.raises(SourceIncompatible, match="found other values in its tensor") as caught:
        back(artifact, "math", tmp_path / "math", base=other)
    assert caught.value.exit_code == 12
    shorter = make_llama(tmp_path / "shorter", seed=1, layers=1)
    with pytest.raises(SourceIncompatible, match="found no such tensor"):
        back(artifact, "math", tmp_path / "math", base=shorter)
    assert not (tmp_path / "math").exists()


def test_a_hard_linked_base_outlives_its_folder(tmp_path: Path, family: Family) -> None:
    base = copied(family.base, tmp_path / "base")
    run(tmp_path / "art", base, {"math": family.variants["math"]}, {"base.store": "hardlink"})
    linked = tmp_path / "art" / "base-00001-of-00001.safetensors"
    assert linked.samefile(base / "model.safetensors")
    shutil.rmtree(base)
    assert back(tmp_path / "art", "base", tmp_path / "base")[0].exact
    assert contents(tmp_path / "base") == contents(family.base)
    assert verify(tmp_path / "art", "values").ok
    with open(linked, "r+b") as stream:
        stream.seek(open_checkpoint(tmp_path / "base", "base").tensors[EMBEDDING].start + 301)
        stream.write(b"\x11")
    with pytest.raises(ArtifactInvalid, match="found other values"):
        back(tmp_path / "art", "math", tmp_path / "math")


def test_an_artifact_moved_elsewhere_with_its_originals_gone(tmp_path: Path, family: Family) -> None:
    folders = {id: copied(folder, tmp_path / "from" / id) for id, folder in family.variants.items()}
    base = copied(family.base, tmp_path / "from" / "base")
    decompose(asked(tmp_path / "art", base, folders))
    shutil.rmtree(tmp_path / "from")
    moved = (tmp_path / "art").rename(tmp_path / "elsewhere")
    assert verify(moved, "values").ok
    assert all(one.checked for one in restore(moved, family.variants, tmp_path / "out", RestoreOptions()))


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"rounding": "nearest"}])
@pytest.mark.parametrize("file", ["v0002-00001.safetensors", "base-00001-of-00001.safetensors"])
def test_damage_is_found_where_no_digest_of_a_tensor_is_compared(
    art: Path, tmp_path: Path, options: dict[str, str], file: str
) -> None:
    damaged = tmp_path / "art"
    shutil.copytree(art, damaged)
    data = bytearray((damaged / file).read_bytes())
    data[-3] ^= 0x10
    (damaged / file).write_bytes(data)
    with pytest.raises(ArtifactInvalid, match=file):
        restore(damaged, ["math"], tmp_path / "math", RestoreOptions(**options))  # type: ignore[arg-type]
    assert not (tmp_path / "math").exists()


def test_a_place_below_a_file_is_refused(art: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputBusy, match="not a folder that can be written to"):
        restore(art, ["math"], tmp_path / "file" / "math")
