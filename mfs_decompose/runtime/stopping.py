"""The text of an answer as it grows: only what is certain, so that the pieces of a stream add up to the whole.

Two things are held back: bytes that are not a whole character yet, and the beginning of what may become a stop text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\ufffd"


class TextStream:
    """Turns tokens into text piece by piece.

    Args:
        detokenize: token ids to text.
        stops: texts that end the answer and do not belong to it.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._detokenize = detokenize
        self._stops = stops
        self._tokens: list[int] = []
        # Text is cut as the difference of two decodings that begin at one token, a little back: what a tokenizer does
        # at the very beginning, such as dropping a space, falls out of the difference.
        self._from = self._read = 0
        self._held = ""
        self.text = ""

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that became certain, and the stop text that was found."""
        self._tokens.append(token)
        new = self._undecoded()
        if not new or new.endswith(_HALF):
            return "", None
        self._from, self._read = self._read, len(self._tokens)
        return self._append(new)

    def finish(self) -> str:
        """What was held back, half characters as U+FFFD; to be called once, when no stop text was found."""
        new = self._undecoded()
        self._read = len(self._tokens)
        piece, stop = self._append(new)
        if stop is None:
            piece += self._held
            self.text += self._held
            self._held = ""
        return piece

    def _undecoded(self) -> str:
        before = self._detokenize(self._tokens[self._from : self._read]) if self._from < self._read else ""
        return self._detokenize(self._tokens[self._from :])[len(before) :]

    def _append(self, new: str) -> tuple[str, str | None]:
        text = self._held + new
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self._held = ""
            self.text += text[:at]
            return text[:at], stop
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        piece = text[: len(text) - keep]
        self._held = text[len(piece) :]
        self.text += piece
        return piece, None


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, `stop` itself left out."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
