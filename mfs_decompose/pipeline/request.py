"""What a run of decompose is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mfs_decompose.artifact.target_record import TargetRecord
from mfs_decompose.pipeline.gauge import Gauges
from mfs_decompose.recipe.schema import Recipe


@dataclass(frozen=True)
class DecomposeRequest:
    """Everything that decompose may be told.

    `base` is None for a base that is the mean of the variants. `variants` maps ids to references. `threads`
    changes how fast and how large the process is, never a byte that it writes.
    """

    variants: Mapping[str, str]
    out: Path
    recipe: Recipe
    base: str | None = None
    device: str = "auto"
    offline: bool = False
    threads: int | None = None
    resume: bool = True
    overwrite: bool = False
    argv: tuple[str, ...] = ()
    calibrate: Gauges | None = None
    """Measures drift on the text that weights of drift are to be fitted on."""
    gauges: Gauges | None = None
    """Measures drift on the text that a target is to hold on."""


@dataclass(frozen=True)
class VariantReport:
    """One variant as it was stored."""

    id: str
    bytes: int
    checkpoint_bytes: int
    footprint: float
    rel_error: float
    codecs: Mapping[str, int]
    tensors: int
    exact_tensors: int
    adapter: bool


@dataclass(frozen=True)
class DecomposeReport:
    """What decompose did. `written` is False where the finished artifact was there already."""

    out: Path
    written: bool
    artifact_digest: str
    base_bytes: int
    total_bytes: int
    checkpoint_bytes: int
    variants: tuple[VariantReport, ...]
    stages: Mapping[str, float] = field(default_factory=dict)
    bytes_read: int = 0
    resumed_units: int = 0
    target: TargetRecord | None = None
    """What a target asked for, and by id what was measured."""
