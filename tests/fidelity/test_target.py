"""`--target`: artifacts as small as a measured drift allows, from real fine-tunes of a tiny real model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Kind, make_adapter
from checkpoints import Family, fine_tune, make_llama, read_weights

from mfs_decompose.artifact.reader import Family as Stored
from mfs_decompose.artifact.reader import read_run_record
from mfs_decompose.artifact.target_record import HeldRecord
from mfs_decompose.errors import GateFailed, OutputBusy, ResumeRefused, UsageError
from mfs_decompose.events import NullSink
from mfs_decompose.fidelity.artifact_drift import DriftRequest, measure_artifact
from mfs_decompose.fidelity.gauge import make_gauges
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.text import Corpus
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.gauge import Drift, Gauge, Gauges
from mfs_decompose.pipeline.request import DecomposeReport, DecomposeRequest
from mfs_decompose.pipeline.restore import RestoreOptions, restore
from mfs_decompose.pipeline.target_search import MOST
from mfs_decompose.recipe.load import load_recipe
from mfs_decompose.source.checkpoint import Checkpoint

PROSE = Corpus("prose", ("The quick brown fox jumps over the lazy dog. " * 3, "So it goes, and so on it went."))
SETTINGS = EvalSettings(window=48, max_tokens=150)
LONG = Corpus("long", tuple(f"{n} times {n + 3} is {n * (n + 3)}, as all of us know. " * 9 for n in range(11)))


@dataclass
class Counting:
    """Gauges that keep what was opened and measured, and may stop before the n-th measurement."""

    real: Gauges
    opened: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    stop_at: int = -1

    @property
    def gauges(self) -> Gauges:
        return replace(self.real, open=self._open)

    @contextmanager
    def _open(self, checkpoint: Checkpoint) -> Iterator[Gauge]:
        self.opened.append(checkpoint.id)
        with self.real.open(checkpoint) as gauge:
            yield _CountingGauge(self, gauge, checkpoint.id)


@dataclass
class _CountingGauge:
    owner: Counting
    gauge: Gauge
    id: str

    def put(self, name: str, values: torch.Tensor) -> None:
        self.gauge.put(name, values)

    def measure(self) -> Drift:
        if len(self.owner.measured) == self.owner.stop_at:
            raise KeyboardInterrupt
        self.owner.measured.append(self.id)
        return self.gauge.measure()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A flat delta and a low rank one with some noise, large enough to be heard."""
    root = tmp_path_factory.mktemp("target")
    base = make_llama(root / "base", seed=5, hidden=40, inter=56, layers=1, vocab=257)
    variants = {
        "flat": fine_tune(base, root / "flat", seed=6, kind="dense", scale=0.3),
        "thin": fine_tune(base, root / "thin", seed=7, scale=0.4),
    }
    return Family(base, variants)


def gauges(text: Corpus = PROSE, settings: EvalSettings = SETTINGS) -> Gauges:
    return make_gauges([text], settings, "cpu")


def run(
    family: Family,
    out: Path,
    target: str,
    *ids: str,
    measuring: Gauges | None = None,
    recipe: Mapping[str, object] | None = None,
    sink: NullSink | None = None,
    **changes: Any,
) -> DecomposeReport:
    request = DecomposeRequest(
        variants={id: str(family.variants[id]) for id in ids or family.variants},
        out=out,
        recipe=load_recipe(None, {"objective.target": target, **(recipe or {})}),
        base=str(family.base),
        device="cpu",
        threads=1,
        gauges=measuring or gauges(),
    )
    return decompose(replace(request, **changes), sink)


def held(report: DecomposeReport, id: str) -> HeldRecord:
    assert report.target is not None
    return report.target.variants[id]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.json"
    }


def partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def test_what_was_measured_is_what_eval_measures(family: Family, tmp_path: Path) -> None:
    """Two variants, each inside the window; the artifact serves just what was measured before it was written."""
    counting = Counting(gauges())
    report = run(family, tmp_path / "art", "kl=2e-4", measuring=counting.gauges)
    assert counting.opened == ["flat", "thin"], "one model after another"
    request = DriftRequest(tmp_path / "art", [PROSE], SETTINGS, ("served",), tmp_path)
    results, _ = measure_artifact(request, NullSink())
    for result in results:
        found = held(report, result.variant)
        assert 0.7 * 2e-4 < found.kl <= 2e-4
        assert result.kl_mean == pytest.approx(found.kl, rel=1e-5)
        assert (result.tokens, found.smallest) == (found.tokens, False)
        assert found.evaluations == counting.measured.count(result.variant) <= MOST
    sizes = {one.id: one.bytes for one in report.variants}
    assert all(0 < nbytes < 0.9 * one.checkpoint_bytes for one in report.variants for nbytes in [sizes[one.id]])
    tried = read_run_record(tmp_path / "art")["target"]
    assert {id: len(trials) for id, trials in tried.items()} == {id: held(report, id).evaluations for id in tried}
    assert all(trial.keys() == {"cap", "nbytes", "score", "kl", "ln_ppl", "tokens"} for trial in tried["flat"])
    # What coding takes is foretold to about a percent, and headers are bounded.
    chosen = next(trial for trial in tried["flat"] if trial["kl"] == held(report, "flat").kl)
    assert chosen["nbytes"] == pytest.approx(sizes["flat"], rel=0.1)


@pytest.mark.parametrize("limit", [2e-3, 2e-5])
def test_it_lies_inside_the_window(family: Family, tmp_path: Path, limit: float) -> None:
    report = run(family, tmp_path / "art", f"kl={limit!r}", "flat")
    assert 0.7 * limit < held(report, "flat").kl <= limit


def test_a_killed_search_measures_nothing_again(family: Family, tmp_path: Path) -> None:
    whole = Counting(gauges())
    run(family, tmp_path / "whole", "kl=5e-5", measuring=whole.gauges)
    assert len(whole.measured) > 3
    killed = Counting(gauges(), stop_at=len(whole.measured) - 1)
    with pytest.raises(KeyboardInterrupt):
        run(family, tmp_path / "art", "kl=5e-5", measuring=killed.gauges)
    with pytest.raises(ResumeRefused, match="the text of the target"):
        run(family, tmp_path / "art", "kl=5e-5", measuring=gauges(LONG))
    again = Counting(gauges())
    run(family, tmp_path / "art", "kl=5e-5", measuring=again.gauges)
    assert [*killed.measured, *again.measured] == whole.measured
    assert again.opened == ["thin"], "what is in the journal needs no model"
    assert contents(tmp_path / "art") == contents(tmp_path / "whole")


def test_the_same_command_writes_nothing(family: Family, tmp_path: Path) -> None:
    first = run(family, tmp_path / "art", "kl=1e-4", "thin")
    counting = Counting(gauges())
    again = run(family, tmp_path / "art", "kl=1e-4", "thin", measuring=counting.gauges)
    assert (first.written, again.written, counting.measured) == (True, False, [])
    assert again.target == first.target
    with pytest.raises(OutputBusy):
        run(family, tmp_path / "art", "kl=1e-4", "thin", measuring=gauges(LONG))
    with pytest.raises(OutputBusy):
        run(family, tmp_path / "art", "kl=1e-3", "thin")


def test_the_smallest_possible_is_an_answer(family: Family, tmp_path: Path) -> None:
    report = run(family, tmp_path / "art", "kl=50", "flat")
    found = held(report, "flat")
    assert (found.smallest, found.evaluations) == (True, 1)
    smaller = run(family, tmp_path / "tiny", "kl=49", "flat")
    assert smaller.variants[0].bytes == report.variants[0].bytes


def test_all_bits_hold_whatever_is_asked(family: Family, tmp_path: Path) -> None:
    report = run(family, tmp_path / "art", "kl=1e-30", "thin")
    found = held(report, "thin")
    assert (found.kl, found.ln_ppl, found.tokens) == (0.0, 0.0, 0)
    restore(tmp_path / "art", ["thin"], tmp_path / "back", RestoreOptions())
    back, original = read_weights(tmp_path / "back"), read_weights(family.variants["thin"])
    assert all(torch.equal(back[name], weight) for name, weight in original.items())


