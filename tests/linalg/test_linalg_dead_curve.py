"""The curve of a dead zone, against the codec itself."""

from __future__ import annotations

import math

import pytest
import torch

from mfs_decompose.codec.deadzone import DEAD, dead_zone_point, quantise_dead
from mfs_decompose.linalg.dead_curve import RATIOS, DeadCurve, Directions, measure_dead_curve


def values(kind: str, shape: tuple[int, int] = (96, 131)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    gauss = torch.randn(shape, generator=generator)
    return {"gauss": gauss, "heavy": gauss**3, "sparse": gauss * (torch.rand(shape, generator=generator) < 0.1)}[kind]


@pytest.mark.parametrize("kind", ["gauss", "heavy", "sparse"])
def test_bits_and_error_are_those_of_the_codec(kind: str) -> None:
    found = values(kind)
    curve = measure_dead_curve(found, DEAD)
    assert curve is not None
    rms = math.sqrt(float(found.double().square().mean()))
    for at in (0, 6, 12, 18):
        nbytes, lost = dead_zone_point(lambda a, b: found[a:b], (96, 131), RATIOS[at] * rms)
        # The codec's step is rounded to bf16, and its models take a byte a symbol.
        assert curve.bits[at] * found.numel() / 8 == pytest.approx(nbytes, rel=0.02, abs=60)
        assert curve.error[at] == pytest.approx(lost / float(found.double().square().sum()), rel=0.05, abs=1e-6)


def test_a_coarser_step_costs_less_and_loses_more() -> None:
    curve = measure_dead_curve(values("gauss"), DEAD)
    assert curve is not None
    assert list(curve.bits) == sorted(curve.bits, reverse=True)
    assert list(curve.error) == sorted(curve.error)
    assert curve.error[0] < 0.01 < 0.9 < curve.error[-1] + 0.2


def test_the_scale_of_values_changes_nothing() -> None:
    one, other = (measure_dead_curve(values("heavy") * scale, DEAD) for scale in (1.0, 2.0**-9))
    assert one == other


def test_nothing_has_no_curve() -> None:
    assert measure_dead_curve(torch.zeros(4, 5), DEAD) is None


def test_between_two_steps_lies_what_is_between_them_and_beyond_the_ends_the_ends() -> None:
    count = len(RATIOS)
    ladders = [[count - at for at in range(count)], [1e-8 * 2.0**at for at in range(count)]]
    curve = DeadCurve(tuple(ladders[0]), tuple(ladders[1]), tuple(9 * one for one in ladders[1]))
    assert curve.at(RATIOS[4]) == pytest.approx((count - 4, 16e-8, 144e-8))
    root = math.sqrt(2)
    middle = (math.sqrt((count - 4) * (count - 5)), 16e-8 * root, 144e-8 * root)
    assert curve.at(math.sqrt(RATIOS[4] * RATIOS[5])) == pytest.approx(middle)
    assert curve.at(RATIOS[0] / 9) == pytest.approx((count, 1e-8, 9e-8))
    assert curve.at(RATIOS[-1] * 9) == pytest.approx((1, 1e-8 * 2 ** (count - 1), 9e-8 * 2 ** (count - 1)))


def spiky(rows: int, columns: int) -> tuple[torch.Tensor, Directions]:
    """A matrix whose strong direction is made of values smaller than those of the noise around it."""
    generator = torch.Generator().manual_seed(5)
    left, right = (torch.randn(1, length, generator=generator).sign() for length in (rows, columns))
    noise = 20.0 * torch.randn(rows, columns, generator=generator)
    noise *= torch.rand(rows, columns, generator=generator) < 0.02
    return left.mT @ right + noise, Directions(left, right, torch.ones(1))


def test_what_strong_directions_miss_is_what_the_codec_misses_along_them() -> None:
    found, strong = spiky(120, 90)
    curve = measure_dead_curve(found, DEAD, strong)
    assert curve is not None
    rms = math.sqrt(float(found.double().square().mean()))
    for at in (4, 8, 12, 16, 20):
        step = float(torch.tensor(RATIOS[at] * rms).to(torch.bfloat16))
        codes = quantise_dead(found, step)
        sizes, over = codes.abs(), found.double().abs() / step - codes.abs()
        stored = sizes * step
        for chosen in (sizes == 1, sizes > 1):
            stored[chosen] += over[chosen].mean() * step if bool(chosen.any()) else 0.0
        stored = torch.where(found < 0, -stored, stored)
        shares = [
            float((strong.left.double() @ one.double() @ strong.right.double().mT)[0, 0]) for one in (stored, found)
        ]
        assert curve.missed[at] == pytest.approx((1 - shares[0] / shares[1]) ** 2, rel=0.2, abs=2e-3)
    # The small values of the direction go first: it is missed long before the energy is.
    assert any(missed > 0.8 and error < 0.15 for missed, error in zip(curve.missed, curve.error, strict=True))


def test_without_directions_all_shrink_alike() -> None:
    found, strong = spiky(40, 30)
    plain, other = measure_dead_curve(found, DEAD), measure_dead_curve(found, DEAD, strong)
    assert plain is not None and other is not None
    assert plain.missed == tuple(error**2 for error in plain.error)
    assert (plain.bits, plain.error) == (other.bits, other.error)
    unseen = measure_dead_curve(found, DEAD, Directions(0 * strong.left, strong.right, strong.weight))
    assert unseen == plain
