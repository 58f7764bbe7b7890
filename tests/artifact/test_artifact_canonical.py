"""Canonical JSON: one spelling, strict reading, and no way to hide a flipped bit."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.artifact.canonical import canonical_bytes, digest_of, load_canonical, load_strict
from mfs_decompose.errors import ArtifactInvalid

LIMIT = 1_000_000

documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def test_golden_bytes() -> None:
    document = {"b": [1, 2.5, 1e-07, -0.0, True, None], "a": {"ü\n\u2028": '\x1f/"'}, "": 2**63 - 1}
    expected = '{"":9223372036854775807,"a":{"ü\\n\u2028":"\\u001f/\\""},"b":[1,2.5,1e-07,-0.0,true,null]}\n'
    assert canonical_bytes(document) == expected.encode()


@given(documents)
def test_round_trip(document: Any) -> None:
    data = canonical_bytes(document)
    found = load_canonical(data, "it", LIMIT)
    assert canonical_bytes(found) == data
    assert found == document


@given(st.dictionaries(st.text(max_size=5), st.integers(-5, 5), min_size=1), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(document: dict[str, int], shuffler: random.Random) -> None:
    items = list(document.items())
    shuffler.shuffle(items)
    assert canonical_bytes(dict(items)) == canonical_bytes(document)
    assert digest_of(dict(items)) == digest_of(document)


@given(st.dictionaries(st.text(max_size=5), documents, min_size=1, max_size=4), st.data())
def test_every_flipped_bit_is_found(document: dict[str, Any], data: st.DataObject) -> None:
    sealed = {**document, "digest": digest_of(document)}
    right = canonical_bytes(sealed)
    bit = data.draw(st.integers(0, 8 * len(right) - 1))
    wrong = bytearray(right)
    wrong[bit // 8] ^= 1 << bit % 8
    try:
        found = load_canonical(bytes(wrong), "it", LIMIT)
    except ArtifactInvalid:
        return
    assert not isinstance(found, dict) or found.get("digest") != digest_of(found)


def test_the_digest_leaves_itself_out() -> None:
    document = {"x": 1}
    assert digest_of({**document, "digest": "anything"}) == digest_of(document)
    assert digest_of({"x": 2}) != digest_of(document)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}\n', '{"a":1}', '{"a":1}\n\n', '{"b":1,"a":1}\n', '{"a":1.0e0}\n', '{"a":"\\u0041"}\n',
        '{"a":"\\/"}\n', '{"a":1.50}\n', '{"a":-0}\n', '{"a":"\\ud800"}\n',
    ],
)  # fmt: skip
def test_another_spelling_is_refused(text: str) -> None:
    with pytest.raises(ArtifactInvalid, match="in it"):
        load_canonical(text.encode(), "it", LIMIT)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a":1,"a":1}', "key 'a' twice"), ('{"x":{"a":1,"b":2,"a":3}}', "key 'a' twice"), ('{"a":NaN}', "NaN"),
        ('{"a":-Infinity}', "-Infinity"), ('{"a":1e999}', "too large"), ('{"a":9223372036854775808}', "64 bits"),
        ('{"a":' + "9" * 5000 + "}", "64 bits"), ("[" * 65 + "]" * 65, "nested"), ("[" * 100_000, "nested"),
        ('{"a":' * 70 + "1" + "}" * 70, "nested"), ("", "expected JSON"),
        ("{", "expected JSON"), ("<html>", "expected JSON"),
    ],
)  # fmt: skip
def test_hostile_json_is_refused_by_reason(text: str, reason: str) -> None:
    with pytest.raises(ArtifactInvalid, match=reason):
        load_strict(text.encode(), "it", LIMIT)


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(ArtifactInvalid, match="UTF-8"):
        load_strict(b'{"a":"\xff"}', "it", LIMIT)


def test_a_document_beyond_the_limit_is_not_parsed() -> None:
    with pytest.raises(ArtifactInvalid, match="at most 10 bytes, found 11"):
        load_strict(b" " * 11, "it", 10)


def test_brackets_inside_text_are_not_depth() -> None:
    document = {"a": "[{" * 500 + '\\"[', "b": ["\\", "[" * 70]}
    assert load_strict(canonical_bytes(document), "it", LIMIT) == document


def test_depth_64_is_allowed() -> None:
    assert load_strict(b"[" * 64 + b"]" * 64, "it", LIMIT) is not None


def test_an_unclosed_string_of_escapes_is_refused_in_linear_time() -> None:
    hostile = b"[" * 65 + b'"' + b'\\"' * 400_000  # quadratic here would be minutes
    with pytest.raises(ArtifactInvalid):
        load_strict(hostile, "it", LIMIT)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 2**63, -(2**63), {1: 2}, {None: 1}, b"x", {"a"}, "\ud800", {"\udc80": 1}]
)
def test_what_json_cannot_hold_is_not_written(value: Any) -> None:
    with pytest.raises(ArtifactInvalid):
        canonical_bytes({"a": [value]})


@given(st.binary(max_size=60))
def test_arbitrary_bytes_never_crash(data: bytes) -> None:
    try:
        document = load_strict(data, "it", LIMIT)
    except ArtifactInvalid:
        return
    assert json.loads(data) == document
