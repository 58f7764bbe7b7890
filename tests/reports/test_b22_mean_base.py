"""B22 without a base: variants under other names are averaged tensor by tensor, by the names of the first."""

from __future__ import annotations

from pathlib import Path

from checkpoints import fine_tune, make_llama
from other_names import called, drawn, tuned, wrapped
from report_runs import Notes, back, run, same_bits, tensors_of, toy

from mfs_decompose import Family
from mfs_decompose.artifact.verify import verify

LOSSLESS = {"deltas.default.codec": "lossless"}


def test_the_mean_does_not_depend_on_names(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", seed=22, vocab=131, tie=False)
    one, two = fine_tune(base, tmp_path / "one", seed=1), fine_tune(base, tmp_path / "two", seed=2)
    notes = Notes()
    run(tmp_path / "plain", None, {"a": one, "b": two}, LOSSLESS)
    run(tmp_path / "art", None, {"a": one, "b": called(two, tmp_path / "other", wrapped)}, LOSSLESS, notes)
    assert any("b: 21 tensors renamed: (no prefix) -> language_model.; 21 matched" in note for note in notes.notes)
    with Family.open(tmp_path / "plain") as plain, Family.open(tmp_path / "art") as art:
        assert plain.manifest.base.tensors == art.manifest.base.tensors
    for id, folder in (("a", one), ("b", tmp_path / "other")):
        back(tmp_path / "art", id, tmp_path / f"{id}-back", exact=True)
        for file in folder.iterdir():
            assert (tmp_path / f"{id}-back" / file.name).read_bytes() == file.read_bytes()
    assert verify(tmp_path / "art", "values").ok


def test_weights_tell_equal_towers_apart(tmp_path: Path) -> None:
    """Names and shapes fit both towers of the base; a run reads a few rows and knows."""
    layers = {f"layers.{at}.{part}.weight": (24, 40) for at in range(3) for part in ("q", "k")}
    text = {f"text.{name}": weight for name, weight in drawn(layers, 1).items()}
    vision = {f"vision.{name}": weight for name, weight in drawn(layers, 2).items()}
    own = {name.removeprefix("vision."): weight for name, weight in tuned(vision, 3).items()}
    notes = Notes()
    run(tmp_path / "art", toy(tmp_path / "base", {**text, **vision}), {"v": toy(tmp_path / "v", own)}, LOSSLESS, notes)
    assert any("6 tensors renamed: vision.layers. -> layers.; 6 matched" in note for note in notes.notes)
    assert not any("name and shape alone" in note for note in notes.notes)
    assert {record["base_name"] for record in tensors_of(tmp_path / "art", "v").values()} == vision.keys()
    restored = back(tmp_path / "art", "v", tmp_path / "out", exact=True)
    assert all(same_bits(restored[name], weight) for name, weight in own.items())
