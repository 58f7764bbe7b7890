"""benchmarks/frontier: what is said about measured cells, on made-up ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.frontier.cells import LONG, SHORT, VARIANTS, Cell, all_cells
from benchmarks.frontier.checks import Check, check
from benchmarks.frontier.journal import Journal, digest_of, fingerprint
from benchmarks.frontier.markdown import page
from benchmarks.frontier.plot import draw
from benchmarks.frontier.result import difference_interval, rank_correlation, tabulate
from benchmarks.frontier.treatment import AUTO, BASE, ROWS


def result(kl: float, nbytes: int = 50, predicted: float | None = None, noise: float = 0.1) -> dict[str, Any]:
    """A cell of 1,000 bytes of checkpoint, over 20 runs of 64 tokens."""
    units = 64 * kl * (1 + noise * np.sin(np.arange(20.0)))
    return {
        "bytes": nbytes, "checkpoint_bytes": 1000, "knobs": {}, "predicted_kl": predicted, "seconds_encode": 1.0,
        "seconds_measure": 2.0, "tokens": 1280, "kl": float(units.sum() / 1280), "top1": 0.9, "ppl_ratio": 1.01,
        "kl_units": units.tolist(), "token_units": [64] * 20, "document_units": [n // 2 for n in range(20)],
    }  # fmt: skip


def cell(codec: str, variant: str = "code", budget: float = 0.05, table: int = 1) -> Cell:
    return Cell(table, variant, budget, LONG if budget == 0.05 else SHORT, codec)


def family(auto: float = 2e-4) -> dict[Cell, dict[str, Any]]:
    found = {Cell(0, v, 0.0, LONG, BASE): result(0.1, 0) for v in ("code", "heavy")}
    for variant in ("code", "heavy"):
        found[cell(AUTO, variant)] = result(auto, 50, 1.1 * auto)
        found[cell("low rank bf16", variant)] = result(2e-3)
        found[cell("BitDelta sign", variant)] = result(3e-2, 60)
    return found


def by_promise(found: dict[Cell, dict[str, Any]]) -> dict[str, Check]:
    return {one.promise: one for one in check(tabulate(found))}


def test_all_promises_of_a_good_table_hold() -> None:
    found = family()
    for budget, auto in ((0.02, 1e-3), (0.1, 5e-5)):
        found[cell(AUTO, budget=budget)] = result(auto, int(1000 * budget), 0.9 * auto)
    checks = by_promise(found)
    assert len(checks) == 8 and all(one.holds for one in checks.values())


def test_each_promise_can_fail() -> None:
    found = family(auto=4.5e-4)
    found[cell("mfs banded")] = result(3e-4)
    for budget, predicted in ((0.02, 1e-6), (0.1, 3e-3), (0.2, 1e-2)):
        found[cell(AUTO, budget=budget)] = result(0.001 / (100 * budget), int(1000 * budget), predicted)
    checks = by_promise(found)
    assert sum(one.holds is False for one in checks.values()) >= 4
    lowest = checks["auto is lowest in every cell, or tied"]
    assert lowest.failing == ("table 1, code 5%, mfs banded",)
    assert checks["KL of auto on code at 5 % is at most 0.0003"].failing == ("table 1, code 5%, mfs auto",)
    assert not checks["KL of auto on code at 5 % is at least 5 times below low rank bf16"].holds
    assert not checks["rank correlation of predicted and measured KL is at least 0.95"].holds


def test_what_is_not_measured_is_unknown() -> None:
    assert all(one.holds is None for one in check([]))


def test_a_tie_and_more_bytes_do_not_fail() -> None:
    found = family()
    found[cell("mfs banded")] = result(1.99e-4) | {"kl_units": result(1.99e-4, noise=0.9)["kl_units"]}
    found[cell("mfs kbit")] = result(1e-6, nbytes=110)
    lowest = by_promise(found)["auto is lowest in every cell, or tied"]
    assert lowest.holds and "1 tied below it, 1 lower at more bytes" in lowest.found


def test_rows() -> None:
    found = family()
    found[cell("mfs lossless")] = {"left_out": "far"}
    rows = {row["codec"]: row for row in tabulate(found) if row["variant"] == "code"}
    assert "mfs lossless" not in rows
    sign = rows["BitDelta sign"]
    assert sign["share"] == 0.06 and sign["bytes_over"] and sign["recovered"] == pytest.approx(0.7, abs=0.02)
    assert rows[AUTO]["kl_above_auto"] is None and not rows[AUTO]["bytes_over"]
    low, high = sign["kl_above_auto_ci"]
    assert low < sign["kl_above_auto"] < high


def test_differences_are_paired() -> None:
    one, other = result(2e-3, noise=0.9), result(1e-3, noise=0.5)
    shifted = {**other, "kl_units": [value + 0.064 for value in one["kl_units"]]}
    low, high = difference_interval(shifted, one)  # runs differ, and all by the same
    assert low == pytest.approx(0.001) and high == pytest.approx(0.001)
    low, high = difference_interval(one, other)
    assert low < one["kl"] - other["kl"] < high
    with pytest.raises(AssertionError):
        difference_interval(one, {**other, "token_units": [32] * 20})
    assert rank_correlation([(1, 10), (2, 30), (3, 20), (4, 40)]) == pytest.approx(0.8)


def test_cells() -> None:
    cells = list(all_cells())
    assert len(cells) == len(set(cells))
    for variant in VARIANTS:
        own = [one for one in cells if one.variant == variant]
        assert own[0].codec == BASE
        assert {(one.tokens, one.table) for one in own if one.budget == 0.05} >= {(LONG, 1)}
        for one in own:
            if one.table:
                assert Cell(one.table, variant, one.budget, one.tokens, AUTO) in own
                assert Cell(0, variant, 0.0, one.tokens, BASE) in own
    assert {one.budget for one in cells if one.variant == "math"} == {0.0, 0.05}
    assert {one.variant for one in cells if one.table == 2} == {"code", "heavy", "lora"}


def test_the_journal_holds_what_was_made_from_the_same(tmp_path: Path) -> None:
    path, one = tmp_path / "j.jsonl", cell(AUTO)
    journal = Journal(path)
    journal.add(one, "a", {"kl": 1.0})
    journal.add(one, "b", {"kl": 2.0})
    with path.open("a") as file:
        file.write('{"cell": {"table"')
    again = Journal(path)
    assert again.get(one, "b") == {"kl": 2.0} and again.get(one, "a") is None and again.get(cell(BASE), "b") is None
    again.add(cell(BASE), "c", {"kl": 3.0})
    assert Journal(path).latest(cell(BASE)) == {"kl": 3.0}


def test_fingerprints_follow_inputs_and_what_a_codec_sees() -> None:
    extra = {AUTO: ["auto", {}]}
    prints = {codec: fingerprint(cell(codec), {"text": 1}, extra) for codec in (AUTO, "Delta-CoMe", "mfs banded")}
    changed = {AUTO: ["auto", {"seed": "1"}]}
    assert fingerprint(cell(AUTO), {"text": 1}, changed) != prints[AUTO]
    assert fingerprint(cell("Delta-CoMe"), {"text": 1}, changed) == prints["Delta-CoMe"]
    assert all(fingerprint(cell(codec), {"text": 2}, extra) != found for codec, found in prints.items())
    assert len(set(prints.values())) == 3


def test_digests_of_sources(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("1")
    (tmp_path / "a" / "x.pyc").write_text("2")
    first = digest_of([tmp_path / "a"])
    (tmp_path / "a" / "x.pyc").write_text("3")
    assert digest_of([tmp_path / "a"]) == first
    (tmp_path / "a" / "x.py").write_text("4")
    assert digest_of([tmp_path / "a"]) != first


def test_page_and_plot_name_every_codec() -> None:
    found = family()
    for at, codec in enumerate(ROWS):
        found.setdefault(cell(codec), result(1e-3 * (at + 1)))
    rows = tabulate(found)
    document = {"rows": rows, "checks": [one.record() for one in check(rows)], "settings": {"embedding_share": 0.125}}
    text = page(json.loads(json.dumps(document)))
    svg = draw(rows)
    assert svg == draw(rows) and b"predicted:heavy" in svg
    for codec in (AUTO, *ROWS):
        assert f"| {codec} | " in text and f"code:{codec}".encode() in svg
    assert "### `code` at 5%, 4,096 tokens" in text and "| **6.00%** | 3.0" in text
    assert draw([])  # nothing measured yet
