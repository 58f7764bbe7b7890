from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Family, fine_tune
from pipeline_runs import run

from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.pipeline.diff import diff
from mfs_decompose.pipeline.diff_artifacts import ArtifactsDiff, VariantDiff


def compared(a: Path, b: Path) -> ArtifactsDiff:
    found = diff(str(a), str(b))
    assert isinstance(found, ArtifactsDiff)
    json.dumps(found.to_json(), allow_nan=False)
    return found


def variant(found: ArtifactsDiff, id: str) -> VariantDiff:
    return next(one for one in found.variants if one.id == id)


@pytest.fixture(autouse=True)
def nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("mfs_decompose.artifact.values.open_tensor", never)
    monkeypatch.setattr("mfs_decompose.artifact.reader.Family.base_rows", never)


def test_an_artifact_equals_its_copy(art: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(art, tmp_path / "copy")
    (copy / "run.json").unlink()
    found = compared(art, copy)
    assert (found.equal, found.made) == (True, ())
    assert found.digests[0] == found.digests[1]
    assert all(one.equal for one in found.variants)
    assert [one.id for one in found.variants] == ["code", "math", "vocab"]


def test_another_budget_stores_and_restores_something_else(family: Family, art: Path, tmp_path: Path) -> None:
    run(tmp_path / "art", family.base, family.variants, {"objective.budget": "40%"})
    found = compared(art, tmp_path / "art")
    assert not found.equal
    assert not found.base
    math = variant(found, "math")
    assert not math.originals
    assert not math.files
    assert math.restored.changed
    assert set(math.restored.changed) <= set(math.stored.changed)
    assert math.bytes[0] != math.bytes[1]
    assert [one.key for one in found.made] == ["recipe.objective.budget"]


def test_another_variant_and_other_weights_of_one(family: Family, art: Path, tmp_path: Path) -> None:
    again = fine_tune(family.base, tmp_path / "math", seed=99)
    (again / "notes.txt").write_text("new")
    run(tmp_path / "art", family.base, {"math": again, "prose": family.variants["code"]})
    found = compared(art, tmp_path / "art")
    assert (found.only_a, found.only_b) == (("code", "vocab"), ("prose",))
    math = variant(found, "math")
    assert len(math.originals.changed) == 20
    assert (math.files.only_b, math.files.changed) == (("notes.txt",), ("generation_config.json",))


def test_another_base(family: Family, art: Path, tmp_path: Path) -> None:
    run(tmp_path / "art", None, {id: family.variants[id] for id in ("code", "math")}, {"objective.budget": "40%"})
    found = compared(art, tmp_path / "art")
    assert found.base.changed
    assert {one.key for one in found.made} >= {"base.mode"}
    assert found.base_files.only_a == ("generation_config.json",)  # a mean base has what its variants agree on
    assert "config.json" not in found.base_files.only_a


def test_the_same_content_by_another_recipe(untied_family: Family, lossless_art: Path, tmp_path: Path) -> None:
    recipe = {"deltas.default.codec": "lossless", "seed": 77}
    run(tmp_path / "art", untied_family.base, untied_family.variants, recipe)
    found = compared(lossless_art, tmp_path / "art")
    assert found.equal
    assert found.digests[0] != found.digests[1]
    assert [one.key for one in found.made] == ["recipe.seed"]


def test_a_variant_of_each_of_two_artifacts(family: Family, art: Path, tmp_path: Path) -> None:
    """Two variants are models again: the same variant under two budgets."""
    run(tmp_path / "art", family.base, family.variants, {"objective.budget": "40%"})
    found = diff(f"{art}::math", f"{tmp_path / 'art'}::math", weights=False)
    assert not found.equal


def test_a_damaged_artifact_is_refused(art: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(art, tmp_path / "copy")
    (copy / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactInvalid):
        compared(art, copy)
