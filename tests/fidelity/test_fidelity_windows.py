from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.errors import UsageError
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.fidelity.tokenizer import TextEncoder
from mfs_decompose.fidelity.windows import TokenizedCorpus, batches, tokenize_corpus

BOS = 999


@dataclass(frozen=True)
class Codepoints:
    """A tokenizer whose tokens are code points, so that expected windows can be written by hand."""

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


def encoder(*prefix: int) -> TextEncoder:
    return TextEncoder(Codepoints(), prefix, "irrelevant")


def cut(documents: tuple[str, ...], *prefix: int, **settings: Any) -> TokenizedCorpus:
    return tokenize_corpus(Corpus("c", documents), encoder(*prefix), EvalSettings(**settings))


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(character) for character in text)


def test_without_bos_the_first_token_of_a_window_is_context_only() -> None:
    windows = cut(("abcdefgh",), window=3).windows
    assert [window.inputs for window in windows] == [ids("ab"), ids("de"), ids("g")]
    assert [window.targets for window in windows] == [ids("bc"), ids("ef"), ids("h")]


def test_with_bos_every_text_token_is_scored_and_the_bos_never() -> None:
    windows = cut(("abcdefgh",), BOS, window=3).windows
    assert [window.inputs for window in windows] == [(BOS, *ids("ab")), (BOS, *ids("de")), (BOS, *ids("g"))]
    assert [window.targets for window in windows] == [ids("abc"), ids("def"), ids("gh")]


def test_overlapping_windows_score_only_what_is_new() -> None:
    windows = cut(("abcdefg",), window=4, stride=2).windows
    assert [window.inputs for window in windows] == [ids("abc"), ids("cde"), ids("ef")]
    assert [window.targets for window in windows] == [ids("bcd"), ids("ef"), ids("g")]


def test_windows_never_cross_documents_and_too_short_ones_are_dropped() -> None:
    without = cut(("abc", "d", "ef", "ghij"), window=3)
    assert [(window.document, window.targets) for window in without.windows] == [
        (0, ids("bc")),
        (2, ids("f")),
        (3, ids("hi")),  # the rest of document 3 is the single token j
    ]
    with_bos = cut(("abc", "d", "ef", "ghij"), BOS, window=3)
    assert [window.targets for window in with_bos.windows] == [ids("abc"), ids("d"), ids("ef"), ids("ghi"), ids("j")]
    assert (without.tokens, with_bos.tokens) == (5, 10)


def test_max_tokens_counts_text_taken_scored_or_not() -> None:
    without = cut(("abcde", "fghij", "k" * 100), window=3, max_tokens=7)
    assert [window.targets for window in without.windows] == [ids("bc"), ids("e"), ids("g")]
    with_bos = cut(("abcde", "fghij", "k" * 100), BOS, window=3, max_tokens=7)
    assert with_bos.tokens == 7


def test_documents_beyond_max_tokens_are_never_encoded() -> None:
    @dataclass(frozen=True)
    class Once(Codepoints):
        def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
            assert text != "never"
            return super().__call__(text, add_special_tokens=add_special_tokens, verbose=verbose)

    corpus = Corpus("c", ("abcdefgh", "never"))
    assert tokenize_corpus(corpus, TextEncoder(Once(), (), "none"), EvalSettings(window=4, max_tokens=8)).tokens == 6


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(UsageError, match="at least 2 tokens in one document of c"):
        cut(("a", "b"), window=3)


def test_descriptions() -> None:
    text = cut(("abcdefgh", "xé"), BOS, window=5)
    assert (text.highest_id, text.longest_input) == (BOS, 5)
    assert text.text_bytes == 8 + 3
    assert cut(("xé",), window=5).highest_id == ord("é")


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    prefix=st.lists(st.integers(1000, 1003), max_size=2),
    window=st.integers(2, 12),
    stride=st.integers(1, 12),
    max_tokens=st.integers(2, 70),
)
def test_every_token_is_scored_once_with_all_of_its_window_before_it(
    lengths: list[int], prefix: list[int], window: int, stride: int, max_tokens: int
) -> None:
    stride = min(stride, window)
    documents = tuple("".join(chr(200 + i) for i in range(length)) for length in lengths)
    # The oracle walks over single tokens: each is scored in the first window that reaches it.
    expected: list[tuple[int, tuple[int, ...], int]] = []
    left = max_tokens
    for index, document in enumerate(documents):
        tokens = ids(document)[:left]
        left -= len(tokens)
        for position, token in enumerate(tokens):
            begin = max(0, -(-(position + 1 - window) // stride)) * stride
            context = (*prefix, *tokens[begin:position])
            if context:
                expected.append((index, context, token))
    settings = EvalSettings(window=window, stride=stride, max_tokens=max_tokens)
    corpus = Corpus("c", documents)
    if not expected:
        with pytest.raises(UsageError):
            tokenize_corpus(corpus, encoder(*prefix), settings)
        return
    found = []
    text = tokenize_corpus(corpus, encoder(*prefix), settings)
    for part in text.windows:
        whole = (*part.inputs, part.targets[-1])
        first = len(whole) - len(part.targets)
        assert whole[first:] == part.targets
        assert whole[: len(prefix)] == tuple(prefix)
        assert len(part.inputs) < window + len(prefix)
        assert part.text_bytes >= 0
        found += [(part.document, whole[:at], whole[at]) for at in range(first, len(whole))]
    assert found == expected
    assert text.tokens == len(expected)


@given(st.integers(1, 17), st.integers(1, 6))
def test_batches_keep_order_and_lose_nothing(count: int, size: int) -> None:
    windows = cut(tuple("ab" * (1 + i % 3) for i in range(count)), BOS, window=2).windows
    parts = list(batches(windows, size))
    assert [window for part in parts for window in part] == list(windows)
    assert all(len(part) == size for part in parts[:-1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 1}, "window of at least 2, found 1"),
        ({"max_tokens": 0}, "max_tokens of at least 2"),
        ({"batch_size": 0}, "batch_size of at least 1"),
        ({"window": 8, "stride": 9}, "stride from 1 to the window of 8 tokens, found 9"),
        ({"stride": 0}, "stride from 1"),
    ],
)
def test_settings_outside_their_range(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EvalSettings(**settings)  # type: ignore[arg-type]


def test_stride_is_the_window_by_default() -> None:
    assert EvalSettings().step == 512
    assert EvalSettings(window=64, stride=32).step == 32
