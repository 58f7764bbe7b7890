"""What `--base-mode auto` looks at without a base: a few matrices, against their mean and against a refined base."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mfs_decompose.base_extraction import delta_rows, mean_rows
from mfs_decompose.linalg.bands import direction_bytes
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.linalg.svd import truncated_svd
from mfs_decompose.pipeline.refined_base import BaseRefiner, matrices_of
from mfs_decompose.pipeline.scheduler import Stop
from mfs_decompose.plan.shared_sizes import Curve
from mfs_decompose.plan.weigh import Tensor, Weighed, weigh_refined
from mfs_decompose.source.header import TensorSpec

SAMPLED = 8
_BITS = 4


def weigh_sample(refiner: BaseRefiner, stop: Stop) -> tuple[int, Weighed]:
    """How many matrices were looked at, and what their deltas take under either base."""
    sample = _sample(refiner)
    refined: list[Tensor] = []
    mean: list[Tensor] = []
    nbytes = 0
    for spec in sample:
        stop.check()
        first, end = (matrices_of(spec) or [(0, 0)])[0]
        weights = refiner.weights(spec, first, end)
        found = refiner.refine(spec, 0, first, end, weights)
        if found is None:
            continue
        shape = (found.base.shape[0], found.base.shape[1])
        rank = refiner.ranks[spec.name]
        key, steps = stream_key(refiner.plan.recipe.seed, "sampled", spec.name), min(4 * rank + 16, *shape)
        flat = [own.reshape(shape) for own in weights]
        curves = [_curves(flat, base, steps, key) for base in (found.base, mean_rows(flat, found.base.dtype))]
        if any(len(one) < len(flat) for one in curves):
            continue
        refined.append((curves[0], shape))
        mean.append((curves[1], shape))
        nbytes += len(flat) * rank * direction_bytes(shape, _BITS)
    return len(refined), weigh_refined(refined, mean, nbytes) if refined else Weighed(0, 0)


def _sample(refiner: BaseRefiner) -> list[TensorSpec]:
    """At most so many matrices, spread over the names."""
    names = [name for name in sorted(refiner.ranks) if matrices_of(refiner.plan.base_tensors[name])]
    step = max(1, len(names) // SAMPLED)
    return [refiner.plan.base_tensors[name] for name in names[::step][:SAMPLED]]


def _curves(weights: Sequence[torch.Tensor], base: torch.Tensor, steps: int, key: int) -> list[Curve]:
    batch = torch.stack([delta_rows(own, base) for own in weights])
    found = truncated_svd(batch, steps, [key] * len(weights))
    return [Curve(one.energy.tolist(), one.total) for one in found if one is not None]
