"""Ladders of sizes: foreseen from pass 1 alone, monotone, and what a run then writes."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Family, fine_tune, make_llama
from interruptions import PASS_1, Interrupting, partial
from pipeline_runs import Recording, asked, contents, run, toys

from mfs_decompose.errors import OutputBusy
from mfs_decompose.pipeline import forecast_ladder
from mfs_decompose.pipeline.begin import Clock, begin
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.device import platform_facts
from mfs_decompose.pipeline.forecast import Forecast, forecast
from mfs_decompose.pipeline.forecast_json import to_json
from mfs_decompose.pipeline.forecast_ladder import BUDGETS, TARGETS, VariantForecast, foresee_variant
from mfs_decompose.pipeline.prepare import prepare
from mfs_decompose.plan.forecast import DriftCurve
from mfs_decompose.provenance import tool_versions

CURVE = DriftCurve(((1e-6, 1e-7), (1e6, 1e5)))  # drift is a tenth of the score


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> tuple[float, ...]:
    """A short ladder, where its length proves nothing."""
    monkeypatch.setattr(forecast_ladder, "BUDGETS", (0.005, 0.09, 0.3))
    return forecast_ladder.BUDGETS


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A family whose headers are few bytes beside its deltas."""
    root = tmp_path_factory.mktemp("forecast")
    base = make_llama(root / "base", seed=5, hidden=96, inter=136, layers=1, vocab=601)
    tuned = {
        "math": fine_tune(base, root / "math", seed=6),
        "code": fine_tune(base, root / "code", seed=7, kind="dense"),
    }
    return Family(base, tuned)


@pytest.fixture(scope="module")
def foreseen(large: Family, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Forecast]:
    """A forecast with a curve for one of two variants, and where its run would write."""
    out = tmp_path_factory.mktemp("foreseen") / "art"
    request = asked(out, large.base, large.variants, {"objective.budget": "12%"})
    return out, forecast(request, curves={"math": CURVE})


def one(found: Forecast, id: str) -> VariantForecast:
    return next(variant for variant in found.variants if variant.id == id)


def test_more_bytes_leave_less(foreseen: tuple[Path, Forecast]) -> None:
    for variant in foreseen[1].variants:
        assert [rung.budget for rung in variant.budgets] == pytest.approx(BUDGETS, rel=1e-3)
        held = [rung for rung in variant.budgets if rung.nbytes is not None]
        assert len(held) >= len(BUDGETS) - 1
        assert all(rung.nbytes is not None and rung.nbytes <= rung.cap for rung in held)
        sizes = [rung.nbytes or 0 for rung in held]
        assert sizes == sorted(sizes)
        left = [rung.left if rung.left is not None else math.nan for rung in held]
        assert all(before >= after for before, after in pairwise(left))
        assert 0.0 <= left[-1] < left[0] <= 1.0
        assert [rung.fitted for rung in variant.budgets] == [share <= 0.12 for share in BUDGETS]


def test_drift_is_foreseen_where_it_was_measured(foreseen: tuple[Path, Forecast]) -> None:
    math_, code = one(foreseen[1], "math"), one(foreseen[1], "code")
    assert code.targets == () and not code.measured
    assert all(rung.kl is None for rung in code.budgets)
    kls = [rung.kl for rung in math_.budgets if rung.kl is not None]
    assert kls == sorted(kls, reverse=True)
    assert [rung.kl for rung in math_.targets] == list(TARGETS)
    sizes = [rung.nbytes for rung in math_.targets if rung.nbytes is not None]
    assert sizes == sorted(sizes)
    assert len(sizes) >= 2


def test_a_target_lies_between_the_budgets_that_hold_it(foreseen: tuple[Path, Forecast]) -> None:
    math_ = one(foreseen[1], "math")
    for target in math_.targets:
        if target.nbytes is None:
            continue
        holding = [r.nbytes for r in math_.budgets if r.kl is not None and r.kl <= target.kl and r.nbytes is not None]
        failing = [r.nbytes for r in math_.budgets if r.kl is not None and r.kl > target.kl and r.nbytes is not None]
        assert target.nbytes <= min(holding, default=target.nbytes)
        assert target.nbytes >= max(failing, default=0)


