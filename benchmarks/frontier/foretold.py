"""What KL is to be expected of an error, whatever codec made it: the delta itself says where errors count.

A fine-tune's delta D [O, I] is a sum of gradients times activations, so its own singular directions stand for those
that outputs are sensitive in and those that inputs have. With D = U S V^T, an error E misses direction r by u_r^T E
v_r, in one sense wherever that direction occurs, and this costs most:

    sum over r of (u_r^T E v_r)^2 (s_r / s_1)^3 / s_1        summed over the layers, times NATS.

The last s_1 is divided by because KL grows with the norm of a delta from one fine-tune to another, not with its square.
Beside it all errors count alike wherever they lie, those of embeddings too, whose tokens are known from no gradient:

    || E ||_F^2        summed over all matrices, times NATS_NOISE.

It would not do to weight noise by the delta: half of a LoRA's factors are random, and inputs are strong where it shows
nothing. Both constants were fitted once, to 75 variants of four fine-tunes (a light, a heavy, one in between and a
merged LoRA; ten codecs) on other text than is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from benchmarks.frontier.work import Work

NATS = 0.0031
"""KL in nats a token of a unit of what directions are missed by."""

NATS_NOISE = 1e-5
"""The same of a unit of squared error."""

_EVERY = 3  # of the layers, the rest of which they stand for


@dataclass
class Foretold:
    """Sums up the drift of the weights that pass through `watch`."""

    work: Work
    kl: float = 0.0
    chosen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.chosen = {*self.work.linears[::_EVERY], *self.work.tables}

    def watch(self, weights: Iterator[tuple[str, int, torch.Tensor]]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The same weights, looked at on their way."""
        for name, nbytes, weight in weights:
            if name in self.chosen:
                self.kl += self._kl(name, weight)
            yield name, nbytes, weight

    def _kl(self, name: str, served: torch.Tensor) -> float:
        error = served.float() - self.work.variant[name].float()
        noise = NATS_NOISE * float(error.square().sum(dtype=torch.float64))
        if name in self.work.tables:
            return noise
        return _EVERY * (NATS * self._missed(name, error) + noise)

    def _missed(self, name: str, error: torch.Tensor) -> float:
        """The sum over the directions of a delta, which is factored once for all cells."""
        found = self.work.factor(name)
        if not found.rank:
            return 0.0
        # Each side has the root of s: of the product that makes u^T E v times s.
        missed = (found.left @ error * found.right).sum(1, dtype=torch.float64)
        return float((missed.square() * found.energy.sqrt()).sum() / found.energy[0].square())
