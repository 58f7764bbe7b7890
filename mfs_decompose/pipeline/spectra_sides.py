"""Where the weights come from whose delta is looked at: the variant's own checkpoint, or what an artifact stores of it.

The original shows what training did; a lossy artifact can only show what it kept. A folder is believed to be the
original tensor by tensor, by the digests on record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import TensorRecord, VariantRecord, source_digests
from mfs_decompose.artifact.values import open_tensor, row_bytes
from mfs_decompose.base_extraction import delta_rows
from mfs_decompose.codec.base import DECODE_ELEMENTS, Rows, block_rows
from mfs_decompose.errors import ArtifactInvalid, MfsError, SourceIncompatible
from mfs_decompose.events import ProgressSink
from mfs_decompose.source.checkpoint import Checkpoint, TensorReader
from mfs_decompose.source.dtypes import is_float
from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.resolve import open_source

if TYPE_CHECKING:
    import torch

Of = Literal["original", "stored"]

_WITHIN: Mapping[str, tuple[str, ...]] = {"F64": ("F64", "F32", "F16", "BF16"), "F32": ("F32", "F16", "BF16")}
"""Float formats whose numbers are all numbers of a wider one."""


@dataclass(frozen=True)
class Pair:
    """One tensor of a variant beside its base's: `common` rows that both have.

    `of` says whose values these are, `dtype` which format they were rounded to; served weights of a lossy codec are
    fp32. `digest` is the sha256 that all rows must have, None where there is none on record.
    """

    name: str
    spec: TensorSpec
    base: TensorSpec | None
    common: int
    of: Of
    dtype: str
    digest: str | None
    identical: bool
    own_rows: Rows
    base_rows: Rows

    @property
    def comparable(self) -> bool:
        """Whether there is a delta: floats on both sides, and rows of one shape."""
        base = self.base
        if base is None or not self.common or 0 in self.spec.shape:
            return False
        return is_float(self.spec.dtype) and is_float(base.dtype) and base.shape[1:] == self.spec.shape[1:]

    @property
    def on_grid(self) -> bool:
        """Whether every number of the base is one of the format the variant was rounded to."""
        return self.base is not None and self.base.dtype in _WITHIN.get(self.dtype, (self.dtype,))

    def delta(self, start: int, stop: int) -> torch.Tensor:
        """Own minus base, fp32 [stop - start, ...]."""
        return delta_rows(self.own_rows(start, stop), self.base_rows(start, stop))


class AnotherOriginal(SourceIncompatible):
    """A checkpoint that is not the one a variant was made from."""


def open_original(
    family: Family, record: VariantRecord, given: str | None, offline: bool, progress: ProgressSink
) -> TensorReader | None:
    """The variant's own checkpoint, by headers: what is given, else where it was, if it is still there.

    None where only the artifact is left, and for an adapter, of which the artifact keeps every bit. A hint fetches
    nothing from the Hub.

    Raises:
        AnotherOriginal: what is given has other tensors.
        SourceNotFound: what is given is not there.
    """
    if given is not None:
        checkpoint = open_source(given, record.id, offline=offline, progress=progress)
        _check_headers(checkpoint, record, given)
    else:
        place = family.original_ref(record.id)
        try:
            if place is None or record.adapter is not None:
                return None
            checkpoint = open_source(place, record.id, offline=True, progress=progress)
            _check_headers(checkpoint, record, place)
        except MfsError:
            return None
    if record.adapter is not None:
        _check_adapter(checkpoint, record, given)
        return None
    return TensorReader(checkpoint)


def pair_up(family: Family, record: VariantRecord, name: str, original: TensorReader | None) -> Pair:
    """One tensor of a variant, ready to be read."""
    tensor = record.tensors[name]
    spec = TensorSpec(name, tensor.dtype, tensor.shape)
    below = family.manifest.base.tensors.get(tensor.base_name) if tensor.base_name is not None else None
    base = TensorSpec(tensor.base_name, below.dtype, below.shape) if below is not None and tensor.base_name else None
    same = below is not None and (below.dtype, below.shape) == (tensor.dtype, tensor.shape)
    identical = same and below is not None and below.sha256 == tensor.original_sha256
    of, dtype, digest, own = _own(family, record, tensor, name, original)

    def base_rows(start: int, stop: int) -> torch.Tensor:
        assert tensor.base_name is not None
        return family.base_rows(tensor.base_name, start, stop)

    return Pair(name, spec, base, tensor.common_rows, of, dtype, digest, identical, own, base_rows)


def _own(
    family: Family, record: VariantRecord, tensor: TensorRecord, name: str, original: TensorReader | None
) -> tuple[Of, str, str | None, Rows]:
    if original is not None:
        return "original", tensor.dtype, tensor.original_sha256, lambda start, stop: original.rows(name, start, stop)
    stored = open_tensor(family, record.id, name)
    if stored.exact:
        return "original", tensor.dtype, tensor.original_sha256, stored.restored
    if not is_float(tensor.dtype):
        return "stored", tensor.dtype, None, stored.restored
    # The original of an adapter is its fp32 merge, which is what is served.
    of: Of = "original" if record.adapter is not None else "stored"
    return of, "F32", None, stored.served


class Proof:
    """Holds the rows of a tensor, read in order, against the digest on record."""

    def __init__(self, pair: Pair, variant: str, original: TensorReader | None) -> None:
        self._pair, self._variant, self._original = pair, variant, original
        self._digest = hashlib.sha256()

    def add(self, rows: torch.Tensor) -> None:
        if self._pair.digest is not None:
            self._digest.update(row_bytes(rows))

    def finish(self, read: int) -> None:
        """Read and hash what follows row `read`, and compare.

        Raises:
            AnotherOriginal: the checkpoint is not the one the variant was made from.
            ArtifactInvalid: the artifact is damaged.
        """
        if self._pair.digest is None:
            return
        step = block_rows(self._pair.spec, DECODE_ELEMENTS)
        for start in range(read, self._pair.spec.rows, step):
            self.add(self._pair.own_rows(start, min(start + step, self._pair.spec.rows)))
        if self._digest.hexdigest() == self._pair.digest:
            return
        if self._original is not None:
            raise _another(str(self._original.checkpoint.root), self._variant, self._pair.name)
        raise ArtifactInvalid(
            f"tensor {self._pair.name[:200]!r} of variant {self._variant!r} is not what was recorded: the artifact is "
            "damaged",
            hint="mfs verify says which file; get the artifact again from where it came from.",
        )


def _check_headers(checkpoint: Checkpoint, record: VariantRecord, place: str) -> None:
    wanted: Mapping[str, tuple[str, tuple[int, ...]]] = {
        name: (tensor.dtype, tensor.shape)
        for name, tensor in (record.adapter.tensors if record.adapter is not None else record.tensors).items()
    }
    for name, expected in wanted.items():
        info = checkpoint.tensors.get(name)
        if info is None or (info.dtype, info.shape) != expected:
            raise _another(place, record.id, name)


def _check_adapter(checkpoint: Checkpoint, record: VariantRecord, place: str | None) -> None:
    with TensorReader(checkpoint) as reader:
        for name, expected in source_digests(record).items():
            if hashlib.sha256(reader.raw(name).numpy().data).hexdigest() != expected:
                raise _another(str(place), record.id, name)


def _another(place: str, id: str, tensor: str) -> AnotherOriginal:
    return AnotherOriginal(
        f"{place} is not the original of variant {id!r}: tensor {tensor[:200]!r} differs",
        hint=f"Give the checkpoint that was decomposed: --originals {id}=FOLDER",
    )
