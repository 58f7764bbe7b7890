"""Verify finds every damage, names the file, and raises only for what the caller did wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_families import Made, edit_manifest, make_artifact, snapshot

from mfs_decompose.artifact import verify as verify_module
from mfs_decompose.artifact.files import FileRecord, hash_file
from mfs_decompose.artifact.layout import MANIFEST, RUN
from mfs_decompose.artifact.report import Problem, VerifyReport
from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import SourceNotFound, UsageError
from mfs_decompose.events import NullSink

FLIPS = 200


def found(report: VerifyReport) -> set[str]:
    assert report.ok == (not report.problems)
    return {problem.file for problem in report.problems}


def test_a_sound_artifact_at_each_level(kept: Made, values: None) -> None:
    before = snapshot(kept.path)
    sizes = {name: len(data) for name, data in before.items()}
    quick, checksums, deep = (verify(kept.path, level) for level in ("quick", "checksums", "values"))
    assert quick == VerifyReport(True, "quick", sizes[MANIFEST], ())
    assert checksums == VerifyReport(True, "checksums", sum(sizes.values()) - sizes[RUN], ())
    assert deep.ok
    assert snapshot(kept.path) == before


def test_the_report_as_json(made: Made) -> None:
    (made.path / "v0001-00001.safetensors").unlink()
    document = verify(made.path, "quick").to_json()
    assert list(document) == ["ok", "level", "checked_bytes", "problems"]
    assert document["ok"] is False
    assert document["level"] == "quick"
    first = document["problems"][0]
    assert first.keys() == {"file", "tensor", "what"}
    assert (first["file"], first["tensor"]) == ("v0001-00001.safetensors", None)
    assert json.loads(json.dumps(document)) == document


def test_every_flipped_bit_is_found_and_its_file_named(made: Made) -> None:
    dice = random.Random(20_240_607)
    files = {name: data for name, data in snapshot(made.path).items() if name != RUN}
    names = sorted(files)
    seen: set[str] = set()
    for number in range(FLIPS):
        # Every file a few times, and beyond that each bit of the artifact with equal chance.
        name = names[number] if number < len(names) else dice.choices(names, [len(files[n]) for n in names])[0]
        bit = dice.randrange(8 * len(files[name]))
        wrong = bytearray(files[name])
        wrong[bit // 8] ^= 1 << bit % 8
        (made.path / name).write_bytes(wrong)
        report = verify(made.path)
        assert not report.ok, f"bit {bit} of {name}"
        assert name in found(report), f"bit {bit} of {name}: {report.problems}"
        (made.path / name).write_bytes(files[name])
        seen.add(name)
    assert seen == set(names)
    assert verify(made.path).ok


def test_quick_finds_flips_in_every_header_of_a_variant(made: Made) -> None:
    shard = made.path / "v0002-00001.safetensors"
    right = shard.read_bytes()
    length = 8 + int.from_bytes(right[:8], "little")
    missed = 0
    for bit in range(0, 8 * length, 37):
        wrong = bytearray(right)
        wrong[bit // 8] ^= 1 << bit % 8
        shard.write_bytes(wrong)
        missed += verify(made.path, "quick").ok
    assert missed == 0


@pytest.mark.parametrize("level", ["quick", "checksums", "values"])
def test_run_json_is_outside(made: Made, values: None, level: Any) -> None:
    (made.path / RUN).write_text("not even JSON")
    assert verify(made.path, level).ok
    (made.path / RUN).unlink()
    assert verify(made.path, level).ok


def test_a_missing_file(made: Made) -> None:
    for name in sorted(set(snapshot(made.path)) - {RUN}):
        aside = (made.path / name).read_bytes()
        (made.path / name).unlink()
        assert name in found(verify(made.path, "quick")), name
        (made.path / name).write_bytes(aside)


@pytest.mark.parametrize("cut", [0, 7, 8, 100, -1])
def test_a_cut_file(made: Made, cut: int) -> None:
    for name in ("v0001-00001.safetensors", "base-00001-of-00002.safetensors", "README.md", MANIFEST):
        whole = (made.path / name).read_bytes()
        (made.path / name).write_bytes(whole[:cut])
        for level in ("quick", "checksums"):
            assert found(verify(made.path, level)) == {name}
        (made.path / name).write_bytes(whole)


@pytest.mark.parametrize("name", ["extra.safetensors", "files/x", ".tmp-1-2", "v0003-00001.safetensors", "sub/deep"])
def test_an_extra_file_is_reported(made: Made, name: str) -> None:
    (made.path / name).parent.mkdir(exist_ok=True)
    (made.path / name).write_text("x")
    report = verify(made.path, "quick")
    assert found(report) == {"sub" if name == "sub/deep" else name}
    assert "no record names" in report.problems[0].what


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling link"])
def test_something_else_under_a_recorded_name(made: Made, kind: str) -> None:
    name = "v0001-00001.safetensors"
    (made.path / name).unlink()
    if kind == "folder":
        (made.path / name).mkdir()
    elif kind == "fifo":
        os.mkfifo(made.path / name)
    else:
        (made.path / name).symlink_to("nowhere")
    assert found(verify(made.path)) == {name}


def test_a_file_in_place_of_the_content_folder(made: Made) -> None:
    shutil.rmtree(made.path / "files")
    (made.path / "files").write_text("x")
    assert "files" in found(verify(made.path))


def test_shards_swapped_inside_a_variant(made: Made) -> None:
    swap(made.path / "v0001-00001.safetensors", made.path / "v0001-00002.safetensors")
    assert found(verify(made.path, "quick")) == {"v0001-00001.safetensors", "v0001-00002.safetensors"}


def test_equal_shards_of_two_artifacts_are_told_apart_by_their_bytes(tmp_path: Path, made: Made) -> None:
    other = make_artifact(tmp_path / "other").path
    name = "v0001-00001.safetensors"
    data = bytearray((other / name).read_bytes())
    data[-1] ^= 0x80  # another family: the same header, other weights
    (made.path / name).write_bytes(data)
    assert verify(made.path, "quick").ok
    assert found(verify(made.path, "checksums")) == {name}


def test_swapped_shards_with_a_spoofed_table_are_told_apart_by_their_owner(made: Made) -> None:
    one, other = made.path / "v0001-00001.safetensors", made.path / "v0002-00001.safetensors"
    swap(one, other)

    def edit(document: dict[str, Any]) -> None:
        files = document["files"]
        files[one.name], files[other.name] = files[other.name], files[one.name]
        for variant in document["variants"]:
            variant["bytes"] = sum(files[shard]["size"] for shard in variant["shards"])

    edit_manifest(made.path, edit)
    assert found(verify(made.path, "quick")) == {one.name, other.name}


def spoof_dtype(document: dict[str, Any]) -> None:
    document["variants"][0]["tensors"]["layer.1.weight"].update(dtype="F64")


def spoof_dropped_tensor(document: dict[str, Any]) -> None:
    """A tensor that only the variant has takes another name; only the stored header still knows of it."""
    tensors = document["variants"][0]["tensors"]
    tensors["head.other"] = tensors.pop("head.weight")


def spoof_checkpoint_bytes(document: dict[str, Any]) -> None:
    document["variants"][0]["checkpoint_bytes"] *= 100


def spoof_base_tensor(document: dict[str, Any]) -> None:
    document["base"]["tensors"]["norm.weight"]["dtype"] = "BF16"


def spoof_codec(document: dict[str, Any]) -> None:
    document["variants"][1]["tensors"]["embed.weight"]["tree"]["codec"] = "wavelet"


@pytest.mark.parametrize(
    ("spoof", "tensor"),
    [
        (spoof_dtype, "layer.1.weight"),
        (spoof_dropped_tensor, "head.weight"),
        (spoof_checkpoint_bytes, None),
        (spoof_base_tensor, "norm.weight"),
        (spoof_codec, "embed.weight"),
    ],
)
def test_a_spoofed_manifest_with_a_right_digest(
    made: Made, values: None, spoof: Callable[[dict[str, Any]], None], tensor: str | None
) -> None:
    edit_manifest(made.path, spoof)
    report = verify(made.path, "quick")
    assert MANIFEST in found(report)
    assert tensor in {problem.tensor for problem in report.problems if problem.file == MANIFEST}
    assert not verify(made.path, "values").ok


def test_a_spoofed_manifest_that_names_a_missing_file(made: Made) -> None:
    digest = "ab" * 32

    def edit(document: dict[str, Any]) -> None:
        document["variants"][0]["source"]["files"]["merges.txt"] = digest
        document["files"][f"files/{digest}"] = {"size": 3, "sha256": digest}

    edit_manifest(made.path, edit)
    assert found(verify(made.path, "quick")) == {f"files/{digest}"}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff" * 9, b"\x02\0\0\0\0\0\0\0[]", b'\x0f\0\0\0\0\0\0\0{"w":{"dtype":1}']
)
def test_a_stored_header_that_is_none(made: Made, content: bytes) -> None:
    import hashlib

    digest = hashlib.sha256(content).hexdigest()
    (made.path / "files" / digest).write_bytes(content)

    def edit(document: dict[str, Any]) -> None:
        shard = document["variants"][1]["source"]["shards"][0]
        old = shard["header_sha256"]
        shard["header_sha256"] = digest
        del document["files"][f"files/{old}"]
        (made.path / "files" / old).unlink()
        document["files"][f"files/{digest}"] = {"size": len(content), "sha256": digest}

    edit_manifest(made.path, edit)
    report = verify(made.path)
    assert not report.ok
    assert found(report) <= {f"files/{digest}", MANIFEST}


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"schema":"mfs.family/2"}', b"\0" * 50, b"[" * 1000])
def test_a_manifest_that_is_none(made: Made, text: bytes) -> None:
    (made.path / MANIFEST).write_bytes(text)
    report = verify(made.path, "values")
    assert [(problem.file, problem.tensor) for problem in report.problems] == [(MANIFEST, None)]


def test_a_folder_without_a_manifest_is_a_finding(tmp_path: Path) -> None:
    assert found(verify(tmp_path)) == {MANIFEST}


def test_no_folder_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        verify(tmp_path / "absent")


def test_an_unknown_variant_is_the_callers_mistake(kept: Made) -> None:
    with pytest.raises(UsageError, match="'other'") as caught:
        verify(kept.path, "values", variants=["alpha", "other"])
    assert "alpha, zeta" in (caught.value.hint or "")


def test_unreadable_files_are_findings(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hash_file

    def fail(path: Path, advance: Callable[[int], None]) -> FileRecord:
        if path.name == "v0002-00001.safetensors":
            raise OSError(5, "Input/output error")
        return real(path, advance)

    monkeypatch.setattr(verify_module, "hash_file", fail)
    assert verify(made.path).problems == (
        Problem("v0002-00001.safetensors", None, "cannot be read: Input/output error"),
    )


def test_progress_adds_up(made: Made) -> None:
    class Sink(NullSink):
        def __init__(self) -> None:
            self.stages: list[tuple[str, int | None]] = []
            self.done = self.finished = 0

        def start(self, stage: str, total_bytes: int | None) -> None:
            self.stages.append((stage, total_bytes))

        def advance(self, nbytes: int) -> None:
            self.done += nbytes

        def finish(self) -> None:
            self.finished += 1

    sink = Sink()
    report = verify(made.path, progress=sink)
    hashed = report.checked_bytes - (made.path / MANIFEST).stat().st_size
    assert sink.stages == [("checksums", hashed)]
    assert (sink.done, sink.finished) == (hashed, 1)


def test_an_interrupt_stops_the_threads(made: Made) -> None:
    class Impatient(NullSink):
        calls = 0

        def advance(self, nbytes: int) -> None:
            self.calls += 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(made.path, progress=Impatient())


def test_problems_come_in_one_order(made: Made) -> None:
    for name in ("v0002-00001.safetensors", "README.md", "base-00001-of-00002.safetensors"):
        (made.path / name).unlink()
    (made.path / "extra").write_text("x")
    report = verify(made.path)
    assert [problem.file for problem in report.problems] == sorted(problem.file for problem in report.problems)
    assert found(report) == {"v0002-00001.safetensors", "README.md", "base-00001-of-00002.safetensors", "extra"}


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
