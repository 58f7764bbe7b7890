"""What a dry run says is enough: bytes written, bytes read, and disk while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import Family
from pipeline_runs import Recording, asked, run, toys

from mfs_decompose.pipeline.prepare import prepare
from mfs_decompose.plan.estimate import Estimate


class Weighing(Recording):
    """Weighs everything beside the output whenever something happens."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.most = folder, 0

    def _weigh(self) -> None:
        sizes = []
        for path in self.folder.rglob("*"):
            try:
                sizes.append(path.stat().st_size if path.is_file() else 0)
            except FileNotFoundError:
                continue  # renamed meanwhile
        self.most = max(self.most, sum(sizes))

    def start(self, stage: str, total_bytes: int | None) -> None:
        super().start(stage, total_bytes)
        self._weigh()

    def advance(self, nbytes: int) -> None:
        super().advance(nbytes)
        self._weigh()

    def finish(self) -> None:
        self._weigh()


RULES = [{"match": "*large*", "codec": "lossless"}, {"match": "*up_proj*", "codec": "lossless"}]
RECIPES: list[dict[str, Any]] = [
    {"objective.budget": "25%"},
    {"objective.budget": "300%", "deltas.default.codec": "sparse"},
    {"objective.rank": 6, "deltas.default.factors": "bf16"},
    {"objective.rank": 4, "output.shard_size": 300},
    {"objective.density": "30%", "deltas.default.codec": "sparse"},
    {"deltas.default.codec": "lossless"},
    {"deltas.default.codec": "raw", "output.shard_size": 1000},
    {"objective.rank": 2, "base.store": "reference"},
    {"objective.rank": 2, "base.store": "hardlink"},
    {"objective.rank": 2, "base.mode": "mean"},
]


def check(estimate: Estimate, out: Path, base: Path | None, variants: dict[str, Path], recipe: dict[str, Any]) -> None:
    sink = Weighing(out.parent)
    report = run(out, base, variants, recipe, sink=sink, threads=2)
    assert [variant.id for variant in estimate.variants] == [variant.id for variant in report.variants]
    for bound, variant in zip(estimate.variants, report.variants, strict=True):
        assert variant.bytes <= bound.bytes
        assert variant.checkpoint_bytes == bound.checkpoint_bytes
    stored = 0 if recipe.get("base.store") == "hardlink" else report.base_bytes
    assert stored <= estimate.base_bytes
    files = sum(path.stat().st_size for path in (out / "files").iterdir())
    assert files <= estimate.files_bytes
    assert sink.most <= estimate.disk_bytes + (report.base_bytes - stored)
    lineage = 2 * (len(variants) + 1) * 8 * 2**18
    assert report.bytes_read <= estimate.read_bytes + min(lineage, 5 * report.checkpoint_bytes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_estimate_is_an_upper_bound(tmp_path: Path, recipe: dict[str, Any]) -> None:
    base, variants = toys(tmp_path / "in", "one", "two")
    if recipe.get("objective.budget") == "300%":
        recipe = {**recipe, "objective.budget": "23000B"}
    out = tmp_path / "work" / "art"
    out.parent.mkdir()
    check(prepare(asked(out, base, variants, recipe, threads=2)).estimate, out, base, variants, recipe)


@pytest.mark.parametrize("recipe", [{}, {"objective.budget": "60%", "deltas.rules": RULES[1:]}])
def test_an_estimate_of_a_real_family(tmp_path: Path, untied_family: Family, recipe: dict[str, Any]) -> None:
    out = tmp_path / "work" / "art"
    out.parent.mkdir()
    chosen = (untied_family.base, untied_family.variants)
    check(prepare(asked(out, *chosen, recipe, threads=2)).estimate, out, *chosen, recipe)


def test_an_estimate_is_not_far_off(tmp_path: Path, family: Family, art: Path) -> None:
    prepared = prepare(asked(tmp_path / "art", family.base, family.variants))
    estimate = prepared.estimate
    for bound in estimate.variants:
        assert bound.bytes == int(0.05 * bound.checkpoint_bytes)
    assert estimate.base_bytes == (art / "base-00001-of-00001.safetensors").stat().st_size
    # Of three variants and their base: pass 1, samples, four rounds of sizing, coding twice over, and measuring.
    assert estimate.read_bytes < 1.1 * 152_000 * (1 + 4 + 3 * 2 * (2 + 2 * 4 + 2 + 1))
    assert estimate.peak_ram == max(unit.peak_bytes for unit in prepared.plan.units)


def test_more_threads_hold_more_units(tmp_path: Path, family: Family) -> None:
    peaks = [
        prepare(asked(tmp_path / "art", family.base, family.variants, threads=threads)).estimate.peak_ram
        for threads in (1, 2, 4)
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[2]
