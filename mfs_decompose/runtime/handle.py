"""What `submit` gives back."""

from __future__ import annotations

from collections.abc import Callable

from mfs_decompose.runtime.requests import FinishReason, Request, RunningSequence, TokenLogprobs


class Handle:
    """One submitted request: what is there of its answer, at any time, from any thread."""

    def __init__(self, sequence: RunningSequence, cancel: Callable[[RunningSequence], None]) -> None:
        self._sequence = sequence
        self._cancel = cancel

    @property
    def request(self) -> Request:
        return self._sequence.request

    @property
    def tokens(self) -> list[int]:
        """The answer so far, a stop id included."""
        return self._sequence.answer

    @property
    def text(self) -> str:
        """The answer so far as text, stop ids and stop texts left out; empty without `detokenize`."""
        stream = self._sequence.stream
        return "" if stream is None else stream.text

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return self._sequence.logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._sequence.finish_reason

    @property
    def stopped_by(self) -> int | str | None:
        """The stop id or stop text that ended the answer."""
        return self._sequence.stopped_by

    @property
    def error(self) -> str | None:
        return self._sequence.error

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys were found instead of computed."""
        return self._sequence.cached

    @property
    def done(self) -> bool:
        return self._sequence.done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, in another thread than the engine's, until the answer has ended."""
        return self._sequence.done.wait(timeout)

    def cancel(self) -> None:
        """End the request now, or after the step that runs; its blocks are free then."""
        self._cancel(self._sequence)
