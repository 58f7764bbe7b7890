"""Does the measurement see what it must: three planted corruptions of a variant, each against the variant as stored.

A measurement that shows no drift has shown nothing until it has shown that it would have seen some.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from mfs_decompose.artifact.reader import Family
from mfs_decompose.errors import MfsError
from mfs_decompose.events import ProgressSink
from mfs_decompose.fidelity.artifact_drift import SERVED, DriftRequest, find_original, open_reference
from mfs_decompose.fidelity.corruption import (
    Change,
    FloatFolder,
    borrow_delta,
    double_delta,
    swap_layers,
    write_corrupted,
)
from mfs_decompose.fidelity.evaluate import measure_drift
from mfs_decompose.fidelity.reference import StoredReference
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.pipeline.restore import restore

Corruption = Literal["layers-swapped", "delta-doubled", "delta-of-another-variant"]

# A corruption is seen where its KL is above this times the stored variant's upper bound.
MARGIN = 2.0


class SelfCheckFailed(MfsError):
    """A planted corruption was not seen: results of this measurement prove nothing."""

    exit_code: ClassVar[int] = 21
    code: ClassVar[str] = "self-check-failed"


@dataclass(frozen=True)
class SelfCheck:
    """What became of one planted corruption.

    Attributes:
        kl_mean: mean KL(original‖corrupted), nats a token; None where its logits are not finite, which is seen too,
            or where nothing was planted.
        limit: what it had to be above: twice the upper bound of the stored variant's KL, or of the noise.
        seen: None where nothing could be planted; `note` says why.
    """

    variant: str
    corpus: str
    corruption: Corruption
    kl_mean: float | None
    limit: float
    seen: bool | None
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_measurement(request: DriftRequest, progress: ProgressSink) -> list[SelfCheck]:
    """Plant three corruptions in the first variant of the request, as served, and measure each on the first text.

    Raises:
        SourceNotFound, SourceIncompatible: as `measure_artifact`.
    """
    base = request.base
    original: Path | StoredReference
    with Family.open(request.artifact, base=base) as family:
        if request.reference is not None:
            id, original = open_reference(family, request)
        else:
            id = (request.variants or family.variant_ids)[0]
            original = find_original(family, id, request, progress)
        other = next((one for one in family.variant_ids if one != id), None)
    scratch = request.scratch / "self-check"
    served = scratch / "served"
    for name, folder in ((id, served), ("base", scratch / "base"), (other, scratch / "other")):
        if name is not None:
            restore(request.artifact, [name], folder, SERVED, base=base, progress=progress)

    def measure(role: str, folder: Path, noise: bool) -> DriftResult:
        texts = request.corpora[:1]
        (result,) = measure_drift(
            original, {role: folder}, None, texts, request.settings, id, progress, request.device, noise=noise
        )
        return result

    stored = measure("served", served, True)
    limit = MARGIN * max(_upper_kl(stored), stored.noise_kl or 0.0)
    with ExitStack() as held:
        weights = FloatFolder(served, held)
        planted: list[tuple[Corruption, Change | None, str]] = [
            ("layers-swapped", swap_layers(weights), "it has no two layers of the same form"),
            ("delta-doubled", double_delta(FloatFolder(scratch / "base", held)), ""),
            (
                "delta-of-another-variant",
                None if other is None else borrow_delta(FloatFolder(scratch / "other", held)),
                "the artifact has no other variant",
            ),
        ]
        found = [
            _try(SelfCheck(id, stored.corpus, corruption, None, limit, None, why), change, served, scratch, measure)
            for corruption, change, why in planted
        ]
    shutil.rmtree(scratch)
    return found


def refuse_unseen(checks: Sequence[SelfCheck]) -> None:
    """Say that a corruption was not seen.

    Raises:
        SelfCheckFailed: at least one was not.
    """
    for check in checks:
        if check.seen is False:
            raise SelfCheckFailed(
                f"the self-check did not see {check.corruption} in variant {check.variant!r} on {check.corpus}: "
                f"KL {check.kl_mean:.3g}, and above {check.limit:.3g} was expected",
                hint="measure on more text, or store the variant with a larger budget: "
                "its own drift hides what is wrong",
            )


def _try(
    check: SelfCheck,
    change: Change | None,
    served: Path,
    scratch: Path,
    measure: Callable[[str, Path, bool], DriftResult],
) -> SelfCheck:
    if change is None:
        return check
    folder = scratch / check.corruption
    try:
        if not write_corrupted(served, folder, change):
            return _with(check, None, None, "it changes no weight of this variant")
        result = measure(check.corruption, folder, False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if result.kl_mean is None:
        return _with(check, None, True, "; ".join(result.notes))
    return _with(check, result.kl_mean, result.kl_mean > check.limit, None)


def _with(check: SelfCheck, kl_mean: float | None, seen: bool | None, note: str | None) -> SelfCheck:
    return SelfCheck(check.variant, check.corpus, check.corruption, kl_mean, check.limit, seen, note)


def _upper_kl(stored: DriftResult) -> float:
    """The upper bound of the stored variant's KL; its mean where that is undecided."""
    if stored.kl_ci is not None:
        return stored.kl_ci[1]
    return stored.kl_mean if stored.kl_mean is not None else float("inf")