@pytest.mark.parametrize("codec", ["lowrank", "sparse"])
def test_out_of_reach_says_how_near_it_came(family: Family, tmp_path: Path, codec: str) -> None:
    counting = Counting(gauges())
    recipe = {"deltas.default.codec": codec}
    with pytest.raises(GateFailed, match=r"variant 'flat'.*has KL .* at .*B") as caught:
        run(family, tmp_path / "art", "kl=1e-12", "flat", measuring=counting.gauges, recipe=recipe)
    assert caught.value.exit_code == 21
    assert len(counting.measured) <= MOST
    assert not partial(tmp_path / "art").exists(), "the same command could never end well"
    assert caught.value.hint is not None and "--target kl=" in caught.value.hint
    offered = caught.value.hint.rpartition("--target ")[2]
    found = held(run(family, tmp_path / "art", offered, "flat", recipe=recipe), "flat")
    assert found.kl <= float(offered.removeprefix("kl="))


def test_a_rank_that_holds_is_found_for_one_codec(family: Family, tmp_path: Path) -> None:
    report = run(family, tmp_path / "art", "kl=3e-3", "thin", recipe={"deltas.default.codec": "lowrank"})
    found = held(report, "thin")
    assert found.kl <= 3e-3
    assert set(report.variants[0].codecs) <= {"lowrank", "identical", "raw", "lossless", "alias"}


def test_perplexity_holds_at_the_end_of_its_interval(family: Family, tmp_path: Path) -> None:
    settings = EvalSettings(window=64, max_tokens=3400)
    report = run(family, tmp_path / "art", "ppl=0.004", "flat", measuring=gauges(LONG, settings))
    found = held(report, "flat")
    assert found.ln_ppl is not None and 0.0 < found.ln_ppl <= 0.004
    request = DriftRequest(tmp_path / "art", [LONG], settings, ("served",), tmp_path)
    (result,), _ = measure_artifact(request, NullSink())
    assert result.ppl_ratio_ci is not None
    assert max(abs(torch.log(torch.tensor(end, dtype=torch.float64)).item()) for end in result.ppl_ratio_ci) == (
        pytest.approx(found.ln_ppl, rel=1e-4)
    )


def test_a_text_too_short_for_an_interval_is_refused_at_once(family: Family, tmp_path: Path) -> None:
    counting = Counting(gauges())
    with pytest.raises(UsageError, match=r"needs about [\d,]+ tokens of text for an interval, found 146") as caught:
        run(family, tmp_path / "art", "ppl=0.01", "flat", measuring=counting.gauges)
    assert caught.value.hint is not None and "--max-tokens" in caught.value.hint
    assert counting.opened == [] and not partial(tmp_path / "art").exists()


def test_without_text_there_is_nothing_to_hold_it_against(family: Family, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs text"):
        run(family, tmp_path / "art", "kl=1e-3", gauges=None)


def test_adapters_beside_are_kept_as_they_are(family: Family, tmp_path: Path) -> None:
    kind = Kind("tied", {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]})
    made = make_adapter(tmp_path / "adapter", kind, family.base)
    counting = Counting(gauges())
    both = Family(family.base, {"light": made.adapter, "thin": family.variants["thin"]})
    report = run(both, tmp_path / "art", "kl=1e-4", measuring=counting.gauges)
    assert report.target is not None and set(report.target.variants) == {"thin"}
    assert set(counting.measured) == {"thin"}
    assert [one.adapter for one in report.variants] == [True, False]


def test_a_variant_that_is_the_base_needs_no_measurement(family: Family, tmp_path: Path) -> None:
    shutil.copytree(family.base, tmp_path / "same")
    counting = Counting(gauges())
    same = Family(family.base, {"same": tmp_path / "same"})
    report = run(same, tmp_path / "art", "kl=1e-9", measuring=counting.gauges)
    assert held(report, "same") == HeldRecord(kl=0.0, ln_ppl=0.0, tokens=0, evaluations=0, smallest=True)
    assert counting.opened == []


def test_the_manifest_says_what_was_asked_and_measured(family: Family, tmp_path: Path) -> None:
    run(family, tmp_path / "art", "kl=50", "flat")
    with Stored.open(tmp_path / "art") as stored:
        target, recipe = stored.manifest.target, stored.manifest.recipe
    assert target is not None and target.asked == recipe["objective"]["target"] == "kl=50.0"
    assert target.measured_on["texts"]["prose"] == {**PROSE.identity(), "limit": 150}
    card = (tmp_path / "art" / "README.md").read_text()
    assert "--text prose" in card and "--max-tokens 150" in card and "objective.target=" in card
