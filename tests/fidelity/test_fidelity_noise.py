from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fidelity_models import DOCUMENTS, RecordingSink
from transformers import AutoModelForCausalLM

from mfs_decompose.events import NullSink
from mfs_decompose.fidelity import noise
from mfs_decompose.fidelity.evaluate import measure_drift
from mfs_decompose.fidelity.model import LoadedModel, load_model, predict_windows
from mfs_decompose.fidelity.noise import measure_noise, noise_windows
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.fidelity.tokenizer import load_encoder
from mfs_decompose.fidelity.windows import TokenizedCorpus, tokenize_corpus

PROSE = Corpus("prose", DOCUMENTS)


def loaded(family: dict[str, Path], **settings: Any) -> tuple[LoadedModel, TokenizedCorpus, EvalSettings]:
    how = EvalSettings(**{"window": 24, **settings})
    text = tokenize_corpus(PROSE, load_encoder(family["original"], how.bos), how)
    return load_model(family["original"], "original", how), text, how


@pytest.mark.parametrize("settings", [{}, {"batch_size": 3}, {"padding": "left"}, {"dtype": "bfloat16"}])
def test_the_same_batching_twice_gives_exactly_nothing(family: dict[str, Path], settings: dict[str, Any]) -> None:
    how = EvalSettings(window=24, **settings)
    results = measure_drift(family["original"], {"served": family["original"]}, None, [PROSE], how, "v", NullSink())
    for result in results:
        assert (result.kl_mean, result.kl_p99, result.ppl_ratio, result.top1) == (0, 0, 1, 1)
        assert result.figures is not None
        assert (result.figures.x.nll_x == result.figures.x.nll_original).all()


@pytest.mark.parametrize("settings", [{}, {"batch_size": 2}, {"batch_size": 5, "padding": "left"}])
def test_the_floor_is_that_of_plain_transformers_batched_by_hand(
    family: dict[str, Path], settings: dict[str, Any]
) -> None:
    model, text, how = loaded(family, **settings)
    found = measure_noise(model, text, how, NullSink())
    plain: Any = AutoModelForCausalLM.from_pretrained(
        family["original"], dtype=torch.float32, attn_implementation="eager"
    )
    size, kl, shift, tokens = max(2, how.batch_size), 0.0, 0.0, 0
    with torch.no_grad():
        for start in range(0, len(text.windows), size):
            batch = text.windows[start : start + size]
            longest = max(len(window.inputs) for window in batch)
            ids, mask = torch.zeros(2, len(batch), longest, dtype=torch.long)
            for row, window in enumerate(batch):
                at = (
                    slice(longest - len(window.inputs), longest) if how.padding == "left" else slice(len(window.inputs))
                )
                ids[row, at], mask[row, at] = torch.tensor(window.inputs), 1
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            together = plain(ids, attention_mask=mask, position_ids=positions).logits
            for row, window in enumerate(batch):
                alone = plain(torch.tensor([window.inputs])).logits[0].double().log_softmax(-1)
                batched = together[row][mask[row] == 1].double().log_softmax(-1)
                p, q = (alone, batched) if how.batch_size == 1 else (batched, alone)
                kl += float(F.kl_div(q, p, log_target=True, reduction="sum"))
                targets = torch.tensor(window.targets)[:, None]
                shift += float((p.gather(-1, targets) - q.gather(-1, targets)).sum())
                tokens += len(window.targets)
    assert found.kl is not None and found.ln_ppl is not None
    assert 0 < found.kl < 1e-10, "fp32 on a CPU: rounding, and no more"
    assert found.kl == pytest.approx(kl / tokens, rel=0.3, abs=1e-14)
    assert found.ln_ppl == pytest.approx(abs(shift) / tokens, abs=1e-7)
    assert found.ln_ppl < 1e-6


def test_a_text_of_one_window_is_batched_with_itself(family: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, text, how = loaded(family)
    sizes: list[int] = []

    def record(model: LoadedModel, batch: Any) -> Any:
        sizes.append(len(batch))
        return predict_windows(model, batch)

    monkeypatch.setattr(noise, "predict_windows", record)
    single = TokenizedCorpus("single", text.windows[:1])
    assert measure_noise(model, single, how, NullSink()).kl is not None
    assert sizes == [2, 1, 1]
    sizes.clear()
    measure_noise(model, single, replace(how, batch_size=3), NullSink())
    assert sizes == [3, 1, 1, 1]


def test_only_the_first_tokens_are_used(family: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, text, _ = loaded(family)
    assert noise_windows(text) == text.windows
    monkeypatch.setattr(noise, "NOISE_TOKENS", 50)
    assert 0 < sum(len(window.targets) for window in noise_windows(text)) <= 50
    monkeypatch.setattr(noise, "NOISE_TOKENS", 1)
    assert noise_windows(text) == text.windows[:1]


def test_logits_that_are_not_finite_have_no_floor(family: dict[str, Path]) -> None:
    model, text, how = loaded(family)
    with torch.no_grad():
        model.network.lm_head.weight[3] = float("inf")
    found = measure_noise(model, text, how, NullSink())
    assert (found.kl, found.ln_ppl) == (None, None)


def test_every_result_has_the_floor_of_its_text_measured_once(
    family: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = Corpus("code", ("for i in range(9): total += i * i",))
    candidates = {"served": family["near"], "restored": family["far"]}
    settings, sink = EvalSettings(window=24), RecordingSink()
    results = measure_drift(family["original"], candidates, None, [PROSE, code], settings, "v", sink)
    floors = {result.corpus: {r.noise_kl for r in results if r.corpus == result.corpus} for result in results}
    assert all(len(found) == 1 for found in floors.values())
    assert floors["prose"] != floors["code"]
    assert all(result.noise_kl is not None and result.noise_ln_ppl is not None for result in results)
    stages = [stage for stage in sink.stages if stage[0].startswith("noise")]
    assert [stage[0] for stage in stages] == ["noise floor of v"]
    assert all(total == done for _, total, done in stages)
    without = measure_drift(family["original"], candidates, None, [PROSE], settings, "v", NullSink(), noise=False)
    assert {result.noise_kl for result in without} == {None}
