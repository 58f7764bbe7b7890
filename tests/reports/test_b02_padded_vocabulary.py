"""B02: the vocabulary is padded beyond the tokenizer's length; the padded rows stay, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EMBEDDING, HEAD, make_llama, random_checkpoint, read_weights

from mfs_decompose import decompose, restore

ROWS, TOKENS = 512, 497


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of fewer tokens than the matrices have rows."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TOKENS)}, unk_token="w0"))
    assert tokenizer.get_vocab_size() == TOKENS
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A padded base, and a fine-tune that never saw the padded rows."""
    root = tmp_path_factory.mktemp("b02")
    base, tuned = (make_llama(root / name, seed=0, vocab=ROWS, tie=False) for name in ("base", "tuned"))
    weights = read_weights(base)
    generator = torch.Generator().manual_seed(3)
    for name, weight in weights.items():
        change = 0.05 * weight.float().std() * torch.randn(weight.shape, generator=generator)
        if name in (EMBEDDING, HEAD):
            change[TOKENS:] = 0
        weights[name] = (weight.float() + change).bfloat16()
    random_checkpoint(tuned, weights, {"format": "pt"})
    write_tokenizer(base)
    write_tokenizer(tuned)
    return base, tuned


@pytest.mark.parametrize(
    "recipe",
    [{"codec": "lossless"}, {"budget": "8%"}, {"budget": "8%", "codec": "lowrank"}, {"budget": "60%"}, {"rank": 5}],
)
def test_all_rows_come_back_and_the_padded_ones_unchanged(
    recipe: Mapping[str, Any], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    base, tuned = folders
    decompose(base, {"tuned": tuned}, tmp_path / "art", device="cpu", threads=1, **recipe)
    restore(tmp_path / "art", "tuned", tmp_path / "back")
    original, restored = read_weights(tuned), read_weights(tmp_path / "back")
    for name in (EMBEDDING, HEAD):
        assert restored[name].shape == (ROWS, 64)
        assert torch.equal(restored[name][TOKENS:], original[name][TOKENS:])
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tuned / name).read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == ROWS
