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
    for at in (0, 3, 6, 9):
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
    curve = DeadCurve(tuple(12.0 - at for at in range(12)), tuple(1e-4 * 2.0**at for at in range(12)))
    assert curve.at(RATIOS[4]) == (pytest.approx(8.0), pytest.approx(16e-4))
    bits, error = curve.at(math.sqrt(RATIOS[4] * RATIOS[5]))
    assert (bits, error) == (pytest.approx(math.sqrt(8.0 * 7.0)), pytest.approx(16e-4 * math.sqrt(2)))
    assert curve.at(RATIOS[0] / 9) == (pytest.approx(12.0), pytest.approx(1e-4))
    assert curve.at(RATIOS[-1] * 9) == (pytest.approx(1.0), pytest.approx(1e-4 * 2**11))
