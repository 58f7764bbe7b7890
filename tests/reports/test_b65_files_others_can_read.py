"""B65: safetensors >= 0.8 saves weights with mode 0600, and other users of the machine cannot read them.

Every file we write has the permissions that the umask gives, as any other file has; so have the folders.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from adapters import make_adapter
from checkpoints import fine_tune, make_llama
from report_program import succeeded


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sources whose weights only their owner can read, as the library leaves them."""
    root = tmp_path_factory.mktemp("b65")
    base = make_llama(root / "base", seed=65)
    found = {"base": base, "own": fine_tune(base, root / "own", seed=66, shards=2)}
    for folder in found.values():
        for weights in folder.glob("*.safetensors"):
            weights.chmod(0o600)
    return found


def modes(folder: Path) -> tuple[set[int], set[int]]:
    """Permissions of the files, and of the folders, the top one included."""
    paths = [folder, *folder.rglob("*")]
    files, folders = ({stat.S_IMODE(path.stat().st_mode) for path in paths if test(path)} for test in (_file, _dir))
    return files, folders


def _file(path: Path) -> bool:
    return path.is_file()


def _dir(path: Path) -> bool:
    return path.is_dir()


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_the_umask_decides(folders: dict[str, Path], tmp_path: Path, mask: int, file: int, folder: int) -> None:
    art = tmp_path / "art"
    with umask(mask):
        words = ["decompose", "--base", folders["base"], "--variants", folders["own"], "--budget", "30%"]
        succeeded(*words, "--out", art)
        succeeded("restore", art, "--variant", "own", "--out", tmp_path / "own")
        succeeded("restore", art, "--variant", "base", "--layout", "single", "--out", tmp_path / "base")
        succeeded("restore", art, "--variant", "own", "--dtype", "float32", "--out", tmp_path / "own32")
    for made in ("art", "own", "base", "own32"):
        assert modes(tmp_path / made) == ({file}, {folder}), made


def test_a_mean_base_and_what_replaces_an_artifact(folders: dict[str, Path], tmp_path: Path) -> None:
    art = tmp_path / "art"
    variants = [f"{id}-of-two={folder}" for id, folder in folders.items()]
    words = ["decompose", "--variants", *variants, "--out", art, "--rank"]
    with umask(0o022):
        succeeded(*words, "2")
        art.chmod(0o700)
        succeeded(*words, "3", "--overwrite", "--yes")
    assert modes(art) == ({0o644}, {0o755})


def test_a_hard_link_keeps_the_permissions_of_the_users_file(folders: dict[str, Path], tmp_path: Path) -> None:
    """It is that file: changing one would change the other."""
    words = ["decompose", "--base", folders["base"], "--variants", folders["own"], "--rank", "2"]
    with umask(0o022):
        succeeded(*words, "--base-store", "hardlink", "--out", tmp_path / "art")
    (linked,) = (tmp_path / "art").glob("base-*.safetensors")
    assert stat.S_IMODE(linked.stat().st_mode) == 0o600
    assert linked.stat().st_ino == (folders["base"] / "model.safetensors").stat().st_ino


def test_an_adapter_and_its_merge(tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "made", "linear")
    for weights in made.adapter.glob("*.safetensors"):
        weights.chmod(0o600)
    art = tmp_path / "art"
    with umask(0o022):
        words = ["decompose", "--base", made.base, "--variants", f"own={made.adapter}", "--budget", "60%"]
        succeeded(*words, "--out", art)
        for form in ("checkpoint", "adapter"):
            succeeded("restore", art, "--variant", "own", "--as", form, "--out", tmp_path / form)
    for folder in ("art", "checkpoint", "adapter"):
        assert modes(tmp_path / folder) == ({0o644}, {0o755}), folder
