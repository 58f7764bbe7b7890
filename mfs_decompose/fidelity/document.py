"""`mfs.eval/1`: what `mfs eval` writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.windows import CONVENTION


@dataclass(frozen=True)
class EvalDocument:
    """All results of one run, how they were measured, and the artifact they belong to.

    Attributes:
        settings: plain Python, from `describe_settings`.
        artifact_digest: sha256 of the artifact's manifest; None where no artifact was measured.
        tasks: results of tasks, beside those of text.
        self_check: what became of each planted corruption; None where none was asked for.
    """

    schema: ClassVar[str] = "mfs.eval/1"

    results: tuple[DriftResult, ...]
    settings: dict[str, Any]
    artifact_digest: str | None
    tasks: tuple[dict[str, Any], ...] = field(default=())
    self_check: tuple[dict[str, Any], ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """One JSON document of plain Python values, without NaN or infinity."""
        return {
            "schema": self.schema,
            "results": [result.to_json() for result in self.results],
            "tasks": list(self.tasks),
            **({} if self.self_check is None else {"self_check": list(self.self_check)}),
            "settings": self.settings,
            "artifact_digest": self.artifact_digest,
        }


def describe_settings(
    settings: EvalSettings, results: Sequence[DriftResult], device: str = "cpu", *, suite: str | None = None
) -> dict[str, Any]:
    """What a reader needs to repeat the measurement, with the BOS of each variant as resolved, and all notes."""
    import torch
    import transformers

    return {
        "suite": suite,
        "window": settings.window,
        "stride": settings.step,
        "bos_policy": settings.bos,
        "bos": {result.variant: result.bos for result in results},
        "served_by": {result.variant: result.engine for result in results if result.through == "served"},
        "max_tokens": settings.max_tokens,
        "texts": {result.corpus: dict(result.text) for result in results},
        "convention": CONVENTION,
        "dtype": settings.dtype,
        "batch_size": settings.batch_size,
        "padding": settings.padding,
        "attention": settings.attention,
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "notes": list(
            dict.fromkeys(
                f"{result.variant}, {result.corpus}, {result.through}: {note}"
                for result in results
                for note in result.remarks
            )
        ),
    }
