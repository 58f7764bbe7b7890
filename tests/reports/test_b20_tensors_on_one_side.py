"""B20: a variant adds `mm_projector.*`, another lacks `lm_head`: the delta step crashes on keys absent from the base.

Right: what only the variant has is stored exactly, what it lacks is named as missing, and both are so again on restore.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import HEAD, fine_tune, make_llama, random_checkpoint, read_weights
from report_runs import Notes, back, run, same_bits, tensors_of

from mfs_decompose import Family
from mfs_decompose.pipeline.inspect import inspect

PROJECTOR = {"model.mm_projector.weight": (64, 37), "model.mm_projector.bias": (64,)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("b20")
    base = make_llama(root / "base", seed=20, vocab=139, tie=False)
    found = {
        "base": base,
        "sees": fine_tune(base, root / "sees", seed=1),
        "mute": fine_tune(base, root / "mute", seed=2),
    }
    generator = torch.Generator().manual_seed(3)
    new = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in PROJECTOR.items()}
    new["model.mm_projector.weight"][3, 5] = float("nan")
    random_checkpoint(found["sees"], {**read_weights(found["sees"]), **new}, {"format": "pt"})
    rest = {name: weight for name, weight in read_weights(found["mute"]).items() if name != HEAD}
    random_checkpoint(found["mute"], rest, {"format": "pt"})
    return found


@pytest.mark.parametrize("recipe", [{}, {"objective.rank": 3}, {"deltas.default.codec": "lossless"}])
def test_added_and_removed_tensors(folders: dict[str, Path], tmp_path: Path, recipe: dict[str, object]) -> None:
    recipe = recipe or {"objective.budget": "20%"}
    notes = Notes()
    run(tmp_path / "art", folders["base"], {id: folders[id] for id in ("sees", "mute")}, recipe, notes)
    assert (
        "sees: 2 tensors not in the base, stored whole: model.mm_projector.bias, model.mm_projector.weight"
        in notes.notes
    )
    assert f"mute: 1 tensor of the base left out: {HEAD}" in notes.notes
    truth = read_weights(folders["sees"])
    restored = back(tmp_path / "art", "sees", tmp_path / "sees")
    assert restored.keys() == truth.keys()
    for name in PROJECTOR:
        record = tensors_of(tmp_path / "art", "sees")[name]
        assert (record["kind"], record["base_name"], record["exact"]) == ("only_in_variant", None, True)
        assert same_bits(restored[name], truth[name])
    assert back(tmp_path / "art", "mute", tmp_path / "mute").keys() == read_weights(folders["mute"]).keys()
    with Family.open(tmp_path / "art") as family:
        assert (family.variant("sees").missing, family.variant("mute").missing) == ((), (HEAD,))
        assert family.manifest.coverage.tensors == 21 + 23 + 20
    assert {one["id"]: one["missing"] for one in inspect(tmp_path / "art")["variants"]} == {"sees": 0, "mute": 1}


def test_a_base_that_has_more_than_all_variants(folders: dict[str, Path], tmp_path: Path) -> None:
    """The other way round: the multimodal model is the base."""
    variants = {"plain": folders["base"], "mute": folders["mute"]}
    run(tmp_path / "art", folders["sees"], variants, {"deltas.default.codec": "lossless"})
    with Family.open(tmp_path / "art") as family:
        assert family.variant("plain").missing == tuple(sorted(PROJECTOR))
        assert family.variant("mute").missing == tuple(sorted([HEAD, *PROJECTOR]))
    for id, folder in variants.items():
        restored, truth = back(tmp_path / "art", id, tmp_path / id, exact=True), read_weights(folder)
        assert restored.keys() == truth.keys()
        assert all(same_bits(restored[name], weight) for name, weight in truth.items())


def test_a_copy_with_nothing_added_or_removed_says_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["base"], tmp_path / "copy")
    notes = Notes()
    run(tmp_path / "art", folders["base"], {"copy": tmp_path / "copy"}, sink=notes)
    assert notes.notes == []
