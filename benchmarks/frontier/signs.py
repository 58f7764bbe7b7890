"""BitDelta (Liu et al., NeurIPS 2024): the sign of every entry and one scale for a tensor.

Published: the scale is the mean magnitude, then all scales (and, in its code, embeddings, head and norms) are trained
for 100 to 200 steps on the squared error of the logits (distill.py, where steps are asked for). That takes minutes a
variant, so `fitted` is else a closed form: the scale of least squared error of each layer's outputs on held-in text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.frontier.plan import Plan
from benchmarks.frontier.work import Work
from benchmarks.rate_drift_rows import Decoded

SCALE_BYTES = 2


def bit_delta(work: Work, names: Sequence[str], budget: int) -> Plan:
    """The mean magnitude as scale; one size only."""
    del budget
    return Plan({}, lambda: _decode(work, names, {name: float(work.delta(name).abs().mean()) for name in names}))


def bit_delta_fitted(work: Work, names: Sequence[str], budget: int) -> Plan | None:
    """Scales fitted to outputs; left out without a held-in text."""
    del budget
    if not work.grams and not work.scales:
        return None
    return Plan(
        {"fit": "logits" if work.scales else "outputs"},
        lambda: _decode(work, names, {name: fit_scale(work, name) for name in names}),
    )


def fit_scale(work: Work, name: str) -> float:
    """What was trained, else `<X D^T, X S^T> / ||X S^T||^2` with S the signs of D."""
    if name in work.scales:
        return work.scales[name]
    delta, signs = work.delta(name), _signs(work.delta(name))
    if name not in work.grams:
        return float(delta.abs().mean())
    seen = signs @ work.grams[name]
    return float((seen * delta).sum(dtype=torch.float64) / (seen * signs).sum(dtype=torch.float64).clamp(min=1e-300))


def _signs(delta: torch.Tensor) -> torch.Tensor:
    return torch.where(delta >= 0, 1.0, -1.0)


def _decode(work: Work, names: Sequence[str], scales: dict[str, float]) -> Iterator[Decoded]:
    for name in names:
        rows, columns = work.shape(name)
        scale = float(torch.tensor(scales[name]).to(torch.bfloat16))
        yield Decoded(name, rows * -(-columns // 8) + SCALE_BYTES, _signs(work.delta(name)) * scale)
