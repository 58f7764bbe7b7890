"""The estimate of time: counted from shapes, scaled by a probe, never less for more work."""

from __future__ import annotations

import pytest
from plan_cases import LLAMA, checkpoint, plan_of

from mfs_decompose.plan import duration
from mfs_decompose.plan.duration import SECONDS_PER, SIZED, count_work, estimate_duration
from mfs_decompose.plan.mixes import SAMPLED


def test_what_is_counted_is_what_has_a_rate() -> None:
    work = count_work(plan_of(checkpoint("a", LLAMA)), 1000)
    assert work.keys() == SECONDS_PER.keys() and work["copied"] == 1000.0


def test_a_product_is_counted_by_its_sketch() -> None:
    """One matrix of 800 x 300 at rank 8: a sketch of 32 columns, five products, and the decode."""
    plan = plan_of(
        checkpoint("a", {"w": ("BF16", (800, 300))}),
        base={"w": ("BF16", (800, 300))},
        recipe={"objective.rank": 8},
    )
    work = count_work(plan, 0)
    assert work["elements"] == 800 * 300
    assert work["fp32"] == 5 * 800 * 300 * 32
    assert work["fp64"] == 4 * 2 * 300 * 32**2 + 5 * 32**3 + 800 * 300 * 8


def test_open_tensors_are_surveyed_and_sized() -> None:
    shapes = {"w": ("BF16", (800, 300)), "small.w": ("BF16", (80, 30))}
    plan = plan_of(checkpoint("a", shapes), base=shapes)
    work = count_work(plan, 0)
    assert work["surveyed"] == SAMPLED + 80 * 30 < 800 * 300
    assert work["sized"] == (1 + SIZED) * (800 * 300 + 80 * 30)
    banded = count_work(plan_of(checkpoint("a", shapes), base=shapes, recipe={"deltas.default.codec": "lowrank"}), 0)
    assert banded["surveyed"] == banded["sized"] == 0


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ({"deltas.default.codec": "lossless"}, "coded"),
        ({"deltas.default.codec": "sparse", "objective.density": "5%"}, "sorted"),
    ],
)
def test_other_codecs_have_their_own_work(recipe: dict[str, object], kind: str) -> None:
    work = count_work(plan_of(checkpoint("a", LLAMA), recipe=recipe), 0)
    assert work[kind] > 0 and work["fp32"] == 0


def test_more_variants_and_higher_ranks_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duration, "_probe", lambda: duration.REFERENCE_HASHING)

    def seconds(*ids: str, rank: int, threads: int = 1) -> float:
        plan = plan_of(*(checkpoint(id, LLAMA) for id in ids), recipe={"objective.rank": rank})
        return estimate_duration(plan, 0, threads).seconds

    assert 0 < seconds("a", rank=2) < seconds("a", rank=12)
    assert seconds("a", rank=4) < seconds("a", "b", rank=4)
    assert seconds("a", rank=4, threads=2) == pytest.approx(seconds("a", rank=4) / 2)


def test_a_machine_that_hashes_half_as_fast_takes_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(checkpoint("a", LLAMA))
    monkeypatch.setattr(duration, "_probe", lambda: duration.REFERENCE_HASHING)
    usual = estimate_duration(plan, 0, 1)
    monkeypatch.setattr(duration, "_probe", lambda: duration.REFERENCE_HASHING / 2)
    slow = estimate_duration(plan, 0, 1)
    assert slow.seconds == pytest.approx(2 * usual.seconds) and slow.hashing == usual.hashing / 2


def test_the_probe_measures() -> None:
    assert 1e7 < duration._probe() < 1e11
