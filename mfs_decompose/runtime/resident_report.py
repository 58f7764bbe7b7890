"""What variants would take in memory: form and bytes by codec, tensor after tensor, no model built."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfs_decompose.artifact.reader import Family
from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.runtime.memory import WHOLE
from mfs_decompose.runtime.resident import Resident, SharedForms, make_resident
from mfs_decompose.source.dtypes import is_float

_FLOAT = 4  # bytes of fp32
NOTHING = "nothing"
"""The form of what the base has already."""


@dataclass
class _Sum:
    tensors: int = 0
    bytes: int = 0
    stored: int = 0


def report_resident(
    artifact: Path, variant: str | None = None, base: str | None = None, progress: ProgressSink | None = None
) -> dict[str, Any]:
    """Plain JSON, schema `mfs.resident/1`: see docs/json.md.

    Forms are those of the checkpoint's tensors. Where a model joins tensors or turns them, own rows may become the
    difference to the base's instead: `LoadedFamily.memory()` counts what is really held.

    Args:
        variant: this one only.
        base: where the base is, for an artifact that refers to it.

    Raises:
        UsageError: there is no such variant.
        ArtifactInvalid: the artifact is damaged.
    """
    sink = progress or NullSink()
    with Family.open(artifact, base=base) as family:
        ids = family.variant_ids if variant is None else (family.variant(variant).id,)
        shared = SharedForms(family)
        sink.start("reading deltas", sum(family.variant(id).bytes for id in ids))
        elements = sum(math.prod(tensor.shape) for tensor in family.manifest.base.tensors.values())
        variants = [_variant(family, id, shared, sink) for id in ids]
        sink.finish()
        common = shared.nbytes
        return {
            "schema": "mfs.resident/1",
            "artifact_digest": family.artifact_digest,
            "base_bytes": _FLOAT * elements,
            "shared_bytes": common,
            "variants": variants,
            "total_bytes": _FLOAT * elements + common + sum(one["bytes"] for one in variants),
        }


def _variant(family: Family, id: str, shared: SharedForms, sink: ProgressSink) -> dict[str, Any]:
    record = family.variant(id)
    sums: defaultdict[tuple[str, str], _Sum] = defaultdict(_Sum)
    for name, tensor in record.tensors.items():
        node = family.tree(id, name)
        stored = tensor.blob.nbytes if tensor.blob else 0
        if node.codec != "alias" and len(tensor.shape) in (2, 3) and is_float(tensor.dtype):
            found = _bytes(make_resident(family, id, name, shared), shared)
        elif node.codec in ("alias", "identical"):
            found = {}
        else:
            found = {WHOLE: _FLOAT * math.prod(tensor.shape)}
        for at, (form, nbytes) in enumerate(sorted(found.items() or {NOTHING: 0}.items())):
            entry = sums[node.text(), form]
            entry.tensors += 1
            entry.bytes += nbytes
            entry.stored += 0 if at else stored  # once, whatever it became
        sink.advance(stored)
    forms = [
        {"codec": codec, "form": form, "tensors": one.tensors, "bytes": one.bytes, "stored_bytes": one.stored}
        for (codec, form), one in sorted(sums.items())
    ]
    own = _FLOAT * sum(math.prod(tensor.shape) for tensor in record.tensors.values())
    total = sum(one.bytes for one in sums.values())
    return {"id": id, "bytes": total, "share": total / own if own else 0.0, "forms": forms}


def _bytes(resident: Resident, shared: SharedForms) -> dict[str, int]:
    """Bytes by form, of what is the variant's own."""
    seen: set[int] = set(shared.storages)
    found: defaultdict[str, int] = defaultdict(int)
    for one in resident.placed:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in one.form.tensors()}
        found[one.form.name] += sum(storage.nbytes() for place, storage in storages.items() if place not in seen)
        seen |= storages.keys()
    return dict(found)
