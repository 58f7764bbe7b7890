"""B66: saving onto the file that was just loaded gives zeros or garbage: the lazily mapped input is the output.

An output that is, holds or lies in an input is refused; an artifact is replaced only once the new one is whole, also
where sources are links into the old one's neighbours; nothing is ever restored over what it is decoded from.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import fine_tune, make_llama, read_weights
from report_program import run, succeeded
from report_runs import same_bits


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("b66")
    base = make_llama(root / "base", seed=66)
    return {"base": base, "own": fine_tune(base, root / "own", seed=67)}


@pytest.fixture
def folders(made: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Copies that a test may be tempted to write to."""
    return {id: shutil.copytree(folder, tmp_path / id) for id, folder in made.items()}


def command(folders: dict[str, Path], *more: object) -> list[object]:
    return ["decompose", "--base", folders["base"], "--variants", folders["own"], *more]


@pytest.mark.parametrize("who", ["base", "own"])
@pytest.mark.parametrize("overwrite", [(), ("--overwrite", "--yes")], ids=["plain", "overwrite"])
def test_an_output_that_meets_an_input_is_refused(
    folders: dict[str, Path], tmp_path: Path, who: str, overwrite: tuple[str, ...]
) -> None:
    (tmp_path / "link").symlink_to(folders[who])
    before = tree(tmp_path)
    source = folders[who]
    for out in (source, source / "art", tmp_path, tmp_path / "link", source.parent / "x" / ".." / source.name):
        ran = run(*command(folders, "--rank", "2", *overwrite, "--out", out))
        assert ran.code == 14, (out, ran.err)
        assert "Error: " in ran.err and "Choose another --out." in ran.err
        assert run(*command(folders, "--rank", "2", *overwrite, "--out", out), "--dry-run").code == 14
    assert tree(tmp_path) == before


def test_an_artifact_is_replaced_in_place_and_only_when_the_new_one_is_whole(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base lies in the old artifact as a hard link of the user's file: replacing must not touch that file."""
    art = tmp_path / "art"
    before = {id: tree(folder) for id, folder in folders.items()}
    succeeded(*command(folders, "--rank", "2", "--base-store", "hardlink", "--out", art))
    old = tree(art)
    with monkeypatch.context() as patch:
        patch.setattr("mfs_decompose.artifact.writer.manifest_bytes", lambda manifest: 1 / 0)
        assert run(*command(folders, "--rank", "4", "--overwrite", "--yes", "--out", art)).code == 1
    assert tree(art) == old
    succeeded(*command(folders, "--rank", "4", "--overwrite", "--yes", "--out", art))
    assert tree(art).keys() == old.keys() and tree(art) != old
    succeeded("verify", art, "--level", "values")
    assert {id: tree(folder) for id, folder in folders.items()} == before
    assert not [path.name for path in tmp_path.iterdir() if path.name not in {"art", *folders}]


def test_what_was_restored_can_be_the_source_that_replaces_its_artifact(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The way in place: out of the artifact, changed, and into the same place again."""
    art = tmp_path / "art"
    succeeded(*command(folders, "--codec", "lossless", "--out", art))
    for id in ("base", "own"):
        succeeded("restore", art, "--variant", id, "--out", tmp_path / "again" / id)
    again = {id: tmp_path / "again" / id for id in folders}
    succeeded(*command(again, "--codec", "lossless", "--overwrite", "--yes", "--out", art))
    succeeded("restore", art, "--variant", "own", "--exact", "--out", tmp_path / "back")
    original = read_weights(folders["own"])
    assert all(same_bits(one, original[name]) for name, one in read_weights(tmp_path / "back").items())


def test_a_folder_inside_an_artifact_is_no_source_for_its_replacement(folders: dict[str, Path], tmp_path: Path) -> None:
    """An artifact's own folder holds safetensors files, and somebody will try."""
    art = tmp_path / "art"
    succeeded(*command(folders, "--rank", "2", "--out", art))
    before = tree(art)
    words = ["decompose", "--base", art, "--variants", folders["own"], "--rank", "2", "--out", art]
    assert run(*words, "--overwrite", "--yes").code != 0
    assert tree(art) == before


@pytest.mark.parametrize("id", ["own", "base"])
@pytest.mark.parametrize("store", ["copy", "hardlink", "reference"])
def test_nothing_is_restored_over_what_it_is_made_from(
    folders: dict[str, Path], tmp_path: Path, id: str, store: str
) -> None:
    art = tmp_path / "art"
    succeeded(*command(folders, "--rank", "2", "--base-store", store, "--out", art))
    (tmp_path / "to-art").symlink_to(art)
    before = tree(tmp_path)
    for out in (art, art / "back", art / "files" / "back", tmp_path / "to-art", tmp_path / "to-art" / "back"):
        ran = run("restore", art, "--variant", id, "--out", out)
        assert ran.code == 14, (out, ran.err)
        assert "lies inside the artifact" in ran.err
    for source in (*folders.values(), tmp_path):
        ran = run("restore", art, "--variant", id, "--out", source)
        assert ran.code == 14 and "absent or empty, found something there" in ran.err
    assert tree(tmp_path) == before


def test_a_base_that_is_changed_in_place_is_noticed(folders: dict[str, Path], tmp_path: Path) -> None:
    """A hard link is the user's own file: a trainer that saves into it changes the artifact's base too."""
    art = tmp_path / "art"
    succeeded(*command(folders, "--rank", "2", "--base-store", "hardlink", "--out", art))
    weights = folders["base"] / "model.safetensors"
    data = weights.read_bytes()
    with open(weights, "r+b") as stream:  # the first weights behind the header: of the embeddings
        stream.seek(8 + int.from_bytes(data[:8], "little"))
        stream.write(bytes([data[stream.tell()] ^ 0x10]))
    for id in ("own", "base"):
        ran = run("restore", art, "--variant", id, "--out", tmp_path / "back")
        assert ran.code == 20, ran.err
        assert "model.embed_tokens.weight" in ran.err
        assert not (tmp_path / "back").exists()
    assert run("verify", art, "--level", "checksums").code == 20
