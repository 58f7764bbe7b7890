"""Perplexity agrees with lm-eval's rolling log-likelihood, wherever both can be asked for the same thing.

lm-eval (0.4, `get_rolling_token_windows` with a context of 1) puts one prefix token, the BOS, before the whole text,
shows the model L tokens at a time, and scores every text token once: the first window scores the L tokens after the
prefix, each later one the L tokens after its first input, which is the last token of the window before; the last
window reaches back to be full. So it is our convention

- for a text of at most L tokens: window L, BOS on;
- for one of n L tokens: the BOS written out as text, BOS off, window L + 1, stride L.

The oracle below is that description in plain transformers. lm-eval itself is asked where it is installed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mfs_decompose.events import NullSink
from mfs_decompose.fidelity.evaluate import measure_drift
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus

BOS = 1
LONGEST = 20
WORDS = "The quick brown fox jumps over the lazy dog, and then it sleeps for a long while in the warm sun. " * 4


def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def text_of(folder: Path, tokens: int) -> str:
    """The first words of the text that make exactly so many tokens; the same many after a BOS that is written out."""
    tokenizer = tokenizer_of(folder)
    for end in range(1, len(WORDS)):
        plain = tokenizer(WORDS[:end], add_special_tokens=False)["input_ids"]
        marked = tokenizer("<s>" + WORDS[:end], add_special_tokens=False)["input_ids"]
        if len(plain) == tokens and marked == [BOS, *plain]:
            return WORDS[:end]
    raise AssertionError(f"no beginning of the text has {tokens} tokens")


def rolling_log_likelihood(folder: Path, text: str) -> float:
    """lm-eval's convention by the description above."""
    tokens = [BOS, *tokenizer_of(folder)(text, add_special_tokens=False)["input_ids"]]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, done = 0.0, 1
    while done < len(tokens):
        end = min(done + LONGEST, len(tokens))
        inputs = tokens[max(0, end - 1 - LONGEST) : end - 1]
        with torch.no_grad():
            log_p = model(torch.tensor([inputs])).logits[0].double().log_softmax(-1)
        for position in range(done, end):
            total += float(log_p[position - end, tokens[position]])
        done = end
    return total


def ours(family: dict[str, Path], documents: tuple[str, ...], settings: EvalSettings) -> float:
    """Our log-likelihood of all documents together."""
    corpus = Corpus("text", documents)
    (result,) = measure_drift(family["with_bos"], {"served": family["near"]}, None, [corpus], settings, "v", NullSink())
    assert result.ppl_original is not None
    return -math.log(result.ppl_original) * result.tokens


def lm_eval_log_likelihoods(folder: Path, documents: tuple[str, ...]) -> list[float]:
    instance = pytest.importorskip("lm_eval.api.instance")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    asked = huggingface.HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        tokenizer=tokenizer_of(folder),
        max_length=LONGEST,
        batch_size=1,
        add_bos_token=False,
    )
    requests = [instance.Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(documents)]
    return [float(total) for total in asked.loglikelihood_rolling(requests)]


@pytest.fixture
def short(family: dict[str, Path]) -> tuple[str, ...]:
    return tuple(text_of(family["with_bos"], tokens) for tokens in (LONGEST, 7, 13))


@pytest.fixture
def long(family: dict[str, Path]) -> tuple[str, ...]:
    return tuple(text_of(family["with_bos"], n * LONGEST) for n in (3, 2))


def test_texts_of_one_window(family: dict[str, Path], short: tuple[str, ...]) -> None:
    expected = sum(rolling_log_likelihood(family["with_bos"], text) for text in short)
    assert ours(family, short, EvalSettings(window=LONGEST, bos="on")) == pytest.approx(expected, rel=1e-6)


def test_texts_of_several_windows(family: dict[str, Path], long: tuple[str, ...]) -> None:
    expected = sum(rolling_log_likelihood(family["with_bos"], text) for text in long)
    marked = tuple(f"<s>{text}" for text in long)
    settings = EvalSettings(window=LONGEST + 1, stride=LONGEST, bos="off")
    assert ours(family, marked, settings) == pytest.approx(expected, rel=1e-6)
    assert ours(family, marked, EvalSettings(window=LONGEST, bos="off")) != pytest.approx(expected, rel=1e-3)


def test_lm_eval_itself_agrees(family: dict[str, Path], short: tuple[str, ...], long: tuple[str, ...]) -> None:
    found = lm_eval_log_likelihoods(family["with_bos"], (*short, *long))
    expected = [rolling_log_likelihood(family["with_bos"], text) for text in (*short, *long)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert ours(family, short, EvalSettings(window=LONGEST, bos="on")) == pytest.approx(sum(found[:3]), rel=1e-5)
    marked = tuple(f"<s>{text}" for text in long)
    settings = EvalSettings(window=LONGEST + 1, stride=LONGEST, bos="off")
    assert ours(family, marked, settings) == pytest.approx(sum(found[3:]), rel=1e-5)
