"""Artifacts that tests of this folder read and never write."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import Family
from pipeline_runs import run


@pytest.fixture(scope="session")
def art(tmp_path_factory: pytest.TempPathFactory, family: Family) -> Path:
    """The tied family under the default recipe."""
    out = tmp_path_factory.mktemp("tied-artifact") / "art"
    run(out, family.base, family.variants)
    return out


@pytest.fixture(scope="session")
def lossless_art(tmp_path_factory: pytest.TempPathFactory, untied_family: Family) -> Path:
    """The untied family with every bit kept."""
    out = tmp_path_factory.mktemp("lossless-artifact") / "art"
    run(out, untied_family.base, untied_family.variants, {"deltas.default.codec": "lossless"})
    return out
