"""The Python API does what the commands do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import Family as TinyFamily
from checkpoints import read_weights

import mfs_decompose
from mfs_decompose import Family, decompose, evaluate, restore
from mfs_decompose.errors import UsageError
from mfs_decompose.fidelity.settings import EvalSettings


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = "import mfs_decompose, sys; print(mfs_decompose.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [mfs_decompose.__version__, "False"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mfs_decompose.nothing


def test_the_three_calls_of_the_docstring(family: TinyFamily, tmp_path: Path) -> None:
    variants = {id: family.variants[id] for id in ("math", "code")}
    report = decompose(family.base, variants, tmp_path / "art", budget="20%", threads=1)
    assert report.written and [variant.id for variant in report.variants] == ["code", "math"]
    again = decompose(family.base, variants, tmp_path / "art", budget="20%", threads=1)
    assert not again.written and again.artifact_digest == report.artifact_digest

    done = restore(tmp_path / "art", "math", tmp_path / "math")
    assert done.checked and (tmp_path / "math" / "config.json").exists()

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 8)
    document = evaluate(tmp_path / "art", [str(text)], variants=["code"], settings=EvalSettings(window=64))
    assert document.artifact_digest == report.artifact_digest
    assert {(result.through, result.engine) for result in document.results} == {("served", "runtime")}

    with Family.open(tmp_path / "art") as stored:
        assert stored.variant("code").footprint <= 0.20


def test_options_reach_the_recipe(family: TinyFamily, tmp_path: Path) -> None:
    variants = {"math": family.variants["math"]}
    decompose(family.base, variants, tmp_path / "exact", codec="lossless")
    restore(tmp_path / "exact", "math", tmp_path / "math", exact=True)
    original, restored = read_weights(family.variants["math"]), read_weights(tmp_path / "math")
    assert original.keys() == restored.keys()
    assert all(torch.equal(original[name], restored[name]) for name in original)


def test_two_objectives_are_refused(family: TinyFamily, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        decompose(family.base, {"math": family.variants["math"]}, tmp_path / "art", budget="5%", rank=4)
    assert not (tmp_path / "art").exists()
