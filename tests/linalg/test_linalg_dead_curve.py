"""The curve of a dead zone, against the codec itself."""

from __future__ import annotations

import math

import pytest
import torch

from mfs_decompose.codec.deadzone import DEAD, dead_zone_point
from mfs_decompose.linalg.dead_curve import RATIOS, DeadCurve, measure_dead_curve


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
    curve = DeadCurve(tuple(ladders[0]), tuple(ladders[1]))
    assert curve.at(RATIOS[4]) == pytest.approx((count - 4, 16e-8))
    root = math.sqrt(2)
    middle = (math.sqrt((count - 4) * (count - 5)), 16e-8 * root)
    assert curve.at(math.sqrt(RATIOS[4] * RATIOS[5])) == pytest.approx(middle)
    assert curve.at(RATIOS[0] / 9) == pytest.approx((count, 1e-8))
    assert curve.at(RATIOS[-1] * 9) == pytest.approx((1, 1e-8 * 2 ** (count - 1)))


@pytest.mark.parametrize("kind", ["gauss", "heavy", "sparse"])
def test_running_sums_tell_what_code_by_code_arithmetic_tells(kind: str) -> None:
    found = values(kind, (40, 33))
    curve = measure_dead_curve(found, DEAD)
    assert curve is not None
    sizes = found.double().abs().reshape(-1)
    energy = float(sizes.square().sum())
    rms = math.sqrt(energy / sizes.numel())
    for ratio, bits, error in zip(RATIOS, curve.bits, curve.error, strict=True):
        step = ratio * rms
        codes = (sizes / step + (0.5 - DEAD)).floor()
        shares = codes.unique(return_counts=True)[1].double() / sizes.numel()
        nonzero = float((codes > 0).double().mean())
        assert bits == pytest.approx(nonzero - float((shares * shares.log2()).sum()), rel=1e-9, abs=1e-12)
        lost = float(sizes[codes == 0].square().sum())
        for chosen in (codes == 1, codes > 1):
            over = (sizes - codes * step)[chosen]
            lost += float((over - over.mean()).square().sum()) if over.numel() else 0.0
        assert error == pytest.approx(max(lost / energy, 1e-12), rel=1e-6, abs=1e-11)
