"""Rows of fp32 as integers, for products with integer factors that are exact.

`row = unit * (d0 + 256 d1 + 65536 d2)` with digits of -128 to 127, to 2^-23 of the row's largest value: about what fp32
itself keeps of it. A product of int8 sums in int32 without rounding, so what a row gets depends on no other row.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

DIGITS = 3
LONGEST = 1 << 16
"""Of a sum: 2^16 products of at most 2^14 stay below 2^31."""
_LARGEST = 126 * (1 + 256 + 65536)  # rounding takes no highest digit beyond 127
_LEAST = 1e-37  # of a unit, so that none is 0 or subnormal
_ALONE = 1 << 15  # more elements than these torch gives to several threads, which takes longer here


class Digits(NamedTuple):
    """codes int8 [DIGITS * T, N], all lowest digits first; unit fp32 [T, 1] of each row."""

    codes: torch.Tensor
    unit: torch.Tensor


class Inputs(NamedTuple):
    """Inputs of a layer as digits, and the sum of each row in its units, fp32 [T].

    Rows with a value that is not finite are zeros here, and true in `endless`, bool [T]; None where no row is.
    """

    codes: torch.Tensor
    unit: torch.Tensor
    sums: torch.Tensor
    endless: torch.Tensor | None


def to_digits(rows_TN: torch.Tensor) -> Digits:
    """Rows of finite fp32; others give codes that mean nothing."""
    rounding, places, least = _constants()
    unit = torch.add(least, rows_TN.abs().amax(dim=1, keepdim=True), alpha=1 / _LARGEST)
    whole = torch.div(rows_TN, unit).to(torch.int32)
    # The low byte of each, read as -128 to 127: what that leaves for the next digit is a rounded quotient.
    codes = torch.add(whole, rounding).bitwise_right_shift_(places).to(torch.int8)
    return Digits(codes.view(-1, rows_TN.shape[1]), unit)


def input_digits(rows_TN: torch.Tensor) -> Inputs:
    """The digits of inputs of any values."""
    endless = None
    codes, unit = to_digits(rows_TN)
    if not math.isfinite(unit.max().item()):
        endless = ~torch.isfinite(unit.squeeze(1))
        rows_TN = rows_TN.masked_fill(endless.unsqueeze(1), 0.0)
        codes, unit = to_digits(rows_TN)
    return Inputs(codes, unit, torch.div(rows_TN.sum(dim=1, keepdim=True), unit).squeeze(1), endless)


def join_digits(products_DT_N: torch.Tensor) -> torch.Tensor:
    """What int32 products of digits come to in fp32 [T, N], in units."""
    if products_DT_N.numel() > _ALONE:
        low, middle, high = products_DT_N.view(DIGITS, -1, products_DT_N.shape[1]).unbind()
        low = low.to(torch.float32)
    else:
        low, middle, high = products_DT_N.to(torch.float32).view(DIGITS, -1, products_DT_N.shape[1]).unbind()
    return low.add_(middle, alpha=256.0).add_(high, alpha=65536.0)


@cache
def _constants() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):
        return (
            torch.tensor([0, 128, 128 + 128 * 256], dtype=torch.int32).view(DIGITS, 1, 1),
            torch.tensor([0, 8, 16], dtype=torch.int32).view(DIGITS, 1, 1),
            torch.tensor(_LEAST),
        )


@cache
def has_exact_products() -> bool:
    """Whether this CPU multiplies int8 fast, and as torch says it does: older ones saturate sums of two products."""
    if not getattr(torch.cpu, "_is_vnni_supported", lambda: False)() or not torch._C._has_mkldnn:
        return False
    with torch.inference_mode():
        for value in (-128, 127):
            rows, matrix = torch.full((24, 576), value, dtype=torch.int8), torch.full((576, 96), -128, dtype=torch.int8)
            for right in (matrix, matrix.mT.contiguous().mT):
                if not bool((torch._int_mm(rows, right) == -128 * 576 * value).all()):
                    return False
    return True
