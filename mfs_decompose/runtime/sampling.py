"""The next token of each request, from its own logits, parameters and random numbers, and nothing of its neighbours.

Filters are those of transformers, in its order: penalties, temperature, top_k, top_p, min_p. The random number of
token i under a key is a pure function of both (linalg.seeds), so an answer is the same whatever ran beside it, and
after it was put off and computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mfs_decompose.linalg.seeds import random_bits16, stream_key
from mfs_decompose.runtime.requests import RunningSequence, SamplingParams, TokenLogprobs

NO_NUMBERS = "the model gave no finite logits for this request"


class Choice(NamedTuple):
    """`token` is None where there is no sound one; `error` says why."""

    token: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def sampling_key(seed: int) -> int:
    return stream_key(seed, "sampling", "")


def choose_tokens(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> list[Choice]:
    """One choice for each row of logits [n, vocabulary]; ids that a variant does not have are set to -inf in place."""
    with torch.inference_mode():
        for row, sequence in zip(logits, sequences, strict=True):
            if sequence.info.vocabulary is not None:
                row[sequence.info.vocabulary :] = float("-inf")
        values, ids = logits.max(dim=1)
        greedy = list(zip(torch.isfinite(values).tolist(), ids.tolist(), strict=True))
        choices = []
        for row, sequence, (sound, best) in zip(logits, sequences, greedy, strict=True):
            try:
                choices.append(_choose(row, sequence, best) if sound else Choice(None, error=NO_NUMBERS))
            except (ValueError, IndexError, RuntimeError) as error:
                choices.append(Choice(None, error=str(error)))
        return choices


def _choose(row: torch.Tensor, sequence: RunningSequence, best: int) -> Choice:
    params = sequence.request.params
    if params.greedy and not params.penalised:
        token = best
    else:
        answer = sequence.answer
        scores = penalise(row.double(), params, sequence.tokens, answer)
        token = int(scores.argmax()) if params.greedy else draw(scores, params, uniform(sequence.key, len(answer)))
    return Choice(token, None if params.logprobs is None else token_logprobs(row, token, params.logprobs))


def penalise(scores: torch.Tensor, params: SamplingParams, seen: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Scores [vocabulary] after the penalties; `seen` is prompt and answer."""
    if not params.penalised:
        return scores
    scores = scores.clone()
    if params.repetition_penalty != 1:
        ids = torch.tensor(sorted(set(seen)), device=scores.device)
        old = scores[ids]
        scores[ids] = torch.where(old < 0, old * params.repetition_penalty, old / params.repetition_penalty)
    if answer and (params.presence_penalty or params.frequency_penalty):
        often = Counter(answer)
        ids = torch.tensor(list(often), device=scores.device)
        counts = torch.tensor(list(often.values()), device=scores.device, dtype=scores.dtype)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * counts
    return scores


def kept_probabilities(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [vocabulary] of scores in fp64 after temperature and filters; what is filtered out is 0."""
    scores = scores / params.temperature
    if 0 < params.top_k < scores.shape[0]:
        least = scores.topk(params.top_k).values[-1]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if params.top_p < 1:
        order = scores.sort(descending=False, stable=True)
        below = order.values.softmax(0).cumsum(0)
        out = below <= 1 - params.top_p
        out[-1] = False
        scores = scores.masked_fill(torch.zeros_like(out).scatter(0, order.indices, out), float("-inf"))
    probabilities = scores.softmax(0)
    if params.min_p > 0:
        probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0)
    return probabilities


def draw(scores: torch.Tensor, params: SamplingParams, at: float) -> int:
    """The id in whose share of the kept probabilities, laid side by side in the order of ids, `at` in [0, 1) falls.

    In the order of ids, not of probabilities: two nearly equal ones may swap places by rounding.
    """
    sums = kept_probabilities(scores, params).cumsum(0)
    return int(torch.searchsorted(sums, sums[-1] * at, right=True).clamp(max=int((sums < sums[-1]).sum())))


def uniform(key: int, count: int) -> float:
    """Number `count` of the stream under `key`, in [0, 1), with 53 bits."""
    lanes = random_bits16(key, 4 * count, 4).tolist()
    return float(sum(lane << 16 * at for at, lane in enumerate(lanes)) >> 11) * 2.0**-53


def token_logprobs(row: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Of logits [vocabulary], before anything but the ids that are not there."""
    logs = row.double().log_softmax(0)
    best = logs.topk(min(count, logs.shape[0]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprobs(float(logs[token]), tuple(pairs))
