"""Text of a growing answer: the pieces add up, half characters and beginnings of stop texts are held back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_decompose.runtime.stopping import TextStream


def by_bytes(tokens: Sequence[int]) -> str:
    """A tokenizer with one token a byte."""
    return bytes(tokens).decode("utf-8", errors="replace")


def by_words(tokens: Sequence[int]) -> str:
    """A tokenizer that drops the space in front, as sentencepiece does."""
    words = [" a", " bc", "d", " ", "\u00e9", " \U0001f642", "ef"]
    return "".join(words[token] for token in tokens).removeprefix(" ")


def feed(
    tokens: Sequence[int], stops: Sequence[str], detokenize: object = by_bytes
) -> tuple[list[str], str | None, str]:
    """The pieces of a stream, the stop text, and the whole text."""
    stream = TextStream(detokenize, stops)  # type: ignore[arg-type]
    pieces, stop = [], None
    for token in tokens:
        piece, stop = stream.push(token)
        pieces.append(piece)
        if stop is not None:
            return pieces, stop, stream.text
    pieces.append(stream.finish())
    return pieces, stop, stream.text


@pytest.mark.parametrize("cut", range(1, 13))
def test_an_emoji_is_never_shown_in_parts(cut: int) -> None:
    """At every max_tokens; what is cut off at the end is one replacement character, as for the whole."""
    tokens = "a\U0001f642b\u00e9\U0001f642".encode()[:cut]
    pieces, _, text = feed(tokens, ())
    assert text == "".join(pieces) == by_bytes(tokens)
    assert "\ufffd" not in "".join(pieces[:-1])


@pytest.mark.parametrize(
    ("text", "stops", "shown", "found"),
    [
        ("Hello Alice: hi", ("Alice:",), "Hello ", "Alice:"),
        ("Hello Alice! hi", ("Alice:",), "Hello Alice! hi", None),
        ("aaab", ("aab",), "a", "aab"),
        ("xababac", ("abac",), "xab", "abac"),
        ("one two", ("two", "o t"), "one ", "two"),
        ("stop", ("stop",), "", "stop"),
        ("ends with sto", ("stop",), "ends with sto", None),
        ("a\U0001f642b", ("\U0001f642",), "a", "\U0001f642"),
        ("line\n\nnext", ("\n\n",), "line", "\n\n"),
    ],
)
def test_stop_texts_are_cut_and_never_shown(text: str, stops: tuple[str, ...], shown: str, found: str | None) -> None:
    pieces, stop, whole = feed(text.encode(), stops)
    assert (whole, stop) == (shown, found)
    assert "".join(pieces) == shown


def test_what_may_become_a_stop_text_is_held_back() -> None:
    pieces, _, _ = feed(b"x Alice!", ("Alice:",))
    assert pieces == ["x", " ", "", "", "", "", "", "Alice!", ""]


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab\u00e9\U0001f642", max_size=12),
    st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=3),
)
def test_a_stream_is_the_whole_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    pieces, found, whole = feed(text.encode(), stops)
    assert "".join(pieces) == whole
    # The oracle looks at the whole text after every character.
    for end in range(len(text) + 1):
        hits = [(at, stop) for stop in stops if (at := text[:end].find(stop)) >= 0]
        if hits:
            assert (whole, found) == (text[: min(hits)[0]], min(hits)[1])
            return
    assert (whole, found) == (text, None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=20))
def test_spaces_that_a_tokenizer_drops_in_front(tokens: list[int]) -> None:
    pieces, _, whole = feed(tokens, (), by_words)
    assert "".join(pieces) == whole == by_words(tokens)
