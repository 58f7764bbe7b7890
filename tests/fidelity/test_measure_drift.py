"""measure_drift against a loop in plain transformers that shares no code with it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fidelity_models import DOCUMENTS, RecordingSink, make_model, make_tokenizer, save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mfs_decompose.errors import ArtifactInvalid, ResourceShortage, SourceIncompatible, UsageError
from mfs_decompose.events import NullSink
from mfs_decompose.fidelity import evaluate
from mfs_decompose.fidelity.document import EvalDocument, describe_settings
from mfs_decompose.fidelity.evaluate import measure_drift
from mfs_decompose.fidelity.model import load_model, predict_windows
from mfs_decompose.fidelity.residency import measure_model
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus

PROSE = Corpus("prose", DOCUMENTS)
CODE = Corpus("code", ("for i in range(9): total += i * i", "while not done: step(); log(now)", "y = a * b" * 4))
SMALL = EvalSettings(window=24, max_tokens=150)


def measure(family: dict[str, Path], original: str = "original", **changes: Any) -> list[DriftResult]:
    arguments: dict[str, Any] = {
        "candidates": {"served": family["near"], "restored": family["far"]},
        "base": family["base"],
        "corpora": [PROSE, CODE],
        "settings": SMALL,
        "variant": "v",
        "progress": NullSink(),
    }
    return measure_drift(family[original], **(arguments | changes))


def plain_transformers(original: Path, other: Path, documents: tuple[str, ...], bos: bool) -> dict[str, float]:
    """Perplexities and KL under the stated convention, written from the libraries' manuals alone."""
    tokenizer = AutoTokenizer.from_pretrained(original)
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (original, other)]
    nll: list[list[float]] = [[], []]
    kl: list[float] = []
    agree: list[bool] = []
    left = SMALL.max_tokens
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False)["input_ids"][:left]
        left -= len(ids)
        for begin in range(0, len(ids), SMALL.window):
            part = torch.tensor([[1] * bos + ids[begin : begin + SMALL.window]])
            if part.shape[1] < 2:
                continue
            with torch.no_grad():
                p, q = (model(part).logits[0, :-1].double() for model in models)
            for column, values in zip(nll, (p, q), strict=True):
                column += F.cross_entropy(values, part[0, 1:], reduction="none").tolist()
            kl += F.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(-1).tolist()
            agree += (p.argmax(-1) == q.argmax(-1)).tolist()
    return {
        "tokens": len(kl),
        "ppl_original": math.exp(sum(nll[0]) / len(nll[0])),
        "ppl_x": math.exp(sum(nll[1]) / len(nll[1])),
        "kl_mean": sum(kl) / len(kl),
        "kl_p99": float(np.percentile(kl, 99)),
        "top1": sum(agree) / len(agree),
    }


@pytest.mark.parametrize("tokenizer", ["original", "with_bos"])
def test_agrees_with_plain_transformers(family: dict[str, Path], tokenizer: str) -> None:
    results = measure(family, tokenizer)
    assert [(r.corpus, r.through) for r in results] == [
        ("prose", "served"),
        ("prose", "restored"),
        ("code", "served"),
        ("code", "restored"),
    ]
    for result in results:
        documents = {"prose": PROSE, "code": CODE}[result.corpus].documents
        other = family[{"served": "near", "restored": "far"}[result.through]]
        expected = plain_transformers(family[tokenizer], other, documents, tokenizer == "with_bos")
        base = plain_transformers(family[tokenizer], family["base"], documents, tokenizer == "with_bos")
        assert result.tokens == expected["tokens"] > 50
        assert result.ppl_original == pytest.approx(expected["ppl_original"], rel=1e-4)
        assert result.ppl_x == pytest.approx(expected["ppl_x"], rel=1e-4)
        assert result.ppl_base == pytest.approx(base["ppl_x"], rel=1e-4)
        assert result.ppl_ratio == pytest.approx(expected["ppl_x"] / expected["ppl_original"], rel=1e-4)
        assert result.kl_mean == pytest.approx(expected["kl_mean"], rel=1e-4, abs=1e-6)
        assert result.kl_p99 == pytest.approx(expected["kl_p99"], rel=1e-4, abs=1e-6)
        assert result.kl_base == pytest.approx(base["kl_mean"], rel=1e-4, abs=1e-6)
        assert result.top1 == expected["top1"]
        assert result.recovered == pytest.approx(1 - expected["kl_mean"] / base["kl_mean"], rel=1e-4)
        assert result.kl_mean is not None and result.kl_mean > 1e-4, "a test of nothing"
        assert result.bos == ("<s>" if tokenizer == "with_bos" else "none")


def test_nearer_candidates_drift_less(family: dict[str, Path]) -> None:
    served, restored = measure(family, corpora=[PROSE])
    assert served.kl_mean is not None and restored.kl_mean is not None and restored.kl_base is not None
    assert 0 < served.kl_mean < restored.kl_mean < restored.kl_base
    assert served.recovered is not None and served.recovered > 0.5


