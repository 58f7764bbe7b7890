from __future__ import annotations

import os
from pathlib import Path

import pytest

from mfs_decompose.errors import SourceIncompatible, SourceNotFound
from mfs_decompose.source import folder as folder_module
from mfs_decompose.source.folder import Sidecar, list_folder, require_plain_name, resolve_inside

BELONGING = [
    *("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "merges.txt"),
    *("tokenizer.model", "qwen.tiktoken", "modeling_own.py", "LICENSE", "LICENSE.txt", "NOTICE", "README.md"),
]
LEFT_OUT = [
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors.index.fp16.json", "training_args.bin"),
    *("consolidated.safetensors.index.json", "USE_POLICY.md", "optimizer.pt", "two words.json", "größe.json"),
    *("x" * 124 + ".json", "figure.png"),
]


def test_sorts_what_lies_there(tmp_path: Path) -> None:
    for name in (*BELONGING, *LEFT_OUT, ".gitattributes", ".hidden.json", "b.safetensors", "a.safetensors"):
        (tmp_path / name).write_bytes(b"x" * len(name))
    (tmp_path / "model.safetensors.index.json").write_bytes(b"{}")
    (tmp_path / "original").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "nested.json").mkdir()
    found = list_folder(tmp_path)
    assert found.weights == ("a.safetensors", "b.safetensors")
    assert found.index == Sidecar("model.safetensors.index.json", 2)
    assert found.sidecars == tuple(Sidecar(name, len(name)) for name in sorted(BELONGING))
    assert found.others == tuple(sorted([*LEFT_OUT, "original/", "nested.json/"]))


def test_too_large_side_files_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "MAX_SIDECAR_BYTES", 10)
    (tmp_path / "fits.json").write_bytes(b"x" * 10)
    (tmp_path / "large.json").write_bytes(b"x" * 11)
    found = list_folder(tmp_path)
    assert (found.sidecars, found.others) == ((Sidecar("fits.json", 10),), ("large.json",))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_side_files_that_are_links(tmp_path: Path, name: str) -> None:
    home = tmp_path / "model"
    home.mkdir()
    (tmp_path / "secret").write_text("s")
    (home / name).symlink_to(tmp_path / "secret")
    with pytest.raises(SourceIncompatible, match="outside of the checkpoint's folder") as caught:
        list_folder(home)
    assert caught.value.exit_code == 12
    (tmp_path / "secret").unlink()
    with pytest.raises(SourceNotFound, match="a link that leads nowhere"):
        list_folder(home)


class TestPlaces:
    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(SourceNotFound, match=r"no such folder: .*/nothing") as caught:
            list_folder(tmp_path / "nothing")
        assert (caught.value.exit_code, caught.value.hint) == (11, "Check the path.")

    def test_a_file_of_weights(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(SourceNotFound, match="expected a checkpoint's folder, found a file") as caught:
            list_folder(tmp_path / "model.safetensors")
        assert caught.value.hint == f"Give the folder that holds it: {tmp_path}"

    def test_another_file(self, tmp_path: Path) -> None:
        (tmp_path / "notes.md").write_bytes(b"")
        with pytest.raises(SourceNotFound, match="found a file") as caught:
            list_folder(tmp_path / "notes.md")
        assert caught.value.exit_code == 11

    def test_a_folder_that_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: Path) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "scandir", refuse)  # root may read everything, so no chmod
        with pytest.raises(SourceNotFound, match=r"cannot read .*: Permission denied"):
            list_folder(tmp_path)


HOSTILE = [
    *("../secret", "/etc/passwd", "a/../b", "a/b", "..", ".", "", ".hidden", "C:\\x", "\\\\unc\\x", "%2e%2e%2fx"),
    *("a\0b", "a\nb", "trailing ", "e\u0301.safetensors", "x" * 129, "a\u202eb", "model.safetensors\n"),
]


class TestResolve:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_hostile_names(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "secret").write_text("s")
        home = tmp_path / "model"
        home.mkdir()
        for check in (require_plain_name, resolve_inside):
            with pytest.raises(SourceIncompatible, match="expected the plain name of a file") as caught:
                check(home, name)
            assert caught.value.exit_code == 12
            assert caught.value.message.isprintable()

    def test_a_link_within_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "inner").mkdir()
        (tmp_path / "inner" / "real").write_text("r")
        (tmp_path / "link").symlink_to("inner/real")
        assert resolve_inside(tmp_path, "link") == tmp_path.resolve() / "inner" / "real"

    @pytest.mark.parametrize("below", ["", "sub"])
    def test_a_hub_cache(self, tmp_path: Path, below: str) -> None:
        repo = tmp_path / "models--org--name"
        snapshot = repo / "snapshots" / "0123abc" / below
        snapshot.mkdir(parents=True)
        (repo / "blobs").mkdir()
        (repo / "blobs" / "f00d").write_text("weights")
        (snapshot / "model.safetensors").symlink_to(os.path.relpath(repo / "blobs" / "f00d", snapshot))
        assert resolve_inside(snapshot, "model.safetensors").read_text() == "weights"
        moved = tmp_path / "moved"
        moved.symlink_to(snapshot)
        assert resolve_inside(moved, "model.safetensors").read_text() == "weights"

    @pytest.mark.parametrize(
        ("place", "is_fine"),
        [
            ("blobs/ab/" + "ab" * 32, True),
            ("blobs/ab/" + "cd" * 32, False),
            ("blobs/ab/secret", False),
            ("blobs/" + "ab" * 32, False),
            ("others/ab/" + "ab" * 32, False),
        ],
    )
    def test_blobs_that_models_of_a_hub_cache_share(self, tmp_path: Path, place: str, is_fine: bool) -> None:
        snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abc"
        blobs = tmp_path / "models--org--name" / "blobs"
        for folder in (snapshot, blobs, (tmp_path / place).parent):
            folder.mkdir(parents=True)
        (tmp_path / place).write_text("weights")
        (blobs / "f00d").symlink_to(tmp_path / place)
        (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
        if is_fine:
            assert resolve_inside(snapshot, "model.safetensors").read_text() == "weights"
        else:
            with pytest.raises(SourceIncompatible, match="outside of the checkpoint's folder"):
                resolve_inside(snapshot, "model.safetensors")

    @pytest.mark.parametrize("target", ["../../../other/blobs/f00d", "../../refs/main", "/etc/hostname"])
    def test_links_out_of_a_hub_cache(self, tmp_path: Path, target: str) -> None:
        snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abc"
        snapshot.mkdir(parents=True)
        for real in ("other/blobs/f00d", "models--org--name/refs/main"):
            (tmp_path / real).parent.mkdir(parents=True)
            (tmp_path / real).write_text("secret")
        (snapshot / "model.safetensors").symlink_to(target)
        with pytest.raises(SourceIncompatible, match="outside of the checkpoint's folder") as caught:
            resolve_inside(snapshot, "model.safetensors")
        assert caught.value.hint == "Copy the file into the folder."

    def test_things_that_are_no_files(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(SourceIncompatible, match="expected a regular file"):
            resolve_inside(tmp_path, "pipe")
        with pytest.raises((SourceNotFound, SourceIncompatible)):
            resolve_inside(tmp_path, "loop")
        with pytest.raises(SourceNotFound, match="cannot read"):
            resolve_inside(tmp_path, "missing")
