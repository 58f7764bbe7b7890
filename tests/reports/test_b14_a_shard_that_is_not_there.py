"""B14: a download was interrupted, the index names a shard that is not on disk, and a loader drops it silently.

Every command that opens the checkpoint names the missing shards and ends before any work, whatever else lies there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import INDEX, fine_tune, make_llama
from report_program import run, succeeded

GONE = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("b14")
    base = make_llama(root / "base", seed=14, shards=3)
    return {"base": base, "math": fine_tune(base, root / "math", seed=15, shards=3)}


def interrupted(folder: Path, left: str = "") -> Path:
    """Without its second shard, of which `left` of a download may be there under another name."""
    (folder / GONE).unlink()
    if left:
        (folder / left).write_bytes(b"\x00" * 100)
    return folder


@pytest.mark.parametrize("left", ["", f"{GONE}.incomplete", f".{GONE}.part"])
@pytest.mark.parametrize("who", ["base", "math"])
def test_the_missing_shard_is_named_before_any_work(
    whole: dict[str, Path], tmp_path: Path, who: str, left: str
) -> None:
    sources = {**whole, who: interrupted(shutil.copytree(whole[who], tmp_path / who), left)}
    before = sorted(path.name for path in tmp_path.rglob("*"))
    words = ["decompose", "--base", sources["base"], "--variants", sources["math"], "--out", tmp_path / "art"]
    for more in ([], ["--dry-run"]):
        ran = run(*words, *more)
        assert ran.code == 11
        assert f"expected 3 shards in {sources[who]}, found 2: {GONE} missing" in ran.err
        assert "Hint: Download or copy the checkpoint again." in ran.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_without_the_index_the_number_in_the_names_tells(whole: dict[str, Path], tmp_path: Path) -> None:
    math = interrupted(shutil.copytree(whole["math"], tmp_path / "math"))
    (math / INDEX).unlink()
    ran = run("decompose", "--base", whole["base"], "--variants", math, "--out", tmp_path / "art")
    assert ran.code == 11 and f"{GONE} missing" in ran.err


def test_a_shard_cut_off_by_the_interruption_is_named_with_its_bytes(whole: dict[str, Path], tmp_path: Path) -> None:
    math = shutil.copytree(whole["math"], tmp_path / "math")
    data = (math / GONE).read_bytes()
    (math / GONE).write_bytes(data[: len(data) // 2])
    ran = run("decompose", "--base", whole["base"], "--variants", math, "--out", tmp_path / "art")
    assert ran.code == 11
    assert f"{math / GONE} is cut off" in ran.err and f"expected {len(data)} bytes" in ran.err
    assert f"found {len(data) // 2}" in ran.err


def test_an_artifact_that_lost_a_shard_is_refused_too(whole: dict[str, Path], tmp_path: Path) -> None:
    """Ours is a download as well."""
    words = ["decompose", "--base", whole["base"], "--variants", whole["math"], "--rank", "4"]
    succeeded(*words, "--shard-size", "1kB", "--out", tmp_path / "art")
    lost = sorted((tmp_path / "art").glob("v0001-*.safetensors"))
    assert len(lost) > 2
    lost[1].unlink()
    ran = run("restore", tmp_path / "art", "--variant", "math", "--out", tmp_path / "back")
    assert ran.code == 20 and lost[1].name in ran.err
    assert not (tmp_path / "back").exists()
    ran = run("verify", tmp_path / "art", "--level", "quick")
    assert ran.code == 20 and lost[1].name in ran.out + ran.err