@pytest.mark.usefixtures("few")
def test_what_was_foreseen_is_what_is_written(tmp_path: Path) -> None:
    """At sizes where headers, whose bytes are bounded from above, are few beside the deltas."""
    base = make_llama(tmp_path / "base", seed=5, hidden=160, inter=224, layers=1, vocab=601)
    variants = {
        "math": fine_tune(base, tmp_path / "math", seed=6),
        "code": fine_tune(base, tmp_path / "code", seed=7, kind="dense"),
    }
    request = asked(tmp_path / "art", base, variants, {"objective.budget": "12%"})
    found = forecast(request)
    report = decompose(request)
    assert report.written
    for variant in report.variants:
        planned = one(found, variant.id).planned
        assert planned is not None and planned.nbytes is not None
        assert variant.bytes <= planned.cap
        assert planned.nbytes == pytest.approx(variant.bytes, rel=0.02)


@pytest.mark.usefixtures("few")
def test_the_run_pays_for_nothing_twice(large: Family, tmp_path: Path) -> None:
    recipe = {"objective.budget": "6%"}
    first, second, whole = Recording(), Recording(), Recording()
    found = forecast(asked(tmp_path / "art", large.base, large.variants, recipe), first)
    assert not (tmp_path / "art").exists()
    assert found.work == partial(tmp_path / "art") and found.work.is_dir()
    assert not any(stage.startswith(("pass 2", "sizes", "writing", "publishing")) for stage in first.stages)
    kinds = [json.loads(line)["kind"] for line in (found.work / "journal.jsonl").read_bytes().splitlines()]
    assert "survey" in kinds and "encode" not in kinds

    again = forecast(asked(tmp_path / "art", large.base, large.variants, recipe))
    assert again.bytes_read == 0
    assert again.variants == found.variants

    report = run(tmp_path / "art", large.base, large.variants, recipe, second)
    alone = run(tmp_path / "alone", large.base, large.variants, recipe, whole)
    assert contents(tmp_path / "art") == contents(tmp_path / "alone")
    assert report.bytes_read < alone.bytes_read
    assert report.resumed_units == found.resumed_units + sum(kind in ("base", "survey") for kind in kinds)
    assert not found.work.exists()
    with pytest.raises(OutputBusy, match="no run left to foresee"):
        forecast(asked(tmp_path / "art", large.base, large.variants, recipe))
    assert not found.work.exists()


KILLED = """\
import os, signal, sys
sys.path[:0] = {paths!r}
from interruptions import PASS_1, Interrupting
from pipeline_runs import asked
from mfs_decompose.pipeline.forecast import forecast
from pathlib import Path
kill = Interrupting(PASS_1, 12, lambda: os.kill(os.getpid(), signal.SIGKILL))
forecast(asked(Path({out!r}), Path({base!r}), {{"math": Path({math!r})}}), kill)
"""


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("killed", [False, True])
def test_a_forecast_that_was_stopped_goes_on(family: Family, tmp_path: Path, killed: bool) -> None:
    request = asked(tmp_path / "art", family.base, {"math": family.variants["math"]})
    if killed:
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
        out, base, variant = tmp_path / "art", family.base, family.variants["math"]
        program = KILLED.format(paths=paths, out=str(out), base=str(base), math=str(variant))
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    else:
        with pytest.raises(KeyboardInterrupt):
            forecast(request, Interrupting(PASS_1, 9))
    found = forecast(request)
    assert found.resumed_units > 0
    fresh = forecast(replace(request, out=tmp_path / "fresh"))
    assert found.variants == fresh.variants
    assert found.bytes_read <= fresh.bytes_read


@pytest.mark.usefixtures("few")
def test_a_cap_that_cannot_hold_what_is_exact_is_too_small(family: Family, tmp_path: Path) -> None:
    found = forecast(asked(tmp_path / "art", family.base, {"vocab": family.variants["vocab"]}))
    (variant,) = found.variants
    assert variant.budgets[0].nbytes is None and variant.budgets[0].left is None
    assert variant.budgets[-1].nbytes is not None