def test_the_original_does_not_drift_from_itself(family: dict[str, Path]) -> None:
    (result,) = measure(family, candidates={"served": family["original"]}, corpora=[PROSE])
    assert result.kl_mean == result.kl_p99 == 0
    assert result.ppl_ratio == result.top1 == result.recovered == 1
    assert result.ppl_x == result.ppl_original


def test_a_wider_copy_of_the_original_does_not_drift(family: dict[str, Path], tmp_path: Path) -> None:
    wide = Path(shutil.copytree(family["original"], tmp_path / "wide"))
    weights = {name: tensor.float() for name, tensor in load_file(wide / "model.safetensors").items()}
    save_file(weights, wide / "model.safetensors", metadata={"format": "pt"})
    (result,) = measure(family, candidates={"restored": wide}, corpora=[PROSE])
    assert (result.kl_mean, result.kl_p99, result.recovered) == (0, 0, 1)


def test_one_bos_at_the_start_of_every_window_and_only_where_the_policy_says(
    family: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, ...]] = []
    predict = predict_windows

    def record(model: Any, batch: Any) -> Any:
        shown.extend(window.inputs for window in batch)
        return predict(model, batch)

    monkeypatch.setattr(evaluate, "predict_windows", record)
    literal = Corpus("literal", (*DOCUMENTS, "<s>A text that brings its own mark."))
    for original, policy, expected in (
        ("original", "auto", 0),
        ("with_bos", "auto", 1),
        ("original", "on", 1),
        ("with_bos", "off", 0),
    ):
        shown.clear()
        settings = EvalSettings(window=24, bos=policy)  # type: ignore[arg-type]
        (result,) = measure(
            family, original, candidates={"served": family["near"]}, corpora=[literal], settings=settings
        )
        own = 1 if expected == 0 else 0  # without a policy of one, the mark in the text is text
        assert sum(inputs.count(1) for inputs in set(shown)) == (own or len(set(shown)))
        assert all(inputs[0] == 1 for inputs in shown) == bool(expected)
        assert result.bos == ("<s>" if expected else "none")


def test_models_in_turn_give_the_figures_of_models_together(
    family: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load = load_model

    def record(folder: Path, role: str, *rest: Any) -> Any:
        loads.append(role)
        return load(folder, role, *rest)

    monkeypatch.setattr(evaluate, "load_model", record)
    sink = RecordingSink()
    together = measure(family, progress=sink)
    assert [stage for stage, _, _ in sink.stages][-1] == "measure v"
    assert sum(stage == "measure v" for stage, _, _ in sink.stages) == 1
    size = measure_model(family["original"], 4).weight_bytes
    monkeypatch.setattr(evaluate, "available_memory", lambda device: int(2.5 * size))
    sink = RecordingSink()
    in_turn = measure(family, progress=sink)
    assert sum(stage == "measure v" for stage, _, _ in sink.stages) == 3
    assert loads == ["original", "served", "restored", "base"] * 2
    assert in_turn == together
    for left, right in zip(in_turn, together, strict=True):
        assert left.figures is not None and right.figures is not None
        assert left.figures.base is not None and right.figures.base is not None
        assert np.array_equal(left.figures.x.kl, right.figures.x.kl)
        assert np.array_equal(left.figures.base.nll_x, right.figures.base.nll_x)
    monkeypatch.setattr(evaluate, "available_memory", lambda device: size)
    with pytest.raises(ResourceShortage):
        measure(family)


def test_batches_change_nothing_beyond_rounding(family: dict[str, Path]) -> None:
    single = measure(family)
    for size in (2, 5):
        for left, right in zip(
            single, measure(family, settings=EvalSettings(24, None, "auto", 150, batch_size=size)), strict=True
        ):
            assert right.tokens == left.tokens
            assert right.ppl_x == pytest.approx(left.ppl_x, rel=1e-4)
            assert right.kl_mean == pytest.approx(left.kl_mean, abs=1e-6, rel=1e-4)


def test_tokens_and_documents_are_kept_for_statistics(family: dict[str, Path]) -> None:
    (result,) = measure(family, candidates={"served": family["near"]}, corpora=[PROSE])
    assert result.figures is not None and result.figures.base is not None
    document, x = result.figures.document, result.figures.x
    assert len(document) == len(x.kl) == len(x.nll_x) == len(result.figures.base.kl) == result.tokens
    assert (np.diff(document) >= 0).all()
    assert set(document.tolist()) == {0, 2, 3}, "document 1 is a single token"
    assert np.array_equal(x.nll_original, result.figures.base.nll_original)
    assert result.ppl_x == pytest.approx(math.exp(x.nll_x.mean()))


@pytest.mark.parametrize(("rows", "shared"), [(129, 129), (140, 131)])
def test_a_base_of_another_vocabulary(family: dict[str, Path], tmp_path: Path, rows: int, shared: int) -> None:
    base = save(make_model(seed=8, vocabulary=rows), tmp_path / "base")
    sink = RecordingSink()
    (result,) = measure(family, candidates={"served": family["near"]}, base=base, corpora=[CODE], progress=sink)
    tokenizer = AutoTokenizer.from_pretrained(family["original"])
    p_model, q_model = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (family["original"], base)
    )
    kl, nll = [], []
    for text in CODE.documents:
        ids = tokenizer(text)["input_ids"]
        assert max(ids) < 129 and len(ids) <= 48
        for part in (ids[:24], ids[24:48]):
            if len(part) > 1:
                with torch.no_grad():
                    p, q = (
                        model(torch.tensor([part])).logits[0, :-1, :shared].double().log_softmax(-1)
                        for model in (p_model, q_model)
                    )
                kl.append(F.kl_div(q, p, log_target=True, reduction="none").sum(-1))
                nll.append(F.nll_loss(q, torch.tensor(part[1:]), reduction="none"))
    assert result.kl_base == pytest.approx(torch.cat(kl).mean().item(), rel=1e-4)
    assert result.ppl_base == pytest.approx(torch.cat(nll).mean().exp().item(), rel=1e-4)
    assert result.recovered is not None
    (note,) = result.notes
    assert f"over the {shared} leading tokens" in note and f"131, the base {rows}" in note
    assert sink.notes == [f"v, code: {note}"]
    alone = measure(family, candidates={"served": family["near"]}, base=None, corpora=[CODE])[0]
    assert (result.kl_mean, result.ppl_x, result.ppl_original) == (alone.kl_mean, alone.ppl_x, alone.ppl_original)


