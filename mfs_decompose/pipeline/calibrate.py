"""Weights of drift for the variants at hand, fitted from probes of the KL on text (`--calibrate`).

A variant is put in memory as its budget would store it. Then, one place (layer type and third of the model) after
another, directions are added there alone, and the KL falls: what a unit of energy bought there, against the other
places, is its weight. Errors of layers add up in one sense, so probes are made where allocation works and not one
layer at a time from the original: weights from those misled it (docs/decisions/0014). Weights are kept only where the
same budget measures less drift with them. Two more sizes give the curve that foretells drift.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mfs_decompose.linalg.bands import WIDTHS
from mfs_decompose.pipeline.allocation import Allocator
from mfs_decompose.pipeline.encode import Choice
from mfs_decompose.pipeline.gauge import Gauge, Gauges
from mfs_decompose.pipeline.passes import Job
from mfs_decompose.pipeline.prober import Prober
from mfs_decompose.plan.allocate import Key
from mfs_decompose.plan.drift import DriftWeights, Place, fit_weights
from mfs_decompose.plan.forecast import DriftCurve, fit_curve
from mfs_decompose.plan.model import Item
from mfs_decompose.recipe.schema import DEFAULT_BUDGET
from mfs_decompose.source.checkpoint import Checkpoint

STAGE = "calibrate"
_SIZES = (0.4, 2.5)
"""Other sizes that the curve is measured at, in units of the budget."""


@dataclass(frozen=True)
class Calibration:
    """What probes told of a variant; `curve` is None where it does not drift at all."""

    weights: DriftWeights
    curve: DriftCurve | None

    def to_json(self) -> dict[str, Any]:
        return {"weights": self.weights.to_json(), "curve": None if self.curve is None else self.curve.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Calibration:
        curve = document["curve"]
        weights = DriftWeights.from_json(document["weights"])
        return cls(weights, None if curve is None else DriftCurve.from_json(curve))


def calibrate_all(
    job: Job, allocator: Allocator, gauges: Gauges, variants: Sequence[Checkpoint]
) -> dict[str, Calibration]:
    """Calibrate every variant that is no adapter and leaves allocation a choice; nothing is probed twice."""
    found: dict[str, Calibration] = {}
    done = job.workspace.done.steps
    for number, checkpoint in enumerate(variants):
        own = [item for item in job.plan.items() if item.variant == checkpoint.id and item.auto]
        if checkpoint.adapter is not None or not any(allocator.surveyed[item.key].open for item in own):
            continue
        if (STAGE, number) not in done:
            calibration = _Calibration(job, allocator.of(checkpoint.id), checkpoint, number).run(gauges)
            job.workspace.record_step(STAGE, number, calibration.to_json())
        found[checkpoint.id] = Calibration.from_json(done[STAGE, number])
    return found


class _Calibration:
    """The probes of one variant."""

    def __init__(self, job: Job, allocator: Allocator, checkpoint: Checkpoint, number: int) -> None:
        self._job, self._allocator, self._checkpoint, self._number = job, allocator, checkpoint, number
        self._prober = Prober(job, allocator.surveyed)
        plan = next(one for one in job.plan.variants if one.id == checkpoint.id)
        cap = DEFAULT_BUDGET.cap(plan.checkpoint_bytes)
        self._cap = cap if plan.cap is None else plan.cap
        self._probe = 0

    def run(self, gauges: Gauges) -> Calibration:
        places = self._places()
        total = len(places) + 2 + len(_SIZES)
        self._job.sink.start(f"calibrate {self._checkpoint.id}: probes", total)
        with gauges.open(self._checkpoint) as gauge:
            choices = self._choose(self._allocator, 1.0)
            start = self._measure(gauge, choices)
            gains: dict[Place, float] = {}
            for place, items in sorted(places.items()):
                wider, energy = self._widen(items, choices)
                if energy > 0.0:
                    names = {item.name for item in items}
                    gains[place] = (start - self._measure(gauge, {**choices, **wider}, names)) / energy
                    self._prober.put(gauge, self._checkpoint.id, choices, names)
            weights, allocator = self._better(gauge, gains, start)
            measured: list[tuple[float, float]] = []
            for size in (1.0, *_SIZES):
                chosen = self._choose(allocator, size)
                score = allocator.outlook(self._checkpoint.id, chosen).score
                measured.append((score, self._measure(gauge, chosen)))
        self._job.sink.finish()
        return Calibration(weights, fit_curve(measured))

    def _better(self, gauge: Gauge, gains: Mapping[Place, float], start: float) -> tuple[DriftWeights, Allocator]:
        """Fitted weights where they lower the KL at the same budget; else those that were there."""
        before = self._allocator.weights[self._checkpoint.id]
        weights = fit_weights(gains, before.layers)
        allocator = replace(self._allocator, weights={**self._allocator.weights, self._checkpoint.id: weights})
        if self._measure(gauge, self._choose(allocator, 1.0)) < start:
            return weights, allocator
        return before, self._allocator

    def _choose(self, allocator: Allocator, size: float) -> dict[Key, Choice]:
        choices = allocator.choose({self._checkpoint.id: max(int(self._cap * size), self._least())})
        return {key: choice for key, choice in choices.items() if key[0] == self._checkpoint.id}

    def _least(self) -> int:
        plan = next(one for one in self._job.plan.variants if one.id == self._checkpoint.id)
        return min(self._cap, 2 * plan.unavoidable_bytes + self._cap // 8)

    def _measure(self, gauge: Gauge, choices: Mapping[Key, Choice], names: set[str] | None = None) -> float:
        """The KL of these choices, journalled: probes are numbered, and a run that goes on makes the same ones."""
        stage, number = f"{STAGE}-{self._number}", self._probe
        self._probe += 1
        self._prober.put(gauge, self._checkpoint.id, choices, names)
        if (stage, number) not in self._job.workspace.done.steps:
            self._job.workspace.record_step(stage, number, {"kl": gauge.measure().kl})
        self._job.sink.advance(1)
        return float(self._job.workspace.done.steps[stage, number]["kl"])

    def _places(self) -> dict[Place, list[Item]]:
        weights = self._allocator.weights[self._checkpoint.id]
        found: dict[Place, list[Item]] = defaultdict(list)
        for item in self._job.plan.items():
            if item.variant == self._checkpoint.id and item.auto and self._allocator.surveyed[item.key].open:
                found[weights.place(item.name)].append(item)
        return found

    def _widen(self, items: Sequence[Item], choices: Mapping[Key, Choice]) -> tuple[dict[Key, Choice], float]:
        """More for some items alone, and the energy that it adds: twice the directions, or half the step of a rest."""
        wider: dict[Key, Choice] = {}
        gained = 0.0
        for item in items:
            choice = choices[item.key]
            if choice.codec != "banded":
                continue
            other = replace(choice, rest_step=choice.rest_step / 2) if choice.rest_step else self._doubled(item, choice)
            wider[item.key] = other
            gained += self._allocator.energy_lost(item, choice) - self._allocator.energy_lost(item, other)
        return wider, gained

    def _doubled(self, item: Item, choice: Choice) -> Choice:
        """Twice the directions and two, as far as they were fitted, the new ones of the narrowest width in use."""
        taken = sum(choice.bands)
        added = len(self._allocator.surveyed[item.key].explained[taken : 2 * taken + 2])
        at = max((at for at, count in enumerate(choice.bands) if count), default=WIDTHS.index(4))
        bands = tuple(count + added * (band == at) for band, count in enumerate(choice.bands))
        return replace(choice, steps=sum(bands), bands=bands)
