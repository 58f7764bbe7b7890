"""The codecs there are, by name. A new codec is one file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid

if TYPE_CHECKING:
    from mfs_decompose.codec.base import ExactCodec, LossyCodec

LOSSY = ("lowrank", "sparse")
EXACT = ("identical", "raw", "lossless")
COMPOSED = ("rows", "alias", "adapter")
"""`rows` joins its children along the first dimension; `alias` is another tensor of the same variant; `adapter` is what
the variant's adapter makes of a tensor of the base."""

_VERSIONS = dict.fromkeys((*LOSSY, *EXACT, *COMPOSED), 1)


def lossy_codec(name: str) -> LossyCodec:
    """The lossy codec called `name`."""
    from mfs_decompose.codec.lowrank import LowRank
    from mfs_decompose.codec.sparse import Sparse

    found: dict[str, LossyCodec] = {"lowrank": LowRank(), "sparse": Sparse()}
    return found[name]


def exact_codec(name: str) -> ExactCodec:
    """The exact codec called `name`."""
    from mfs_decompose.codec.identical import Identical
    from mfs_decompose.codec.lossless import Lossless
    from mfs_decompose.codec.raw import Raw

    found: dict[str, ExactCodec] = {"identical": Identical(), "raw": Raw(), "lossless": Lossless()}
    return found[name]


def check_node(node: CodecNode) -> None:
    """Refuse a tree that this version cannot decode.

    Raises:
        ArtifactInvalid: an unknown codec, a newer version of a codec, or children where none belong.
    """
    version = _VERSIONS.get(node.codec)
    if version is None or node.version > version:
        raise ArtifactInvalid(
            f"expected a codec among {', '.join(_VERSIONS)}, found {node.codec!r} version {node.version}",
            hint="Read this artifact with a newer mfs.",
        )
    if node.children and node.codec != "rows":
        raise ArtifactInvalid(f"codec {node.codec!r} has nodes below it, which only 'rows' may have")
    for child in node.children:
        check_node(child)


def is_exact(node: CodecNode) -> bool:
    """Whether the tree gives the original's bits back; an alias is as exact as what it names, not known here.

    An adapter's original is an fp32 merge, which a checkpoint in the base's dtype cannot hold.
    """
    if node.codec == "rows":
        return all(is_exact(child) for child in node.children)
    return node.codec in EXACT
