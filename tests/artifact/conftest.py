"""One small artifact for all tests of this folder."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from artifact_families import Made, make_artifact, oracle_sha256


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """An artifact that tests read and never write."""
    return make_artifact(tmp_path_factory.mktemp("kept"), hints=True)


@pytest.fixture
def made(tmp_path: Path, kept: Made) -> Made:
    """A copy that a test may damage."""
    shutil.copytree(kept.path.parent, tmp_path / "copy")
    return Made(tmp_path / "copy" / "family", kept.base, kept.variants)


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> None:
    """`restored_sha256` for raw and identical tensors."""
    fake = SimpleNamespace(restored_sha256=oracle_sha256)
    monkeypatch.setitem(sys.modules, "mfs_decompose.artifact.values", fake)
