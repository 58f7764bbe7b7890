"""What was promised of the table, held against what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.frontier.result import rank_correlation
from benchmarks.frontier.treatment import AUTO, BASE

Rows = Sequence[dict[str, Any]]
LEAST_PAIRS = 3


@dataclass(frozen=True)
class Check:
    """One promise; `holds` is None where the cells for it are not there yet."""

    promise: str
    holds: bool | None
    found: str
    failing: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"failing": list(self.failing)}


def check(rows: Rows) -> list[Check]:
    return [
        _lowest(rows),
        _at_most(rows, "code", 3e-4),
        _times(rows, "code", "low rank bf16", 5),
        _times(rows, "code", "BitDelta sign", 50),
        _times(rows, "heavy", "low rank bf16", 5),
        _times(rows, "heavy", "BitDelta sign", 10),
        *_predictions(rows),
    ]


def _name(row: dict[str, Any]) -> str:
    return f"table {row['table']}, {row['variant']} {100 * row['budget']:g}%, {row['codec']}"


def _lowest(rows: Rows) -> Check:
    """A codec that took more bytes than it was given may be lower; one that did not, only inside the interval."""
    rivals = [row for row in rows if row["kl_above_auto_ci"] is not None]
    lower = [row for row in rivals if not row["bytes_over"] and row["kl_above_auto_ci"][1] < 0]
    ties = sum(row["kl_above_auto"] < 0 and row["kl_above_auto_ci"][1] >= 0 for row in rivals)
    over = sum(row["bytes_over"] and row["kl_above_auto_ci"][1] < 0 for row in rivals)
    found = f"{len(rivals)} rivals: {len(lower)} lower, {ties} tied below it, {over} lower at more bytes than given"
    return Check(
        "auto is lowest in every cell, or tied", not lower if rivals else None, found, tuple(map(_name, lower))
    )


def _cell(rows: Rows, variant: str, codec: str) -> dict[str, Any] | None:
    wanted = (1, variant, 0.05, codec)
    return next((row for row in rows if (row["table"], row["variant"], row["budget"], row["codec"]) == wanted), None)


def _at_most(rows: Rows, variant: str, limit: float) -> Check:
    row = _cell(rows, variant, AUTO)
    promise = f"KL of auto on {variant} at 5 % is at most {limit:g}"
    if row is None:
        return Check(promise, None, "not measured")
    return Check(promise, row["kl"] <= limit, f"{row['kl']:.3g}", () if row["kl"] <= limit else (_name(row),))


def _times(rows: Rows, variant: str, codec: str, times: float) -> Check:
    own, other = _cell(rows, variant, AUTO), _cell(rows, variant, codec)
    promise = f"KL of auto on {variant} at 5 % is at least {times:g} times below {codec}"
    if own is None or other is None:
        return Check(promise, None, "not measured")
    ratio = other["kl"] / own["kl"] if own["kl"] else math.inf
    return Check(promise, ratio >= times, f"{ratio:.3g} times", () if ratio >= times else (_name(own),))


def _predictions(rows: Rows) -> list[Check]:
    known = [row for row in rows if row["predicted_kl"] and row["kl"] and row["codec"] != BASE]
    promises = ("rank correlation of predicted and measured KL is at least 0.95", "their median ratio is within 1.5")
    if len(known) < LEAST_PAIRS:
        return [Check(promise, None, f"{len(known)} cells have a prediction") for promise in promises]
    correlation = rank_correlation([(row["predicted_kl"], row["kl"]) for row in known])
    ratios = {_name(row): row["predicted_kl"] / row["kl"] for row in known}
    median = statistics.median(ratios.values())
    off = tuple(f"{name}: {ratio:.2f}" for name, ratio in ratios.items() if not 1 / 1.5 <= ratio <= 1.5)
    return [
        Check(promises[0], correlation >= 0.95, f"{correlation:.3f} over {len(known)} cells"),
        Check(promises[1], 1 / 1.5 <= median <= 1.5, f"{median:.2f} (predicted / measured)", off),
    ]
