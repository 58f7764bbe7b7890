"""B04: a fine-tune's embeddings were cut below the base's padded rows; the cut is said aloud, recorded and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import EMBEDDING, HEAD, fine_tune, make_llama, random_checkpoint, read_weights

from mfs_decompose import Family, decompose, restore
from mfs_decompose.events import NullSink

ROWS, KEPT = 512, 500


class Notes(NullSink):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def note(self, message: str, level: str = "info") -> None:
        self.heard.append(message)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("b04")
    base = make_llama(root / "base", seed=0, vocab=ROWS, tie=False)
    cut = fine_tune(base, root / "cut", seed=1)
    weights = read_weights(cut)
    weights |= {name: weights[name][:KEPT].contiguous() for name in (EMBEDDING, HEAD)}
    random_checkpoint(cut, weights, {"format": "pt"})
    config = json.loads((cut / "config.json").read_text())
    (cut / "config.json").write_text(json.dumps(config | {"vocab_size": KEPT}))
    return base, cut


def test_lossless_gives_the_cut_matrices_back(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, cut = folders
    decompose(base, {"cut": cut}, tmp_path / "art", codec="lossless", device="cpu", threads=1)
    restore(tmp_path / "art", "cut", tmp_path / "back", exact=True)
    for file in cut.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


def test_with_loss_nothing_is_padded_and_the_cut_is_said_aloud(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from architectures import load

    base, cut = folders
    notes = Notes()
    decompose(base, {"cut": cut}, tmp_path / "art", budget="8%", device="cpu", threads=1, progress=notes)
    assert any(
        f"with {KEPT} rows where the base has {ROWS}, the other rows left out" in note
        and EMBEDDING in note
        and HEAD in note
        for note in notes.heard
    )
    with Family.open(tmp_path / "art") as family:
        records = family.variant("cut").tensors
        assert {(records[name].kind, records[name].common_rows) for name in (EMBEDDING, HEAD)} == {("resized", KEPT)}
    restore(tmp_path / "art", "cut", tmp_path / "back")
    assert load(tmp_path / "back").config.vocab_size == KEPT
    original, restored = read_weights(cut), read_weights(tmp_path / "back")
    before = read_weights(base)
    for name in (EMBEDDING, HEAD):
        assert restored[name].shape == (KEPT, 64)
        lost = torch.linalg.norm(restored[name].float() - original[name].float())
        moved = torch.linalg.norm(original[name].float() - before[name][:KEPT].float())
        assert lost < 0.9 * moved
