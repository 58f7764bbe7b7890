from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fidelity_models import StoredFamily, make_model, make_tokenizer, perturb, save, store_family


@pytest.fixture(autouse=True)
def _on_one_thread(one_thread: None) -> None:
    """For all tests of this folder."""


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """original (bf16 on disk, no BOS), near and far candidates, a base, and the original again with a BOS tokenizer."""
    root = tmp_path_factory.mktemp("family")
    model, plain = make_model(seed=3), make_tokenizer(bos=False)
    folders = {
        "original": save(model, root / "original", plain, dtype=torch.bfloat16),
        "with_bos": save(model, root / "with_bos", make_tokenizer(bos=True), dtype=torch.bfloat16),
        # What the bf16 file holds, stored wider: the weights that a model loads are equal.
        "widened": save(model, root / "widened"),
    }
    folders["near"] = save(perturb(model, 0.02, 1), root / "near")
    folders["far"] = save(perturb(model, 0.2, 2), root / "far", dtype=torch.bfloat16)
    folders["base"] = save(perturb(model, 0.3, 3), root / "base", dtype=torch.bfloat16)
    return folders


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredFamily:
    """An artifact of three fine-tunes, small enough to measure through."""
    return store_family(tmp_path_factory.mktemp("stored"))
