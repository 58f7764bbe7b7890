"""Bytes of what is shared against those of what makes each variant itself, on curves made by hand."""

from __future__ import annotations

import math

import pytest

from mfs_decompose.linalg.bands import Bands, bands_bytes
from mfs_decompose.plan import shared_sizes
from mfs_decompose.plan.shared_sizes import (
    OWN,
    Curve,
    SharedBudget,
    SharedCurves,
    best_offer,
    gain,
    price_within,
    share_shared,
)
from mfs_decompose.plan.weigh import weigh_shared

SHAPE = (96, 64)
BUDGET = SharedBudget(12_000, 10_000)


def falling(first: float, count: int = 64, by: float = 0.85, beyond: float = 0.0) -> Curve:
    energy = [first * by**at for at in range(count)]
    return Curve(energy, math.fsum(energy) + beyond)


def kin(name: str = "up", own: float = 0.01, users: int = 3) -> SharedCurves:
    """Variants that share all but a part `own` of their energy."""
    ids = [f"v{at}" for at in range(users)]
    return SharedCurves(
        name,
        SHAPE,
        falling(1.0),
        {id: falling(own) for id in ids},
        {id: falling(1.0 + own) for id in ids},
    )


def strangers(name: str = "up", users: int = 3) -> SharedCurves:
    """Variants that share no more than means of unlike things do."""
    ids = [f"v{at}" for at in range(users)]
    rest = falling(1.0 - 1.0 / users)
    return SharedCurves(
        name, SHAPE, falling(1.0 / users), dict.fromkeys(ids, rest), {id: falling(1.0, by=0.8) for id in ids}
    )


class TestGain:
    def test_a_rest_as_large_as_the_mean_counts_alike(self) -> None:
        assert gain(falling(1.0), falling(1.0)) == 1.0
        assert gain(falling(1.0), falling(9.0)) == 1.0

    def test_the_smaller_a_rest_the_more_a_unit_of_it_counts(self) -> None:
        found = [gain(falling(1.0), falling(part)) for part in (0.5, 0.1, 0.01, 0.0001)]
        assert found == sorted(found) and found[0] > 1.0
        assert found[2] == pytest.approx(100**OWN)

    def test_all_of_a_rest_counts_less_the_less_there_is_of_it(self) -> None:
        """Variants that hardly differ are not given bytes for nothing."""
        found = [part * gain(falling(1.0), falling(part)) for part in (0.5, 0.1, 0.01, 0.0001)]
        assert found == sorted(found, reverse=True)

    def test_what_was_not_fitted_counts_too(self) -> None:
        assert gain(falling(1.0), falling(0.01, beyond=1.0)) < gain(falling(1.0), falling(0.01))

    def test_no_rest_or_no_mean(self) -> None:
        nothing = Curve((), 0.0)
        assert gain(falling(1.0), nothing) == gain(nothing, falling(1.0)) == gain(nothing, nothing) == 1.0


def split(one: SharedCurves, budget: SharedBudget = BUDGET) -> tuple[Bands, int, int]:
    """Bands of the shared delta, its bytes, and those of all rests."""
    lam = price_within([one], budget)
    assert lam is not None
    offer = best_offer(one, lam)
    shared = bands_bytes(one.shape, offer.shared)
    return offer.shared, shared, offer.nbytes - shared


def test_rests_get_bytes_that_plain_energy_would_not_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _, shared, rests = split(kin())
    monkeypatch.setattr(shared_sizes, "OWN", 0.0)
    _, plain, few = split(kin())
    assert rests > 1.2 * few and shared < plain


@pytest.mark.parametrize("total", [6_000, 12_000, 20_000])
def test_all_stays_within_the_budget(total: int) -> None:
    budget = SharedBudget(total, 9 * total // 10)
    curves = [kin("up"), kin("down", own=0.05)]
    lam = price_within(curves, budget)
    assert lam is not None
    offers = [best_offer(one, lam) for one in curves]
    assert 0.5 * total < sum(offer.nbytes for offer in offers) <= total
    assert sum(bands_bytes(SHAPE, offer.shared) for offer in offers) <= budget.most
    bands = share_shared(curves, budget)
    assert bands == {one.name: offer.shared for one, offer in zip(curves, offers, strict=True)}


def test_drift_left_counts_the_tail_of_the_mean_for_each_variant() -> None:
    one = kin(users=4)
    lam = price_within([one], BUDGET)
    assert lam is not None
    offer = best_offer(one, lam)
    tail = one.mean.total - math.fsum(one.mean.energy[: sum(offer.shared)])
    assert offer.left >= 4 * tail > 0.0


@pytest.mark.parametrize("total", [4_000, 8_000, 16_000])
def test_strangers_share_nothing_and_kin_do(total: int) -> None:
    """Whatever rests get: it is decided in plain energy whether there is anything to share."""
    budget = SharedBudget(total, total)
    assert share_shared([strangers()], budget) == {}
    assert share_shared([kin()], budget).keys() == {"up"}


def test_of_several_tensors_each_decides_for_itself() -> None:
    assert share_shared([strangers("down"), kin("up")], BUDGET).keys() == {"up"}


@pytest.mark.parametrize("budget", [None, SharedBudget(0, 0)])
def test_without_bytes_there_is_none(budget: SharedBudget | None) -> None:
    assert share_shared([kin()], budget) == {}


class TestWeighed:
    def test_kin_take_fewer_bytes_with_a_shared_delta(self) -> None:
        found = weigh_shared([kin()], BUDGET)
        assert found.better and found.settle("shared") == "shared"
        assert found.rich <= BUDGET.total and found.rich < 0.75 * found.plain

    def test_strangers_are_better_off_alone(self) -> None:
        found = weigh_shared([strangers()], BUDGET)
        assert not found.better and found.settle("shared") == "known"
