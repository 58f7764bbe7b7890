from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EMBEDDING, Family, random_checkpoint, read_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_runs import LARGE, NORM, THIN, back, moved, run, toy, toy_tensors, toys

from mfs_decompose.errors import ArtifactInvalid, SourceIncompatible, SourceNotFound, UsageError
from mfs_decompose.events import NullSink
from mfs_decompose.pipeline import diff_tensors
from mfs_decompose.pipeline.diff import ModelsDiff, diff
from mfs_decompose.pipeline.diff_sides import Named, parse_side
from mfs_decompose.pipeline.diff_tensors import TensorDiff


def compared(a: object, b: object, **options: Any) -> ModelsDiff:
    found = diff(str(a), str(b), **options)
    assert isinstance(found, ModelsDiff)
    json.dumps(found.to_json(), allow_nan=False)
    return found


def one(found: ModelsDiff, name: str) -> TensorDiff:
    return next(tensor for tensor in found.tensors.both if tensor.name == name)


class Counted(NullSink):
    """Bytes announced and bytes done, by stage."""

    def __init__(self) -> None:
        self.stages: dict[str, list[int]] = {}

    def start(self, stage: str, total_bytes: int | None) -> None:
        self.stage = stage
        self.stages[stage] = [total_bytes or 0, 0]

    def advance(self, nbytes: int) -> None:
        self.stages[self.stage][1] += nbytes


# Two checkpoints.


def test_a_checkpoint_equals_its_copy(family: Family, tmp_path: Path) -> None:
    shutil.copytree(family.variants["math"], tmp_path / "copy")
    sink = Counted()
    found = compared(family.variants["math"], tmp_path / "copy", progress=sink)
    assert (found.equal, found.tensors.equal, found.files.equal, found.rel) == (True, True, True, None)
    assert found.to_json()["tensors"]["changes"] == []
    assert sink.stages == {"comparing tensors": [2 * found.a.nbytes, 2 * found.a.nbytes]}


def test_every_tensor_against_torch(family: Family) -> None:
    found = compared(family.base, family.variants["code"])
    base, code = read_weights(family.base), read_weights(family.variants["code"])
    assert [tensor.name for tensor in found.tensors.both] == sorted(base)
    for tensor in found.tensors.both:
        a, b = base[tensor.name].double(), code[tensor.name].double()
        assert (tensor.compared, tensor.changed) == (a.numel(), int((a != b).sum()))
        assert tensor.max_abs == float((a - b).abs().max())
        assert tensor.rel == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-12)
        cosine = float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0))
        assert tensor.cosine == pytest.approx(cosine, abs=1e-12)
    rels = [tensor.rel for tensor in found.most_changed]
    assert rels == sorted(rels, reverse=True)  # type: ignore[type-var]
    whole = torch.cat([base[name].double().flatten() for name in base])
    other = torch.cat([code[name].double().flatten() for name in base])
    assert found.rel == pytest.approx(float((whole - other).norm() / whole.norm()), rel=1e-12)


def test_shards_and_order_are_no_difference(family: Family, tmp_path: Path) -> None:
    folder = shutil.copytree(family.variants["math"], tmp_path / "one", ignore=shutil.ignore_patterns("*.safetensors*"))
    random_checkpoint(folder, dict(reversed(read_weights(family.variants["math"]).items())))
    assert compared(family.variants["math"], folder).equal


CHANGES = st.lists(st.sampled_from(["drop", "add", "retype", "resize", "reshape", "nudge", "flip"]), max_size=3)


