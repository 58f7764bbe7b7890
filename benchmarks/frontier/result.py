"""The result document: every cell with its shares, what it recovers, and how it stands to `auto`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.frontier.cells import Cell
from benchmarks.frontier.treatment import AUTO, BASE
from mfs_decompose.fidelity.statistics import RESAMPLES, SEED, _bootstrap

SCHEMA = "mfs.bench.frontier/1"
Found = Mapping[Cell, Mapping[str, Any]]


def tabulate(found: Found) -> list[dict[str, Any]]:
    """Plain rows in the order of the cells; those that were left out are not among them."""
    return [_row(cell, one, found) for cell, one in found.items() if "left_out" not in one]


def _row(cell: Cell, one: Mapping[str, Any], found: Found) -> dict[str, Any]:
    base = found.get(Cell(0, cell.variant, 0.0, cell.tokens, BASE))
    rival = found.get(Cell(cell.table, cell.variant, cell.budget, cell.tokens, AUTO))
    return {
        **cell.record(),
        "scored": one["tokens"],
        "bytes": one["bytes"],
        "share": one["bytes"] / one["checkpoint_bytes"],
        "bytes_over": one["bytes"] > cell.budget * one["checkpoint_bytes"],
        "kl": one["kl"],
        "recovered": None if base is None or not base["kl"] else 1 - one["kl"] / base["kl"],
        "top1": one["top1"],
        "ppl_ratio": one["ppl_ratio"],
        "kl_above_auto": None if rival is None or cell.codec == AUTO else one["kl"] - rival["kl"],
        "kl_above_auto_ci": None if rival is None or cell.codec == AUTO else difference_interval(one, rival),
        "predicted_kl": one["predicted_kl"],
        "seconds_encode": one["seconds_encode"],
        "seconds_measure": one["seconds_measure"],
        "knobs": one["knobs"],
    }


def difference_interval(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """Paired 95 % interval of KL(one) - KL(other): runs of 64 tokens are drawn together, as in fidelity/statistics.py.

    Few runs widen it, by Student's quantile; 1,024 tokens are few.
    """
    assert one["token_units"] == other["token_units"], "two cells of unlike texts"
    sums = np.array(one["kl_units"], np.float64) - np.array(other["kl_units"], np.float64)
    documents = np.array(one["document_units"], np.int64)
    low, high = _bootstrap(sums[:, None], np.array(one["token_units"], np.float64), documents, RESAMPLES, SEED)
    return [float(low[0]), float(high[0])]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's."""
    from scipy.stats import spearmanr

    return float(spearmanr([x for x, _ in pairs], [y for _, y in pairs]).statistic)
