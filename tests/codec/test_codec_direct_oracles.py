"""Each direct codec against a slow answer in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from codec_entries import Stored, generator, part_bytes
from direct_entries import Case, base_of, decode_direct, delta_of, shape_of, store_direct
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.codec.deadzone import DeadZone, dead_zone_point
from mfs_decompose.codec.kbit import KBit, Ternary
from mfs_decompose.codec.rowsparse import RowSparse
from mfs_decompose.codec.sign import Sign
from mfs_decompose.codec.significant import Significant, rounding_steps
from mfs_decompose.linalg.shapes import GROUP

_SHAPE = (13, 131)


def bf16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(torch.bfloat16))


def squared(delta: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((decoded - delta.to(torch.float64)).square().sum())


@pytest.mark.parametrize("scale", ["tensor", "row", "group"])
def test_sign_is_the_sign_times_the_mean_magnitude(scale: str) -> None:
    delta = delta_of(_SHAPE, seed=1)
    decoded = decode_direct(case := Case(Sign(), {"scale": scale}), store_direct(case, delta), _SHAPE).tolist()
    rows = delta.tolist()
    for o, row in enumerate(rows):
        for i, value in enumerate(row):
            first = i // GROUP * GROUP
            members = {"tensor": [v for r in rows for v in r], "row": row, "group": row[first : first + GROUP]}[scale]
            mean = math.fsum(abs(v) for v in members) / len(members)
            assert decoded[o][i] == pytest.approx(mean if value >= 0 else -mean, rel=2**-8)


@given(st.integers(0, 50), st.sampled_from(["tensor", "row", "group"]))
def test_no_other_scale_of_signs_is_better(seed: int, scale: str) -> None:
    delta = delta_of((9, 70), seed)
    decoded = decode_direct(case := Case(Sign(), {"scale": scale}), store_direct(case, delta), (9, 70))
    for factor in (0.97, 1.03):
        assert squared(delta, decoded) <= squared(delta, decoded * factor)


def unpack_by_hand(stored: Stored, bits: int, columns: int) -> list[list[int]]:
    part = stored.node.part("code")
    data, width = part_bytes(stored, part), part.shape[1]
    rows = [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]
    return [[(number >> (bits * i)) % (1 << bits) for i in range(columns)] for number in rows]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("fit", ["mse", "absmax"])
def test_kbit_is_the_nearest_integer_times_the_scale_of_its_group(bits: int, fit: str) -> None:
    delta = delta_of(_SHAPE, seed=2)
    case, levels = Case(KBit(), {"bits": bits, "fit": fit}), (1 << (bits - 1)) - 1
    stored = store_direct(case, delta)
    raw = part_bytes(stored, stored.node.part("scale"))
    scales = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(_SHAPE[0], -1).tolist()
    decoded, codes = decode_direct(case, stored, _SHAPE).tolist(), unpack_by_hand(stored, bits, _SHAPE[1])
    for o, row in enumerate(delta.tolist()):
        for i, value in enumerate(row):
            scale, code = scales[o][i // GROUP], codes[o][i] - levels
            assert decoded[o][i] == code * scale
            assert abs(code) <= levels
            if scale and abs(code) < levels:
                assert abs(value - decoded[o][i]) <= 0.5001 * scale
        if fit == "absmax":
            for group, scale in enumerate(scales[o]):
                peak = max(abs(v) for v in row[group * GROUP : (group + 1) * GROUP])
                assert scale == pytest.approx(peak / levels, rel=2**-8, abs=1e-40)


@given(st.integers(0, 60), st.integers(2, 8))
def test_searching_a_scale_never_makes_it_worse(seed: int, bits: int) -> None:
    delta = delta_of((9, 70), seed)
    errors = {}
    for fit in ("mse", "absmax"):
        case = Case(KBit(), {"bits": bits, "fit": fit})
        errors[fit] = squared(delta, decode_direct(case, store_direct(case, delta), (9, 70)))
    assert errors["mse"] <= errors["absmax"] * (1 + 1e-6)


def test_the_search_is_close_to_the_best_scale() -> None:
    delta = torch.randn(1, GROUP, generator=generator(3)) * 1e-3
    case = Case(KBit(), {"bits": 3, "fit": "mse"})
    ours = squared(delta, decode_direct(case, store_direct(case, delta), (1, GROUP)))
    peak = float(delta.abs().max())
    grid = [peak / 3 * at / 2000 for at in range(1, 2001)]
    best = min(squared(delta, (delta.to(torch.float64) / s).round().clamp(-3, 3) * s) for s in grid)
    assert best <= ours * (1 + 1e-9) and ours <= 1.05 * best


def test_ternary_packs_five_values_into_a_byte() -> None:
    delta = torch.tensor([[1.0, -1.0, 0.0, 0.0, 1.0, -1.0, 1.0, 0.0, 0.0]] * 8)
    stored = store_direct(case := Case(Ternary(), {"fit": "absmax"}), delta)
    codes = part_bytes(stored, stored.node.part("code"))[:2]
    assert codes == bytes([2 + 3 * 0 + 9 * 1 + 27 * 1 + 81 * 2, 0 + 3 * 2 + 9 * 1 + 27 * 1 + 81 * 1])
    assert torch.equal(decode_direct(case, stored, (8, 9)), delta.to(torch.float64))


def test_ternary_beats_signs_where_most_is_zero() -> None:
    delta = delta_of((40, 131), seed=4)
    errors = []
    for case in (Case(Ternary(), {"fit": "mse"}), Case(Sign(), {"scale": "group"})):
        errors.append(squared(delta, decode_direct(case, store_direct(case, delta), (40, 131))))
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("step", [3e-3, 4e-4, 1e-5])
def test_dead_zone_against_one_value_at_a_time(step: float) -> None:
    delta, step = delta_of(_SHAPE, seed=5), bf16(step)
    case = Case(DeadZone(), {"step": step})
    decoded = decode_direct(case, store_direct(case, delta), _SHAPE)
    codes = [[math.floor(abs(v) / step + 0.3) * (-1 if v < 0 else 1) for v in row] for row in delta.tolist()]
    points = []
    for chosen in (lambda c: c == 1, lambda c: c > 1):
        over = [
            abs(v) / step - abs(c)
            for row, line in zip(delta.tolist(), codes, strict=True)
            for v, c in zip(row, line, strict=True)
            if chosen(abs(c))
        ]
        points.append(round(math.fsum(over) / max(len(over), 1) * 256) / 256)
    for line, found in zip(codes, decoded.tolist(), strict=True):
        for code, value in zip(line, found, strict=True):
            size = abs(code) + points[0 if abs(code) == 1 else 1] if code else 0.0
            assert value == math.copysign(size * step, code)


def test_a_point_of_the_curve_is_what_encoding_gives() -> None:
    delta = torch.randn(200, 300, generator=generator(6)) * 1e-3
    previous = (math.inf, 0.0)
    for step in (3e-4, 1e-3, 2e-3, 4e-3):
        case = Case(DeadZone(), {"step": step})
        stored = store_direct(case, delta)
        nbytes, error = dead_zone_point(lambda a, b: delta[a:b], (200, 300), step)
        assert error == pytest.approx(squared(delta, decode_direct(case, stored, (200, 300))), rel=1e-9)
        assert nbytes == pytest.approx(len(stored.data), rel=0.05, abs=60)
        assert nbytes < previous[0] and error > previous[1]
        previous = (nbytes, error)


def test_dead_zone_comes_close_to_what_theory_allows() -> None:
    """Shannon's bound for a Gaussian is 2^(-2 R): a scalar quantiser at about half a bit is within 1.45 of it."""
    delta = torch.randn(400, 500, generator=generator(7)) * 1e-3
    case = Case(DeadZone(), {"step": 2.2e-3})
    stored = store_direct(case, delta)
    rate = 8 * len(stored.data) / delta.numel()
    relative = squared(delta, decode_direct(case, stored, (400, 500))) / float(delta.square().sum())
    assert 0.3 < rate < 0.9
    assert relative < 1.45 * 2 ** (-2 * rate)


