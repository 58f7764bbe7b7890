"""Reports about other tools, and what this one does: batching, padding, BOS, windows, contaminated references."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fidelity_models import DOCUMENTS, make_model, make_tokenizer, perturb, save
from transformers import GPT2Config, GPT2LMHeadModel

from mfs_decompose.events import NullSink
from mfs_decompose.fidelity import evaluate, model
from mfs_decompose.fidelity.comparable import comparable
from mfs_decompose.fidelity.document import describe_settings
from mfs_decompose.fidelity.evaluate import measure_drift
from mfs_decompose.fidelity.model import load_model
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.fidelity.tokenizer import load_encoder
from mfs_decompose.fidelity.windows import tokenize_corpus

# One document of 5 words and one of 40: in one batch, most of the first row is padding.
UNLIKE = Corpus("unlike", ("a fox, a dog", " ".join(f"word{i} and" for i in range(20)), *DOCUMENTS))


def measure(family: dict[str, Path], original: str = "original", **settings: Any) -> DriftResult:
    how = EvalSettings(**{"window": 48, **settings})
    (result,) = measure_drift(family[original], {"served": family["near"]}, None, [UNLIKE], how, "v", NullSink())
    return result


def within_noise(found: DriftResult, expected: DriftResult) -> None:
    """Equal figures of every token up to what the noise floor lets them differ.

    A floor of KL e means logits moved by about sqrt(2 e), and a KL of k moves by about sqrt(2 k) times that.
    """
    assert found.figures is not None and expected.figures is not None
    assert found.noise_kl is not None and expected.noise_kl is not None
    assert found.tokens == expected.tokens
    assert np.array_equal(found.figures.document, expected.figures.document)
    moved = 30 * math.sqrt(2 * max(found.noise_kl, expected.noise_kl, 1e-15))  # single tokens lie around the mean
    assert moved < 1e-4, "the floor itself is small"
    x, y = found.figures.x, expected.figures.x
    np.testing.assert_allclose(x.nll_original, y.nll_original, atol=moved)
    np.testing.assert_allclose(x.nll_x, y.nll_x, atol=moved)
    np.testing.assert_allclose(x.kl, y.kl, atol=moved * math.sqrt(2 * y.kl.max()))
    assert (x.top1 == y.top1).mean() > 0.99


def test_b53_batch_size_changes_nothing_beyond_the_noise_floor(family: dict[str, Path]) -> None:
    single = measure(family)
    assert single.kl_mean is not None and single.noise_kl is not None
    assert single.noise_kl < single.kl_mean / 1000, "the floor is far below what is measured"
    for size in (2, 5):
        batched = measure(family, batch_size=size)
        within_noise(batched, single)
        found = comparable(
            describe_settings(EvalSettings(48), [single]),
            describe_settings(EvalSettings(48, batch_size=size), [batched]),
        )
        assert f"batch_size: 1 and {size}" in found.differences, "and is written down all the same"


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("size", [2, 5])
def test_b54_padding_is_neither_seen_nor_counted(family: dict[str, Path], padding: str, size: int) -> None:
    within_noise(measure(family, batch_size=size, padding=padding), measure(family))


def test_b54_padding_that_is_seen_would_be_noticed(family: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake of the report, planted: without a mask, padding changes the figures and the noise floor."""
    right = measure(family)
    load = load_model

    def careless(*words: Any) -> Any:
        loaded = load(*words)
        forward = loaded.network.forward
        loaded.network.forward = lambda input_ids, **_: forward(input_ids=input_ids, use_cache=False)
        return loaded

    monkeypatch.setattr(evaluate, "load_model", careless)
    wrong = measure(family, batch_size=5, padding="left")
    assert wrong.noise_kl is not None and wrong.noise_kl > 1e-3
    with pytest.raises(AssertionError):
        within_noise(wrong, right)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_b54_learned_positions_count_from_the_first_token(tmp_path: Path, padding: Any) -> None:
    """A rotary model hardly minds a shift of all positions; this one does."""
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=131, n_positions=64, n_embd=48, n_layer=2, n_head=4, initializer_range=0.2)
    network: Any = GPT2LMHeadModel(config)
    save(network, tmp_path / "gpt2", make_tokenizer(bos=False))
    loaded = load_model(tmp_path / "gpt2", "original", EvalSettings(padding=padding))
    windows = [window for window in _windows(tmp_path / "gpt2") if len(window.inputs) < 47][:3]
    assert len({len(window.inputs) for window in windows}) == 3
    together = model.predict_windows(loaded, windows)
    for window, logits_TV in zip(windows, together, strict=True):
        (alone_TV,) = model.predict_windows(loaded, [window])
        torch.testing.assert_close(logits_TV, alone_TV, atol=1e-5, rtol=1e-5)
    forward = loaded.network.forward
    loaded.network.forward = lambda position_ids=None, **inputs: forward(**inputs)
    without = model.predict_windows(loaded, windows)
    shortest = min(range(3), key=lambda i: len(windows[i].inputs))
    close = torch.allclose(without[shortest], together[shortest], atol=1e-3)
    assert close == (padding == "right"), "only padding on the left needs positions"


