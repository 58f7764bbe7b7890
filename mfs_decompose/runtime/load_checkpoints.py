"""The base and the variants of an artifact as checkpoints without files: headers and config, for the tensor map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.variant_files import files_of_variant, stored_files
from mfs_decompose.errors import ArtifactInvalid, SourceIncompatible
from mfs_decompose.source.checkpoint import CONFIG, Checkpoint
from mfs_decompose.source.header import TensorInfo
from mfs_decompose.source.side_files import SideFiles
from mfs_decompose.source.tensor_map import TensorMap, load_tensor_map


@dataclass(frozen=True)
class Headers:
    """One model of an artifact: `id` is `base` or the variant's, its tensors' names and shapes, and its files."""

    id: str
    checkpoint: Checkpoint
    files: SideFiles


@dataclass(frozen=True)
class Described(Headers):
    """The same, and what its tensors become in transformers."""

    map: TensorMap


def headers_of_base(family: Family) -> Headers:
    """The base; one that was made has no config of its own, and takes that of the first variant with its shapes.

    Raises:
        ArtifactInvalid: there is no config.json that can be read.
        SourceIncompatible: no variant has the shapes of a base that was made.
    """
    source, tensors = family.manifest.base.source, family.manifest.base.tensors
    files = stored_files(family, source.files) if source is not None else _files_of_made(family)
    return _headers(family, "base", {name: (one.dtype, one.shape) for name, one in tensors.items()}, files)


def headers_of_variant(family: Family, id: str) -> Headers:
    """A variant; of an adapter, the checkpoint that it makes of the base.

    Raises:
        UsageError: there is no such variant.
        ArtifactInvalid: there is no config.json that can be read.
    """
    tensors = {name: (one.dtype, one.shape) for name, one in family.variant(id).tensors.items()}
    return _headers(family, id, tensors, files_of_variant(family, family.variant(id)))


def describe(headers: Headers, model_class: Any) -> Described:
    """What the tensors become in a model of this class.

    Raises:
        SourceIncompatible: they are not exactly those that the config describes, or are quantised.
    """
    found = load_tensor_map(headers.checkpoint, model_class)
    complaints = {
        "missing": found.unfilled,
        "without a place": found.unused,
        "dropped for another of the same place": tuple(found.shadowed),
        "of another shape": tuple(one.parameter for one in found.mismatched),
        "not to be joined": tuple(one.parameter for one in found.failed),
    }
    wrong = [f"{what} {', '.join(names[:5])}" for what, names in complaints.items() if names]
    if wrong:
        raise SourceIncompatible(
            f"cannot serve {headers.id!r}: expected exactly the tensors that its config.json describes, "
            f"found {'; '.join(wrong)}",
            hint="use `mfs restore` for it, and leave it out here",
        )
    return Described(headers.id, headers.checkpoint, headers.files, found)


def _headers(family: Family, id: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]], files: SideFiles) -> Headers:
    parsed = files.parse(CONFIG)
    if parsed.value is None:
        raise ArtifactInvalid(
            f"expected the config.json of {id!r} in the artifact, found {parsed.problem or 'none'}",
            hint="only models that transformers has can be served; use `mfs restore` for others",
        )
    infos = {name: TensorInfo(name, *tensors[name], "", 0) for name in sorted(tensors)}
    return Headers(id, Checkpoint(id, family.path, (), None, infos, (), (), parsed.value), files)


def _files_of_made(family: Family) -> SideFiles:
    shapes = {name: tensor.shape for name, tensor in family.manifest.base.tensors.items()}
    for variant in family.manifest.variants:
        if {name: tensor.shape for name, tensor in variant.tensors.items()} == shapes:
            return files_of_variant(family, variant)
    raise SourceIncompatible(
        "cannot serve a base that was made of variants: none of them has all of its tensors and shapes",
        hint="use `mfs restore`",
    )
