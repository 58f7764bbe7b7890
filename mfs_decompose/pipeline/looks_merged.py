"""Whether a delta looks like a merged LoRA, from its fit and a sample of rows: peeling is tried where it does.

A search for a rank that meets the rounding boxes takes half a second a matrix of a 135M model, and finds nothing in a
full fine-tune. What a fit leaves tells the two apart at no cost: nothing but rounding noise, or more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mfs_decompose.codec.base import Fit
from mfs_decompose.codec.corrected import is_correctable
from mfs_decompose.linalg.rounding_noise import count_units, predict_noise
from mfs_decompose.pipeline.delta_class import Facts, classify
from mfs_decompose.pipeline.reading import Sources
from mfs_decompose.plan.model import Item
from mfs_decompose.plan.units import MAX_PEELED


def looks_merged(item: Item, fit: Fit, sources: Sources, places: Sequence[tuple[int, int]]) -> bool:
    """Whether few directions leave no more than rounding noise; `places` are rows of the sample."""
    own, base = sources.own(item), sources.of_base(item)
    shape, spec = item.matrix, item.common
    if base is None or shape is None or len(spec.shape) != 2 or item.key in sources.shared:
        return False
    if not item.comparable_bits or not is_correctable(spec) or not 0 < spec.numel <= MAX_PEELED:
        return False
    own_RI, base_RI = (torch.cat([rows(*place) for place in places]) for rows in (own, base))
    part = spec.numel / own_RI.numel()
    noise = part * predict_noise(
        count_units(own_RI), spec.dtype, int((own_RI == base_RI).sum()), fit.total / part, on_grid=True
    )
    energies = fit.energy.to(torch.float64).numpy()
    beyond = min(shape) - energies.size
    left = max(fit.total - float(energies.sum()), 0.0)
    if beyond > 0:  # as flat as they could be: classify() asks for sums of them
        energies = np.concatenate([energies, np.full(beyond, left / beyond)])
    rank = classify(Facts(shape, spec.numel, 0, fit.total, noise, energies)).rank
    return rank is not None and rank <= fit.steps
