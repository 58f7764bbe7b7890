"""The records a manifest is made of: what an artifact holds, in plain JSON types.

Every model is frozen, strict (no text becomes a number) and closed (no unknown field).  Checks that need one record are
here; checks across records are in `crosscheck.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from mfs_decompose.artifact.layout import check_user_path, is_digest, is_generated_path, is_variant_id
from mfs_decompose.errors import MfsError
from mfs_decompose.source import dtypes
from mfs_decompose.source.header import MAX_DIMS, MAX_ELEMENTS


def _digest(text: str) -> str:
    if not is_digest(text):
        raise ValueError("expected a sha256 in 64 lower-case hexadecimal digits")
    return text


def _commit(text: str) -> str:
    if not (len(text) in (40, 64) and all(digit in "0123456789abcdef" for digit in text)):
        raise ValueError("expected a full commit hash")
    return text


def _variant_id(text: str) -> str:
    if not is_variant_id(text):
        raise ValueError("expected an id of 1 to 64 letters, digits, '.', '_' or '-', not 'base' or 'all'")
    return text


def _generated(path: str) -> str:
    if not is_generated_path(path):
        raise ValueError(f"expected a file name that mfs generates, found {path[:120]!r}")
    return path


def _safe(parts: int) -> Any:
    def check(path: str) -> str:
        try:
            return check_user_path(path, parts=parts)
        except MfsError as error:
            raise ValueError(error.message) from None

    return AfterValidator(check)


def _known_dtype(name: str) -> str:
    if not dtypes.is_known(name):
        raise ValueError(f"unknown dtype {name[:40]!r}")
    return name


def _plausible(shape: tuple[int, ...]) -> tuple[int, ...]:
    # As for headers: whoever decodes it counts elements, rows and blocks.
    if math.prod(max(1, length) for length in shape) > MAX_ELEMENTS:
        raise ValueError("more than the 2^40 elements allowed")
    return shape


def _readable(names: Any) -> Any:
    """File names that are not UTF-8 reach Python with surrogates, which JSON cannot hold: shown as escapes instead."""
    if not isinstance(names, list | tuple):
        return names
    return tuple(
        name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") if isinstance(name, str) else name
        for name in names
    )


Digest = Annotated[str, AfterValidator(_digest)]
Commit = Annotated[str, AfterValidator(_commit)]
VariantId = Annotated[str, AfterValidator(_variant_id)]
GeneratedPath = Annotated[str, AfterValidator(_generated)]
UserFile = Annotated[str, _safe(1)]
UserPath = Annotated[str, _safe(4)]
Dtype = Annotated[str, AfterValidator(_known_dtype)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TensorName = Annotated[str, Field(min_length=1, max_length=1024)]
Shape = Annotated[tuple[Count, ...], Field(max_length=MAX_DIMS), AfterValidator(_plausible)]


_LARGE = 1e290  # 2^40 tensors of this error still have a sum


class Record(BaseModel):
    """Base of all records."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)


class ToolRecord(Record):
    """What wrote the artifact; a part of what makes its bytes reproducible."""

    name: str
    version: str
    torch: str
    numpy: str
    safetensors: str
    zstandard: str


class PlatformRecord(Record):
    """Where it was written: the kind of device, and the CPU capability torch chose its kernels by."""

    device: Literal["cpu", "cuda"]
    capability: str


class FileEntry(Record):
    """A file of the artifact: bytes, and sha256 of the content."""

    size: Count
    sha256: Digest


class SourceShard(Record):
    """A weight file of a source, under the user's name; its header lies verbatim in `files/<header_sha256>`."""

    file: UserFile
    size: Count
    header_sha256: Digest


class IndexFile(Record):
    """The weight index of a source, verbatim in `files/<sha256>`."""

    name: UserFile
    sha256: Digest


class SourceRecord(Record):
    """A checkpoint as it was given: enough to write it again, byte for byte, when every tensor is exact."""

    kind: Literal["local", "hub"]
    repo: str | None = None
    revision: Commit | None = None
    shards: Annotated[tuple[SourceShard, ...], Field(min_length=1)]
    index: IndexFile | None = None
    files: dict[UserPath, Digest]
    left_out: Annotated[tuple[str, ...], BeforeValidator(_readable)] = ()

    @model_validator(mode="after")
    def _check(self) -> SourceRecord:
        if (self.kind == "hub") != (self.repo is not None) or (self.kind == "hub") != (self.revision is not None):
            raise ValueError("a Hub source has a repo and a revision, a local one has neither")
        names = [shard.file for shard in self.shards] + list(self.files) + ([self.index.name] if self.index else [])
        double = [name for name, count in Counter(names).items() if count > 1]
        if double:
            raise ValueError(f"the file {double[0]!r} stands in one source twice")
        return self

    def contents(self) -> set[str]:
        """Digests of everything that lies in `files/` for this source."""
        found = {shard.header_sha256 for shard in self.shards} | set(self.files.values())
        return found | ({self.index.sha256} if self.index else set())


class BaseTensor(Record):
    """A tensor of the base as stored: sha256 of its bytes."""

    dtype: Dtype
    shape: Shape
    sha256: Digest


class BaseRecord(Record):
    """The shared weights. `bytes` counts the shard files inside the artifact: 0 when the base is referenced."""

    mode: Literal["known", "mean", "refined", "shared"]
    store: Literal["copy", "reference", "hardlink"]
    source: SourceRecord | None
    shards: tuple[GeneratedPath, ...]
    tensors: dict[TensorName, BaseTensor]
    bytes: Count

    @model_validator(mode="after")
    def _check(self) -> BaseRecord:
        made = self.mode in ("mean", "refined")
        if made != (self.source is None):
            raise ValueError("a base that was made has no source, one that was given has")
        if made and self.store != "copy":
            raise ValueError("a base that was made exists nowhere else, so it is stored as a copy")
        if self.store == "reference" and (self.shards or self.bytes):
            raise ValueError("a base by reference has no shards here")
        if self.store != "reference" and self.source and len(self.shards) != len(self.source.shards):
            raise ValueError("a stored base has one shard for each file of its source")
        return self


