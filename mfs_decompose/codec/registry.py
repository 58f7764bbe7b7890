"""The codecs there are, by name. A new codec is one file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid

if TYPE_CHECKING:
    from mfs_decompose.codec.base import Delta, ExactCodec, Fetch, LossyCodec
    from mfs_decompose.codec.direct import DirectCodec
    from mfs_decompose.codec.shared import Shared

FITTED = ("lowrank", "sparse")
"""Deltas fitted once, of which every prefix is a smaller fit."""

DIRECT = ("sign", "ternary", "kbit", "deadzone", "rowsparse")
"""Deltas written straight from their rows."""

LOSSY = (*FITTED, *DIRECT, "banded", "fixed", "shared", "sum")
"""Codecs that give a delta; `sum` adds those below it, `shared` stands for the family's own."""

EXACT = ("identical", "raw", "lossless")
"""Codecs that give a tensor's own bits."""

COMPOSED = ("rows", "corrected", "alias", "adapter")
"""`rows` joins its children along the first dimension; `corrected` gives the bits that the delta below it gets wrong;
`alias` is another tensor of the same variant; `adapter` is what the variant's adapter makes of a tensor of the base."""

_MAX_TERMS = 16  # an empty delta is a few bytes of JSON, and costs time in every block of the tensor

_VERSIONS = {**dict.fromkeys((*LOSSY, *EXACT, *COMPOSED), 1), "lossless": 2}


def lossy_codec(name: str) -> LossyCodec:
    """The fitted codec called `name`; `banded` is what pass 1 keeps of a low rank delta whose bits are chosen later."""
    from mfs_decompose.codec.banded_fit import BandedFit
    from mfs_decompose.codec.lowrank import LowRank
    from mfs_decompose.codec.sparse import Sparse

    found: dict[str, LossyCodec] = {"lowrank": LowRank(), "sparse": Sparse(), "banded": BandedFit()}
    return found[name]


def direct_codec(name: str) -> DirectCodec:
    """The codec called `name` that writes deltas straight from their rows."""
    from mfs_decompose.codec.deadzone import DeadZone
    from mfs_decompose.codec.kbit import KBit, Ternary
    from mfs_decompose.codec.rowsparse import RowSparse
    from mfs_decompose.codec.sign import Sign
    from mfs_decompose.codec.significant import Significant

    found: tuple[DirectCodec, ...] = (Sign(), Ternary(), KBit(), DeadZone(), RowSparse(), Significant())
    return next(codec for codec in found if codec.name == name)


def open_delta(node: CodecNode, fetch: Fetch, shape: tuple[int, int], shared: Shared | None = None) -> Delta:
    """Open the delta [O, I] that a tree of LOSSY codecs stores; `shared` is what its leaf of that name stands for.

    Raises:
        ArtifactInvalid: the tree does not fit the shape.
    """
    if node.codec == "sum":
        from mfs_decompose.codec.summed import Summed

        return Summed([open_delta(child, fetch, shape, shared) for child in node.children])
    if node.codec == "shared":
        from mfs_decompose.codec.shared import open_shared

        return open_shared(shared, shape)
    if node.codec == "banded":
        from mfs_decompose.codec.banded import Banded

        return Banded().open(node, fetch, shape)
    if node.codec == "fixed":
        from mfs_decompose.codec.fixed import StoredFixed

        return StoredFixed(node, fetch, shape)
    if node.codec in DIRECT:
        return direct_codec(node.codec).open(node, fetch, shape)
    return lossy_codec(node.codec).open(node, fetch, shape)


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
    if version is None or not 1 <= node.version <= version:
        raise ArtifactInvalid(
            f"expected a codec among {', '.join(_VERSIONS)}, found {node.codec!r} version {node.version}",
            hint="Read this artifact with a newer mfs.",
        )
    if node.codec == "corrected" and [child.codec in LOSSY for child in node.children] != [True]:
        raise ArtifactInvalid("codec 'corrected' needs one delta below it")
    if node.codec == "sum" and not (node.children and all(child.codec in LOSSY for child in node.children)):
        raise ArtifactInvalid("codec 'sum' needs deltas below it, and nothing else")
    if node.codec == "sum" and (terms := _terms(node)) > _MAX_TERMS:
        raise ArtifactInvalid(f"codec 'sum' adds at most {_MAX_TERMS} deltas, found {terms}")
    if node.codec == "shared" and (node.params or node.parts):
        raise ArtifactInvalid("codec 'shared' has no parameters and no bytes of its own")
    if node.children and node.codec not in ("rows", "corrected", "sum"):
        raise ArtifactInvalid(f"codec {node.codec!r} has nodes below it, which only a composition may have")
    for child in node.children:
        check_node(child)


def _terms(node: CodecNode) -> int:
    return sum(map(_terms, node.children)) if node.codec == "sum" else 1


def is_exact(node: CodecNode) -> bool:
    """Whether the tree gives the original's bits back; an alias is as exact as what it names, not known here.

    An adapter's original is an fp32 merge, which a checkpoint in the base's dtype cannot hold.
    """
    if node.codec == "rows":
        return all(is_exact(child) for child in node.children)
    return node.codec in (*EXACT, "corrected")
