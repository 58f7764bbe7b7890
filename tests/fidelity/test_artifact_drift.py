"""Measuring an artifact: what is bound to what, and a run that was stopped goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fidelity_models import RecordingSink, StoredFamily
from transformers import AutoModelForCausalLM, AutoTokenizer

from mfs_decompose.artifact.reader import Family
from mfs_decompose.errors import SourceNotFound, UsageError
from mfs_decompose.events import NullSink
from mfs_decompose.fidelity import artifact_drift
from mfs_decompose.fidelity.artifact_drift import SERVED, DriftRequest, measure_artifact
from mfs_decompose.fidelity.evaluate import measure_drift
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.fidelity.result_log import ResultLog
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.pipeline.restore import restore

PROSE = Corpus("prose", ("The quick brown fox jumps over the lazy dog, and sleeps in the sun.", "So it goes."))
SMALL = EvalSettings(window=32, max_tokens=60)


def asked(stored: StoredFamily, scratch: Path, **changes: Any) -> DriftRequest:
    scratch.mkdir(exist_ok=True)
    request = DriftRequest(stored.artifact, [PROSE], SMALL, ("served", "restored"), scratch)
    return replace(request, **changes)


class Stop(RuntimeError):
    """The kill."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants that were measured, in order; the name `stop` in it stops before the next one."""
    ids: list[str] = []
    real = measure_drift

    def record(*words: Any, **more: Any) -> list[DriftResult]:
        if "stop" in ids:
            ids.remove("stop")
            raise Stop
        ids.append(words[5])
        return real(*words, **more)

    monkeypatch.setattr(artifact_drift, "measure_drift", record)
    return ids


def stopped_after(number: int, measured: list[str], request: DriftRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until that many variants are measured and kept."""
    real = ResultLog.add

    def add(log: ResultLog, id: str, results: Any) -> None:
        real(log, id, results)
        if len(measured) == number:
            measured.append("stop")

    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(ResultLog, "add", add)
        measure_artifact(request, NullSink())


def test_served_is_what_a_float32_checkpoint_computes(stored: StoredFamily, tmp_path: Path) -> None:
    results, digest = measure_artifact(asked(stored, tmp_path / "s", variants=["math"]), NullSink())
    assert len(digest) == 64
    served, restored = results
    tokenizer = AutoTokenizer.from_pretrained(stored.variants["math"])
    restore(stored.artifact, ["math"], tmp_path / "served", SERVED)
    restore(stored.artifact, ["math"], tmp_path / "restored")
    p_model: Any = AutoModelForCausalLM.from_pretrained(stored.variants["math"], dtype=torch.float32)
    for result, folder in ((served, "served"), (restored, "restored")):
        q_model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        kl: list[float] = []
        left = SMALL.max_tokens
        for text in PROSE.documents:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][:left]
            left -= len(ids)
            for begin in range(0, len(ids), 32):
                part = torch.tensor([ids[begin : begin + 32]])
                if part.shape[1] > 1:
                    with torch.no_grad():
                        p, q = (m(part).logits[0, :-1].double().log_softmax(-1) for m in (p_model, q_model))
                    kl += (p.exp() * (p - q)).sum(-1).tolist()
        assert result.tokens == len(kl)
        assert result.kl_mean == pytest.approx(sum(kl) / len(kl), rel=1e-4, abs=1e-12)


def test_a_stopped_run_goes_on_and_gives_the_same_results(
    stored: StoredFamily, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "drift.json"
    whole, _ = measure_artifact(asked(stored, tmp_path / "a"), NullSink())
    assert measured == ["code", "math", "vocab"]
    measured.clear()
    request = asked(stored, tmp_path / "b", out=out)
    stopped_after(2, measured, request, monkeypatch)
    assert measured == ["code", "math"]
    assert (tmp_path / "drift.json.partial").is_dir() and not out.exists()
    measured.clear()
    sink = RecordingSink()
    again, _ = measure_artifact(asked(stored, tmp_path / "c", out=out), sink)
    assert measured == ["vocab"]
    assert "going on: 2 of 3 variants were measured before (code, math)" in sink.notes
    assert again == whole
    assert [stage for stage, _, _ in sink.stages if stage.startswith("check the original")] == [
        "check the original of vocab"
    ]


def test_with_everything_measured_nothing_is_restored(
    stored: StoredFamily, tmp_path: Path, measured: list[str]
) -> None:
    out = tmp_path / "drift.json"
    first, _ = measure_artifact(asked(stored, tmp_path / "a", out=out), NullSink())
    measured.clear()
    lost = {id: str(tmp_path / "gone") for id in stored.variants}
    sink = RecordingSink()
    again, _ = measure_artifact(asked(stored, tmp_path / "b", out=out, originals=lost), sink)
    assert (again, measured, sink.stages) == (first, [], [])


def test_a_run_on_fewer_variants_takes_only_those(stored: StoredFamily, tmp_path: Path, measured: list[str]) -> None:
    out = tmp_path / "drift.json"
    measure_artifact(asked(stored, tmp_path / "a", out=out), NullSink())
    results, _ = measure_artifact(asked(stored, tmp_path / "b", out=out, variants=["math"]), NullSink())
    assert {result.variant for result in results} == {"math"}
    assert measured == ["code", "math", "vocab"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"settings": replace(SMALL, window=33)}, "stride and window"),
        ({"settings": replace(SMALL, max_tokens=59)}, "max_tokens"),
        ({"corpora": [Corpus("prose", (*PROSE.documents, "more"))]}, "texts"),
        ({"corpora": [Corpus("prose", PROSE.documents, 59)]}, "texts"),
        ({"through": ("served",)}, "through"),
    ],
)
def test_other_settings_are_measured_anew(
    stored: StoredFamily, tmp_path: Path, measured: list[str], change: dict[str, Any], named: str
) -> None:
    out = tmp_path / "drift.json"
    measure_artifact(asked(stored, tmp_path / "a", out=out, variants=["math"]), NullSink())
    sink = RecordingSink()
    measure_artifact(asked(stored, tmp_path / "b", out=out, variants=["math"], **change), sink)
    assert measured == ["math", "math"]
    assert f"{out}.partial was measured with another {named}: measured anew" in sink.notes


def test_another_artifact_is_measured_anew(
    stored: StoredFamily, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "drift.json"
    measure_artifact(asked(stored, tmp_path / "a", out=out, variants=["math"]), NullSink())
    journal = tmp_path / "drift.json.partial" / "journal.jsonl"
    line = json.loads(journal.read_text().splitlines()[0])
    assert (
        line["payload"]["artifact"] == measure_artifact(asked(stored, tmp_path / "b", variants=["math"]), NullSink())[1]
    )
    real = Family.open

    def open_other(*words: Any, **more: Any) -> Family:
        family = real(*words, **more)
        family.artifact_digest = "0" * 64
        return family

    monkeypatch.setattr(Family, "open", open_other)
    sink = RecordingSink()
    measure_artifact(asked(stored, tmp_path / "c", out=out, variants=["math"]), sink)
    assert f"{out}.partial was measured with another artifact: measured anew" in sink.notes


def test_a_request_that_is_refused_leaves_nothing(stored: StoredFamily, tmp_path: Path) -> None:
    out = tmp_path / "drift.json"
    with pytest.raises(UsageError):
        measure_artifact(asked(stored, tmp_path / "a", out=out, variants=["mth"]), NullSink())
    with pytest.raises(SourceNotFound):
        gone = {"math": str(tmp_path / "gone")}
        measure_artifact(asked(stored, tmp_path / "a", out=out, variants=["math"], originals=gone), NullSink())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
