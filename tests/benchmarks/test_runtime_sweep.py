"""benchmarks/runtime_sweep.py: a whole run at toy size, gone on with, and every cell a command that is accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TOY = ["--layers", "1", "--vocabulary", "300", "--variants", "2", "--ranks", "8", "--rounds", "1", "--rows", "2"]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import runtime_sweep

    yield runtime_sweep


def test_a_run_writes_every_cell_and_goes_on_where_it_stopped(
    sweep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sweep.json"
    given = ["--work", str(tmp_path / "work"), "--out", str(out), "--threads", "1", *TOY]
    sweep.main([*given, "--codecs"])
    first = json.loads(out.read_text())
    assert list(first["cells"]) == ["lowrank int4 8"] and not list((tmp_path / "work").iterdir())
    cell = first["cells"]["lowrank int4 8"]
    assert [one["variants"] for one in cell["mixed"]] == [0, 1, 2] and cell["mixed"][0]["overhead"] == 1.0
    assert cell["memory"]["models"] == 2 and first["shape"]["num_hidden_layers"] == 1
    monkeypatch.setattr(sweep, "measure", lambda args, how, variants: {"mixed": [{"overhead": 1.5}], "how": [*how]})
    sweep.main([*given, "--codecs", "sign"])
    second = json.loads(out.read_text())["cells"]
    assert second["lowrank int4 8"] == cell and second["sign"]["how"] == ["--codec", "sign"]
    monkeypatch.setattr(sweep, "write_family", None)  # nothing is made where nothing is left to measure
    sweep.main([*given, "--codecs", "sign"])


def test_every_cell_is_a_plan_that_mfs_accepts(sweep: Any, tmp_path: Path) -> None:
    from mfs_decompose.cli.app import main

    sweep.write_family(tmp_path, sweep.Size(72, 144, 1, 300, 9, 3), 1, 1 << 30)
    for how in [["--rank", "8"], *sweep.CODECS.values()]:
        words = [
            "decompose",
            "--base",
            tmp_path / "base",
            "--variants",
            f"v={tmp_path / 'v1'}",
            "--out",
            tmp_path / "a",
        ]
        assert main([*map(str, words), *how, "--dry-run", "--json"]) == 0
