from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.source.strict_json import parse_strict_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_reads_what_json_writes(value: dict[str, object]) -> None:
    assert parse_strict_object(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "'a' stands in it twice"),
        (b'{"x": {"a": 1, "a": 1}}', "'a' stands in it twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b"[1]", "found list"),
        (b'{"a": 1', "not JSON"),
        (b"", "not JSON"),
        (b'{"\xff": 1}', "not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
    ],
)
def test_refuses(raw: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_strict_object(raw)


@given(st.binary(max_size=60))
def test_raises_nothing_but_value_errors(raw: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_strict_object(raw), dict)
