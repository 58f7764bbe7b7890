"""What may stand on either side of `mfs diff`: a checkpoint, a variant or the base of an artifact, or an artifact.

    ./folder, org/name[@revision]    a checkpoint
    ART                              a whole artifact: a folder that holds a manifest.json and no config.json
    ART::ID, ART::base               one variant of it as restored, or its base

What exists as a folder is one, also with `::` in its name. Behind a folder that is no artifact, `::` is left to the
reader of checkpoints, which knows `FOLDER::adapter` and `FOLDER::weights`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mfs_decompose.artifact.layout import MANIFEST, RESERVED_IDS
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.variant_files import files_of_base, files_of_variant
from mfs_decompose.codec.base import Rows
from mfs_decompose.errors import UsageError
from mfs_decompose.events import ProgressSink
from mfs_decompose.source.checkpoint import CONFIG, TensorReader
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.resolve import open_source
from mfs_decompose.source.side_files import SideFiles, files_of_checkpoint

BASE = "base"
SEPARATOR = "::"
_OF_A_FOLDER = ("adapter", "weights")


@dataclass(frozen=True, slots=True)
class Named:
    """A side as it was written: `artifact` where it lies in one, and `id` (a variant, or `base`) where one is named."""

    text: str
    artifact: Path | None = None
    id: str | None = None

    @property
    def whole(self) -> bool:
        """Whether a whole artifact is meant."""
        return self.artifact is not None and self.id is None


@dataclass(frozen=True)
class Side:
    """One model, opened for comparison.

    `open(name)` gives the rows of a tensor in the dtype of its spec. `recorded` are sha256 of those tensors, where they
    are known without reading; `originals` those of the checkpoint that a variant was made from. `raw` reads the bytes
    of rows where the tensors lie in files as they are.
    """

    ref: str
    kind: Literal["checkpoint", "adapter", "variant", "base"]
    specs: Mapping[str, TensorSpec]
    files: SideFiles
    open: Callable[[str], Rows]
    raw: TensorReader | None = None
    recorded: Mapping[str, str] = field(default_factory=dict)
    originals: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())


def parse_side(text: str) -> Named:
    """What a side means; nothing but names is looked at.

    Raises:
        UsageError: an id is asked of something that is no artifact.
    """
    if os.path.lexists(text):
        return Named(text, artifact=Path(text)) if _is_artifact(Path(text)) else Named(text)
    place, separator, id = text.rpartition(SEPARATOR)
    if not separator:
        return Named(text)
    if _is_artifact(Path(place)):
        if not id:
            raise UsageError(f"expected a variant's id behind {place}::, found none", hint=f"write {place}::base")
        return Named(text, artifact=Path(place), id=id)
    if os.path.isdir(place) and id not in _OF_A_FOLDER:  # noqa: PTH112
        raise UsageError(
            f"expected an artifact (a folder with {MANIFEST}) before ::{id[:80]}, found another folder: {place}",
            hint=f"write {place} for the checkpoint itself",
        )
    return Named(text)


def open_side(named: Named, stack: ExitStack, *, base: str | None, offline: bool, progress: ProgressSink) -> Side:
    """Open one model; what it holds open ends with `stack`.

    Raises:
        UsageError: the artifact has no such variant.
        MfsError: as `open_source` and `Family.open` do.
    """
    if named.artifact is None:
        checkpoint = open_source(named.text, "checkpoint", offline=offline, progress=progress)
        reader = stack.enter_context(TensorReader(checkpoint))
        return Side(
            ref=named.text,
            kind="adapter" if checkpoint.adapter is not None else "checkpoint",
            specs=checkpoint.tensors,
            files=files_of_checkpoint(checkpoint),
            open=lambda name: lambda start, stop: reader.rows(name, start, stop),
            raw=reader,
            left_out=checkpoint.left_out,
        )
    family = stack.enter_context(Family.open(named.artifact, base=base))
    assert named.id is not None, "whole artifacts have no tensors of their own"
    return _base_side(named.text, family) if named.id == BASE else _variant_side(named.text, family, named.id)


def _variant_side(text: str, family: Family, id: str) -> Side:
    from mfs_decompose.artifact.values import open_tensor

    if id in RESERVED_IDS:
        raise UsageError(f"expected one variant, found {text!r}", hint="mfs diff compares two models, or two artifacts")
    record = family.variant(id)
    return Side(
        ref=text,
        kind="variant",
        specs={name: TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in record.tensors.items()},
        files=files_of_variant(family, record),
        open=lambda name: open_tensor(family, id, name).restored,
        recorded={name: tensor.restored_sha256 for name, tensor in record.tensors.items()},
        originals={name: tensor.original_sha256 for name, tensor in record.tensors.items()},
        left_out=record.source.left_out,
    )


def _base_side(text: str, family: Family) -> Side:
    record = family.manifest.base
    return Side(
        ref=text,
        kind="base",
        specs={name: TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in record.tensors.items()},
        files=files_of_base(family),
        open=lambda name: lambda start, stop: family.base_rows(name, start, stop),
        recorded={name: tensor.sha256 for name, tensor in record.tensors.items()},
        left_out=record.source.left_out if record.source is not None else (),
    )


def _is_artifact(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and not (folder / CONFIG).exists()
