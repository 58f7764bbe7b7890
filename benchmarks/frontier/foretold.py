"""What KL is to be expected of an error, whatever codec made it: the delta itself says where errors count.

A fine-tune's delta D [O, I] is a sum of gradients times activations, so its own singular directions stand for those
that outputs are sensitive in and those that inputs have: with D = U S V^T, an error E counts by

    || S U^T E V S ||_F^2 / s_1^4 = || D E^T D ||_F^2 / s_1^4        summed over the layers, times NATS

which for directions left out is the sum of s^2 (s / s_1)^4 that allocation works with (mfs_decompose/plan/mixes.py).
Tokens, the outputs of an embedding [V, D], are known from no gradient: its error counts by the other side alone,

    || E V S ||_F^2 / s_1^2        times NATS_A_TOKEN.

Both were fitted once, to one light and one heavy full fine-tune on other text than is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from benchmarks.frontier.work import Work
from mfs_decompose.linalg.bands import MOST_MADE_UP

NATS = 0.044
"""KL in nats a token of a unit of drift; from the fit of docs/decisions/0014."""

NATS_A_TOKEN = 0.018
"""The same for embeddings; within 1.7 for seven sizes of banded factors."""

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
        table = name in self.work.tables
        base, own = self.work.base[name].float(), self.work.variant[name].float()
        delta, stored = own - base, served.float() - base
        if delta.shape[0] < delta.shape[1]:
            delta, stored = delta.mT, stored.mT
        gram = delta.mT @ delta
        strongest = float(torch.linalg.eigvalsh(gram.double())[-1])
        if strongest <= 0.0:
            return 0.0

        def product(one: torch.Tensor, two: torch.Tensor) -> float:
            """<one, two> in the metric that errors count by; D^T E is [I, I], tr((D^T E) (D^T D) (D^T E)^T)."""
            left, right = (one, two) if table else (delta.mT @ one, delta.mT @ two)
            return float((left @ gram * right).sum(dtype=torch.float64))

        # Enlarged, a delta makes up for what other layers lack (mfs_decompose/linalg/bands.py), which is not seen here.
        enlarged = product(stored, delta) / product(delta, delta)
        error = stored / min(max(enlarged, 1.0), MOST_MADE_UP) - delta
        if table:
            return NATS_A_TOKEN * product(error, error) / strongest
        return _EVERY * NATS * product(error, error) / strongest**2
