"""benchmarks/gpu_check.sh: everything in it runs at toy size on the CPU, and its checks can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PARTS = {"bits", "svd", "memory", "buffering", "family"}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts import each other by name; at one thread, since all is tiny."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def failed(result: Any) -> set[str]:
    return {name for name, part in result["parts"].items() if not part["passed"]}


def test_the_script_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = ["bash", str(BENCHMARKS / "gpu_check.sh"), "--toy", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["passed"] and result["toy"] and result["schema"] == "mfs.bench.gpu_check/1"
    assert result["parts"].keys() == PARTS and failed(result) == set()
    assert result["machine"]["device"] == "cpu" and result["versions"]["torch"]
    assert str(tmp_path) not in out.read_text() and str(ROOT) not in out.read_text()
    halved = {check["what"]: check["value"] for check in result["parts"]["memory"]["checks"]}
    assert halved["batches halved for want of memory"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA")
def test_without_a_device_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gpu_check

    assert gpu_check.main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert "expected a CUDA device for --device cuda:0, found none" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


def run(tmp_path: Path) -> Any:
    import gpu_check

    code = gpu_check.main(["--toy", "--device", "cpu", "--out", str(tmp_path / "gpu.json")])
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert code == (0 if result["passed"] else 1)
    return result


def test_a_planted_dependence_on_the_batch_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_parts

    real = gpu_parts.truncated_svd

    def crooked(batch: torch.Tensor, rank: int, keys: Sequence[int]) -> Any:
        return real(batch * (1 + 1e-6 * batch.shape[0]), rank, keys)

    monkeypatch.setattr(gpu_parts, "truncated_svd", crooked)
    assert {"bits", "memory"} <= failed(run(tmp_path))


def test_a_planted_bad_fit_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_parts

    real = gpu_parts.truncated_svd

    def short(batch: torch.Tensor, rank: int, keys: Sequence[int]) -> Any:
        return [found.head(rank - 1) for found in real(batch, rank, keys)]

    monkeypatch.setattr(gpu_parts, "truncated_svd", short)
    assert failed(run(tmp_path)) == {"svd"}


def test_other_errors_on_one_device_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_check

    real = gpu_check.recorded_errors
    calls = iter(range(10))
    monkeypatch.setattr(
        gpu_check,
        "recorded_errors",
        lambda folder: {key: error * (1 + 2e-4 * next(calls)) for key, error in list(real(folder).items())[:2]},
    )
    assert failed(run(tmp_path)) == {"family"}


def test_without_the_packages_the_rest_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mfs_decompose.pipeline.decompose", None)
    result = run(tmp_path)
    assert failed(result) == {"family"} and result["parts"].keys() == PARTS
