from __future__ import annotations

import datetime

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.recipe.strict_yaml import MAX_BYTES, read_document, read_scalar

TEXT = """\
schema: x/1
deltas:
  default: {codec: raw}
  rules:
    - match: "*norm*"
      codec: raw

    - {match: [a, b],
       codec: raw}
about: 2024-01-02
"""


def test_values_come_with_their_lines() -> None:
    document = read_document(TEXT)
    assert document.mistakes == []
    assert document.data == yaml.safe_load(TEXT)
    assert document.data["about"] == datetime.date(2024, 1, 2)
    assert document.lines["deltas", "default", "codec"] == 3
    assert document.lines["deltas", "rules", 0, "codec"] == 6
    assert document.lines["deltas", "rules", 1] == 8
    assert document.lines["deltas", "rules", 1, "codec"] == 9


def test_a_place_without_a_line_takes_the_one_around_it() -> None:
    document = read_document(TEXT)
    assert document.line_of(("deltas", "rules", 1, "factors")) == 8
    assert document.line_of(("seed",)) == 1
    assert read_document("").line_of(("seed",)) is None


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "expected a mapping"),
        ("- a\n", 1, "expected a mapping"),
        ("a: 1\nb: {c: 2, c: 3}\n", 2, "given twice, first on line 2"),
        ("a: 1\n\nb: 2\na: 3\n", 4, "given twice, first on line 1"),
        ("a: &x 1\nb: *x\n", 2, "anchors and aliases"),
        ("a: [1\nb: 2\n", 2, "not YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not YAML"),
        ("a: 1\nb: 2024-13-45\n", 2, "not a value that can be read"),
        ("a: " + "9" * 6000, 1, "not a value that can be read"),
        ("a: !!python/object:os.system {}\n", 1, "found the tag"),
        ("a: !!python/object/apply:os.system [x]\n", 1, "found the tag"),
        ("a: !!python/name:os.system x\n", 1, "not YAML"),
        ("a: " + "[" * 5000, 1, "nested too deeply"),
        ("on: 1\n", 1, "expected a word as key, found True"),
        ("3: 1\n", 1, "expected a word as key, found 3"),
        ("? [a]\n: 1\n", 1, "expected a word as key"),
        ("a: \x00", None, "not YAML"),
    ],
)
def test_what_is_not_a_plain_mapping_is_a_mistake_with_its_line(text: str, line: int | None, message: str) -> None:
    mistakes = read_document(text).mistakes
    assert len(mistakes) == 1
    assert message in mistakes[0].message
    assert mistakes[0].line == line


def test_all_mistakes_are_collected() -> None:
    assert [m.line for m in read_document("a: 1\na: 2\n3: 4\nb: {c: 1, c: 2}\n").mistakes] == [2, 3, 4]


def test_a_merge_key_is_a_word_like_any_other() -> None:
    assert read_document("<<: {a: 1}\n").data == {"<<": {"a": 1}}


def test_a_huge_file_is_not_parsed() -> None:
    document = read_document("a: " + "x" * MAX_BYTES)
    assert "expected at most" in document.mistakes[0].message
    assert document.data == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [("5%", "5%"), ("16", 16), ("", None), ("[a, b]", ["a", "b"]), ("{a: 1}", {"a": 1}), ("true", True), ("'5'", "5")],
)
def test_an_option_value_is_yaml(text: str, value: object) -> None:
    assert read_scalar(text) == value


@pytest.mark.parametrize("text", ["[a", "%5", "1\nother: 2", "*a", "a: b: c"])
def test_an_option_value_that_is_not_one_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_scalar(text)


words = st.text("abcxyz", min_size=1, max_size=4)
plain = st.recursive(
    st.one_of(st.integers(), st.booleans(), st.none(), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=12,
)


@given(st.dictionaries(words, plain, min_size=1, max_size=4))
def test_plain_data_reads_as_the_safe_loader_reads_it(data: dict[str, object]) -> None:
    document = read_document(yaml.safe_dump(data))
    assert document.mistakes == []
    assert document.data == data


@given(st.text(max_size=60))
def test_no_text_raises(text: str) -> None:
    document = read_document(text)
    assert document.mistakes or isinstance(document.data, dict)