class Blob(Record):
    """Where a tensor's bytes lie: entry `entry` of the variant's shard number `shard`, counted from 0."""

    shard: Count
    entry: TensorName
    nbytes: Annotated[int, Field(ge=1)]


class TensorRecord(Record):
    """One tensor of one variant.

    `energy` is ||delta||^2 and `error` ||decoded - delta||^2, both summed in fp64, of what is served; `nonfinite`
    counts NaN and infinities of the original; `common_rows` are the first rows that have a row of the base to differ
    from. `restored_sha256` is that of the default restore (stochastic rounding, the original's dtype).
    """

    dtype: Dtype
    shape: Shape
    kind: Literal["same", "resized", "only_in_variant", "tied"]
    base_name: TensorName | None
    common_rows: Count
    tree: dict[str, Any]
    blob: Blob | None
    energy: Amount
    error: Amount
    original_sha256: Digest
    restored_sha256: Digest
    exact: bool
    nonfinite: Count

    @model_validator(mode="after")
    def _check(self) -> TensorRecord:
        if (self.kind == "only_in_variant") != (self.base_name is None):
            raise ValueError("exactly a tensor that is only in the variant has no base tensor")
        if self.common_rows > (self.shape[0] if self.shape else 1):
            raise ValueError("more common rows than the tensor has")
        if self.base_name is None and self.common_rows:
            raise ValueError("common rows without a base tensor")
        if self.exact and self.original_sha256 != self.restored_sha256:
            raise ValueError("an exact tensor is restored to its own bytes, the digests differ")
        if not math.isfinite(self.rel_error):
            raise ValueError("an error beyond all measure of its delta")
        return self

    @property
    def rel_error(self) -> float:
        """||decoded - delta|| / ||delta||, unsquared."""
        return relative_error(self.energy, self.error)


class AdapterTensor(Record):
    """A tensor of an adapter, kept as it was given: its bytes are entry `blob`, None where it has none."""

    dtype: Dtype
    shape: Shape
    sha256: Digest
    blob: Blob | None


class AdapterRecord(Record):
    """What makes a variant an adapter: its own tensors, and what its merge changes in the base's config.json."""

    tensors: dict[TensorName, AdapterTensor]
    config_changes: dict[str, Any]


class VariantRecord(Record):
    """One fine-tune. `checkpoint_bytes` are the tensor bytes of its own checkpoint, `bytes` its shard files, whole.

    Of an adapter, `source` and `adapter` describe its own folder, `tensors` the checkpoint that it makes of the base,
    and `checkpoint_bytes` are the tensor bytes of the base.
    """

    id: VariantId
    source: SourceRecord
    shards: tuple[GeneratedPath, ...]
    tensors: dict[TensorName, TensorRecord]
    missing: tuple[TensorName, ...]
    checkpoint_bytes: Count
    bytes: Count
    adapter: AdapterRecord | None = None
    shared_bytes: Count = 0
    """Its part of the bytes of the family's shared delta, as long as it uses that."""

    @model_serializer(mode="wrap")
    def _without_what_is_absent(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialise(self)
        return {key: value for key, value in document.items() if key not in ("adapter", "shared_bytes") or value}

    @property
    def blobs(self) -> dict[str, Blob]:
        """Every entry of its shards, by the tensor it belongs to: its own, and those of its adapter."""
        own = {name: tensor.blob for name, tensor in self.tensors.items()}
        kept = {name: tensor.blob for name, tensor in self.adapter.tensors.items()} if self.adapter else {}
        assert not own.keys() & kept.keys(), "crosscheck saw to it"
        return {name: blob for name, blob in (own | kept).items() if blob is not None}

    @property
    def footprint(self) -> float:
        """Its shard files and its part of the shared delta over its own checkpoint's tensors, in bytes: a fraction."""
        return (self.bytes + self.shared_bytes) / self.checkpoint_bytes if self.checkpoint_bytes else 0.0

    @property
    def rel_error(self) -> float:
        """Over all tensors: sqrt of the summed squared errors over the summed energies."""
        energies = [tensor.energy for tensor in self.tensors.values()]
        errors = [tensor.error for tensor in self.tensors.values()]
        # Scaled where sums could overflow, which only those of hostile records do.
        largest = max((*energies, *errors), default=0.0)
        unit = 2.0**-30 if largest > _LARGE else 1.0
        return relative_error(math.fsum(e * unit for e in energies), math.fsum(e * unit for e in errors))


def source_digests(variant: VariantRecord) -> dict[str, str]:
    """sha256 of every tensor in the folder that a variant was made from: an adapter's are its own, not the merge's."""
    if variant.adapter is not None:
        return {name: tensor.sha256 for name, tensor in variant.adapter.tensors.items()}
    return {name: tensor.original_sha256 for name, tensor in variant.tensors.items()}


class CoverageRecord(Record):
    """The proof that nothing was dropped: tensors of all sources (base, if it has one, and variants), and groups."""

    tensors: Count
    groups: Count


def relative_error(energy: float, error: float) -> float:
    """sqrt(error / energy); 0 where nothing was lost, infinite where something was lost from a delta of zero."""
    if error == 0.0:
        return 0.0
    return math.sqrt(error / energy) if energy else math.inf
