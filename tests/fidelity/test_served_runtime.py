"""`served` through the runtime is what a float32 restore computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fidelity_models import RecordingSink, StoredFamily
from test_artifact_drift import asked
from test_eval_command import document

from mfs_decompose.errors import SourceIncompatible, UsageError
from mfs_decompose.events import NullSink
from mfs_decompose.fidelity import artifact_drift
from mfs_decompose.fidelity.artifact_drift import measure_artifact, save_artifact_reference
from mfs_decompose.fidelity.evaluate import measure_drift
from mfs_decompose.fidelity.served_runtime import ServedCandidate, load_served
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.pipeline.restore import RestoreOptions, restore

SETTINGS = EvalSettings(window=24, max_tokens=60, batch_size=3, padding="left")


def test_both_engines_give_the_same_figures(stored: StoredFamily, tmp_path: Path) -> None:
    request = asked(stored, tmp_path / "a", settings=SETTINGS)
    found = {}
    for engine in ("restore", "runtime"):
        scratch = tmp_path / engine
        scratch.mkdir()
        found[engine], _ = measure_artifact(
            replace(request, scratch=scratch, engine=engine),  # type: ignore[arg-type]
            NullSink(),
        )
    assert len(found["restore"]) == len(found["runtime"]) == 6
    for one, other in zip(found["restore"], found["runtime"], strict=True):
        assert (one.variant, one.through, one.tokens) == (other.variant, other.through, other.tokens)
        assert one.kl_mean is not None and other.kl_mean is not None and one.kl_base is not None
        assert abs(one.kl_mean - other.kl_mean) <= min(1e-6, 0.01 * one.kl_mean)
        assert other.kl_mean < 0.75 * one.kl_base, "the delta is there"
        assert one.ppl_x == pytest.approx(other.ppl_x, rel=1e-5) and one.top1 == other.top1


def test_the_runtime_is_within_1e_6_of_the_restore_itself(stored: StoredFamily, tmp_path: Path) -> None:
    """KL of the restore and the runtime, the restore as the original."""
    for id in stored.variants:
        folder = tmp_path / id
        restore(stored.artifact, [id], folder, RestoreOptions(dtype="float32"))
        family = load_served(stored.artifact, [id], None, SETTINGS, "cpu")
        candidate = ServedCandidate.of(family, id, tmp_path / f"{id}-files")
        assert (tmp_path / f"{id}-files" / "tokenizer.json").exists()
        corpora = asked(stored, tmp_path / "s").corpora
        (result,) = measure_drift(folder, {"served": candidate}, None, corpora, SETTINGS, id, NullSink(), noise=False)
        assert result.kl_mean is not None and result.kl_mean <= 1e-6 and result.top1 == 1.0


def test_a_saved_reference_is_measured_against_too(stored: StoredFamily, tmp_path: Path) -> None:
    request = asked(stored, tmp_path / "s", variants=["math"], through=("served",), engine="runtime")
    save_artifact_reference(request, tmp_path / "math.reference", NullSink())
    plain, _ = measure_artifact(request, NullSink())
    again = replace(request, reference=tmp_path / "math.reference", scratch=tmp_path / "t")
    again.scratch.mkdir()
    kept, _ = measure_artifact(again, NullSink())
    assert kept[0].kl_mean == pytest.approx(plain[0].kl_mean, abs=1e-9)


def test_the_command_says_which_engine_it_was(stored: StoredFamily, tmp_path: Path) -> None:
    text = tmp_path / "prose.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 8)
    words = ("eval", stored.artifact, "--text", text, "--variant", "math", "--window", "32")
    out = tmp_path / "drift.json"
    runtime = document(*words, "--out", out)
    assert json.loads(out.read_text()) == runtime
    plain = document(*words, "--engine", "restore", "--through", "both")
    assert [row["through"] for row in (*runtime["results"], *plain["results"])] == ["served", "served", "restored"]
    assert (runtime["settings"]["served_by"], plain["settings"]["served_by"]) == (
        {"math": "runtime"},
        {"math": "transformers"},
    )
    assert abs(plain["results"][0]["kl_mean"] - runtime["results"][0]["kl_mean"]) <= 1e-6


def test_what_the_runtime_refuses_is_restored_and_said(
    stored: StoredFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SourceIncompatible("its rotations are of another kind")

    request = asked(stored, tmp_path / "s", variants=["math"], through=("served",))
    monkeypatch.setattr(artifact_drift, "load_served", refuse)
    sink = RecordingSink()
    (result, *_), _ = measure_artifact(request, sink)
    assert result.engine == "transformers" and result.kl_mean is not None
    note = "math: the runtime does not serve it (its rotations are of another kind), an fp32 restore answers"
    assert note in sink.notes
    again = replace(request, engine="runtime", scratch=tmp_path / "t")
    again.scratch.mkdir()
    with pytest.raises(SourceIncompatible, match="its rotations"):
        measure_artifact(again, NullSink())


def test_the_family_is_asked_for_one_variant_at_a_time(stored: StoredFamily) -> None:
    family = load_served(stored.artifact, ["math"], None, SETTINGS, "cpu")
    assert family.variants.keys() == {"base", "math"}
    with pytest.raises(UsageError):
        family.model(input_ids=torch.tensor([[1]]))
