"""What an artifact holds, from its manifest and side files: no weight is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mfs_decompose.artifact.card import codec_counts
from mfs_decompose.artifact.layout import CONTENT_FOLDER
from mfs_decompose.artifact.manifest import Manifest
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import VariantRecord, relative_error
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.bands import WIDTHS
from mfs_decompose.pipeline.inspect_settings import read_settings


def inspect(artifact: Path) -> dict[str, Any]:
    """Plain JSON, schema `mfs.inspect/1`: see docs/json.md."""
    with Family.open(artifact) as family:
        manifest, digest = family.manifest, family.artifact_digest
        manifest_bytes = (family.path / "manifest.json").stat().st_size
        settings = read_settings(family)
    return {
        "schema": "mfs.inspect/1",
        "artifact_digest": digest,
        "base": {"mode": manifest.base.mode, "store": manifest.base.store, "bytes": manifest.base.bytes},
        "variants": [_variant(manifest, variant) | settings[variant.id] for variant in manifest.variants],
        **_shared(manifest),
        "total_bytes": manifest.total_bytes,
        "files_bytes": manifest_bytes + _side_bytes(manifest),
        "coverage": _coverage(manifest),
        "tool": manifest.tool.model_dump(),
        "platform": manifest.platform.model_dump(),
        "recipe": manifest.recipe,
    }


def inspect_tensors(artifact: Path, variant_id: str) -> list[dict[str, Any]]:
    """One entry for each tensor of a variant: its codec tree, bytes and error.

    Raises:
        UsageError: there is no such variant.
    """
    with Family.open(artifact) as family:
        record = family.variant(variant_id)
    return [
        {
            "tensor": name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "kind": tensor.kind,
            "codec": _described(CodecNode.from_json(tensor.tree)),
            "bytes": tensor.blob.nbytes if tensor.blob else 0,
            "rel_error": tensor.rel_error,
            "energy": tensor.energy,
            "exact": tensor.exact,
            "nonfinite": tensor.nonfinite,
        }
        for name, tensor in record.tensors.items()
    ]


def _described(node: CodecNode) -> str:
    """The tree with the size of what it stores: `lowrank[84 int4]`."""
    if node.children:
        return f"{node.codec}({'+'.join(dict.fromkeys(_described(child) for child in node.children))})"
    shown = ("steps", "rank", "bits", "scale", "step", "factors", "values", "of")
    options = [str(node.params[key]) for key in shown if key in node.params]
    bands = node.params.get("bands")
    if isinstance(bands, list):  # directions at each width: 3x8 5x6 ...
        options += [f"{count}x{bits}" for count, bits in zip(bands, WIDTHS, strict=False) if count]
    return f"{node.codec}[{' '.join(options)}]" if options else node.codec


def _variant(manifest: Manifest, variant: VariantRecord) -> dict[str, Any]:
    own = {*variant.source.contents()}
    return {
        "id": variant.id,
        "footprint": variant.footprint,
        "bytes": variant.bytes,
        "shared_bytes": variant.shared_bytes,
        "checkpoint_bytes": variant.checkpoint_bytes,
        "files_bytes": sum(manifest.files[f"{CONTENT_FOLDER}/{digest}"].size for digest in own),
        "codecs": codec_counts(variant),
        "correction_bytes": sum(_correction_bytes(CodecNode.from_json(t.tree)) for t in variant.tensors.values()),
        "rel_error": variant.rel_error,
        "tensors": len(variant.tensors),
        "exact_tensors": sum(tensor.exact for tensor in variant.tensors.values()),
        "missing": len(variant.missing),
        "left_out": list(variant.source.left_out),
    }


def _shared(manifest: Manifest) -> dict[str, Any]:
    if manifest.shared is None:
        return {}
    found = manifest.shared
    energy, error = (math.fsum(getattr(one, key) for one in found.tensors.values()) for key in ("energy", "error"))
    return {"shared": {"bytes": found.bytes, "tensors": len(found.tensors), "rel_error": relative_error(energy, error)}}


def _correction_bytes(node: CodecNode) -> int:
    """Bytes that only bring a delta's original bits back: nothing that is served needs them."""
    if node.codec == "corrected":
        return sum(part.nbytes for part in node.parts)
    return sum(_correction_bytes(child) for child in node.children)


def _side_bytes(manifest: Manifest) -> int:
    return sum(entry.size for path, entry in manifest.files.items() if not path.endswith(".safetensors"))


def _coverage(manifest: Manifest) -> float:
    """The share of the sources' tensors that have a record: counted, not assumed."""
    base = len(manifest.base.tensors) if manifest.base.source is not None else 0
    found = base + sum(len(variant.tensors) for variant in manifest.variants)
    return found / manifest.coverage.tensors if manifest.coverage.tensors else 1.0
