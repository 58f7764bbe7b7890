"""Cut a corpus into windows of tokens.

The convention: every document is encoded on its own, and only the first `max_tokens` text tokens of a corpus are
taken. A window is at most `window` text tokens of one document; the next one starts `stride` text tokens later. Each
window is preceded by the encoder's prefix (one BOS, or nothing), which is never scored and not counted as text. Every
text token is scored at most once, in the first window that holds it, given all that stands before it in that window;
so the first token of a document (with stride = window: of every window) is scored only after a BOS. The last token
of a window is a target and never an input. A window that scores nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mfs_decompose.errors import UsageError
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.fidelity.tokenizer import TextEncoder

CONVENTION = (
    "the first max_tokens text tokens of a file; documents apart; windows of `window` text tokens, one every `stride`; "
    "the BOS comes on top and is never scored; a text token is scored once, in the first window that holds it; "
    "without a BOS the first token of a document, and of a window that overlaps no other, is context only"
)


@dataclass(frozen=True)
class Window:
    """One stretch of a document as a model sees it.

    Attributes:
        document: index of the document in its corpus.
        inputs: token ids fed to the model, prefix included.
        targets: token ids scored; the logits at the last `len(targets)` inputs predict them.
        text_bytes: the new text's share of the document's UTF-8 bytes, for progress only.
    """

    document: int
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    text_bytes: int


@dataclass(frozen=True)
class TokenizedCorpus:
    """A corpus as windows of one tokenizer."""

    name: str
    windows: tuple[Window, ...]

    @property
    def tokens(self) -> int:
        """Tokens scored."""
        return sum(len(window.targets) for window in self.windows)

    @property
    def text_bytes(self) -> int:
        return sum(window.text_bytes for window in self.windows)

    @property
    def highest_id(self) -> int:
        """The largest token id that any model is shown or asked for."""
        return max(max(max(window.inputs), max(window.targets)) for window in self.windows)

    @property
    def longest_input(self) -> int:
        return max(len(window.inputs) for window in self.windows)


def tokenize_corpus(corpus: Corpus, encoder: TextEncoder, settings: EvalSettings) -> TokenizedCorpus:
    """Encode documents until `token_limit` text tokens are taken, and cut them into windows.

    Raises:
        UsageError: nothing is left to score.
    """
    windows: list[Window] = []
    left = token_limit(corpus, settings)
    for index, document in enumerate(corpus.documents):
        if left <= 0:
            break
        ids = encoder.encode(document)
        nbytes = len(document.encode("utf-8", "surrogatepass"))
        taken = ids[:left]
        left -= len(taken)
        for begin, end, scored in _spans(len(taken), len(encoder.prefix), settings):
            tokens = (*encoder.prefix, *taken[begin:end])
            share = nbytes * end // len(ids) - nbytes * (end - scored) // len(ids)
            windows.append(Window(index, tokens[:-1], tokens[-scored:], share))
    if not windows:
        raise UsageError(
            f"expected at least 2 tokens in one document of {corpus.name}, found fewer", hint="pass longer text"
        )
    return TokenizedCorpus(corpus.name, tuple(windows))


def token_limit(corpus: Corpus, settings: EvalSettings) -> int:
    """Text tokens taken from a corpus at most."""
    return settings.max_tokens if corpus.max_tokens is None else corpus.max_tokens


def batches(windows: Sequence[Window], size: int) -> Iterator[Sequence[Window]]:
    """Runs of `size` windows in order; the last may be shorter."""
    for start in range(0, len(windows), size):
        yield windows[start : start + size]


def _spans(length: int, prefix: int, settings: EvalSettings) -> Iterator[tuple[int, int, int]]:
    """(begin, end, tokens scored) of each window over `length` text tokens that scores anything."""
    done = 0
    for begin in range(0, length, settings.step):
        end = min(begin + settings.window, length)
        scored = min(end - done, prefix + end - begin - 1)
        if scored > 0:
            yield begin, end, scored
        done = end
        if end == length:
            return
