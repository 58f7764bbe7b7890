"""A forecast as the document that `mfs decompose --dry-run --spectra --json` prints."""

from __future__ import annotations

from typing import Any

from mfs_decompose.pipeline.forecast import Forecast
from mfs_decompose.pipeline.forecast_ladder import Rung, TargetRung, VariantForecast

SCHEMA = "mfs.forecast/1"


def to_json(found: Forecast) -> dict[str, Any]:
    """Plain JSON, schema `mfs.forecast/1`: see docs/json.md."""
    return {
        "schema": SCHEMA,
        "recipe": dict(found.recipe),
        "base": {"mode": found.base_mode, "store": found.base_store, "bytes": found.base_bytes},
        "shared_bytes": found.shared_bytes,
        "keep_exact": found.keep_exact,
        "variants": [variant_json(one) for one in found.variants],
        "work": str(found.work),
        "bytes_read": found.bytes_read,
        "resumed_units": found.resumed_units,
    }


def variant_json(one: VariantForecast) -> dict[str, Any]:
    """One variant of the document."""
    return {
        "id": one.id,
        "checkpoint_bytes": one.checkpoint_bytes,
        "shared_bytes": one.shared_bytes,
        "adapter": one.adapter,
        "planned": None if one.planned is None else _rung(one.planned, one),
        "budgets": [_rung(rung, one) for rung in one.budgets],
        "targets": [_target(rung, one) for rung in one.targets] if one.measured else None,
        "unforeseen": one.unforeseen,
    }


def _rung(rung: Rung, of: VariantForecast) -> dict[str, Any]:
    return {
        "budget": rung.budget,
        "cap": rung.cap,
        "bytes": rung.nbytes,
        "footprint": _footprint(rung.nbytes, of),
        "left": rung.left,
        "kl": rung.kl,
        "fitted": rung.fitted,
    }


def _target(rung: TargetRung, of: VariantForecast) -> dict[str, Any]:
    return {
        "kl": rung.kl,
        "bytes": rung.nbytes,
        "footprint": _footprint(rung.nbytes, of),
        "left": rung.left,
        "fitted": rung.fitted,
    }


def _footprint(nbytes: int | None, of: VariantForecast) -> float | None:
    if nbytes is None:
        return None
    return nbytes / of.checkpoint_bytes if of.checkpoint_bytes else 0.0
