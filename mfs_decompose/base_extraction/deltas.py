"""What the variants have in common, and what is left of each: base and delta.

A known base is taken as it is. The base of a family without one is the element-wise mean: it minimises
`sum_k ||W_k - W*||_F^2`. It is rounded to the dtype it is stored in before any delta is taken: deltas are against the
base as stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mfs_decompose.linalg.differences import difference


def mean_rows(rows: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The mean of equal-shaped rows of K variants, summed in fp64 in the order given, rounded to `dtype`.

    Rows are taken one after the other, so that memory does not grow with K.

    Where a variant is not finite the mean is 0: that element will be stored exactly in the variants that have it, and
    a NaN in one variant must not reach the others.
    """
    given = iter(rows)
    total, count = next(given).to(torch.float64, copy=True), 1  # not from 0.0: what is -0.0 in all of them stays so
    for values in given:
        total += values.to(torch.float64)
        count += 1
    mean = (total / count).to(dtype)
    return torch.where(torch.isfinite(mean), mean, torch.zeros_like(mean))


def delta_rows(own: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """`own - base` in fp32, element by element; the subtraction is in fp64 where either is.

    In the dtype of the weights the difference of two neighbours would be rounded away.
    """
    return difference(own, base)
