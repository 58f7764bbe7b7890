"""The next token against transformers' own filters, and what it may depend on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_decompose.errors import UsageError
from mfs_decompose.runtime.kv import SequenceKv
from mfs_decompose.runtime.requests import Request, RunningSequence, SamplingParams, VariantInfo
from mfs_decompose.runtime.sampling import (
    NO_NUMBERS,
    choose_tokens,
    draw,
    kept_probabilities,
    penalise,
    sampling_key,
    token_logprobs,
    uniform,
)

VOCABULARY = 37


def row(seed: int, size: int = VOCABULARY) -> torch.Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def sequence(
    params: SamplingParams,
    prompt: list[int] | None = None,
    answer: list[int] | None = None,
    vocabulary: int | None = None,
) -> RunningSequence:
    prompt = prompt or [1, 2, 3]
    info = VariantInfo("v", 0, b"v", vocabulary)
    key = sampling_key(params.seed or 0)
    return RunningSequence(0, Request("v", prompt, params), info, key, SequenceKv([]), prompt + (answer or []), None)


def through_transformers(scores: torch.Tensor, params: SamplingParams, seen: list[int]) -> torch.Tensor:
    """Probabilities after transformers' processors, in fp64."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain: list[Any] = []
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(MinPLogitsWarper(params.min_p))
    out: torch.Tensor = LogitsProcessorList(chain)(torch.tensor([seen]), scores.double()[None].clone())[0]
    return out.softmax(0)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 36, 37, 99]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4, 1.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
)
def test_filters_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, repetition: float
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition
    )
    seen = [1, 4, 4, 9, 30]
    ours = kept_probabilities(penalise(row(seed).double(), params, seen, seen[3:]), params)
    torch.testing.assert_close(ours / ours.sum(), through_transformers(row(seed), params, seen), rtol=1e-9, atol=1e-12)


def test_presence_and_frequency_look_at_the_answer() -> None:
    """As OpenAI and vllm define them: mu - frequency * count - presence * (count > 0)."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25)
    scores = row(1).double()
    out = penalise(scores, params, [1, 2, 3, 5, 5, 7], [5, 5, 7])
    expected = scores.clone()
    expected[5] -= 0.5 - 0.25 * 2
    expected[7] -= 0.5 - 0.25
    torch.testing.assert_close(out, expected)
    assert torch.equal(penalise(scores, params, [1, 2, 3], []), scores)


def test_greedy_under_penalties() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 5], logits[0, 9] = 2.0, 1.5
    params = SamplingParams(repetition_penalty=4.0)
    assert choose_tokens(logits.clone(), [sequence(params, prompt=[5])])[0].token == 9
    assert choose_tokens(logits.clone(), [sequence(params, prompt=[4])])[0].token == 5
    params = SamplingParams(presence_penalty=1.0)
    assert choose_tokens(logits.clone(), [sequence(params, prompt=[5])])[0].token == 5
    assert choose_tokens(logits.clone(), [sequence(params, prompt=[4], answer=[5])])[0].token == 9


def test_frequencies_are_the_probabilities() -> None:
    """Chi square over 6,000 numbers of one stream; 36 degrees of freedom, one in a million above 100."""
    params = SamplingParams(temperature=1.4, top_k=20)
    probabilities = kept_probabilities(row(2).double(), params)
    counts = Counter(draw(row(2).double(), params, uniform(sampling_key(5), at)) for at in range(6000))
    assert set(counts) <= set(probabilities.nonzero().flatten().tolist())
    square = sum((counts[id] - 6000 * p) ** 2 / (6000 * p) for id, p in enumerate(probabilities.tolist()) if p > 0)
    assert square < 100


@pytest.mark.parametrize("at", [0.0, 0.5, 1 - 2.0**-53])
def test_a_filtered_id_is_never_drawn(at: float) -> None:
    """Not even at the ends, where the sums of probabilities do not grow."""
    scores = torch.full((VOCABULARY,), 50.0, dtype=torch.float64)
    scores[[0, 1, 35, 36]] = -50.0
    assert 2 <= draw(scores, SamplingParams(temperature=1.0, top_k=33), at) <= 34


def test_random_numbers_are_a_function_of_key_and_count() -> None:
    numbers = [uniform(sampling_key(3), at) for at in range(2000)]
    assert numbers[::-1] == [uniform(sampling_key(3), at) for at in reversed(range(2000))]
    assert len(set(numbers)) == 2000 and all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 2000 - 0.5) < 0.03
    assert numbers[0] != uniform(sampling_key(4), 0)
    assert [round(number, 12) for number in numbers[:3]] == GOLDEN


GOLDEN = [0.956445480064, 0.703059477591, 0.709899978808]
"""Answers to a seed stay the same from version to version."""


def test_neighbours_and_their_order_change_nothing() -> None:
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, seed=1, logprobs=2),
        SamplingParams(temperature=2.0, seed=9, repetition_penalty=1.2),
    ]
    logits = torch.stack([row(at) for at in range(4)])
    sequences = [sequence(p) for p in params]
    together = choose_tokens(logits.clone(), sequences)
    for order in ([3, 1, 0, 2], [2], [0, 3]):
        again = choose_tokens(logits[order].clone(), [sequences[at] for at in order])
        assert again == [together[at] for at in order]


def test_ids_that_a_variant_does_not_have_are_never_chosen() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 30:] = 40.0
    greedy = sequence(SamplingParams(logprobs=40), vocabulary=30)
    drawn = sequence(SamplingParams(temperature=5.0), vocabulary=30)
    more = sequence(SamplingParams(), vocabulary=31)
    choices = choose_tokens(logits, [greedy, drawn, more])
    assert choices[0].token is not None and choices[0].token < 30
    assert choices[1].token is not None and choices[1].token < 30
    assert choices[2].token == 30
    assert choices[0].logprobs is not None
    assert choices[0].logprobs.chosen == pytest.approx(-torch.tensor(30.0).log().item())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_fail_one_request(value: float) -> None:
    logits = torch.stack([row(1), row(2)])
    logits[0] = value
    choices = choose_tokens(logits, [sequence(SamplingParams()), sequence(SamplingParams())])
    assert choices[0].token is None and choices[0].error == NO_NUMBERS
    assert choices[1].token == int(row(2).argmax())


def test_logprobs_are_of_the_plain_logits() -> None:
    logs = row(4).double().log_softmax(0)
    best = logs.sort(descending=True)
    found = token_logprobs(row(4), 7, 3)
    assert found.chosen == pytest.approx(float(logs[7]))
    assert [id for id, _ in found.best] == best.indices[:3].tolist()
    assert [log for _, log in found.best] == pytest.approx(best.values[:3].tolist())
    hot = SamplingParams(temperature=3.0, top_k=2, repetition_penalty=1.5, logprobs=0)
    choice = choose_tokens(row(4)[None].clone(), [sequence(hot)])[0]
    assert choice.token is not None and choice.logprobs is not None
    assert choice.logprobs.chosen == pytest.approx(float(logs[choice.token])) and choice.logprobs.best == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("stop", "text"),
        ("stop", ("",)),
        ("logprobs", 101),
    ],
)
def test_a_wrong_parameter_is_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}: expected"):
        SamplingParams(**{name: value})
