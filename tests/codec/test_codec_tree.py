"""Codec trees as JSON: there and back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.errors import ArtifactInvalid

_COUNTS = st.integers(0, 1 << 50)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_PARTS = st.builds(Part, st.text(), st.text(), st.lists(_COUNTS, max_size=3).map(tuple), offset=_COUNTS, nbytes=_COUNTS)


def _nodes(children: st.SearchStrategy[tuple[CodecNode, ...]]) -> st.SearchStrategy[CodecNode]:
    params = st.dictionaries(st.text(), _JSON, max_size=3)
    return st.builds(CodecNode, st.text(), st.integers(), params, st.lists(_PARTS, max_size=3).map(tuple), children)


_TREES = st.recursive(_nodes(st.just(())), lambda node: _nodes(st.lists(node, max_size=3).map(tuple)), max_leaves=5)
_PART = {"name": "u", "dtype": "U8", "shape": [2, 3], "offset": 0, "nbytes": 6}


def chain(levels: int) -> dict[str, Any]:
    """A tree of so many levels, one node each."""
    document: dict[str, Any] = {"codec": "raw", "version": 1}
    for _ in range(levels - 1):
        document = {"codec": "rows", "version": 1, "children": [document]}
    return document


@given(_TREES)
def test_there_and_back(tree: CodecNode) -> None:
    text = json.dumps(tree.to_json(), sort_keys=True)
    found = CodecNode.from_json(json.loads(text))
    assert found == tree
    assert json.dumps(found.to_json(), sort_keys=True) == text


def test_empty_fields_are_not_written() -> None:
    assert CodecNode("identical").to_json() == {"codec": "identical", "version": 1}


def test_what_is_written() -> None:
    node = CodecNode("raw", 1, {"a": [1, None]}, (Part("data", "BF16", (3, 2), 4, 12),))
    tree = CodecNode("rows", params={"splits": [0, 3]}, children=(node,))
    assert tree.to_json() == {
        "codec": "rows",
        "version": 1,
        "params": {"splits": [0, 3]},
        "children": [
            {
                "codec": "raw",
                "version": 1,
                "params": {"a": [1, None]},
                "parts": [{"name": "data", "dtype": "BF16", "shape": [3, 2], "offset": 4, "nbytes": 12}],
            }
        ],
    }


@given(_TREES, st.integers(0, 1000))
def test_shifting_moves_every_array_and_nothing_else(tree: CodecNode, by: int) -> None:
    def offsets(node: CodecNode) -> list[int]:
        return [part.offset for part in node.parts] + [at for child in node.children for at in offsets(child)]

    moved = tree.shifted(by)
    assert offsets(moved) == [offset + by for offset in offsets(tree)]
    assert moved.nbytes == tree.nbytes
    assert moved.text() == tree.text()
    assert tree.shifted(0) == tree


def test_bytes_count_all_levels() -> None:
    leaf = CodecNode("raw", parts=(Part("a", "U8", (5,), 0, 5), Part("b", "U8", (7,), 5, 7)))
    assert CodecNode("rows", parts=(Part("c", "U8", (1,), 0, 1),), children=(leaf, leaf)).nbytes == 25


def test_the_composition_in_words() -> None:
    inner = CodecNode("rows", children=(CodecNode("lowrank"), CodecNode("raw")))
    assert CodecNode("sparse").text() == "sparse"
    assert inner.text() == "rows(lowrank+raw)"
    assert CodecNode("rows", children=(inner, CodecNode("raw"))).text() == "rows(rows(lowrank+raw)+raw)"


@pytest.mark.parametrize("value", [None, -1, 1.0, True, "1", [1], {"a": 1}])
def test_whole_numbers_are_whole_numbers(value: Any) -> None:
    with pytest.raises(ArtifactInvalid, match="needs a whole number 'steps', found"):
        CodecNode("lowrank", params={"steps": value}).integer("steps")


def test_a_missing_number_and_a_missing_array_are_named() -> None:
    node = CodecNode("lowrank", params={"rank": 3}, parts=(Part("us", "U8", (0,), 0, 0),))
    assert node.integer("rank") == 3
    with pytest.raises(ArtifactInvalid, match="'lowrank' needs a whole number 'steps', found None"):
        node.integer("steps")
    with pytest.raises(ArtifactInvalid, match=r"'lowrank' needs an array 'u', found \['us'\]"):
        node.part("u")


@pytest.mark.parametrize("document", [None, [], "raw", 3, {}, {"codec": "raw"}, {"version": 1}])
def test_junk_is_refused(document: Any) -> None:
    with pytest.raises(ArtifactInvalid, match="expected a codec tree"):
        CodecNode.from_json(document)


@pytest.mark.parametrize(
    "change",
    [
        {"codec": 1},
        {"codec": None},
        {"version": "1"},
        {"version": 1.0},
        {"version": True},
        {"version": None},
        {"params": []},
        {"params": None},
        {"parts": {}},
        {"parts": None},
        {"children": {}},
        {"children": None},
        {"more": 1},
    ],
)
def test_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ArtifactInvalid, match="expected a codec tree, found"):
        CodecNode.from_json({"codec": "raw", "version": 1, **change})


@pytest.mark.parametrize(
    "part",
    [
        None,
        [],
        {},
        {**_PART, "name": 1},
        {**_PART, "dtype": None},
        {**_PART, "shape": 6},
        {**_PART, "shape": [2, -3]},
        {**_PART, "shape": [2, 3.0]},
        {**_PART, "shape": [True, 6]},
        {**_PART, "offset": -1},
        {**_PART, "offset": None},
        {**_PART, "nbytes": "6"},
        {**_PART, "more": 1},
        {key: value for key, value in _PART.items() if key != "nbytes"},
    ],
)
def test_a_wrong_array_is_refused(part: Any) -> None:
    with pytest.raises(ArtifactInvalid, match="expected an array of a codec"):
        CodecNode.from_json({"codec": "raw", "version": 1, "parts": [_PART, part]})


@given(_JSON)
def test_any_json_gives_a_tree_or_a_refusal(document: Any) -> None:
    for candidate in (document, {"codec": "raw", "version": 1, "parts": document, "children": document}):
        try:
            CodecNode.from_json(candidate)
        except ArtifactInvalid as error:
            assert len(error.message) < 200


def test_at_most_eight_levels() -> None:
    assert CodecNode.from_json(chain(8)).to_json() == chain(8)
    with pytest.raises(ArtifactInvalid, match="of at most 8 levels"):
        CodecNode.from_json(chain(9))


def test_a_tree_deeper_than_the_stack_is_refused_like_any_other() -> None:
    with pytest.raises(ArtifactInvalid, match="of at most 8 levels"):
        CodecNode.from_json(chain(20_000))


def test_at_most_65536_children() -> None:
    leaf = {"codec": "raw", "version": 1}
    with pytest.raises(ArtifactInvalid, match="at most 65536 nodes below codec 'rows', found 65537"):
        CodecNode.from_json({"codec": "rows", "version": 1, "children": [leaf] * 65_537})