@pytest.mark.parametrize(
    "recipe",
    [
        {"deltas.default.codec": "lossless"},
        {"objective.rank": 3},
        {"objective.density": 0.1},
        {"deltas.default.codec": "sign"},
    ],
)
def test_sizes_that_the_recipe_fixes_have_no_ladder(family: Family, tmp_path: Path, recipe: dict[str, object]) -> None:
    found = forecast(asked(tmp_path / "art", family.base, family.variants, recipe), curves={"math": CURVE})
    for variant in found.variants:
        assert variant.budgets == () and variant.targets == ()
        assert variant.planned is not None and variant.planned.nbytes is not None
        assert 0 < variant.planned.nbytes <= 1.1 * variant.checkpoint_bytes
        assert (variant.unforeseen > 0) == (recipe.get("deltas.default.codec") == "sign")
    report = run(tmp_path / "art", family.base, family.variants, recipe)
    for written in report.variants:
        planned = one(found, written.id).planned
        assert planned is not None and planned.nbytes is not None and planned.nbytes >= written.bytes


@pytest.mark.parametrize(
    ("recipe", "base"),
    [
        ({"deltas.default.codec": "lowrank", "objective.budget": "9%"}, True),
        ({"deltas.keep_exact": True}, True),
        ({"base.mode": "shared"}, True),
        ({"base.mode": "mean"}, False),
    ],
)
@pytest.mark.usefixtures("few")
def test_other_recipes_and_bases(family: Family, tmp_path: Path, recipe: dict[str, object], base: bool) -> None:
    variants = {id: family.variants[id] for id in ("math", "code")}
    found = forecast(asked(tmp_path / "art", family.base if base else None, variants, recipe))
    check_document(found)
    for variant in found.variants:
        left = [rung.left for rung in variant.budgets if rung.left is not None]
        assert left == sorted(left, reverse=True) and left[-1] < 1.0
    assert found.keep_exact == bool(recipe.get("deltas.keep_exact"))
    report = run(tmp_path / "art", family.base if base else None, variants, recipe)
    assert {variant.id for variant in report.variants} == {variant.id for variant in found.variants}
    assert report.resumed_units > 0


@pytest.mark.usefixtures("few")
def test_rules_of_many_codecs_and_stacks(tmp_path: Path) -> None:
    base, variants = toys(tmp_path, "one", "two")
    rules = [
        {"match": "large*", "codec": "sign"},
        {"match": "wide*", "codec": "lossless"},
        {"match": "embed*", "codec": "lowrank", "rank": 2},
    ]
    found = forecast(asked(tmp_path / "art", base, variants, {"deltas.rules": rules, "objective.budget": "60%"}))
    for variant in found.variants:
        assert variant.unforeseen == 1
        held = [rung.left for rung in variant.budgets if rung.left is not None]
        assert held == sorted(held, reverse=True)
        assert variant.planned is not None and variant.planned.left is not None and variant.planned.left < 1.0


@pytest.mark.usefixtures("few")
def test_nothing_to_store_leaves_nothing(tmp_path: Path) -> None:
    base, variants = toys(tmp_path, "one")
    found = forecast(asked(tmp_path / "art", base, {"same": base}))
    (variant,) = found.variants
    assert {rung.left for rung in variant.budgets} == {0.0}
    assert variants.keys() == {"one"}


@pytest.mark.usefixtures("few")
def test_the_score_is_that_of_the_allocation_of_the_run(family: Family, tmp_path: Path) -> None:
    """The slow way: every rung by an allocator of its own, at the plan of the whole family."""
    variants = {id: family.variants[id] for id in ("math", "code")}
    request = asked(tmp_path / "art", family.base, variants)
    prepared = prepare(request)
    with begin(request, prepared, "cpu", platform_facts("cpu"), tool_versions(), Clock(), Recording()) as begun:
        ladder = foresee_variant(begun.allocator, "code").budgets[1:]
        scores = []
        for share in forecast_ladder.BUDGETS[1:]:
            total = next(v.checkpoint_bytes for v in prepared.plan.variants if v.id == "code")
            scores.append(begun.allocator.foresee({"code": int(share * total)})["code"])
    for rung, outlook in zip(ladder, scores, strict=True):
        assert rung.nbytes == outlook.nbytes
        assert rung.left is not None and ladder[0].left is not None
        assert rung.left / ladder[0].left == pytest.approx(outlook.score / scores[0].score)


def check_document(found: Forecast) -> None:
    """Plain JSON without NaN, with the keys that docs/json.md names."""
    document: Any = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert document["schema"] == "mfs.forecast/1"
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    section = page.partition("`mfs.forecast/1`")[2].partition("\n## ")[0]
    for keys in (document, document["variants"][0], document["variants"][0]["budgets"][0]):
        assert all(key in section for key in keys if key != "schema"), keys
