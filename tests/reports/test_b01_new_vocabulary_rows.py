"""B01: a fine-tune has a few more rows in embedding and head; common rows are a delta, new ones are stored exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import EMBEDDING, HEAD, fine_tune, make_llama, read_weights

from mfs_decompose import Family, decompose, restore

ROWS, NEW = 512, 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("b01")
    base = make_llama(root / "base", seed=0, vocab=ROWS, tie=False)
    return base, fine_tune(base, root / "grown", seed=1, kind="vocab", extra_rows=NEW)


def test_lossless_is_bit_exact(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, grown = folders
    decompose(base, {"grown": grown}, tmp_path / "art", codec="lossless", device="cpu", threads=1)
    restore(tmp_path / "art", "grown", tmp_path / "back", exact=True)
    for file in grown.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


def test_with_loss_the_new_rows_are_exact_and_the_vocabulary_is_the_variants(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    base, grown = folders
    decompose(base, {"grown": grown}, tmp_path / "art", budget="8%", device="cpu", threads=1)
    restore(tmp_path / "art", "grown", tmp_path / "back")
    original, restored = read_weights(grown), read_weights(tmp_path / "back")
    with Family.open(tmp_path / "art") as family:
        for name in (EMBEDDING, HEAD):
            record = family.variant("grown").tensors[name]
            assert (record.kind, record.common_rows, record.shape) == ("resized", ROWS, (ROWS + NEW, 64))
            assert record.tree["codec"] == "rows"
            assert torch.equal(restored[name][ROWS:], original[name][ROWS:])
            assert not torch.equal(restored[name], original[name])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == ROWS + NEW


def test_the_restored_model_loads_with_the_new_rows(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from architectures import load

    base, grown = folders
    decompose(base, {"grown": grown}, tmp_path / "art", budget="8%", device="cpu", threads=1)
    restore(tmp_path / "art", "grown", tmp_path / "back")
    model = load(tmp_path / "back")
    assert model.get_input_embeddings().weight.shape == model.get_output_embeddings().weight.shape == (ROWS + NEW, 64)
