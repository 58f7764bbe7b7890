"""The artifacts that tests of this folder attack, each in a copy of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attack_artifacts import Target
from every_codec import make_artifacts


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_artifacts(tmp_path_factory.mktemp("attacked"))


@pytest.fixture
def attacked(artifacts: dict[str, Path], tmp_path: Path) -> Callable[[str], Target]:
    """A copy of one of them, to be changed."""
    return lambda name: Target.copy(artifacts[name], tmp_path / name)
