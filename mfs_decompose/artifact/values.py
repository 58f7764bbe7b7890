"""The weights inside an artifact: every tensor of every variant, read by rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mfs_decompose.artifact.reader import Family
from mfs_decompose.codec.base import DECODE_ELEMENTS, Rows, block_rows
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.events import ProgressSink
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec

if TYPE_CHECKING:
    import torch

    from mfs_decompose.codec.opened import OpenedTensor
    from mfs_decompose.codec.opened_adapter import OpenedAdapterTensor
    from mfs_decompose.linalg.rounding import Rounding


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a variant, opened; `spec` is what the variant's own checkpoint had."""

    spec: TensorSpec
    exact: bool
    _opened: OpenedTensor | OpenedAdapterTensor
    _base: Rows | None

    def blocks(self) -> list[tuple[int, int]]:
        """Row ranges to read it by, of bounded memory."""
        step = block_rows(self.spec, DECODE_ELEMENTS)
        return [(start, min(start + step, self.spec.rows)) for start in range(0, self.spec.rows, step)]

    def restored(
        self, start: int, stop: int, dtype: torch.dtype | None = None, rounding: Rounding = "stochastic"
    ) -> torch.Tensor:
        """Rows as `mfs restore` writes them: [stop - start, ...], by default in the original's dtype."""
        return self._opened.restored(start, stop, self._base, dtype, rounding)

    def served(self, start: int, stop: int) -> torch.Tensor:
        """Rows as the runtime computes with them, fp32: never rounded to the original's dtype on the way."""
        return self._opened.served(start, stop, self._base)


def open_tensor(family: Family, variant_id: str, name: str) -> StoredTensor:
    """Open one tensor of one variant.

    Raises:
        UsageError: there is no such variant or tensor.
        ArtifactInvalid: its tree cannot be decoded or does not fit it.
    """
    from mfs_decompose.codec.opened import OpenedTensor

    node = family.tree(variant_id, name)
    record = family.variant(variant_id).tensors[name]
    spec = TensorSpec(name, record.dtype, record.shape)
    if node.codec == "alias":
        return _follow(family, variant_id, spec, node.params.get("of"))

    def fetch(offset: int, count: int) -> bytes:
        return family.blob_range(variant_id, name, offset, count)

    base = _rows_of(family, record.base_name, spec) if record.base_name is not None else None
    if node.codec == "adapter":
        return StoredTensor(spec, False, _open_merged(family, variant_id, node, spec, record.base_name), base)
    opened = OpenedTensor(node, fetch, spec, family.shared(record.base_name))
    return StoredTensor(spec, opened.exact, opened, base)


def _rows_of(family: Family, base_name: str, spec: TensorSpec) -> Rows:
    """Reads rows of a base tensor for whoever decodes `spec`: as many elements a row, and no row it has not."""
    base = family.manifest.base.tensors[base_name]
    known = TensorSpec(base_name, base.dtype, base.shape)

    def rows(start: int, stop: int) -> torch.Tensor:
        if len(known.shape) != len(spec.shape) or known.shape[1:] != spec.shape[1:] or stop > known.rows:
            expected = f"{[stop - start, *spec.shape[1:]]} from row {start}"
            raise ArtifactInvalid(
                f"tensor {spec.name!r} needs {expected} of the base's {base_name!r}, which is {list(base.shape)}"
            )
        return family.base_rows(base_name, start, stop)

    return rows


def _open_merged(
    family: Family, variant_id: str, node: CodecNode, spec: TensorSpec, base_name: str | None
) -> OpenedAdapterTensor:
    from mfs_decompose.codec.opened_adapter import OpenedAdapterTensor

    base = None
    if base_name is not None:
        found = family.manifest.base.tensors[base_name]
        base = TensorSpec(base_name, found.dtype, found.shape)
    return OpenedAdapterTensor(node, lambda name: read_adapter_tensor(family, variant_id, name), spec, base)


def read_adapter_tensor(family: Family, variant_id: str, name: str) -> torch.Tensor:
    """A tensor of a variant's adapter, as it was given.

    Raises:
        ArtifactInvalid: the variant is no adapter, or its adapter has no such tensor.
    """
    import torch

    adapter = family.variant(variant_id).adapter
    record = adapter.tensors.get(name) if adapter is not None else None
    if record is None:
        raise ArtifactInvalid(f"expected a tensor of the adapter of variant {variant_id!r}, found {name[:120]!r}")
    data = bytearray(family.adapter_bytes(variant_id, name))
    dtype = torch_dtype(record.dtype)
    if not data:
        return torch.empty(record.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(record.shape)


def _follow(family: Family, variant_id: str, spec: TensorSpec, target: object) -> StoredTensor:
    records = family.variant(variant_id).tensors
    known = isinstance(target, str) and target in records
    if not known or family.tree(variant_id, str(target)).codec == "alias":
        raise ArtifactInvalid(
            f"tensor {spec.name!r} of variant {variant_id!r} is an alias of {target!r}, which is none"
        )
    found = open_tensor(family, variant_id, str(target))
    if (found.spec.dtype, found.spec.shape) != (spec.dtype, spec.shape):
        raise ArtifactInvalid(f"tensor {spec.name!r} of variant {variant_id!r} is an alias of an unlike {target!r}")
    return StoredTensor(spec, found.exact, found._opened, found._base)


def restored_sha256(family: Family, variant_id: str, tensor: str, progress: ProgressSink) -> str:
    """The digest of a tensor as `mfs restore` writes it by default."""
    stored = open_tensor(family, variant_id, tensor)
    digest = hashlib.sha256()
    for start, stop in stored.blocks():
        digest.update(row_bytes(stored.restored(start, stop)))
        progress.advance((stop - start) * stored.spec.row_bytes)
    return digest.hexdigest()


def row_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a block of rows, not copied where they lie in order already."""
    import torch

    flat = values.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
