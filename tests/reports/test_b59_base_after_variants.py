"""B59: base answers change once an adapter was used, mixtures of experts above all: they must stay bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "runtime"))

from runtime_families import alone, packed_logits, store_architecture, texts


@pytest.mark.parametrize("name", ["mixtral", "qwen2"])
def test_base_between_variants(name: str, tmp_path: Path) -> None:
    stored = store_architecture(tmp_path, name)
    family, fresh = stored.load(), stored.load()
    asked = texts(3)
    with fresh.use("base"):
        alone_first = [alone(fresh.model, text) for text in asked]
    packed_first = packed_logits(fresh, ["base"] * 3, asked)
    for id in ("chat", "words", "chat"):
        with family.use(id):
            alone(family.model, asked[0])
        packed_logits(family, [id, "base", id], asked)
        with family.use("base"):
            for text, wanted in zip(asked, alone_first, strict=True):
                assert torch.equal(alone(family.model, text), wanted)
        for found, wanted in zip(packed_logits(family, ["base"] * 3, asked), packed_first, strict=True):
            assert torch.equal(found, wanted)