@settings(max_examples=25)
@given(CHANGES, st.randoms(use_true_random=False))
def test_nothing_that_changed_is_missed(tmp_path_factory: pytest.TempPathFactory, what: list[str], random: Any) -> None:
    """Any mixture of changes, against a plain comparison of all tensors."""
    a = toy_tensors()
    b = dict(a)
    for kind in what:
        name = random.choice([name for name, tensor in b.items() if tensor.dim() == 2 and tensor.numel()] or [NORM])
        tensor = b[name].clone()
        if kind == "drop":
            del b[name]
        elif kind == "add":
            b[f"{name}.new"] = tensor
        elif kind == "retype":
            b[name] = tensor.float()
        elif kind == "resize":
            b[name] = torch.cat([tensor, tensor[:1] + 1])
        elif kind == "reshape":
            b[name] = tensor.reshape(-1, tensor.shape[0]).contiguous()
        elif kind == "nudge":
            tensor[-1, -1] += 1
            b[name] = tensor
        else:
            tensor[0, 0] = -tensor[0, 0]
            b[name] = tensor
    root = tmp_path_factory.mktemp("any")
    found = compared(toy(root / "a", a), toy(root / "b", b))
    assert found.tensors.only_a == tuple(sorted(a.keys() - b.keys()))
    assert found.tensors.only_b == tuple(sorted(b.keys() - a.keys()))
    for tensor in found.tensors.both:
        x, y = a[tensor.name], b[tensor.name]
        expected = "reshaped" if x.shape != y.shape else "retyped" if x.dtype != y.dtype else "changed"
        assert tensor.verdict == ("equal" if x.dtype == y.dtype and torch.equal(x, y) else expected)
    same = [name in b and a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a]
    assert found.equal == (all(same) and a.keys() == b.keys())


def test_rows_in_common_are_compared(family: Family) -> None:
    found = compared(family.base, family.variants["vocab"])
    grown = one(found, EMBEDDING)
    assert (grown.verdict, grown.a.shape, grown.b.shape) == ("reshaped", (257, 64), (259, 64))
    assert (grown.compared, grown.changed is not None and grown.changed > 0) == (257 * 64, True)
    assert found.files.tokenizer.vocabulary.only_b == 2
    shrunk = one(compared(family.variants["vocab"], family.base), EMBEDDING)
    assert (shrunk.compared, shrunk.changed) == (grown.compared, grown.changed)


def test_another_shape_is_not_compared(tmp_path: Path) -> None:
    a = toy(tmp_path / "a", {LARGE: torch.ones(4, 6), NORM: torch.ones(5)})
    b = toy(tmp_path / "b", {LARGE: torch.ones(6, 4), NORM: torch.ones(5, 1)})
    sink = Counted()
    found = compared(a, b, progress=sink)
    assert [(t.verdict, t.compared, t.rel) for t in found.tensors.both] == [("reshaped", None, None)] * 2
    assert sink.stages["comparing tensors"] == [2 * 29 * 4] * 2
    assert not found.equal


def test_large_tensors_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.randn(40, 24)
    b = a.clone()
    b[[3, 39], 5] += 0.5
    folders = toy(tmp_path / "a", {LARGE: a}), toy(tmp_path / "b", {LARGE: b})
    whole = one(compared(*folders), LARGE)
    monkeypatch.setattr(diff_tensors, "DECODE_ELEMENTS", 70)
    blocks = one(compared(*folders), LARGE)
    assert (blocks.changed, blocks.max_abs) == (whole.changed, whole.max_abs) == (2, pytest.approx(0.5, abs=1e-6))
    assert blocks.rel == pytest.approx(whole.rel, rel=1e-14)


# Artifacts.


def test_a_variant_against_its_own_checkpoint(family: Family, art: Path, tmp_path: Path) -> None:
    found = compared(family.variants["math"], f"{art}::math")
    assert (found.a.kind, found.b.kind, found.tensors.original) == ("checkpoint", "variant", "a")
    assert found.files.equal
    _, weights = back(art, "math", tmp_path / "back")
    original = read_weights(family.variants["math"])
    for tensor in found.tensors.both:
        a, b = original[tensor.name].double(), weights[tensor.name].double()
        assert tensor.changed == int((a != b).sum())
        assert tensor.verdict == ("changed" if tensor.changed else "equal")
        assert tensor.rel == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-12)
    assert 0 < sum(tensor.verdict == "equal" for tensor in found.tensors.both) < len(original)
    assert compared(f"{art}::math", family.variants["math"]).tensors.original == "b"
    assert compared(f"{art}::math", family.variants["code"]).tensors.original is None


