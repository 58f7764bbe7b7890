"""A run that must come out as a saved plan says."""

from __future__ import annotations

from dataclasses import dataclass

from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.plan.saved import SavedPlan


@dataclass(frozen=True, kw_only=True)
class PlannedRequest(DecomposeRequest):
    """As a request; `recipe` is the plan's, with limits of its own. It names exactly the sources of the plan."""

    saved: SavedPlan