def test_the_rows_that_moved_most_and_no_others() -> None:
    delta = (
        delta_of((40, 131), seed=8) * torch.linspace(0.5, 2, 40)[torch.randperm(40, generator=generator(9))][:, None]
    )
    case = Case(RowSparse(), {"rows": 7})
    stored = store_direct(case, delta)
    energies = [math.fsum(v * v for v in row) for row in delta.to(torch.float64).tolist()]
    expected = sorted(sorted(range(40), key=lambda o: -energies[o])[:7])
    index = torch.frombuffer(bytearray(part_bytes(stored, stored.node.part("index"))), dtype=torch.int32).tolist()
    assert index == expected
    decoded = decode_direct(case, stored, (40, 131))
    for o in range(40):
        if o not in expected:
            assert not decoded[o].any()
            continue
        step = bf16(float(delta[o].abs().max() / 127))
        assert float((decoded[o] - delta[o]).abs().max()) <= 0.51 * step + 127 * 2**-9 * step


def test_rows_that_are_still_are_never_stored() -> None:
    delta = torch.zeros(30, 20)
    delta[[3, 17]] = 1e-3
    stored = store_direct(Case(RowSparse(), {"rows": 9}), delta)
    assert stored.node.params["rows"] == 2
    assert len(stored.data) == 2 * (4 + 2 + 20)


def test_the_choice_by_effect_asks_for_steps_of_the_weight() -> None:
    delta, base = delta_of(_SHAPE, seed=10), base_of(_SHAPE, 11)
    stored = store_direct(Case(Significant(), {"steps": 6}), delta, base)
    assert stored.node.codec == "sparse"
    index = torch.frombuffer(bytearray(part_bytes(stored, stored.node.part("index"))), dtype=torch.uint16).view(6, -1)
    for o, (row, weights) in enumerate(zip(delta.tolist(), base.tolist(), strict=True)):
        effect = [
            abs(d) / 2.0 ** math.floor(math.log2(max(abs(w), 2.0**-126))) for d, w in zip(row, weights, strict=True)
        ]
        assert index[:, o].tolist() == sorted(range(len(row)), key=lambda i: -effect[i])[:6]


def test_magnitude_picks_noise_where_effect_picks_what_moved() -> None:
    """Large weights that moved by their last bit, small ones that moved by many: the second are the fine-tune."""
    base = torch.full((8, 100), 2.0**-10, dtype=torch.bfloat16)
    base[:, :50] = 1.0
    delta = torch.full((8, 100), 2.0**-11)
    delta[:, :50] = 2.0**-8
    stored = store_direct(Case(Significant(), {"steps": 50}), delta, base)
    decoded = Significant().open(stored.node, stored.fetch, (8, 100)).rows(0, 8)
    assert not decoded[:, :50].any()
    assert torch.equal(decoded[:, 50:], delta[:, 50:].to(torch.float64))


def test_rounding_steps_are_powers_of_two_of_the_weights() -> None:
    weights = torch.tensor([1.0, 1.99, 2.0, -3.0, 0.0, -0.0, 1e-40, 3e38, 2.0**-126])
    expected = [1.0, 1.0, 2.0, 2.0, 2.0**-126, 2.0**-126, 2.0**-126, 2.0**127, 2.0**-126]
    assert rounding_steps(weights).tolist() == expected
    assert shape_of(weights[None]) == (1, 9)
