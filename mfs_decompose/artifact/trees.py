"""Codec trees of an artifact, checked against this version's codecs and against the bytes they claim."""

from __future__ import annotations

from collections.abc import Iterator

from mfs_decompose.artifact.records import TensorRecord, VariantRecord
from mfs_decompose.codec.registry import check_node
from mfs_decompose.codec.tree import CodecNode, Part
from mfs_decompose.errors import ArtifactInvalid


def read_tree(variant: str, name: str, record: TensorRecord) -> CodecNode:
    """The codec tree of one tensor; its arrays must tile the tensor's bytes, without holes or overlaps.

    Raises:
        ArtifactInvalid: it is no tree, names a codec or version that is unknown here, or claims other bytes.
    """
    return check_tree(f"tensor {name!r} of variant {variant!r}", record.tree, record.blob.nbytes if record.blob else 0)


def check_tree(who: str, document: object, nbytes: int) -> CodecNode:
    """A codec tree whose arrays tile `nbytes` bytes; raises as `read_tree` does, about `who`."""
    try:
        tree = CodecNode.from_json(document)
        check_node(tree)
    except ArtifactInvalid as error:
        raise ArtifactInvalid(f"{who}: {error.message}", hint=error.hint) from None
    end = 0
    for part in sorted(_parts(tree), key=lambda part: (part.offset, part.nbytes)):
        if part.offset != end:
            raise ArtifactInvalid(f"{who}: expected array {part.name!r} at byte {end}, found it at {part.offset}")
        end += part.nbytes
    if end != nbytes:
        raise ArtifactInvalid(f"{who}: expected arrays of {nbytes} bytes, found {end}")
    return tree


def read_trees(variant: VariantRecord) -> dict[str, CodecNode]:
    """The codec trees of all tensors of a variant, by tensor.

    Raises:
        ArtifactInvalid: one of them cannot be decoded by this version; other variants are not concerned.
    """
    return {name: read_tree(variant.id, name, record) for name, record in variant.tensors.items()}


def _parts(tree: CodecNode) -> Iterator[Part]:
    yield from tree.parts
    for child in tree.children:
        yield from _parts(child)
