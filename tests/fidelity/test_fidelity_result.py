from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mfs_decompose.fidelity.document import EvalDocument, describe_settings
from mfs_decompose.fidelity.figures import PairedFigures, TokenFigures
from mfs_decompose.fidelity.noise import NoiseFloor
from mfs_decompose.fidelity.result import DriftResult, summarise
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.statistics import estimate_intervals

# Names and order of design.md, section 10: others parse them.
NAMES = [
    "variant", "through", "corpus", "tokens", "units", "ppl_original", "ppl_x", "ppl_base", "ppl_ratio",
    "ppl_ratio_ci", "kl_base", "kl_mean", "kl_ci", "kl_p99", "top1", "top1_ci", "recovered", "noise_kl",
    "noise_ln_ppl",
]  # fmt: skip


def figures(nll_original: Any, nll_x: Any, kl: Any, top1: Any) -> TokenFigures:
    return TokenFigures(*(np.array(column, dtype=np.float64) for column in (nll_original, nll_x, kl, top1)))


def pair(x: TokenFigures, base: TokenFigures | None = None) -> PairedFigures:
    return PairedFigures(np.zeros(len(x.kl), dtype=np.int64), x, base)


X = figures([1.0, 2.0, 3.0], [1.5, 2.0, 3.25], [0.1, 0.0, 0.2], [1, 0, 1])
BASE = figures([1.0, 2.0, 3.0], [2.0, 4.0, 3.0], [1.0, 2.0, 3.0], [0, 0, 1])


def row(x: TokenFigures, base: TokenFigures | None = None) -> DriftResult:
    return summarise("code", "served", "prose", pair(x, base), bos="<s>")


def long(tokens: int = 64 * 50, seed: int = 0) -> TokenFigures:
    """Enough tokens of one document for intervals."""
    generator = np.random.default_rng(seed)
    nll = generator.exponential(1.0, tokens)
    return figures(nll, nll + 0.05, generator.exponential(0.1, tokens), generator.random(tokens) < 0.8)


def test_figures_by_hand() -> None:
    found = row(X, BASE)
    assert (found.variant, found.through, found.corpus, found.tokens) == ("code", "served", "prose", 3)
    assert found.ppl_original == pytest.approx(math.exp(2), rel=1e-15)
    assert found.ppl_x == pytest.approx(math.exp(2.25), rel=1e-15)
    assert found.ppl_base == pytest.approx(math.exp(3), rel=1e-15)
    assert found.ppl_ratio == pytest.approx(math.exp(0.25), rel=1e-15)
    assert found.kl_mean == pytest.approx(0.1, rel=1e-15)
    assert found.kl_base == pytest.approx(2.0, rel=1e-15)
    assert found.recovered == pytest.approx(0.95, rel=1e-15)
    assert found.top1 == pytest.approx(2 / 3, rel=1e-15)
    assert found.ppl_ratio_ci is None
    assert found.notes == ()


def test_p99_is_interpolated_linearly() -> None:
    kl = np.arange(1.0, 12.0)  # 1..11: the 99th percentile lies at index 9.9
    x = figures(np.zeros(11), np.zeros(11), kl, np.ones(11))
    assert row(x).kl_p99 == pytest.approx(10.9, rel=1e-14)
    shuffled = figures(np.zeros(11), np.zeros(11), kl[::-1], np.ones(11))
    assert row(shuffled).kl_p99 == row(x).kl_p99
    single = figures([0.0], [0.0], [0.7], [1.0])
    assert row(single).kl_p99 == 0.7


def test_without_base() -> None:
    found = row(X)
    assert (found.ppl_base, found.kl_base, found.recovered) == (None, None, None)
    assert found.kl_mean is not None


def test_nothing_to_recover() -> None:
    same = figures([1.0, 2.0], [1.0, 2.0], [0.0, 0.0], [1, 1])
    found = row(figures([1.0, 2.0], [1.5, 2.0], [0.1, 0.0], [1, 1]), same)
    assert found.kl_base == 0
    assert found.recovered is None
    assert found.notes == ("nothing to recover: the base answers exactly as the original does",)


def test_worse_than_the_base_is_negative() -> None:
    assert row(BASE, figures(X.nll_original, X.nll_x, X.kl, X.top1)).recovered == pytest.approx(1 - 2 / 0.1)


def test_figures_that_are_not_finite_are_null_and_said() -> None:
    nan = float("nan")
    found = row(figures([1.0, 2.0], [nan, 2.0], [nan, 0.1], [nan, 1.0]), figures([1, 2], [3, 4], [0.5, 0.5], [1, 1]))
    assert found.ppl_original == pytest.approx(math.exp(1.5))
    assert (found.ppl_x, found.ppl_ratio, found.kl_mean, found.kl_p99, found.top1, found.recovered) == (None,) * 6
    assert found.kl_base == 0.5
    assert found.notes == ("served has logits that are not finite at 1 of 2 tokens",)


def test_a_broken_original_and_a_broken_base_are_said() -> None:
    nan = float("nan")
    broken = figures([nan, 2.0], [nan, 2.0], [nan, 0.1], [nan, 1.0])
    notes = row(broken, broken).notes
    assert [note.split(" has ")[0] for note in notes] == ["the original", "served", "the base"]


