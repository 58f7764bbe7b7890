"""B22: names `model.layers.*` on one side and `language_model.model.layers.*` on the other match nothing, in silence.

Right: the prefix is found, shown with matched and unmatched counts, recorded tensor by tensor and undone on restore;
where nothing matches the run is refused. (This is the part of whole checkpoints; adapters have their own.)
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import fine_tune, make_llama, read_weights
from other_names import called, drawn, tuned, wrapped
from report_runs import Notes, back, measured_error, run, same_bits, tensors_of, toy

from mfs_decompose import Family
from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import SourceIncompatible

LOSSLESS = {"deltas.default.codec": "lossless"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A base, a fine-tune, and one with two more tokens."""
    root = tmp_path_factory.mktemp("b22")
    base = make_llama(root / "base", seed=22, vocab=131, tie=False)
    return base, fine_tune(base, root / "tuned", seed=1), fine_tune(base, root / "grown", seed=2, kind="vocab")


def unwrapped(name: str) -> str:
    return name.removeprefix("language_model.")


@pytest.mark.parametrize("wrap", ["base", "variants"])
def test_every_bit_comes_back_under_the_variants_own_names(
    plain: tuple[Path, Path, Path], tmp_path: Path, wrap: str
) -> None:
    base, own, grown = plain
    if wrap == "base":
        base = called(base, tmp_path / "wrapped-base", wrapped)
    else:
        own, grown = called(own, tmp_path / "own", wrapped), called(grown, tmp_path / "grown", wrapped)
    notes = Notes()
    run(tmp_path / "art", base, {"own": own, "grown": grown}, LOSSLESS, notes)
    rule = "language_model. -> (no prefix)" if wrap == "base" else "(no prefix) -> language_model."
    said = f"21 tensors renamed: {rule}; 21 matched, 0 only in the variant, 0 of the base left out"
    for id, folder in (("own", own), ("grown", grown)):
        assert any(note.startswith(f"{id}: {said}") for note in notes.notes)
        records = tensors_of(tmp_path / "art", id)
        for name, record in records.items():
            assert record["base_name"] == (wrapped(name) if wrap == "base" else unwrapped(name))
            assert record["kind"] in ("same", "resized")
        back(tmp_path / "art", id, tmp_path / f"{id}-back", exact=True)
        for file in folder.iterdir():
            assert (tmp_path / f"{id}-back" / file.name).read_bytes() == file.read_bytes()
    with Family.open(tmp_path / "art") as family:
        assert family.variant("own").missing == family.variant("grown").missing == ()
        assert family.manifest.coverage.tensors == 3 * 21
    assert verify(tmp_path / "art", "values").ok


def test_a_renamed_variant_costs_what_it_costs_without(plain: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """It is compared with the base, not stored whole, and its recorded error is that of its weights."""
    base, own, _ = plain
    elsewhere = called(own, tmp_path / "elsewhere", wrapped)
    report = run(tmp_path / "art", base, {"own": own, "elsewhere": elsewhere}, {"objective.budget": "12%"})
    near, far = sorted(report.variants, key=lambda variant: variant.id, reverse=True)
    assert far.bytes == pytest.approx(near.bytes, rel=0.02)
    assert far.rel_error == pytest.approx(near.rel_error, rel=0.05)
    served = back(tmp_path / "art", "elsewhere", tmp_path / "out", dtype="float32")
    renamed_base = {wrapped(name): weight for name, weight in read_weights(base).items()}
    assert measured_error(read_weights(elsewhere), renamed_base, served) == pytest.approx(far.rel_error, rel=1e-6)


def test_several_prefixes_in_one_model(tmp_path: Path) -> None:
    """The names that transformers 5 gave to a vision-language tree, against those of the release."""
    layers = {f"layers.{at}.{part}_proj.weight": (24, 40) for at in range(3) for part in ("q", "k", "up")}
    shapes = {f"language_model.model.{name}": shape for name, shape in layers.items()}
    shapes |= {f"vision_tower.{name}": shape for name, shape in layers.items()}
    shapes |= {"language_model.lm_head.weight": (57, 40), "multi_modal_projector.linear_1.weight": (40, 36)}
    base = drawn(shapes, 1)
    own = {}
    for name, weight in tuned(base, 2).items():
        new = f"model.{name}"
        for old, other in {"language_model.lm_head": "lm_head", "language_model.model": "model.language_model"}.items():
            new = other + name[len(old) :] if name.startswith(old) else new
        own[new] = weight
    notes = Notes()
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, LOSSLESS, notes)
    (note,) = (note for note in notes.notes if "renamed" in note)
    assert note.startswith("v: 20 tensors renamed: ")
    assert "language_model.model.layers. -> model.language_model.layers." in note
    assert "language_model.lm_head. -> lm_head." in note
    assert "(no prefix) -> model.; 20 matched" in note
    records = tensors_of(tmp_path / "art", "v")
    assert records["model.vision_tower.layers.1.q_proj.weight"]["base_name"] == "vision_tower.layers.1.q_proj.weight"
    restored = back(tmp_path / "art", "v", tmp_path / "out", exact=True)
    assert restored.keys() == own.keys()
    assert all(same_bits(restored[name], weight) for name, weight in own.items())


def test_what_is_new_or_gone_beside_a_rename(tmp_path: Path) -> None:
    layers = {f"model.layers.{at}.mlp.weight": (24, 40) for at in range(4)}
    base = drawn({**layers, "model.norm.weight": (40,), "model.rotary.inv_freq": (7,)}, 3)
    own = {wrapped(name): weight for name, weight in tuned(base, 4).items() if "inv_freq" not in name}
    own |= drawn({"projector.weight": (9, 11)}, 5)
    notes = Notes()
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, LOSSLESS, notes)
    assert any("5 matched, 1 only in the variant, 1 of the base left out" in note for note in notes.notes)
    with Family.open(tmp_path / "art") as family:
        assert family.variant("v").missing == ("model.rotary.inv_freq",)
        assert family.variant("v").tensors["projector.weight"].kind == "only_in_variant"
    restored = back(tmp_path / "art", "v", tmp_path / "out", exact=True)
    assert all(torch.equal(restored[name], weight) for name, weight in own.items())


def test_zero_matches_are_refused_and_counted(plain: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, own, _ = plain
    odd = called(own, tmp_path / "odd", lambda name: f"{name}_orig")
    with pytest.raises(
        SourceIncompatible, match="0 of 21 tensors align, 0 % of its bytes; 21 do not, among them"
    ) as caught:
        run(tmp_path / "art", base, {"odd": odd})
    assert caught.value.exit_code == 12
    assert not (tmp_path / "art").exists()


def test_a_foreign_model_in_a_wrapper_is_refused(plain: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Names that fit after a rename are no kinship: the weights have the last word."""
    base, _, _ = plain
    foreign = called(make_llama(tmp_path / "seed", seed=77, vocab=131, tie=False), tmp_path / "foreign", wrapped)
    with pytest.raises(SourceIncompatible, match=r"'foreign'.*cosine"):
        run(tmp_path / "art", base, {"foreign": foreign})
