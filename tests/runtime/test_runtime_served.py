"""The Python API of a family that answers: text, ids and chat in, text out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import fine_tune, make_llama
from engine_family import greedy_alone, ties
from runtime_families import Stored, alone, check_logits, store
from transformers import AutoTokenizer

from mfs_decompose import Family
from mfs_decompose.errors import ArtifactInvalid, UsageError
from mfs_decompose.runtime.requests import SamplingParams, TokenEvent
from mfs_decompose.runtime.served import Answer, Prompt, ServedFamily
from mfs_decompose.runtime.tiers import TierLimits

SHORT = SamplingParams(max_tokens=5, ignore_stop_ids=True)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    root = tmp_path_factory.mktemp("served")
    base = make_llama(root / "base", seed=41)
    return store(root, base, {"code": fine_tune(base, root / "code", seed=42), "math": _math(base, root / "math")})


def _math(base: Path, folder: Path) -> Path:
    return fine_tune(base, folder, seed=43, kind="vocab")


@pytest.fixture(scope="module")
def family(stored: Stored) -> ServedFamily:
    return Family.load(stored.artifact, kv_tokens=512)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_text_ids_and_chat_are_encoded_as_the_variants_own_tokenizer_does(family: ServedFamily, stored: Stored) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stored.variants["math"])
    text, messages = "2 + 2 =<|extra_1|>", [{"role": "user", "content": "How many?"}]
    assert family.encode("math", text) == tokenizer.encode(text)
    assert family.encode("code", text) != tokenizer.encode(text)  # it has no such token
    assert family.encode("math", [5, 7]) == [5, 7]
    said = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert family.encode("math", messages) == tokenizer.encode(said, add_special_tokens=False)


def test_a_mixed_batch_answers_each_prompt_for_its_variant(family: ServedFamily, stored: Stored) -> None:
    chat = [{"role": "user", "content": "Say it."}]
    prompts: list[Prompt | tuple[str, object]] = [
        ("math", "2 + 2 ="),
        Prompt("code", "def f(x):", SamplingParams(max_tokens=3, ignore_stop_ids=True, logprobs=2)),
        Prompt("base", [9, 8, 7]),
        ("math", chat),
    ]
    answers = family.generate(prompts, SHORT)  # type: ignore[arg-type]
    assert [answer.variant for answer in answers] == ["math", "code", "base", "math"]
    assert [len(answer.tokens) for answer in answers] == [5, 3, 5, 5]
    assert all(answer.finish_reason == "length" and answer.error is None for answer in answers)
    assert [len(answer.logprobs) for answer in answers] == [0, 3, 0, 0]
    for answer, prompt in zip(answers, prompts, strict=True):
        content = prompt.content if isinstance(prompt, Prompt) else prompt[1]
        ids = family.encode(answer.variant, content)  # type: ignore[arg-type]
        assert answer.prompt_tokens == len(ids)
        model = stored.restored(answer.variant)
        with torch.inference_mode():
            ties(model, ids, greedy_alone(model, ids, len(answer.tokens)), list(answer.tokens))
        tokenizer = AutoTokenizer.from_pretrained(stored.variants.get(answer.variant, stored.base))
        assert answer.text == tokenizer.decode(list(answer.tokens), skip_special_tokens=True)


def test_sampling_has_a_seed_and_tokens_can_be_streamed(family: ServedFamily) -> None:
    seen: list[TokenEvent] = []
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=5, ignore_stop_ids=True)
    first, second = family.generate(
        [Prompt("code", "x", params, seen.append), Prompt("code", "x", params)], SamplingParams(max_tokens=1)
    )
    assert first == second and [event.token for event in seen] == list(first.tokens)
    assert "".join(event.text for event in seen) == first.text


def test_use_gives_the_model(family: ServedFamily, stored: Stored) -> None:
    for id in family.ids:
        with family.use(id) as model, torch.inference_mode():
            assert model is family.model
            check_logits(model(input_ids=torch.tensor([[4, 5, 6]])).logits[0], alone(stored.restored(id), [4, 5, 6]))
    with pytest.raises(UsageError, match="expected a variant for every row"):
        family.model(input_ids=torch.tensor([[4]]))


def test_mistakes_are_named_and_nothing_runs(family: ServedFamily) -> None:
    steps = family.stats().steps
    with pytest.raises(UsageError, match="expected a loaded variant, found 'maths'"):
        family.generate([("math", "x"), ("maths", "x")])
    with pytest.raises(UsageError, match="expected a loaded variant"):
        family.use("maths")
    with pytest.raises(UsageError, match="expected a prompt of at least one token"):
        family.generate([("math", [])])
    with pytest.raises(UsageError, match="expected token ids, found"):
        family.generate([("math", [1, "2"])])  # type: ignore[list-item]
    with family.use("math"), pytest.raises(UsageError, match="outside of `use`"):
        family.generate([("math", [3])])
    assert family.stats().steps == steps


def test_a_variant_without_a_tokenizer_answers_in_ids(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family.load(stored.artifact, variants=["code"], kv_tokens=128)
    monkeypatch.setattr(type(family.loaded.variant("code")), "load_tokenizer", _none)
    (answer,) = family.generate([("code", [3, 4])], SHORT)
    assert answer.text == "" and len(answer.tokens) == 5
    with pytest.raises(ArtifactInvalid, match="cannot load the tokenizer of 'code': there is none") as caught:
        family.generate([("code", "text")])
    assert caught.value.hint == "pass token ids instead of text"


def _none(self: object) -> None:
    raise OSError("there is none\nand more")


def test_messages_need_a_template(family: ServedFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family.tokenizer("math"), "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="'math' refuses these messages: roles must alternate"):
        family.encode("math", [{"role": "user", "content": "x"}])
    monkeypatch.setattr(family.tokenizer("code"), "chat_template", None)
    with pytest.raises(UsageError, match="expected a chat template of 'code'"):
        family.encode("code", [{"role": "user", "content": "x"}])


def test_tiers_and_memory_are_in_reach(stored: Stored) -> None:
    family = Family.load(stored.artifact, kv_tokens=128, tiers=TierLimits(pinned=("math",)))
    assert family.stats().tiers is not None and family.stats().tiers.device[0] == "math"
    assert family.memory().variants.keys() == {"code", "math"}
    assert isinstance(family.generate([("math", "x")], SHORT)[0], Answer)


def test_an_artifact_is_still_opened_by_the_same_name(stored: Stored) -> None:
    with Family.open(stored.artifact) as opened:
        assert isinstance(opened, Family) and opened.variant_ids == ("code", "math")