def test_what_was_restored_is_equal_and_known_without_decoding(
    art: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back(art, "vocab", tmp_path / "back")
    monkeypatch.setattr("mfs_decompose.artifact.values.open_tensor", None)
    sink = Counted()
    found = compared(f"{art}::vocab", tmp_path / "back", progress=sink)
    assert found.equal
    assert found.tensors.original is None
    assert sink.stages["comparing tensors"] == [2 * found.a.nbytes] * 2


def test_the_base_of_an_artifact(family: Family, art: Path) -> None:
    assert compared(f"{art}::base", family.base).equal
    found = compared(f"{art}::base", f"{art}::math")
    originals = read_weights(family.base)
    assert {t.name for t in found.tensors.both} == originals.keys()
    assert one(found, "model.norm.weight").verdict == "changed"


def test_a_lossless_variant_equals_its_checkpoint(untied_family: Family, lossless_art: Path) -> None:
    for id, folder in untied_family.variants.items():
        found = compared(f"{lossless_art}::{id}", folder)
        assert (found.equal, found.tensors.original) == (True, "b")


def test_without_weights_digests_on_record_decide(family: Family, art: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("mfs_decompose.pipeline.diff_tensors._sum_up", never)
    monkeypatch.setattr("mfs_decompose.pipeline.diff_tensors._hash", never)
    found = compared(f"{art}::math", f"{art}::math", weights=False)
    assert found.equal
    other = compared(f"{art}::math", f"{art}::code", weights=False)
    assert {tensor.verdict for tensor in other.tensors.both} == {"changed"}
    unknown = compared(family.base, family.variants["vocab"], weights=False)
    assert one(unknown, EMBEDDING).verdict == "reshaped"
    assert one(unknown, "model.norm.weight").verdict == "unknown"
    assert unknown.to_json()["tensors"]["unknown"] == len(unknown.tensors.both) - 1
    assert not compared(family.base, family.base, weights=False).equal  # unknown is not equal


def test_a_base_elsewhere_is_given(tmp_path: Path) -> None:
    base, variants = toys(tmp_path / "in", "math")
    run(tmp_path / "art", base, variants, {"base.store": "reference", "objective.rank": 3})
    shutil.move(base, tmp_path / "moved")
    with pytest.raises(SourceNotFound, match="expected the base that this artifact refers to"):
        compared(f"{tmp_path / 'art'}::math", variants["math"])
    found = compared(f"{tmp_path / 'art'}::math", variants["math"], base=str(tmp_path / "moved"))
    assert found.tensors.original == "b"
    with pytest.raises(SourceIncompatible, match="expected the base this artifact was made against"):
        compared(f"{tmp_path / 'art'}::math", variants["math"], base=str(variants["math"]))


def test_a_damaged_tensor_is_refused_by_name(tmp_path: Path) -> None:
    base, variants = toys(tmp_path / "in", "math")
    run(tmp_path / "art", base, variants, {"objective.rank": 3})
    shard = next((tmp_path / "art").glob("v0001-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ArtifactInvalid, match=r"tensor .* of .*::math is not what was recorded"):
        compared(f"{tmp_path / 'art'}::math", variants["math"])


def test_an_empty_and_a_0d_tensor(tmp_path: Path) -> None:
    a = toy_tensors()
    b = {**a, "position": torch.tensor(10), "mask": torch.tensor([True, True, True])}
    found = compared(toy(tmp_path / "a", a), toy(tmp_path / "b", b))
    assert [tensor.name for tensor in found.most_changed] == ["mask", "position"]
    assert one(found, "position").rel == pytest.approx(1 / 9)
    assert (one(found, "empty").verdict, one(found, "also.empty").verdict) == ("equal", "equal")


def test_left_out_files_are_named(tmp_path: Path) -> None:
    a = toy(tmp_path / "a", toy_tensors())
    (a / "optimizer.pt").write_bytes(b"x")
    assert compared(a, a).to_json()["a"]["left_out"] == ["optimizer.pt"]


def test_adapters_are_sides_by_their_own_tensors(tmp_path: Path) -> None:
    for id, alpha in (("a", 8), ("b", 12)):
        folder = random_checkpoint(tmp_path / id, {"base_model.model.q.lora_A.weight": torch.ones(2, 5)})
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "target_modules": ["q"], "peft_version": id}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    found = compared(tmp_path / "a", tmp_path / "b")
    assert (found.a.kind, found.tensors.equal, found.equal) == ("adapter", True, False)
    difference = found.files.configs["adapter_config.json"]
    assert [(one.key, one.a, one.b) for one in difference.changes] == [("lora_alpha", 8, 12)]
    assert difference.noise == ("peft_version",)


# What a side may be.


def test_spellings_of_a_side(art: Path, family: Family) -> None:
    assert parse_side(str(art)) == Named(str(art), artifact=art)
    assert parse_side(f"{art}::math") == Named(f"{art}::math", artifact=art, id="math")
    assert parse_side(f"{art}::base").id == "base"
    assert parse_side(str(family.base)) == Named(str(family.base))
    assert parse_side("org/name@main") == Named("org/name@main")
    for text in (f"{family.base}::adapter", f"{family.base}::weights", "nowhere::math"):
        assert parse_side(text) == Named(text)


def test_a_folder_with_colons_in_its_name_is_a_folder(art: Path, tmp_path: Path) -> None:
    named = toy(tmp_path / "art::math", toy_tensors())
    shutil.copytree(art, tmp_path / "art")
    assert parse_side(str(named)) == Named(str(named))
    assert parse_side(f"{tmp_path / 'art'}::code").id == "code"
    twice = shutil.copytree(art, tmp_path / "a::b")
    assert parse_side(f"{twice}::math") == Named(f"{twice}::math", artifact=twice, id="math")


def test_a_checkpoint_with_a_manifest_of_its_own_is_a_checkpoint(tmp_path: Path) -> None:
    folder = toy(tmp_path / "model", toy_tensors(), manifest_json="{}")
    assert parse_side(str(folder)) == Named(str(folder))


@pytest.mark.parametrize(
    ("a", "message"),
    [
        ("{art}", "expected two models or two artifacts, found a whole artifact"),
        ("{art}::", "expected a variant's id behind"),
        ("{art}::mth", r"expected a variant of this artifact, found 'mth' \(did you mean 'math'\?\)"),
        ("{art}::all", "expected one variant, found"),
        ("{base}::math", "expected an artifact .* before ::math, found another folder"),
    ],
)
def test_what_is_no_side(art: Path, family: Family, a: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        compared(a.format(art=art, base=family.base), family.variants["math"])
    assert refused.value.hint
    with pytest.raises(UsageError, match=message):
        compared(family.variants["math"], a.format(art=art, base=family.base))


def test_a_whole_artifact_says_what_it_holds(art: Path, family: Family) -> None:
    with pytest.raises(UsageError) as refused:
        compared(art, family.base)
    assert refused.value.hint == f"say which one of it: {art}::base, {art}::code, {art}::math, {art}::vocab"


def test_moved_tensors_of_two_fine_tunes(tmp_path: Path) -> None:
    base = toy_tensors()
    a, b = toy(tmp_path / "a", moved(base, 1)), toy(tmp_path / "b", moved(base, 2))
    found = compared(a, b)
    assert one(found, THIN).changed
    assert {t.name for t in found.tensors.both if t.verdict == "equal"} == {"position", "mask", "empty", "also.empty"}