def test_perplexity_beyond_float64_is_null_and_said() -> None:
    found = row(figures([1.0], [800.0], [600.0], [0.0]))
    assert (found.ppl_x, found.ppl_ratio, found.kl_mean) == (None, None, 600.0)
    assert found.notes == ("the perplexity of served is beyond float64 (mean NLL 800 nats)",)


def test_row_has_exactly_the_documented_names_and_plain_values() -> None:
    content = row(X, BASE).to_json()
    assert list(content) == NAMES
    assert {type(value) for value in content.values()} <= {str, int, float, type(None)}
    assert type(row(long()).to_json()["ppl_ratio_ci"]) is list


def test_intervals_are_those_of_the_bootstrap_and_become_lists() -> None:
    x = long()
    found, expected = row(x), estimate_intervals(pair(x))
    assert expected.kl is not None and expected.top1 is not None
    assert (found.units, found.kl_ci, found.top1_ci) == (50, expected.kl, expected.top1)
    assert found.ppl_ratio_ci == expected.ppl_ratio == pytest.approx((math.exp(0.05), math.exp(0.05)))
    assert found.kl_mean is not None and expected.kl[0] < found.kl_mean < expected.kl[1]
    assert found.to_json()["kl_ci"] == list(expected.kl)
    assert found.remarks == ()


def test_too_few_units_are_said_with_the_tokens_that_are_needed() -> None:
    x = long(64 * 10)
    found = row(x)
    assert (found.units, found.ppl_ratio_ci, found.kl_ci, found.top1_ci) == (10, None, None, None)
    assert found.notes == ()
    assert found.remarks == (
        "no intervals, undecided: 50 runs of up to 64 scored tokens of one document are needed, and there are 10; "
        "about 3,200 tokens of text like this are enough",
    )
    assert found.to_json()["kl_ci"] is None


def test_noise_and_text_are_kept() -> None:
    text = {"sha256": "ab", "documents": 3, "bytes": 99, "max_tokens": 40}
    found = summarise("v", "served", "prose", pair(X), bos="none", noise=NoiseFloor(1e-13, None), text=text)
    assert (found.noise_kl, found.noise_ln_ppl, found.text) == (1e-13, None, text)
    assert (row(X).noise_kl, row(X).noise_ln_ppl) == (None, None)


@pytest.mark.parametrize("x", [X, long(), figures([1.0], [float("nan")], [float("nan")], [float("nan")])])
def test_a_record_reads_back_as_what_it_was(x: TokenFigures) -> None:
    text = {"sha256": "ab", "documents": 3, "bytes": 99, "max_tokens": 40}
    found = summarise("v", "served", "prose", pair(x), bos="<s>", notes=("one",), noise=NoiseFloor(0.0, 2.0), text=text)
    again = DriftResult.from_record(json.loads(json.dumps(found.record(), allow_nan=False)))
    assert again == found
    assert again.figures is None
    assert again.to_json() == found.to_json()
    assert again.remarks == found.remarks


def test_document() -> None:
    nan = float("nan")
    other = summarise(
        "chat", "restored", "prose", pair(figures([nan], [1.0], [nan], [nan])), bos="none", notes=("said once",)
    )
    results = (replace(row(long()), text={"max_tokens": 7}), other, other)
    settings = describe_settings(
        EvalSettings(window=64, stride=32, bos="auto", batch_size=2), results, "cpu", suite="ci"
    )
    content = EvalDocument(results, settings, "ab" * 32).to_json()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert list(content) == ["schema", "results", "tasks", "settings", "artifact_digest"]
    assert content["schema"] == "mfs.eval/1"
    assert content["tasks"] == []
    assert content["artifact_digest"] == "ab" * 32
    assert [result["variant"] for result in content["results"]] == ["code", "chat", "chat"]
    assert settings["suite"] == "ci"
    assert settings["texts"]["prose"] == {}
    assert settings["padding"] == "right"
    assert settings["window"] == 64
    assert settings["stride"] == 32
    assert settings["bos_policy"] == "auto"
    assert settings["bos"] == {"code": "<s>", "chat": "none"}
    assert settings["max_tokens"] == 8192
    assert (settings["dtype"], settings["batch_size"], settings["attention"]) == ("float32", 2, "eager")
    assert (settings["device"], settings["threads"]) == ("cpu", 1)
    assert "never scored" in settings["convention"]
    assert {"torch", "transformers"} <= set(settings)
    assert settings["notes"] == [
        "chat, prose, restored: said once",
        "chat, prose, restored: the original has logits that are not finite at 1 of 1 tokens",
        "chat, prose, restored: no intervals, undecided: 50 runs of up to 64 scored tokens of one document are needed, "
        "and there are 1; about 100 tokens of text like this are enough",
    ]


def test_no_artifact_is_null() -> None:
    assert EvalDocument((), {}, None).to_json()["artifact_digest"] is None


def test_self_checks_stand_in_the_document_where_they_were_asked_for() -> None:
    assert "self_check" not in EvalDocument((), {}, None).to_json()
    checked = EvalDocument((), {}, None, self_check=({"seen": True},)).to_json()
    assert list(checked) == ["schema", "results", "tasks", "self_check", "settings", "artifact_digest"]
    assert checked["self_check"] == [{"seen": True}]
