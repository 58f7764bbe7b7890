"""Which codecs there are, and how others are refused by name."""

from __future__ import annotations

import pytest

from mfs_decompose.codec.registry import (
    COMPOSED,
    DIRECT,
    EXACT,
    FITTED,
    LOSSY,
    check_node,
    direct_codec,
    exact_codec,
    is_exact,
    lossy_codec,
)
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid

CHILD = CodecNode("lowrank")
NEEDS = {"sum": (CHILD,), "corrected": (CHILD,)}


def node(name: str, version: int = 1) -> CodecNode:
    """A codec with the nodes below it that it needs."""
    return CodecNode(name, version=version, children=NEEDS.get(name, ()))


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_codecs_are_known_and_not_exact(name: str) -> None:
    check_node(node(name))
    assert not is_exact(node(name))


@pytest.mark.parametrize("name", [*FITTED, "banded"])
def test_fitted_codecs_know_their_name(name: str) -> None:
    assert lossy_codec(name).name == name


@pytest.mark.parametrize("name", [*DIRECT, "significant"])
def test_direct_codecs_know_their_name(name: str) -> None:
    assert direct_codec(name).name == name


@pytest.mark.parametrize("name", EXACT)
def test_exact_codecs_know_their_name(name: str) -> None:
    assert exact_codec(name).name == name
    check_node(CodecNode(name))
    assert is_exact(CodecNode(name))


@pytest.mark.parametrize("name", ["zipnn", "LOWRANK", "", "raw "])
def test_an_unknown_codec_is_refused_by_name(name: str) -> None:
    with pytest.raises(ArtifactInvalid, match=f"found '{name}' version 1") as caught:
        check_node(CodecNode(name))
    assert "lowrank" in caught.value.message
    assert caught.value.hint is not None
    with pytest.raises(ArtifactInvalid, match=f"found '{name}'"):
        check_node(CodecNode("rows", children=(CodecNode("raw"), CodecNode(name))))


@pytest.mark.parametrize("name", [*LOSSY, *EXACT, *COMPOSED])
def test_a_newer_version_is_refused_by_name(name: str) -> None:
    newest = 2 if name == "lossless" else 1
    for version in range(1, newest + 1):
        check_node(node(name, version))
    with pytest.raises(ArtifactInvalid, match=f"found '{name}' version {newest + 1}"):
        check_node(node(name, newest + 1))


@pytest.mark.parametrize(
    ("name", "children"),
    [
        ("corrected", ()),
        ("corrected", (CodecNode("raw"),)),
        ("corrected", (CHILD, CHILD)),
        ("corrected", (CodecNode("corrected", children=(CHILD,)),)),
        ("sum", ()),
        ("sum", (CHILD, CodecNode("identical"))),
        ("sum", (CodecNode("rows", children=(CHILD,)),)),
    ],
)
def test_compositions_take_what_they_can_decode(name: str, children: tuple[CodecNode, ...]) -> None:
    with pytest.raises(ArtifactInvalid, match=f"'{name}' needs"):
        check_node(CodecNode(name, children=children))
    check_node(CodecNode("sum", children=(CHILD, CodecNode("sum", children=(CHILD,)))))
    assert is_exact(node("corrected"))


@pytest.mark.parametrize("name", [*sorted(set(LOSSY) - {"sum"}), *EXACT, "alias", "adapter"])
def test_only_compositions_have_children(name: str) -> None:
    with pytest.raises(ArtifactInvalid, match=f"{name}' has nodes below it"):
        check_node(CodecNode(name, children=(CodecNode("raw"),)))


def test_a_composition_is_as_exact_as_its_parts() -> None:
    raw, lossless, lowrank = CodecNode("raw"), CodecNode("lossless"), CodecNode("lowrank")
    assert is_exact(CodecNode("rows", children=(raw, lossless)))
    assert not is_exact(CodecNode("rows", children=(raw, lowrank)))
    assert not is_exact(CodecNode("rows", children=(raw, CodecNode("rows", children=(lossless, lowrank)))))
    assert not is_exact(CodecNode("alias", params={"of": "model.embed_tokens.weight"}))
