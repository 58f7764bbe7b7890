"""Weights of drift fitted on text: probes are made once, kept where they help, and the forecast reads their curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mfs_decompose.artifact.reader import Family
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.gauge import Drift, Gauge, Gauges, TextAmount
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.plan.drift import SHRINK, DriftWeights, Place, fit_weights
from mfs_decompose.plan.forecast import DriftCurve, fit_curve
from mfs_decompose.recipe.load import load_recipe
from mfs_decompose.source.checkpoint import Checkpoint

LAYERS, ROWS, COLUMNS = 3, 72, 56


def weights(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{layer}.{part}.weight": torch.randn(ROWS, COLUMNS, generator=generator) * scale
        for layer in range(LAYERS)
        for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = weights(1)
    made = {"base": base}
    for number, id in enumerate(("one", "two")):
        delta = weights(2 + number, 0.02)
        made[id] = {name: base[name] + delta[name] for name in base}
    found = {}
    for id, tensors in made.items():
        found[id] = tmp_path_factory.mktemp("family") / id
        found[id].mkdir()
        save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, found[id] / "m.safetensors")
    return found


class Judged:
    """Drift that values count for a hundred times what queries do: what a gauge on text would have to find out."""

    def __init__(self) -> None:
        self.measured = 0

    def gauges(self) -> Gauges:
        @contextmanager
        def opened(checkpoint: Checkpoint) -> Iterator[Gauge]:
            yield _Gauge(self, checkpoint)

        return Gauges(opened, {"text": "judged"}, "judged", lambda checkpoint: TextAmount(4_096, 64))


class _Gauge:
    def __init__(self, judged: Judged, checkpoint: Checkpoint) -> None:
        from safetensors.torch import load_file

        self._judged = judged
        self._own = {name: one.float() for name, one in load_file(checkpoint.root / "m.safetensors").items()}
        self._served: dict[str, torch.Tensor] = {}

    def put(self, name: str, values: torch.Tensor) -> None:
        self._served[name] = values.float()

    def measure(self) -> Drift:
        self._judged.measured += 1
        lost = [
            (100.0 if "v_proj" in name else 1.0) * float((values - self._own[name]).square().sum())
            for name, values in self._served.items()
        ]
        return Drift(math.fsum(lost) * 1e-3, None, 4_096)


def run(folders: Mapping[str, Path], out: Path, gauges: Gauges | None, **objective: object) -> None:
    changes = {f"objective.{key}": value for key, value in objective.items()} or {"objective.budget": "12%"}
    request = DecomposeRequest(
        variants={id: str(folders[id]) for id in ("one", "two")},
        out=out,
        recipe=load_recipe(None, changes),
        base=str(folders["base"]),
        calibrate=gauges,
        threads=1,
    )
    decompose(request)


def errors(out: Path, part: str) -> float:
    with Family.open(out) as family:
        tensors = [family.variant(id).tensors for id in family.variant_ids]
    found = [record for own in tensors for name, record in own.items() if part in name]
    return math.sqrt(sum(record.error for record in found) / sum(record.energy for record in found))


@pytest.mark.parametrize("objective", [{"budget": "12%"}, {"budget_total": "12%"}])
def test_what_drifts_more_gets_more(folders: Mapping[str, Path], tmp_path: Path, objective: dict[str, object]) -> None:
    judged = Judged()
    run(folders, tmp_path / "plain", None, **objective)
    run(folders, tmp_path / "fitted", judged.gauges(), **objective)
    plain, fitted = (
        {part: errors(tmp_path / out, part) for part in ("q_proj", "v_proj")} for out in ("plain", "fitted")
    )
    assert fitted["v_proj"] < plain["v_proj"]
    assert fitted["v_proj"] / fitted["q_proj"] < plain["v_proj"] / plain["q_proj"]
    # A probe a place and variant, the start, the fitted weights, and three sizes for the curve.
    assert judged.measured == 2 * (3 * LAYERS + 5)


def test_a_run_that_goes_on_probes_nothing_twice(
    folders: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Judged()
    run(folders, tmp_path / "whole", whole.gauges())
    stopped, limit = Judged(), 17

    def measure(self: _Gauge) -> Drift:
        if stopped.measured == limit:
            raise KeyboardInterrupt
        return real(self)

    real = _Gauge.measure
    monkeypatch.setattr(_Gauge, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run(folders, tmp_path / "art", stopped.gauges())
    monkeypatch.setattr(_Gauge, "measure", real)
    later = Judged()
    run(folders, tmp_path / "art", later.gauges())
    assert stopped.measured + later.measured == whole.measured
    assert (tmp_path / "art" / "manifest.json").read_bytes() == (tmp_path / "whole" / "manifest.json").read_bytes()


PLACES = st.tuples(st.sampled_from(["query", "value", "down", "other"]), st.integers(0, 2))


@given(st.dictionaries(PLACES, st.floats(1e-6, 1e3), max_size=12), st.floats(1e-3, 1e3))
def test_weights_are_relative_and_shrunk(gains: dict[Place, float], scale: float) -> None:
    found = fit_weights(gains, 9)
    assert DriftWeights.from_json(found.to_json()) == found
    again = fit_weights({place: gain * scale for place, gain in gains.items()}, 9)
    for (kind, depth), gain in gains.items():
        assert again.table[kind][depth] == pytest.approx(found.table[kind][depth])
        for (other, third), more in gains.items():
            ratio = found.table[kind][depth] / found.table[other][third]
            assert ratio == pytest.approx((gain / more) ** SHRINK)


def test_what_was_not_probed_weighs_as_its_type_or_nothing_special() -> None:
    found = fit_weights({("value", 0): 4.0, ("query", 1): 1.0, ("down", 2): -1.0}, 6)
    assert found.of("model.layers.5.self_attn.v_proj.weight") == found.of("model.layers.0.self_attn.v_proj.weight")
    assert found.of("model.layers.5.mlp.down_proj.weight") == 1.0
    assert found.of("tower.weight") == 1.0
    assert fit_weights({("value", 0): 0.0}, 6) == DriftWeights(6)


@given(
    st.lists(st.tuples(st.integers(-6, 6).map(lambda power: 2.0**power), st.floats(1e-9, 10.0)), min_size=1, max_size=6)
)
def test_a_curve_goes_through_its_points_and_never_falls(measured: list[tuple[float, float]]) -> None:
    curve = fit_curve(measured)
    assert curve is not None
    kls = [kl for _, kl in curve.points]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(kls))
    for score, kl in curve.points:
        assert curve.kl(score) == pytest.approx(kl, rel=1e-6)
    if len(curve.points) == 1:
        assert curve.kl(2 * curve.points[0][0]) == pytest.approx(2 * curve.points[0][1])
    scores = sorted(score for score, _ in curve.points)
    between = [math.exp(math.log(low) * 0.5 + math.log(high) * 0.5) for low, high in pairwise(scores)]
    assert all(
        low * (1 - 1e-6) <= curve.kl(score) <= high * (1 + 1e-6)
        for score, (low, high) in zip(between, pairwise(kls), strict=True)
    )
    assert DriftCurve.from_json(curve.to_json()) == curve


def test_nothing_measured_is_no_curve() -> None:
    assert fit_curve([]) is None
    assert fit_curve([(0.0, 1.0), (1.0, 0.0), (1.0, math.nan)]) is None
    assert fit_curve([(2.0, 1.0), (2.0, 3.0)]) == DriftCurve(((2.0, 2.0),))
    assert DriftCurve(((1.0, 1.0), (4.0, 16.0))).kl(2.0) == pytest.approx(4.0)
    assert DriftCurve(((1.0, 1.0), (4.0, 16.0))).kl(0.0) == 0.0
