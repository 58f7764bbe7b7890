"""Two whole artifacts compared by their manifests: digests on record tell what is equal, and nothing is decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import BaseRecord, TensorRecord, VariantRecord
from mfs_decompose.artifact.variant_files import files_of_base, files_of_variant
from mfs_decompose.source.config_diff import Change, compare_objects

SCHEMA = "mfs.diff-artifacts/1"


@dataclass(frozen=True, slots=True)
class Names:
    """Names on one side alone, and those of both that differ; each sorted."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.changed)


@dataclass(frozen=True, slots=True)
class VariantDiff:
    """One variant that both have. Tensors are `originals` where the checkpoints they were made from differ, `restored`
    where what is restored does, `stored` where the codec or the recorded error does.
    """

    id: str
    originals: Names
    restored: Names
    stored: Names
    files: Names
    bytes: tuple[int, int]
    rel_error: tuple[float | None, float | None]

    @property
    def equal(self) -> bool:
        return not (self.originals or self.restored or self.stored or self.files)


@dataclass(frozen=True)
class ArtifactsDiff:
    """What differs between two artifacts. `made` are changes of recipe, tool and platform, which are no content."""

    a: Path
    b: Path
    digests: tuple[str, str]
    base: Names
    base_files: Names
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    variants: tuple[VariantDiff, ...]
    made: tuple[Change, ...]

    @property
    def equal(self) -> bool:
        """Whether base and variants are the same, whoever made them by whatever recipe."""
        own = self.base or self.base_files or self.only_a or self.only_b
        return not own and all(variant.equal for variant in self.variants)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, schema `mfs.diff-artifacts/1`: see docs/json.md."""
        return {
            "schema": SCHEMA,
            "equal": self.equal,
            "a": {"ref": str(self.a), "artifact_digest": self.digests[0]},
            "b": {"ref": str(self.b), "artifact_digest": self.digests[1]},
            "base": {"tensors": asdict(self.base), "files": asdict(self.base_files)},
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "variants": [
                {
                    "id": one.id,
                    "equal": one.equal,
                    "originals": asdict(one.originals),
                    "restored": asdict(one.restored),
                    "stored": asdict(one.stored),
                    "files": asdict(one.files),
                    "bytes_a": one.bytes[0],
                    "bytes_b": one.bytes[1],
                    "rel_error_a": one.rel_error[0],
                    "rel_error_b": one.rel_error[1],
                }
                for one in self.variants
            ],
            "made": [asdict(one) for one in self.made],
        }


def compare_artifacts(a: Path, b: Path) -> ArtifactsDiff:
    """Compare two artifacts by what their manifests record.

    Raises:
        ArtifactInvalid: one of them is damaged, or not an artifact.
    """
    with Family.open(a) as one, Family.open(b) as two:
        own, other = {v.id: v for v in one.manifest.variants}, {v.id: v for v in two.manifest.variants}
        return ArtifactsDiff(
            a=a,
            b=b,
            digests=(one.artifact_digest, two.artifact_digest),
            base=_names(_base(one.manifest.base), _base(two.manifest.base)),
            base_files=_names(files_of_base(one).digests, files_of_base(two).digests),
            only_a=tuple(sorted(own.keys() - other.keys())),
            only_b=tuple(sorted(other.keys() - own.keys())),
            variants=tuple(_variant(one, own[id], two, other[id]) for id in sorted(own.keys() & other.keys())),
            made=tuple(compare_objects(_made(one), _made(two), skipped=())),
        )


def _variant(one: Family, a: VariantRecord, two: Family, b: VariantRecord) -> VariantDiff:
    files = files_of_variant(one, a), files_of_variant(two, b)
    return VariantDiff(
        id=a.id,
        originals=_names(_digests(a, "original"), _digests(b, "original")),
        restored=_names(_digests(a, "restored"), _digests(b, "restored")),
        stored=_names(
            {name: _stored(tensor) for name, tensor in a.tensors.items()},
            {name: _stored(tensor) for name, tensor in b.tensors.items()},
        ),
        files=_names(
            {name: files[0].digest(name) for name in files[0].sizes},
            {name: files[1].digest(name) for name in files[1].sizes},
        ),
        bytes=(a.bytes, b.bytes),
        rel_error=(_finite(a.rel_error), _finite(b.rel_error)),
    )


def _digests(variant: VariantRecord, which: str) -> dict[str, object]:
    return {
        name: (tensor.dtype, tensor.shape, tensor.original_sha256 if which == "original" else tensor.restored_sha256)
        for name, tensor in variant.tensors.items()
    }


def _stored(tensor: TensorRecord) -> object:
    return tensor.tree, tensor.base_name, tensor.energy, tensor.error


def _base(base: BaseRecord) -> dict[str, object]:
    return {name: (tensor.dtype, tensor.shape, tensor.sha256) for name, tensor in base.tensors.items()}


def _made(family: Family) -> dict[str, object]:
    manifest = family.manifest
    base = {"mode": manifest.base.mode, "store": manifest.base.store}
    return {
        "recipe": manifest.recipe,
        "tool": manifest.tool.model_dump(),
        "platform": manifest.platform.model_dump(),
        "base": base,
    }


def _finite(value: float) -> float | None:
    """Something lost from a delta of zero is infinite, which JSON cannot say."""
    return value if math.isfinite(value) else None


def _names(a: Mapping[str, object], b: Mapping[str, object]) -> Names:
    return Names(
        tuple(sorted(a.keys() - b.keys())),
        tuple(sorted(b.keys() - a.keys())),
        tuple(sorted(name for name in a.keys() & b.keys() if a[name] != b[name])),
    )
