"""Finishing an artifact: content stored once, the manifest last, nothing unrecorded."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from artifact_families import PLATFORM, RECIPE, TOOL, Made, make_artifact, snapshot

from mfs_decompose.artifact import writer
from mfs_decompose.artifact.atomic import write_file
from mfs_decompose.artifact.files import FileRecord
from mfs_decompose.artifact.layout import MANIFEST, RUN
from mfs_decompose.artifact.manifest import Manifest
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.verify import verify
from mfs_decompose.artifact.writer import finish_artifact, source_contents, store_content, write_run_record
from mfs_decompose.errors import ArtifactInvalid, ResourceShortage


def finish_again(made: Made, **changes: Any) -> Manifest:
    """Run the last step once more from the records of a finished artifact."""
    manifest = Family.open(made.path).manifest
    given: dict[str, Any] = {
        "tool": TOOL,
        "platform": PLATFORM,
        "recipe": RECIPE,
        "base": manifest.base,
        "variants": manifest.variants,
        "coverage": manifest.coverage,
        "files": [
            FileRecord(path, entry.size, entry.sha256) for path, entry in manifest.files.items() if path != "README.md"
        ],
    }
    return finish_artifact(made.path, **{**given, **changes})


def test_content_is_stored_once_under_its_digest(tmp_path: Path) -> None:
    first = store_content(tmp_path, b"config")
    inode = (tmp_path / first.path).stat().st_ino
    assert store_content(tmp_path, b"config") == first
    assert (tmp_path / first.path).stat().st_ino == inode
    assert first == FileRecord(
        "files/" + hashlib.sha256(b"config").hexdigest(), 6, hashlib.sha256(b"config").hexdigest()
    )
    assert store_content(tmp_path, b"").size == 0


def test_damaged_content_of_an_earlier_run_is_written_again(tmp_path: Path) -> None:
    record = store_content(tmp_path, b"config")
    (tmp_path / record.path).write_bytes(b"confix")
    store_content(tmp_path, b"config")
    assert (tmp_path / record.path).read_bytes() == b"config"


def test_equal_side_files_of_all_sources_are_one_file(tmp_path: Path) -> None:
    made = make_artifact(tmp_path)
    contents = [path.read_bytes() for path in (made.path / "files").iterdir()]
    assert contents.count(b'{"version": "1.0"}\n') == 1
    assert len(set(contents)) == len(contents)


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    one, other = make_artifact(tmp_path / "one"), make_artifact(tmp_path / "a" / "deeper" / "place", hints=True)
    left, right = snapshot(one.path), snapshot(other.path)
    assert right.pop(RUN)
    assert left == right


def test_no_path_of_this_machine_is_inside(tmp_path: Path) -> None:
    made = make_artifact(tmp_path, hints=True)
    inside = {name: data for name, data in snapshot(made.path).items() if name != RUN}
    assert not [name for name, data in inside.items() if str(tmp_path).encode() in data]


def test_finishing_again_changes_nothing(tmp_path: Path) -> None:
    made = make_artifact(tmp_path)
    before = snapshot(made.path)
    manifest = finish_again(made)
    assert snapshot(made.path) == before
    assert manifest == Family.open(made.path).manifest


def test_the_order_of_variants_and_files_does_not_matter(tmp_path: Path) -> None:
    made = make_artifact(tmp_path)
    before = snapshot(made.path)
    manifest = Family.open(made.path).manifest
    files = [FileRecord(p, e.size, e.sha256) for p, e in manifest.files.items() if p != "README.md"]
    finish_again(made, variants=manifest.variants[::-1], files=[*files[::-1], *files])
    assert snapshot(made.path) == before


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def spy(path: Path, data: bytes) -> None:
        written.append(path.name)
        write_file(path, data)

    monkeypatch.setattr(writer, "write_file", spy)
    make_artifact(tmp_path, hints=True)
    assert written[-1] == MANIFEST
    assert written.count(MANIFEST) == 1


@pytest.mark.parametrize("stray", ["left.safetensors", ".tmp-1-0", "files/left", "sub"])
def test_a_stray_file_is_not_published(tmp_path: Path, stray: str) -> None:
    made = make_artifact(tmp_path)
    (made.path / stray).write_text("x")
    with pytest.raises(ArtifactInvalid, match="which belongs to no record"):
        finish_again(made)


def test_a_recorded_file_that_is_not_whole_is_not_published(tmp_path: Path) -> None:
    made = make_artifact(tmp_path)
    manifest = Family.open(made.path).manifest
    files = [FileRecord(p, e.size, e.sha256) for p, e in manifest.files.items() if p != "README.md"]
    os.truncate(made.path / "v0001-00001.safetensors", 100)
    (made.path / MANIFEST).unlink()
    with pytest.raises(ArtifactInvalid, match=r"no whole v0001-00001\.safetensors"):
        finish_artifact(
            made.path,
            tool=TOOL,
            platform=PLATFORM,
            recipe=RECIPE,
            base=manifest.base,
            variants=manifest.variants,
            coverage=manifest.coverage,
            files=files,
        )
    assert not (made.path / MANIFEST).exists()


def test_a_recipe_that_is_not_json_is_not_published(tmp_path: Path) -> None:
    made = make_artifact(tmp_path)
    before = (made.path / MANIFEST).read_bytes()
    with pytest.raises(ArtifactInvalid):
        finish_again(made, recipe={"seed": 2**64})
    assert (made.path / MANIFEST).read_bytes() == before


def test_a_full_disk_at_each_write_leaves_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the n-th write, for all n: never a manifest, never a temporary file; the last n finishes."""
    real, count = os.write, 0
    for limit in range(200):
        root = tmp_path / str(limit)
        root.mkdir()
        count = 0

        def failing(fd: int, data: Any, limit: int = limit) -> int:
            nonlocal count
            count += 1
            if count > limit:
                raise OSError(28, "No space left on device")
            return real(fd, data)

        monkeypatch.setattr(os, "write", failing)
        try:
            make_artifact(root)
        except ResourceShortage:
            assert not (root / "family" / MANIFEST).exists()
            assert not list(root.rglob(".tmp-*"))
            continue
        finally:
            monkeypatch.undo()
        assert verify(root / "family").ok
        break
    assert count == limit > 20


def test_the_run_record_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_run_record(tmp_path, {"argv": ["mfs"], "seconds": 1.5})
    write_run_record(tmp_path, {"argv": []})
    assert json.loads((tmp_path / RUN).read_bytes()) == {"argv": []}


def test_contents_of_a_source(tmp_path: Path) -> None:
    made = make_artifact(tmp_path)
    with Family.open(made.path) as family:
        source = family.variant("alpha").source
        assert len(source_contents(source)) == 5  # two headers, the index, config and tokenizer
        assert all((made.path / name).is_file() for name in source_contents(source))
