"""Spectra as the document that `mfs inspect --spectrum --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mfs_decompose.pipeline.delta_class import CLASSES, Facts, directions_for, effective_rank
from mfs_decompose.pipeline.spectra import VariantSpectra
from mfs_decompose.pipeline.spectra_summary import SHARES, VariantSummary, layer_of, name_families, summarise
from mfs_decompose.pipeline.spectra_tensor import Measured

SCHEMA = "mfs.spectrum/1"


def to_json(digest: str, variants: Sequence[VariantSpectra], plots: Sequence[str] | None) -> dict[str, Any]:
    """Plain JSON, schema `mfs.spectrum/1`: see docs/json.md."""
    return {
        "schema": SCHEMA,
        "artifact_digest": digest,
        "variants": [_variant_json(one, summarise(one)) for one in variants],
        "plots": list(plots or ()),
    }


def noise_share(facts: Facts) -> float | None:
    """Predicted noise over energy, at most 1; None where nothing changed."""
    return min(1.0, facts.noise / facts.energy) if facts.energy > 0.0 else None


def _variant_json(spectra: VariantSpectra, summary: VariantSummary) -> dict[str, Any]:
    labels = name_families({one.tensor for one in spectra.matrices})
    return {
        "id": summary.id,
        "of": summary.of,
        "class": summary.kind,
        "classes": {kind: summary.classes.get(kind, 0) for kind in CLASSES},
        "unclassified": summary.unclassified,
        "energy": summary.energy,
        "families": [
            {
                "family": one.family,
                "class": one.kind,
                "classes": {kind: one.classes.get(kind, 0) for kind in CLASSES},
                "matrices": one.matrices,
                "energy": one.energy,
                "unchanged": one.unchanged,
                "noise_share": one.noise_share,
                "effective_rank": one.effective_rank,
                "rank": one.rank,
                "directions": _shares(one.directions),
                "curve": None if one.curve is None else {key: _listed(v) for key, v in asdict(one.curve).items()},
            }
            for one in summary.families
        ],
        "tensors": [_matrix_json(one, labels[one.tensor]) for one in spectra.matrices],
    }


def _matrix_json(one: Measured, family: str) -> dict[str, Any]:
    facts, verdict = one.facts, one.verdict
    energies = facts.energies if facts is not None else None
    return {
        "tensor": one.tensor,
        "slice": one.slice,
        "family": family,
        "layer": layer_of(one.tensor),
        "dtype": one.dtype,
        "shape": list(one.shape),
        "of": one.of,
        "class": verdict.kind if verdict else None,
        "why": verdict.why if verdict else "no tensor of floats of the base's to differ from",
        "elements": facts.elements if facts else 0,
        "unchanged": facts.unchanged if facts else 0,
        "nonfinite": one.nonfinite,
        "energy": facts.energy if facts else 0.0,
        "noise": facts.noise if facts else 0.0,
        "noise_share": noise_share(facts) if facts else None,
        "rank": verdict.rank if verdict else None,
        "tail": verdict.tail if verdict else None,
        "standing_out": verdict.standing_out if verdict else None,
        "head": verdict.head if verdict else None,
        "effective_rank": effective_rank(energies) if energies is not None else None,
        "directions": _shares([None if energies is None else directions_for(energies, share) for share in SHARES]),
    }


def _shares(values: Sequence[float | None]) -> dict[str, float | None]:
    return {f"{100 * share:.0f}": value for share, value in zip(SHARES, values, strict=True)}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
