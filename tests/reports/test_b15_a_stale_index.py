"""B15: the index lists a tensor that its shard does not hold (an MTP head that was left out), and nobody notices.

Index and headers are held against each other both ways, the tensor and the shard are named, and nothing is written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import INDEX, fine_tune, make_llama
from report_program import run, succeeded
from safetensors.torch import load_file, save_file

STALE, SHARD = "mtp.fc.weight", "model-00003-of-00003.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("b15")
    base = make_llama(root / "base", seed=15, shards=3)
    return {"base": base, "math": fine_tune(base, root / "math", seed=16, shards=3)}


def index_of(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def rewrite(folder: Path, weight_map: dict[str, str]) -> None:
    document = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**document, "weight_map": weight_map}))


def refused(whole: dict[str, Path], who: str, changed: Path, out: Path) -> str:
    sources = {**whole, who: changed}
    for more in ([], ["--dry-run"]):
        ran = run("decompose", "--base", sources["base"], "--variants", sources["math"], "--out", out, *more)
        assert ran.code == 11, ran.err
    assert not out.exists() and not out.with_name(f"{out.name}.partial").exists()
    return ran.err


@pytest.mark.parametrize("who", ["base", "math"])
def test_a_tensor_that_no_shard_has(whole: dict[str, Path], tmp_path: Path, who: str) -> None:
    changed = shutil.copytree(whole[who], tmp_path / who)
    rewrite(changed, {**index_of(changed), STALE: SHARD})
    said = refused(whole, who, changed, tmp_path / "art")
    assert f"the weight index of {changed} places tensor '{STALE}' in {SHARD}, but no shard has it" in said


@pytest.mark.parametrize("who", ["base", "math"])
def test_a_tensor_that_the_index_does_not_list(whole: dict[str, Path], tmp_path: Path, who: str) -> None:
    """Loaders that go by the index would drop it."""
    changed = shutil.copytree(whole[who], tmp_path / who)
    weight_map = index_of(changed)
    name, shard = "model.layers.1.mlp.up_proj.weight", weight_map["model.layers.1.mlp.up_proj.weight"]
    del weight_map[name]
    rewrite(changed, weight_map)
    said = refused(whole, who, changed, tmp_path / "art")
    assert f"the weight index of {changed} does not list {name}, found in {shard}" in said


def test_a_tensor_in_another_shard_than_the_index_says(whole: dict[str, Path], tmp_path: Path) -> None:
    changed = shutil.copytree(whole["math"], tmp_path / "math")
    weight_map = index_of(changed)
    name = "model.norm.weight"
    real = weight_map[name]
    other = next(shard for shard in sorted(set(weight_map.values())) if shard != real)
    rewrite(changed, {**weight_map, name: other})
    said = refused(whole, "math", changed, tmp_path / "art")
    assert f"places tensor '{name}' in {other}, but it is in {real}" in said


def test_one_tensor_in_two_shards(whole: dict[str, Path], tmp_path: Path) -> None:
    changed = shutil.copytree(whole["math"], tmp_path / "math")
    name = "model.norm.weight"
    real = index_of(changed)[name]
    other = next(shard for shard in sorted(set(index_of(changed).values())) if shard != real)
    weights = {**load_file(changed / other), name: load_file(changed / real)[name]}
    save_file(weights, changed / other, {"format": "pt"})
    ran = run("decompose", "--base", whole["base"], "--variants", changed, "--out", tmp_path / "art")
    assert ran.code == 12 and f"tensor '{name}' stands in two shards" in ran.err
    assert real in ran.err and other in ran.err


def test_the_index_of_what_is_restored_is_true(whole: dict[str, Path], tmp_path: Path) -> None:
    command = ["decompose", "--base", whole["base"], "--variants", whole["math"], "--codec", "lossless"]
    succeeded(*command, "--out", tmp_path / "art")
    succeeded("restore", tmp_path / "art", "--variant", "math", "--out", tmp_path / "back")
    assert (tmp_path / "back" / INDEX).read_bytes() == (whole["math"] / INDEX).read_bytes()
    found = {name: path.name for path in sorted((tmp_path / "back").glob("*.safetensors")) for name in load_file(path)}
    assert found == index_of(tmp_path / "back")
