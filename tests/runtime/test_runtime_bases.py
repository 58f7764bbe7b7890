"""Families whose base was made of its variants, or that share a delta beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import fine_tune, make_llama
from runtime_families import Stored, alone, check_logits, packed_logits, texts

from mfs_decompose.artifact.reader import Family
from mfs_decompose.codec.shared import uses_shared
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.recipe.load import load_recipe


def related(root: Path, mode: str, given: bool) -> Stored:
    """Three fine-tunes of one fine-tune, so that they have much in common beside the base."""
    base = make_llama(root / "base", seed=1)
    common = fine_tune(base, root / "common", seed=9, scale=0.3)
    variants = {f"v{at}": fine_tune(common, root / f"v{at}", seed=20 + at) for at in range(3)}
    recipe = load_recipe(
        None,
        {"objective.budget": "30%", "base.mode": mode, "deltas.default": {"codec": "lowrank", "factors": "banded"}},
    )
    places = {id: str(folder) for id, folder in variants.items()}
    known = str(base) if given else None
    decompose(DecomposeRequest(places, root / "art", recipe, base=known, threads=1, device="cpu"))
    return Stored(root / "art", base, variants, root / "scratch")


@pytest.mark.parametrize(("mode", "given"), [("mean", False), ("shared", True)])
def test_a_made_base_and_a_shared_delta(tmp_path: Path, mode: str, given: bool) -> None:
    stored = related(tmp_path, mode, given)
    family = stored.load()
    ids, asked = ["v2", "v0", "base", "v1"], texts(4, below=250)
    for id, text, found in zip(ids, asked, packed_logits(family, ids, asked), strict=True):
        if id != "base" or given:
            check_logits(found, alone(stored.restored(id), text))
    memory = family.memory()
    with Family.open(stored.artifact) as opened:
        shared = any(uses_shared(opened.tree("v0", name)) for name in opened.variant("v0").tensors)
    assert shared == (mode == "shared")
    assert bool(memory.shared) == shared