def test_text_with_tokens_that_the_base_lacks(family: dict[str, Path], tmp_path: Path) -> None:
    base = save(make_model(seed=8, vocabulary=129), tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(family["original"])
    added = Corpus("added", ("<|ask|>why is it so?<|reply|>nobody knows", "more text"))
    assert max(tokenizer(added.documents[0])["input_ids"]) == 130
    sink = RecordingSink()
    results = measure(family, base=base, corpora=[added, CODE], progress=sink)
    for result in results[:2]:
        assert (result.kl_base, result.ppl_base, result.recovered) == (None, None, None)
        assert result.kl_mean is not None
        assert result.notes == ("no figures of the base: it has 129 tokens, and the text holds token 130",)
        assert result.figures is not None and result.figures.base is None
    assert all(result.kl_base is not None for result in results[2:])
    stage, total, done = sink.stages[-1]
    assert (stage, done) == ("measure v", total)
    (alone,) = measure(family, candidates={"served": family["near"]}, base=None, corpora=[added])
    assert alone.kl_mean == results[0].kl_mean


def test_progress_adds_up_and_talks_of_every_stage(family: dict[str, Path]) -> None:
    sink = RecordingSink()
    measure(family, progress=sink)
    assert [stage for stage, _, _ in sink.stages] == [
        "load original", "noise floor of v", "load served", "load restored", "load base", "measure v",
    ]  # fmt: skip
    assert all(total == done and done > 0 for _, total, done in sink.stages)
    assert sink.notes == []


def test_logits_that_are_not_finite_are_reported(family: dict[str, Path], tmp_path: Path) -> None:
    broken = Path(shutil.copytree(family["near"], tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["lm_head.weight"][5, 0] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    sink = RecordingSink()
    results = measure(family, candidates={"served": broken, "restored": family["far"]}, corpora=[PROSE], progress=sink)
    served, restored = results
    assert (served.ppl_x, served.kl_mean, served.top1, served.recovered) == (None,) * 4
    assert served.ppl_original is not None and restored.kl_mean is not None
    assert "served has logits that are not finite" in served.notes[0]
    assert any("not finite" in note for note in sink.notes)
    content = EvalDocument(tuple(results), describe_settings(SMALL, results), "d").to_json()
    json.dumps(content, allow_nan=False)


def test_nothing_is_written_into_the_folders(family: dict[str, Path]) -> None:
    def listing() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for folder in family.values() for path in folder.iterdir())

    before = listing()
    measure(family, corpora=[CODE])
    assert listing() == before


def test_requests_that_make_no_sense(family: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found none"):
        measure(family, corpora=[])
    with pytest.raises(UsageError, match="found none"):
        measure(family, candidates={})
    with pytest.raises(UsageError, match="two named 'prose'"):
        measure(family, corpora=[PROSE, CODE, PROSE])
    with pytest.raises(UsageError, match="at most the model's 64 positions, found 99 tokens"):
        measure(family, corpora=[Corpus("long", ("a b c d " * 40,))], settings=EvalSettings(window=100))
    with pytest.raises(UsageError, match="at least 2 tokens"):
        measure(family, corpora=[Corpus("tiny", ("</s>",))])
    with pytest.raises(
        ArtifactInvalid, match="expected 131 tokens in the restored checkpoint as in the original, found 140"
    ):
        measure(family, candidates={"restored": save(make_model(vocabulary=140), tmp_path / "grown")})


def test_a_tokenizer_of_another_checkpoint(tmp_path: Path, family: dict[str, Path]) -> None:
    foreign = save(make_model(vocabulary=20), tmp_path / "foreign", make_tokenizer(bos=False))
    with pytest.raises(SourceIncompatible, match="expected token ids below 20 from the tokenizer of"):
        measure_drift(foreign, {"served": family["near"]}, None, [PROSE], SMALL, "v", NullSink())
