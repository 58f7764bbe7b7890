"""--device on a machine without CUDA: refused in one sentence, nothing written; auto takes the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import Family
from e2e_program import refused, succeeded


@pytest.fixture
def words(family: Family, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return ["decompose", "--base", str(family.base), "--variants", f"math={family.variants['math']}", "--rank", "3"]


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:2"])
def test_no_cuda_is_said_in_a_sentence(words: list[str], tmp_path: Path, wanted: str) -> None:
    said, hint = refused(2, *words, "--out", tmp_path / "art", "--device", wanted)
    assert said.startswith(f"expected {wanted} to be one of this machine's CUDA devices, found 0")
    assert said.count(". ") == 0 and hint == "Use --device cpu."
    assert list(tmp_path.iterdir()) == []


def test_auto_takes_the_cpu(words: list[str], tmp_path: Path) -> None:
    succeeded(*words, "--out", tmp_path / "art", "--device", "auto")
    assert json.loads((tmp_path / "art" / "manifest.json").read_bytes())["platform"]["device"] == "cpu"
