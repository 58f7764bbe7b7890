"""What is asked of the engine, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mfs_decompose.errors import UsageError

if TYPE_CHECKING:
    from mfs_decompose.runtime.kv import SequenceKv
    from mfs_decompose.runtime.stopping import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]
MOST_LOGPROBS = 100


@dataclass(frozen=True)
class VariantInfo:
    """One variant, or the base, as the engine sees it.

    Attributes:
        slot: its number in a BatchPlan, BASE for the base.
        digest: of everything that decides its keys and values: base weights and deltas. Prefixes are shared only
            under one digest, so weights loaded anew under an old id must bring a new one.
        vocabulary: how many ids it has; logits behind them are never looked at.  None: as many as the model gives.
        stop_ids: ids that end its answers.
    """

    id: str
    slot: int
    digest: bytes
    vocabulary: int | None = None
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen; the default is greedy.

    Attributes:
        temperature: 0 is greedy; then the filters and the seed have no effect.
        top_k, top_p, min_p: as in transformers, in this order, after the temperature; 0, 1 and 0 switch them off.
        repetition_penalty: over prompt and answer (Keskar et al. 2019).
        presence_penalty, frequency_penalty: over the answer, subtracted once and once an occurrence.
        seed: the answer is a function of prompt, parameters and seed, whatever else runs.  None: the engine draws one.
        stop: texts that end the answer, cut from it; they need a `detokenize`.
        stop_ids: beside those of the variant.  `ignore_stop_ids` switches all of them off.
        logprobs: report the chosen token's log probability and those of so many best, before temperature, penalties
            and filters.  None: nothing.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_stop_ids: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _expect("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _expect("temperature", self.temperature, 0 <= self.temperature < float("inf"), "a number from 0")
        _expect("top_k", self.top_k, self.top_k >= 0, "a number from 0, 0 for all")
        _expect("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _expect("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1")
        repetition = self.repetition_penalty
        _expect("repetition_penalty", repetition, 0 < repetition < float("inf"), "a number above 0, 1 for none")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _expect(name, value, abs(value) < float("inf"), "a finite number")
        _expect("stop", self.stop, not isinstance(self.stop, str) and all(self.stop), "texts that are not empty")
        most = self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS
        _expect("logprobs", self.logprobs, most, f"between 0 and {MOST_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _expect(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise UsageError(f"{name}: expected {expected}, found {value!r}", hint=f"correct {name} of the request")


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities: of the chosen token, and of the best ones, most probable first."""

    chosen: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenEvent:
    """One step of one answer: what a streaming callback gets.

    `token` is None in the last event of a request that failed.  `text` is what is certain to belong to the answer,
    without half characters and a possible beginning of a stop text; empty where the request has no `detokenize`.
    """

    token: int | None
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Request:
    """One prompt for one variant.

    Attributes:
        variant: the id of a VariantInfo.
        prompt: token ids, at least one.
        on_token: called in the engine's thread once a token, and not for a cancel; what it raises ends this request
            and no other.
        detokenize: token ids to text, with the variant's own tokenizer, special tokens skipped.
    """

    variant: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    on_token: Callable[[TokenEvent], None] | None = None
    detokenize: Callable[[Sequence[int]], str] | None = None


@dataclass(eq=False)
class RunningSequence:
    """The state of one request inside the engine; `tokens` are prompt and answer, the first `computed` have keys.

    `number` counts arrivals: the youngest gives way first.  `queued` and `served` are scheduler steps.
    """

    number: int
    request: Request
    info: VariantInfo
    key: int
    kv: SequenceKv
    tokens: list[int]
    stream: TextStream | None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    queued: int = 0
    served: int = 0
    made_way: bool = False
    finish_reason: FinishReason | None = None
    stopped_by: int | str | None = None
    error: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens without keys yet; 1 while the answer grows."""
        return len(self.tokens) - self.computed
