"""A family that answers: text or chat in, text out, for any variant, in one batch.

family = Family.load("art")
answers = family.generate([("math", "2 + 2 ="), ("base", "Once upon a time")], SamplingParams(max_tokens=8))
print(answers[0].text)
with family.use("math") as model:
    logits = model(input_ids=ids).logits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from mfs_decompose.errors import ArtifactInvalid, UsageError
from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.handle import Handle
from mfs_decompose.runtime.loaded import LoadedFamily
from mfs_decompose.runtime.memory import Memory
from mfs_decompose.runtime.open_engine import open_engine
from mfs_decompose.runtime.requests import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from mfs_decompose.runtime.scheduler import Limits
from mfs_decompose.runtime.stats import EngineStats

Content = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""What is asked: text, token ids, or the messages of a chat."""


@dataclass(frozen=True)
class Prompt:
    """One question to one variant.

    Attributes:
        content: text, which its tokenizer encodes with the special tokens it puts around text; token ids, taken as
            they are; or messages such as `{"role": "user", "content": "..."}`, which its chat template lays out.
        params: how its tokens are chosen; None: as `generate` says.
        on_token: called once a token.
    """

    variant: str
    content: Content
    params: SamplingParams | None = None
    on_token: Callable[[TokenEvent], None] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Answer:
    """What a variant answered.

    Attributes:
        text: without stop ids and stop texts; empty where the variant has no tokenizer.
        tokens: a stop id included.
        stopped_by: the stop id or text that ended it.
        error: why it failed, where `finish_reason` is `error`.
        cached_tokens: tokens of the prompt whose keys were found instead of computed.
    """

    variant: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    stopped_by: int | str | None
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()


class ServedFamily:
    """A loaded family and its engine.

    Any thread may call; calls of `generate` take turns, and so does what runs inside `use`.

    Attributes:
        loaded: the model, the variants, and where their deltas are.
    """

    def __init__(self, loaded: LoadedFamily, *, limits: Limits | None = None, kv_tokens: int = 16384) -> None:
        """
        Args:
            limits: of one step of the engine.
            kv_tokens: room for keys and values, in tokens, over all that runs at a time; taken at the first `generate`.
        """
        self.loaded = loaded
        self._limits, self._kv_tokens = limits, kv_tokens
        self._engine: Engine | None = None
        self._tokenizers: dict[str, Any] = {}

    @property
    def model(self) -> Any:
        """The transformers model; it answers inside `use` only."""
        return self.loaded.model

    @property
    def ids(self) -> tuple[str, ...]:
        """`base` and the variants."""
        return tuple(self.loaded.variants)

    @property
    def engine(self) -> Engine:
        """The engine, made when it is first asked for.

        Raises:
            SourceIncompatible: the model's attention cannot be packed; `use` works all the same.
            ResourceShortage: no memory for keys and values.
        """
        with self.loaded.slot.alone():
            if self._engine is None:
                self._engine = open_engine(self.loaded, limits=self._limits, kv_tokens=self._kv_tokens)
            return self._engine

    def use(self, id: str) -> AbstractContextManager[Any]:
        """Calls of the model, which is given, answer as this variant inside, in any shape; other threads wait.

        Raises:
            UsageError: no such variant is loaded.
            NotReady: it cannot be brought to the device.
        """
        return self.loaded.use(id)

    def tokenizer(self, id: str) -> Any:
        """The tokenizer of a variant, loaded once.

        Raises:
            UsageError: no such variant is loaded.
            ArtifactInvalid: transformers cannot make one of its files.
        """
        if id not in self._tokenizers:
            variant = self.loaded.variant(id)
            try:
                self._tokenizers[id] = variant.load_tokenizer()
            except Exception as error:  # of several libraries
                raise ArtifactInvalid(
                    f"cannot load the tokenizer of {id!r}: {str(error).strip().splitlines()[0]}",
                    hint="pass token ids instead of text",
                ) from error
        return self._tokenizers[id]

    def encode(self, id: str, content: Content) -> list[int]:
        """The token ids that a variant is given.

        Raises:
            UsageError: no such variant, or messages to one without a chat template.
            ArtifactInvalid: it has no tokenizer that can be loaded.
        """
        if isinstance(content, str):
            return list(self.tokenizer(id).encode(content))
        if not content or isinstance(content[0], int):
            return [_token(value) for value in content]
        tokenizer = self.tokenizer(id)
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                f"expected a chat template of {id!r} for messages, found none", hint="pass the prompt as text"
            )
        try:
            text = tokenizer.apply_chat_template(list(content), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # the template's own complaints
            raise UsageError(
                f"the chat template of {id!r} refuses these messages: {error}", hint="give each a role and a content"
            ) from error
        return list(tokenizer.encode(text, add_special_tokens=False))

    def request(self, prompt: Prompt | tuple[str, Content], params: SamplingParams | None = None) -> Request:
        """A prompt as the engine takes it.  Raises as `encode` does."""
        asked = prompt if isinstance(prompt, Prompt) else Prompt(*prompt)
        ids = self.encode(asked.variant, asked.content)
        return Request(
            asked.variant, ids, asked.params or params or SamplingParams(), asked.on_token, self._decoder(asked.variant)
        )

    def generate(
        self, prompts: Iterable[Prompt | tuple[str, Content]], params: SamplingParams | None = None
    ) -> list[Answer]:
        """Answer many prompts, each for its own variant, in one batch; the answers come in the order of the prompts.

        Args:
            prompts: of `Prompt`, or pairs of a variant and what it is asked.
            params: of prompts that bring none; greedy and 16 tokens by default.

        Raises:
            UsageError, ArtifactInvalid: a prompt cannot be encoded, or is not one for its variant; none runs then.
            UsageError: called inside `use`, where a step of another thread would wait for the model, and this for it.
        """
        if self.loaded.slot.is_inside:
            raise UsageError(
                "expected generate outside of `use`, found it inside", hint="name the variant in each prompt instead"
            )
        requests = [self.request(prompt, params) for prompt in prompts]
        return [_answer(handle) for handle in self.engine.generate(requests)]

    def memory(self) -> Memory:
        """Tensor bytes by part; keys and values are in `stats`."""
        return self.loaded.memory()

    def stats(self) -> EngineStats:
        """What the engine has done; `tiers` says where deltas are, and what moving them took."""
        return self.engine.stats()

    def _decoder(self, id: str) -> Callable[[Sequence[int]], str] | None:
        """None where the variant has no tokenizer: its answers are token ids then."""
        try:
            tokenizer = self.tokenizer(id)
        except ArtifactInvalid:
            return None
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _token(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | torch.Tensor):
        raise UsageError(f"expected token ids, found {value!r}", hint="pass text, a list of ids, or chat messages")
    return int(value)


def _answer(handle: Handle) -> Answer:
    return Answer(
        handle.request.variant,
        handle.text,
        tuple(handle.tokens),
        handle.finish_reason,
        handle.stopped_by,
        handle.error,
        len(handle.request.prompt),
        handle.cached_tokens,
        tuple(handle.logprobs),
    )