def test_b54_rotary_models_need_no_positions_with_padding_on_the_right(family: dict[str, Path]) -> None:
    loaded = load_model(family["original"], "original", EvalSettings(window=48, batch_size=2))
    shown: list[set[str]] = []
    loaded.network.register_forward_pre_hook(lambda module, args, inputs: shown.append(set(inputs)), with_kwargs=True)
    model.predict_windows(loaded, _windows(family["original"])[:2])
    assert shown == [{"input_ids", "attention_mask", "use_cache"}]


def _windows(folder: Path, window: int = 48) -> Any:
    return tokenize_corpus(UNLIKE, load_encoder(folder, "auto"), EvalSettings(window=window)).windows


@dataclass
class Shown:
    """What every model was shown: unpadded rows of every forward pass."""

    rows: list[list[int]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    record = Shown([])
    load = model.load_model

    def watched(*words: Any) -> Any:
        loaded = load(*words)

        def keep(module: Any, args: Any, inputs: Any) -> None:
            for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
                record.rows.append(ids[mask == 1].tolist())

        loaded.network.register_forward_pre_hook(keep, with_kwargs=True)
        return loaded

    monkeypatch.setattr(evaluate, "load_model", watched)
    yield record


LITERAL = Corpus("literal", (*DOCUMENTS, "<s>A text that brings its own mark.", "</s>"))


@pytest.mark.parametrize("batching", [{}, {"batch_size": 2}, {"batch_size": 5, "padding": "left"}, {"stride": 10}])
@pytest.mark.parametrize(
    ("original", "policy", "marked"),
    [("with_bos", "auto", True), ("original", "on", True), ("with_bos", "on", True), ("original", "auto", False)],
)
def test_b55_exactly_one_bos_in_every_path(
    family: dict[str, Path], shown: Shown, original: str, policy: Any, marked: bool, batching: dict[str, Any]
) -> None:
    settings = EvalSettings(window=24, bos=policy, **batching)
    candidates = {"served": family["near"], "restored": family["far"]}
    results = measure_drift(family[original], candidates, family["base"], [LITERAL], settings, "v", NullSink())
    assert len(shown.rows) > 4 * 5, "original, candidates, base, and the noise floor"
    for row in shown.rows:
        if marked:
            assert row[0] == 1 and row.count(1) == 1
        else:
            assert row.count(1) == (1 if row[0] == 1 else 0), "there the mark is text, and only that document has it"
    assert {result.bos for result in results} == {"<s>" if marked else "none"}


def test_b55_the_policy_is_recorded_changes_figures_and_is_never_compared(family: dict[str, Path]) -> None:
    measured = {policy: measure(family, "with_bos", bos=policy) for policy in ("auto", "on", "off")}
    assert measured["auto"] == measured["on"]
    assert measured["off"].tokens < measured["on"].tokens
    assert measured["off"].ppl_original != measured["on"].ppl_original
    policies: tuple[Any, ...] = ("auto", "on", "off")
    described = {policy: describe_settings(EvalSettings(48, bos=policy), [measured[policy]]) for policy in policies}
    assert described["auto"]["bos"] == {"v": "<s>"} and described["off"]["bos"] == {"v": "none"}
    assert comparable(described["on"], described["off"]).differences == (
        "bos_policy: 'on' and 'off'",
        "bos of variant v: '<s>' and 'none'",
    )


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with room for windows of 128."""
    root = tmp_path_factory.mktemp("wide")
    original = make_model(seed=11, positions=160)
    folders = {"original": save(original, root / "original", make_tokenizer(bos=False))}
    folders["near"] = save(perturb(original, 0.02, 1), root / "near")
    return folders


def test_b57_windows_and_strides_are_recorded_and_unlike_ones_are_not_equal(wide: dict[str, Path]) -> None:
    text = Corpus("long", (" ".join(f"line {i} of a long text" for i in range(40)),))
    found: dict[tuple[int, int | None], tuple[DriftResult, dict[str, Any]]] = {}
    for window, stride in ((64, None), (64, 32), (128, None), (128, 32)):
        how = EvalSettings(window=window, stride=stride)
        (result,) = measure_drift(wide["original"], {"served": wide["near"]}, None, [text], how, "v", NullSink())
        settings = json.loads(json.dumps(describe_settings(how, [result])))
        assert (settings["window"], settings["stride"]) == (window, stride or window)
        found[window, stride] = result, settings
    assert len({result.ppl_original for result, _ in found.values()}) == 4, "one text, one model, four perplexities"
    assert found[64, 32][0].tokens > found[64, None][0].tokens
    for a, (_, settings_a) in found.items():
        for b, (_, settings_b) in found.items():
            unlike = comparable(settings_a, settings_b)
            assert bool(unlike) == (a == b)
            named = {difference.split(":")[0] for difference in unlike.differences}
            assert ("window" in named) == (a[0] != b[0])
            assert ("stride" in named) == ((a[1] or a[0]) != (b[1] or b[0]))


ORACLE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
rows = json.load(sys.stdin)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="eager")
nll = []
with torch.no_grad():
    for inputs, targets in rows:
        log_p = model(torch.tensor([inputs])).logits[0, -len(targets):].double().log_softmax(-1)
        nll += (-log_p.gather(-1, torch.tensor(targets)[:, None])[:, 0]).tolist()
print(json.dumps(nll))
"""


def test_b62_the_original_is_not_contaminated_by_what_is_measured_beside_it(
    family: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is a process that has loaded the original and nothing else."""
    kept: list[Any] = []
    load: Callable[..., Any] = load_model

    def keep(*words: Any) -> Any:
        kept.append(load(*words))
        return kept[-1]

    monkeypatch.setattr(evaluate, "load_model", keep)
    candidates = {"served": family["near"], "restored": family["far"]}
    how = EvalSettings(window=24)
    results = [
        result
        for _ in range(2)
        for result in measure_drift(family["original"], candidates, family["base"], [UNLIKE], how, "v", NullSink())
    ]
    windows = _windows(family["original"], how.window)
    process = subprocess.run(
        [sys.executable, "-c", ORACLE, str(family["original"])],
        input=json.dumps([[window.inputs, window.targets] for window in windows]),
        capture_output=True,
        text=True,
        check=True,
    )
    expected = np.array(json.loads(process.stdout.splitlines()[-1]))
    for result in results:
        assert result.figures is not None and result.figures.base is not None
        np.testing.assert_allclose(result.figures.x.nll_original, expected, atol=1e-6)
        np.testing.assert_allclose(result.figures.base.nll_original, expected, atol=1e-6)
    fresh = load(family["original"], "original", how).network.state_dict()
    for loaded in kept:
        if loaded.role == "original":
            assert all(torch.equal(tensor, fresh[name]) for name, tensor in loaded.network.state_dict().items())
