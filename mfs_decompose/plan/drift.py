"""How much drift an error makes, by layer type and depth: what allocation weighs bytes against.

Weights are fitted from probes of the KL on text (fidelity/calibrate.py). Energy of the delta does most of the work:
weights say how far a layer differs from the others at that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mfs_decompose.plan.layers import DEPTHS, LAYER_TYPES, LayerType, depth_of, layer_number, layer_type
from mfs_decompose.plan.model import Plan

Place = tuple[LayerType, int]
"""Layer type, and third of the model."""

DEFAULT: Mapping[LayerType, tuple[float, ...]] = {
    "query": (0.51, 0.64, 0.45),
    "key": (0.98, 0.96, 0.91),
    "value": (1.44, 1.95, 1.20),
    "output": (1.02, 1.31, 0.67),
    "gate": (0.76, 0.87, 0.75),
    "up": (0.86, 0.98, 0.86),
    "down": (0.86, 1.05, 0.84),
}
"""What a unit of missing energy makes in each third of a model, relative to the average: fitted by `fit_weights` on a
full fine-tune of SmolLM2-135M-Instruct on Python source, from probes on HumanEval problems that no figure in
benchmarks/results/ is measured on."""


@dataclass(frozen=True)
class DriftWeights:
    """Drift of a unit of missing energy, relative to the average, in a model of `layers` layers."""

    layers: int = 0
    table: Mapping[LayerType, tuple[float, ...]] = field(default_factory=lambda: DEFAULT)

    def place(self, name: str) -> Place:
        """Where a tensor stands in the table."""
        return layer_type(name), depth_of(layer_number(name), self.layers)

    def of(self, name: str) -> float:
        """The weight of a tensor; 1 for types that no probe told of."""
        kind, depth = self.place(name)
        row = self.table.get(kind)
        return 1.0 if row is None else row[depth]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, layer types in order."""
        table = {kind: [*self.table[kind]] for kind in LAYER_TYPES if kind in self.table}
        return {"layers": self.layers, "table": table}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> DriftWeights:
        return cls(int(document["layers"]), {kind: tuple(row) for kind, row in document["table"].items()})


def drift_weights(plan: Plan) -> dict[str, DriftWeights]:
    """The weights that ship, for every variant of a plan."""
    found: dict[str, DriftWeights] = {}
    for variant in plan.variants:
        numbers = [layer_number(item.name) for item in plan.items() if item.variant == variant.id]
        found[variant.id] = DriftWeights(1 + max((number for number in numbers if number is not None), default=-1))
    return found


SHRINK = 0.5
"""The power that measured weights are taken to. A probe tells what a group's next bytes buy while all others stay, and
with all of it allocation overshoots: KL of a fine-tune at 18 % of its linears in bf16 factors, at powers
0 / 0.25 / 0.5 / 1: 2.46 / 2.28 / 2.27 / 2.60e-4."""


def fit_weights(gains: Mapping[Place, float], layers: int) -> DriftWeights:
    """Weights from what a unit of energy bought at each place: relative to their geometric mean, shrunk.

    A place that was not probed, or where nothing was gained, gets the mean of its type.
    """
    positive = {place: gain for place, gain in gains.items() if gain > 0.0}
    if not positive:
        return DriftWeights(layers)
    middle = math.exp(math.fsum(map(math.log, positive.values())) / len(positive))
    table: dict[LayerType, tuple[float, ...]] = {}
    for kind in LAYER_TYPES:
        own = {depth: gain for (known, depth), gain in positive.items() if known == kind}
        if own:
            mean = math.exp(math.fsum(map(math.log, own.values())) / len(own))
            table[kind] = tuple((own.get(depth, mean) / middle) ** SHRINK for depth in range(DEPTHS))
    return DriftWeights(layers, table)
