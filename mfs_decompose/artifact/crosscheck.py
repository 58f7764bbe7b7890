"""Records of a manifest against each other: each is sound by itself, and now they must tell one story."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from mfs_decompose.artifact.layout import CARD, base_shard_name, content_name, variant_shard_name
from mfs_decompose.artifact.records import (
    BaseRecord,
    Blob,
    CoverageRecord,
    FileEntry,
    SourceRecord,
    TensorRecord,
    VariantRecord,
)
from mfs_decompose.artifact.shared_delta import SharedRecord, shard_names
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.source.dtypes import item_size

Files = Mapping[str, FileEntry]


def crosscheck(
    base: BaseRecord,
    variants: Sequence[VariantRecord],
    files: Files,
    coverage: CoverageRecord,
    shared: SharedRecord | None = None,
) -> None:
    """Check that the records agree: ids and names, shards and their sizes, blobs, digests, coverage.

    Raises:
        ArtifactInvalid: naming the first disagreement.
    """
    ids = [variant.id for variant in variants]
    _require(ids == sorted(set(ids)), "variants sorted by id, each once", f"{ids[:8]}")
    _check_base(base, files)
    for number, variant in enumerate(variants, 1):
        _check_variant(number, variant, base, files)
    _check_shared(base, variants, files, shared)
    _check_files(base, variants, files, () if shared is None else shared.shards)
    tensors = (len(base.tensors) if base.source else 0) + sum(len(variant.tensors) for variant in variants)
    _require(coverage.tensors == tensors, f"coverage of all {tensors} tensors", str(coverage.tensors))


def _check_base(base: BaseRecord, files: Files) -> None:
    names = tuple(base_shard_name(number, len(base.shards)) for number in range(1, len(base.shards) + 1))
    _require(base.shards == names, "the base's shards numbered in order", f"{base.shards[:4]}")
    _require(base.bytes == _bytes(base.shards, files), "the base's bytes to be those of its shards", str(base.bytes))
    if base.source and base.shards:
        sizes = [files[name].size for name in base.shards]
        given = [shard.size for shard in base.source.shards]
        _require(sizes == given, "base shards of the sizes of their source's files", f"{sizes[:4]}")


def _check_variant(number: int, variant: VariantRecord, base: BaseRecord, files: Files) -> None:
    who = f"variant {variant.id!r}"
    names = tuple(variant_shard_name(number, shard) for shard in range(1, len(variant.shards) + 1))
    _require(variant.shards == names, f"the shards of {who} numbered in order", f"{variant.shards[:4]}")
    _require(variant.bytes == _bytes(names, files), f"the bytes of {who} to be those of its shards", str(variant.bytes))
    missing = sorted(base.tensors.keys() - variant.tensors.keys() - _renamed(variant))
    _require(
        list(variant.missing) == missing,
        f"the {len(missing)} base tensors that {who} lacks, sorted",
        f"{variant.missing[:4]}",
    )
    for name, tensor in variant.tensors.items():
        _check_tensor(f"tensor {name!r} of {who}", tensor, base)
    if variant.adapter is not None:
        _check_adapter(who, variant, base)
    _check_blobs(who, names, variant.blobs, files)


def _check_shared(
    base: BaseRecord, variants: Sequence[VariantRecord], files: Files, shared: SharedRecord | None
) -> None:
    answered = sum(variant.shared_bytes for variant in variants)
    _require(answered == (shared.bytes if shared else 0), "all bytes of the shared delta in footprints", str(answered))
    if shared is None:
        return
    who = "the shared delta"
    _require(base.mode == "shared", f"a base that was given for {who}", repr(base.mode))
    _require(shared.shards == shard_names(len(shared.shards)), f"the shards of {who} in order", f"{shared.shards[:4]}")
    nbytes = _bytes(shared.shards, files)
    _require(shared.bytes == nbytes, f"the bytes of {who} to be those of its shards", str(shared.bytes))
    strangers = sorted(shared.tensors.keys() - base.tensors.keys())
    _require(not strangers, f"base tensors below {who}", f"{strangers[:3]}")
    _check_blobs(who, shared.shards, shared.blobs, files)


def _check_blobs(who: str, names: Sequence[str], blobs: Mapping[str, Blob], files: Files) -> None:
    filled = [0] * len(names)
    seen: set[tuple[int, str]] = set()
    for name, blob in blobs.items():
        place = (blob.shard, blob.entry)
        _require(blob.shard < len(names), f"a shard of {who} for tensor {name!r}", f"number {blob.shard}")
        _require(place not in seen, f"each tensor of {who} in an entry of its own", f"{blob.entry!r} twice")
        seen.add(place)
        filled[blob.shard] += blob.nbytes
    for shard, amount in zip(names, filled, strict=True):
        _require(0 < amount < files[shard].size, f"{shard} to hold the {amount} bytes said to be in it", "another size")


def _renamed(variant: VariantRecord) -> set[str]:
    """Base tensors that the variant has under other names."""
    whole = (tensor for tensor in variant.tensors.values() if tensor.kind in ("same", "resized"))
    return {tensor.base_name for tensor in whole if tensor.base_name is not None}


def _check_adapter(who: str, variant: VariantRecord, base: BaseRecord) -> None:
    assert variant.adapter is not None
    kept = variant.adapter.tensors
    _require(base.source is not None, f"a base that was given below the adapter {who}", "none")
    double = sorted(kept.keys() & variant.tensors.keys())
    _require(not double, f"the tensors of the adapter {who} under names of their own", f"{double[:3]}")
    for name, tensor in kept.items():
        expected = math.prod(tensor.shape) * item_size(tensor.dtype)
        found = tensor.blob.nbytes if tensor.blob else 0
        _require(found == expected, f"{expected} bytes of {name!r} of the adapter {who}", str(found))
    stored = sorted(name for name, tensor in variant.tensors.items() if tensor.blob is not None)
    _require(not stored, f"no bytes of {who} but its adapter's", f"{stored[:3]}")


def _check_tensor(who: str, tensor: TensorRecord, base: BaseRecord) -> None:
    if tensor.base_name is None:
        return
    partner = base.tensors.get(tensor.base_name)
    _require(partner is not None, f"a base tensor for {who}", f"{tensor.base_name!r}, which the base has not")
    assert partner is not None
    if tensor.kind == "same":
        _require(tensor.shape == partner.shape, f"{who} in the shape of its base tensor", f"{list(tensor.shape)}")
    rows = partner.shape[0] if partner.shape else 1
    _require(tensor.common_rows <= rows, f"{who} to share at most the base's {rows} rows", str(tensor.common_rows))


def _check_files(base: BaseRecord, variants: Sequence[VariantRecord], files: Files, shared: Sequence[str]) -> None:
    """Every file has one reason to be there, and every reason a file."""
    sources: list[SourceRecord] = [variant.source for variant in variants] + ([base.source] if base.source else [])
    contents = {content_name(sha256): sha256 for source in sources for sha256 in source.contents()}
    expected = {CARD, *contents, *base.shards, *shared, *(name for variant in variants for name in variant.shards)}
    _require(expected <= files.keys(), "every file in the table", f"no {sorted(expected - files.keys())[:4]}")
    _require(files.keys() <= expected, "only files with a use", f"{sorted(files.keys() - expected)[:4]}")
    for name, sha256 in contents.items():
        _require(files[name].sha256 == sha256, f"{name} to be named by its content", files[name].sha256)


def _bytes(names: Iterable[str], files: Files) -> int:
    missing = [name for name in names if name not in files]
    _require(not missing, "every shard in the file table", f"no {missing[:4]}")
    return sum(files[name].size for name in names)


def _require(holds: bool, expected: str, found: str) -> None:
    if not holds:
        raise ArtifactInvalid(
            f"expected {expected} in manifest.json, found {found}",
            hint="the artifact was not written by mfs, or was edited; get it again from where it came from",
        )
