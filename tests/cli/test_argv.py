from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.cli.argv import GLOBAL_FLAGS, GLOBAL_OPTIONS, MULTI, expand_multi, hoist_globals, rewrite
from mfs_decompose.errors import UsageError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("decompose --variants a b c --out x", "decompose --variants a --variants b --variants c --out x"),
        ("decompose -V a b --variants c", "decompose -V a -V b --variants c"),
        ("eval art --text f.txt g.txt -v", "-v eval art --text f.txt --text g.txt"),
        ("eval --text=f.txt art", "eval --text=f.txt art"),
        ("eval --text - art --json", "--json eval --text - --text art"),
        ("verify art --against a=b c=d", "verify art --against a=b --against c=d"),
        ("eval art --originals a=b --text c d", "eval art --originals a=b --text c --text d"),
        ("verify --json art --progress plain -qv", "--json --progress plain -qv verify art"),
        ("verify --progress=json art", "--progress=json verify art"),
        ("verify art -- --json --variants a b", "verify art -- --json --variants a b"),
        ("decompose --variants a -- b --json", "decompose --variants a -- b --json"),
        ("decompose --variants a --json b", "--json decompose --variants a b"),
        ("decompose -o -V x", "decompose -o -V x"),
        ("verify --out=--json", "verify --out=--json"),
        ("decompose -Vq", "decompose -Vq"),
        ("--help", "--help"),
        ("", ""),
    ],
)
def test_rewriting(line: str, expected: str) -> None:
    assert rewrite(line.split()) == expected.split()


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("decompose --variants", "--variants"),
        ("decompose --variants --out x", "--variants"),
        ("decompose --variants -V a", "--variants"),
        ("decompose -V -- a", "-V"),
        ("verify --progress", "--progress"),
        ("verify --progress --json", "--progress"),
        ("verify --progress -- plain", "--progress"),
    ],
)
def test_an_option_without_its_value_is_refused(line: str, option: str) -> None:
    with pytest.raises(UsageError, match=f"expected a value after {option}, found none"):
        rewrite(line.split())


values = st.text("abc=./", min_size=1, max_size=4)
others = st.sampled_from(["--out", "-o", "--rank=3", "--resume", "-x", "--textual", "-"])
flags = st.sampled_from([*sorted(GLOBAL_FLAGS), "-q", "-vv", "-qv", "--progress=plain"])
multis = st.tuples(st.sampled_from(sorted(MULTI)), st.lists(values, min_size=1, max_size=4)).map(
    lambda t: [t[0], *t[1]]
)
pieces = st.one_of(
    values.map(lambda v: [v]),
    others.map(lambda v: [v]),
    flags.map(lambda v: [v]),
    multis,
    st.sampled_from(sorted(GLOBAL_OPTIONS)).map(lambda o: [o, "plain"]),
)
lines = st.lists(pieces, max_size=6).map(lambda parts: [word for part in parts for word in part])
tails: st.SearchStrategy[list[str]] = st.one_of(
    st.just([]), st.lists(st.one_of(values, flags, others), max_size=3).map(lambda words: ["--", *words])
)


@given(lines, tails)
def test_a_tail_is_left_alone(line: list[str], tail: list[str]) -> None:
    assert rewrite([*line, *tail]) == [*rewrite(line), *tail]


@given(lines)
def test_rewriting_twice_changes_the_order_of_nothing_more(line: list[str]) -> None:
    front, rest = hoist_globals(expand_multi(line))
    assert hoist_globals(rest) == ([], rest)
    assert hoist_globals(front) == (front, [])


@given(lines)
def test_nothing_is_lost_and_only_options_are_repeated(line: list[str]) -> None:
    out = rewrite(line)
    assert [w for w in sorted(out) if w not in MULTI] == [w for w in sorted(line) if w not in MULTI]
    assert {w for w in out if w in MULTI} == {w for w in line if w in MULTI}


@given(st.sampled_from(sorted(MULTI)), st.lists(values, min_size=1, max_size=5))
def test_every_value_gets_its_option_in_order(option: str, given_values: list[str]) -> None:
    assert expand_multi([option, *given_values]) == [word for value in given_values for word in (option, value)]


@given(st.lists(st.one_of(values, others), max_size=8))
def test_words_without_such_options_stay(line: list[str]) -> None:
    assert rewrite(line) == line


@given(lines, lines)
def test_hoisting_keeps_the_order_on_both_sides(left: list[str], right: list[str]) -> None:
    front_left, rest_left = hoist_globals(left)
    front_right, rest_right = hoist_globals(right)
    assert hoist_globals([*left, *right]) == (front_left + front_right, rest_left + rest_right)
