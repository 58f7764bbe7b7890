"""benchmarks/svd_speed.py at a small size: both ways run, the stages add up, residuals are what they are said to be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mfs_decompose.linalg import svd
from mfs_decompose.pipeline import reading
from mfs_decompose.plan import units

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Layers of 128 x 128, and of 448 x 128 in row blocks."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import measure
    import svd_speed

    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(units, "BLOCK_ELEMENTS", 1 << 15)
    before = torch.get_num_threads()
    svd_speed.main(["--scale", "32", "--turns", "1", "--name", "small"])
    torch.set_num_threads(before)
    yield json.loads((tmp_path / "small.json").read_text())


def test_small_layers(result: Any) -> None:
    from stage_clock import STAGES

    layers = result["layers"]
    assert [layer["shape"] for layer in layers.values()] == [[128, 128], [448, 128]]
    assert [layer["row_blocks"] for layer in layers.values()] == [False, True]
    for layer in layers.values():
        assert set(layer["stages"]) == set(STAGES)
        assert sum(layer["stages"].values()) == pytest.approx(layer["ours_seconds"], rel=0.3)
        assert all(layer["stages"][stage] > 0 for stage in STAGES if stage != "sketch" or not gram(layer["shape"]))
        assert 1 - 1e-5 <= layer["residual_over_least"] <= 1.01
        assert layer["residual_quantised_over_least"] >= layer["residual_over_least"]
        assert layer["reported_over_measured"] == pytest.approx(1, abs=1e-4)
        assert 0.5 < layer["rel_error_least"] < 0.95
    assert result["times_faster"] > 0 and result["whole_decompose"]["seconds"] > 0
    assert sum(result["stage_shares"].values()) == pytest.approx(1)
    assert str(ROOT) not in json.dumps(result)


def gram(shape: list[int]) -> bool:
    return svd.uses_gram(16, min(shape))


def test_nothing_stays_wrapped(result: Any) -> None:
    from mfs_decompose.codec import lowrank
    from mfs_decompose.source.checkpoint import TensorReader

    assert result
    for function in (svd.squared_norm, svd.from_range, svd.random_matrix, lowrank._fit, reading.delta_rows):
        assert "timed" not in function.__name__ and "watched" not in function.__name__
    assert TensorReader.raw.__name__ == "raw"


def test_a_stage_does_not_count_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import stage_clock

    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(stage_clock.time, "perf_counter", lambda: next(now))
    clock = stage_clock.StageClock()
    inner = clock.wrapped("norm", lambda: 7)
    with clock.stage("other"):  # opens at 0
        assert clock.wrapped("read", lambda: inner() + 1)() == 8  # read from 1, norm from 3 to 6, read until 10
    seconds = {stage: taken for stage, taken in clock.seconds.items() if taken}
    assert seconds == {"other": 1.0 + 5.0, "read": 2.0 + 4.0, "norm": 3.0}
