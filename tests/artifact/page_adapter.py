"""The merge of an adapter by the letter of docs/format.md: factors and magnitudes of a matrix, numpy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from page_reader import Doubles, Tensor


def merged_by_the_page(tensor: Tensor, adapter: Mapping[str, Doubles]) -> Doubles:
    """The matrix [O, I] that one entry of factors, and magnitudes if there are any, make of the base."""
    params = tensor.record["tree"]["params"]
    (entry,) = params["factors"]
    assert entry["orientation"] == "out_in"
    merged = tensor.base + _product(adapter[entry["b"]], adapter[entry["a"]]) * entry["scale"]
    if "magnitude" in params:
        norms = np.array([_norm(row) for row in merged])
        merged = merged * (adapter[params["magnitude"]].reshape(-1) / norms)[:, None]
    return merged


def _exponent(values: Doubles) -> int:
    """The least e with all magnitudes below 2^e."""
    return max(math.frexp(float(np.abs(values).max()))[1], -1022)


def _slices(rows: Doubles, w: int, n: int) -> tuple[list[Doubles], Doubles]:
    powers = np.array([2.0 ** _exponent(row) for row in rows])
    rest, found = rows / powers[:, None], []
    for _ in range(n):
        found.append(np.rint(2.0**w * rest))
        rest = 2.0**w * rest - found[-1]
    return found, powers


def _product(b: Doubles, a: Doubles) -> Doubles:
    w = (53 - math.ceil(math.log2(b.shape[1]))) // 2
    n = math.ceil(60 / w)
    left, rows = _slices(b, w, n)
    right, columns = _slices(a.T, w, n)
    total = np.zeros((b.shape[0], a.shape[1]))
    pairs = [(i, j) for i in range(n) for j in range(n - i)]
    for i, j in sorted(pairs, key=lambda pair: (-sum(pair), pair)):
        total = total + (left[i] @ right[j].T) * 2.0 ** (-w * (i + j + 2))
    return total * rows[:, None] * columns[None, :]


def _norm(values: Doubles) -> float:
    e, w = _exponent(values), (62 - math.ceil(math.log2(len(values)))) // 2
    x = values * 2.0**-e * 2.0**w
    heads = [int(head) for head in np.rint(x)]
    tails = [int(tail) for tail in np.rint(2.0**w * (x - np.rint(x)))]
    h, t = (sum(one * one for one in side) for side in (heads, tails))
    mixed = sum(head * tail for head, tail in zip(heads, tails, strict=True))
    return 2.0**e * math.sqrt(
        float(h) * 2.0 ** (-2 * w) + (float(t) * 2.0 ** (-4 * w) + float(mixed) * 2.0 ** (1 - 3 * w))
    )
