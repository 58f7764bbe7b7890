"""B30: a fine-tune that changed only its norms, and an extractor that drops them. Right: they are stored, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import Family, fine_tune, read_weights
from report_runs import back, run, same_bits, tensors_of

from mfs_decompose.pipeline.inspect import inspect


@pytest.mark.parametrize("recipe", [{}, {"objective.rank": 4}, {"deltas.default.codec": "lossless"}])
def test_the_result_is_not_no_difference(tmp_path: Path, family: Family, recipe: dict[str, object]) -> None:
    own = fine_tune(family.base, tmp_path / "norms", seed=30, kind="norms")
    report = run(tmp_path / "art", family.base, {"norms": own}, recipe)
    tensors = tensors_of(tmp_path / "art", "norms")
    norms = {name for name in tensors if "norm" in name}
    assert len(norms) == 5
    for name, found in tensors.items():
        assert (found["energy"] > 0) == (name in norms)
        assert (found["blob"] is not None) == (name in norms)
        assert found["exact"]
    assert report.variants[0].bytes > 0 and report.variants[0].rel_error == 0.0
    assert inspect(tmp_path / "art")["variants"][0]["codecs"]["identical"] == len(tensors) - len(norms)
    weights = back(tmp_path / "art", "norms", tmp_path / "out", exact=True)
    assert all(same_bits(weights[name], one) for name, one in read_weights(own).items())
