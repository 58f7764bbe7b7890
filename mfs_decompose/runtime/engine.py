"""The engine: requests for any variant in, one packed step of all of them at a time, answers out.

    engine = Engine(model, slot, [VariantInfo("base", BASE, b"...")])
    handle = engine.submit(Request("base", [1, 2, 3]))
    engine.run_until_done()
    handle.tokens

`submit` and `cancel` may be called from any thread, `step` from one at a time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from mfs_decompose.errors import UsageError
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.runtime.attention import PackedModel
from mfs_decompose.runtime.batch_plan import BASE, PlanSlot
from mfs_decompose.runtime.forward import forward, refuse_without_logits_to_keep
from mfs_decompose.runtime.handle import Handle
from mfs_decompose.runtime.kv import KvCache
from mfs_decompose.runtime.probe import check_packing, probe_layers
from mfs_decompose.runtime.requests import (
    FinishReason,
    Request,
    RunningSequence,
    TokenEvent,
    VariantInfo,
)
from mfs_decompose.runtime.sampling import Choice, choose_tokens, sampling_key
from mfs_decompose.runtime.scheduler import Limits, Scheduled, Scheduler
from mfs_decompose.runtime.stats import Counts, EngineStats
from mfs_decompose.runtime.stopping import TextStream
from mfs_decompose.runtime.tiers import NotReady, Tiers


class Engine:
    """Continuous batching over the variants of one resident model.

    Args:
        model: a causal language model of transformers, its modules swapped or not.
        slot: where those modules look up the rows' variants.
        variants: what can be asked for, the base among them if it may be.
        kv_tokens: room for keys and values, in tokens.
        share_prefixes: compute the common beginning of prompts for one variant once.
        seed: of requests that bring none.
        check: compare one packed call with the model alone first.
        tiers: where the deltas of the variants are, if not all of them are on the device at all times.

    Raises:
        SourceIncompatible: the model's attention cannot be packed.
    """

    def __init__(
        self,
        model: Any,
        slot: PlanSlot,
        variants: Iterable[VariantInfo],
        *,
        limits: Limits | None = None,
        kv_tokens: int = 16384,
        block_size: int = 16,
        share_prefixes: bool = True,
        seed: int = 0,
        check: bool = True,
        tiers: Tiers[Any] | None = None,
    ) -> None:
        limits = limits or Limits()
        refuse_without_logits_to_keep(model)
        self._packed = PackedModel(model)
        self._slot = slot
        shapes = probe_layers(self._packed, slot)
        if check:
            check_packing(self._packed, slot, shapes)
        self.kv = KvCache(
            shapes,
            tokens=kv_tokens,
            block_size=block_size,
            sequences=limits.sequences,
            chunk=limits.tokens,
            share_prefixes=share_prefixes,
        )
        text_config = model.config.get_text_config(decoder=True)
        self._context: int | None = getattr(text_config, "max_position_embeddings", None)
        self._vocabulary: int = text_config.vocab_size
        self._variants = {info.id: info for info in variants}
        self._tiers = tiers
        self._scheduler = Scheduler(self.kv, limits, tiers)
        self._counts = Counts()
        self._seed = seed
        self._arrivals = 0
        self._inbox: deque[RunningSequence] = deque()
        self._cancelled: deque[RunningSequence] = deque()
        self._arriving = threading.Lock()
        self._turn = threading.RLock()
        self._inside = False

    @property
    def variants(self) -> dict[str, VariantInfo]:
        return dict(self._variants)

    def set_variant(self, info: VariantInfo) -> None:
        """Add a variant, or put another in its place: its digest decides whether old prefixes are its own.

        Raises:
            UsageError: requests of the one that is there have not ended.
        """
        with self._turn:
            self._refuse_busy(info.id)
            self._variants[info.id] = info

    def remove_variant(self, id: str) -> None:
        """Raises UsageError where its requests have not ended, or there is none."""
        with self._turn:
            self._refuse_busy(id)
            if self._variants.pop(id, None) is None:
                raise self._unknown(id)

    def submit(self, request: Request) -> Handle:
        """Queue a request.

        Raises:
            UsageError: a variant that is not there, ids that it does not have, or more tokens than fit.
        """
        info = self._variants.get(request.variant)
        if info is None:
            raise self._unknown(request.variant)
        self._check(request, info)
        stream = None if request.detokenize is None else TextStream(request.detokenize, request.params.stop)
        with self._arriving:
            number = self._arrivals
            self._arrivals += 1
        seed = request.params.seed
        key = stream_key(self._seed, "request", str(number)) if seed is None else sampling_key(seed)
        sequence = RunningSequence(number, request, info, key, self.kv.open(), [*request.prompt], stream)
        self._inbox.append(sequence)
        return Handle(sequence, self._cancel)

    def step(self) -> bool:
        """Compute one packed step; False where nothing was left to do."""
        with self._turn:
            started = time.perf_counter()
            self._inside = True
            try:
                scheduled = self._schedule()
                if not scheduled:
                    return False
                self._run(scheduled)
                self._tidy()
            finally:
                self._inside = False
            self._counts.seconds += time.perf_counter() - started
            return True

    def run_until_done(self) -> None:
        while self.step():
            pass

    def generate(self, requests: Iterable[Request]) -> list[Handle]:
        """Submit, run until all are done, and give the answers in the order of the requests.

        Raises what `submit` raises, and then none of them runs.
        """
        handles: list[Handle] = []
        try:
            for request in requests:
                handles.append(self.submit(request))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        self.run_until_done()
        return handles

    def forget_prefixes(self) -> None:
        """Give up every block that only waits to be found again."""
        with self._turn:
            for group in self.kv.groups:
                group.pool.forget()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return self._counts.snapshot(
            self.kv,
            waiting=len(scheduler.waiting) + len(self._inbox),
            running=len(scheduler.running),
            preemptions=scheduler.preemptions,
            tiers=None if self._tiers is None else self._tiers.stats(),
        )

    def _schedule(self) -> list[Scheduled]:
        """The next step; empty where nothing is left to do."""
        scheduler = self._scheduler
        tries = 0
        while True:
            self._tidy()
            try:
                found = scheduler.schedule()
            except NotReady as error:
                for sequence in [*scheduler.running, *scheduler.waiting]:
                    if sequence.info.id == error.id:
                        self._fail(sequence, error.message)
                continue
            # A step may come out empty where all it was for gave way to older ones: those are next.
            tries += 1
            if found or tries > len(scheduler.running) + len(scheduler.waiting):
                return found

    def _run(self, scheduled: list[Scheduled]) -> None:
        self._counts.steps += 1
        slots = {sequence.info.slot for sequence, _ in scheduled}
        self._counts.variants_per_step[len(slots - {BASE})] += 1
        try:
            logits = forward(self._packed, self._slot, self.kv, scheduled)
        except Exception as error:
            self._isolate(scheduled, error)
            return
        ended = [sequence for sequence, count in scheduled if count == sequence.remaining]
        for sequence, count in scheduled:
            if sequence.remaining > 1 or not sequence.answer:
                self._counts.prompt_tokens += count
            sequence.computed += count
            self.kv.publish(sequence.kv, sequence.info.digest, sequence.tokens, sequence.computed)
        for sequence, choice in zip(ended, choose_tokens(logits, ended), strict=True) if ended else ():
            self._accept(sequence, choice)

    def _isolate(self, scheduled: list[Scheduled], error: Exception) -> None:
        """A call failed: halves of it are tried, so that only the sequence it fails with ends."""
        if len(scheduled) == 1:
            self._fail(scheduled[0].sequence, str(error) or type(error).__name__)
            return
        half = len(scheduled) // 2
        for part in (scheduled[:half], scheduled[half:]):
            self._run(part)

    def _accept(self, sequence: RunningSequence, choice: Choice) -> None:
        if choice.token is None:
            self._fail(sequence, choice.error or "")
            return
        sequence.tokens.append(choice.token)
        if choice.logprobs is not None:
            sequence.logprobs.append(choice.logprobs)
        self._counts.generated_tokens += 1
        try:
            reason, text = self._advance(sequence, choice.token)
            if sequence.request.on_token is not None:
                sequence.request.on_token(TokenEvent(choice.token, text, choice.logprobs, reason))
        except Exception as error:  # of this request's callbacks
            self._end(sequence, "error", str(error) or type(error).__name__)
            return
        if reason is not None:
            self._end(sequence, reason)

    def _advance(self, sequence: RunningSequence, token: int) -> tuple[FinishReason | None, str]:
        """Why the answer ends with this token, if it does, and the text that became certain."""
        params, stream = sequence.request.params, sequence.stream
        if not params.ignore_stop_ids and (token in sequence.info.stop_ids or token in params.stop_ids):
            sequence.stopped_by = token
            return "stop", "" if stream is None else stream.finish()
        text = ""
        if stream is not None:
            text, sequence.stopped_by = stream.push(token)
            if sequence.stopped_by is not None:
                return "stop", text
        if len(sequence.answer) >= params.max_tokens or len(sequence.tokens) == self._context:
            return "length", text if stream is None else text + stream.finish()
        return None, text

    def _fail(self, sequence: RunningSequence, error: str) -> None:
        """End a request for a fault that is not its callbacks', and tell them."""
        self._end(sequence, "error", error)
        if sequence.request.on_token is not None:
            with suppress(Exception):
                sequence.request.on_token(TokenEvent(None, "", None, "error"))

    def _end(self, sequence: RunningSequence, reason: FinishReason, error: str | None = None) -> None:
        self._scheduler.remove(sequence)
        sequence.finish_reason = reason
        sequence.error = error
        self._counts.cached_tokens += sequence.cached
        self._counts.failed += reason == "error"
        self._counts.cancelled += reason == "cancelled"
        self._counts.finished += reason in ("stop", "length")
        sequence.done.set()

    def _tidy(self) -> None:
        """Take in what was submitted and let go of what was cancelled meanwhile."""
        while self._inbox:
            self._scheduler.add(self._inbox.popleft())
        while self._cancelled:
            sequence = self._cancelled.popleft()
            if not sequence.done.is_set():
                self._end(sequence, "cancelled")

    def _cancel(self, sequence: RunningSequence) -> None:
        self._cancelled.append(sequence)
        if self._turn.acquire(blocking=False):
            try:
                if not self._inside:  # else a callback of the running step, which tidies up at its end
                    self._tidy()
            finally:
                self._turn.release()

    def _check(self, request: Request, info: VariantInfo) -> None:
        prompt, params = request.prompt, request.params
        if not prompt:
            raise UsageError("expected a prompt of at least one token, found none", hint="begin with the BOS token")
        vocabulary = self._vocabulary if info.vocabulary is None else info.vocabulary
        wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise UsageError(
                f"expected token ids of {info.id} in 0..{vocabulary - 1}, found {wrong}",
                hint="encode the prompt with the tokenizer of the variant",
            )
        if self._context is not None and len(prompt) >= self._context:
            raise UsageError(
                f"expected a prompt shorter than the context of {self._context} tokens, found {len(prompt)}",
                hint="cut the prompt",
            )
        if params.stop and request.detokenize is None:
            raise UsageError(
                "expected a detokenize beside stop texts, found none", hint="give the request its tokenizer's decode"
            )
        tokens = len(prompt) + params.max_tokens
        self.kv.check_fits(tokens if self._context is None else min(tokens, self._context))

    def _refuse_busy(self, id: str) -> None:
        everywhere: Sequence[RunningSequence] = [*self._scheduler.waiting, *self._scheduler.running, *self._inbox]
        busy = sum(sequence.info.id == id for sequence in everywhere)
        if busy:
            raise UsageError(
                f"expected no unfinished request of {id}, found {busy}", hint="cancel them, or wait until they end"
            )

    def _unknown(self, id: str) -> UsageError:
        return UsageError(
            f"expected one of {', '.join(sorted(self._variants)) or 'no variants'}, found {id!r}",
            hint="`mfs inspect ART` lists the variants",
        )
