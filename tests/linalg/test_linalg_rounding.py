"""Rounding: right in the mean, exactly, and never harmful to what needs none."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg import rounding
from mfs_decompose.linalg.rounding import round_to, rounding_key
from mfs_decompose.linalg.seeds import stream_key

_SHORT = [torch.bfloat16, torch.float16]
_KEY = rounding_key("model.layers.3.self_attn.q_proj.weight")


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every value that a 16-bit dtype has."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def finite_grid(dtype: torch.dtype) -> list[float]:
    values = all_patterns(dtype).to(torch.float64)
    return sorted(set(values[torch.isfinite(values)].tolist()))


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int32)


@pytest.fixture
def every_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the generator by one that gives each of the 65,536 draws once."""

    def draws(key: int, start: int, count: int) -> torch.Tensor:
        assert count == 65536
        return torch.arange(count, dtype=torch.int32)

    monkeypatch.setattr(rounding, "random_bits16", draws)


_BF16_VALUES = [
    1.0 + 2**-9, 1.0 + 2**-8 + 2**-15, -1.0 - 3 * 2**-12, 0.0123456, -7.7e-5, 3.14159e4, -2.5e30,
    1.9999, -0.99999, 2.0 - 2**-12, 1e-38, -1.3e-39, 3e-41, -1e-43, 6.1e-41,
]  # fmt: skip
_FP16_VALUES = [
    1.0 + 2**-12, -1.0 - 2**-11 - 2**-20, 0.333333, -0.0001234, 1234.567, -65503.5, 0.99999, -1.99999,
    6.1e-5, -6.0e-5, 3.3e-6, -5.9e-8, 2.5e-8, -1e-8, 4.4e-9,
]  # fmt: skip


@pytest.mark.usefixtures("every_draw")
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.bfloat16, v) for v in _BF16_VALUES] + [(torch.float16, v) for v in _FP16_VALUES],
)
def test_over_all_draws_the_mean_is_the_value(dtype: torch.dtype, value: float) -> None:
    grid = finite_grid(dtype)
    at = bisect.bisect_left(grid, value)
    below, above = grid[at - 1], grid[at]
    assert below < value < above
    rounded = round_to(torch.full((65536,), value, dtype=torch.float64), dtype, "stochastic", 0, 0).to(torch.float64)
    assert set(rounded.tolist()) <= {below, above}
    # 65,536 equally likely draws can be right to one draw; bf16 goes through fp32, which costs another, and more where
    # fp32 itself has run out of exponents.
    slack = 2 * (above - below) / 65536
    assert abs(float(rounded.mean()) - value) <= slack


@pytest.mark.parametrize("dtype", _SHORT)
def test_a_change_below_the_ulp_survives_in_the_mean(dtype: torch.dtype) -> None:
    ulp = torch.finfo(dtype).eps
    for base in (1.0, -1.0):
        values = torch.full((200_000,), base + 0.03 * ulp, dtype=torch.float64)
        mean = float(round_to(values, dtype, "stochastic", _KEY, 0).to(torch.float64).mean())
        assert abs(mean - base - 0.03 * ulp) < 5 * ulp * math.sqrt(0.03 / 200_000)
        nearest = round_to(values, dtype, "nearest", _KEY, 0).to(torch.float64)
        assert bool((nearest == base).all())


@pytest.mark.parametrize("rounding_mode", ["stochastic", "nearest"])
@pytest.mark.parametrize("dtype", _SHORT)
def test_what_the_dtype_holds_is_unchanged(dtype: torch.dtype, rounding_mode: rounding.Rounding) -> None:
    patterns = all_patterns(dtype)
    for start in (0, 65536, 3):
        rounded = round_to(patterns.to(torch.float64), dtype, rounding_mode, _KEY, start)
        nan = torch.isnan(patterns.to(torch.float32))
        assert torch.equal(bits(rounded)[~nan], bits(patterns)[~nan])  # Inf and -0.0 among them
        assert bool(torch.isnan(rounded.to(torch.float32))[nan].all())


@pytest.mark.parametrize("rounding_mode", ["stochastic", "nearest"])
@pytest.mark.parametrize("dtype", [*_SHORT, torch.float32, torch.float64])
def test_any_nan_becomes_the_same_quiet_one(dtype: torch.dtype, rounding_mode: rounding.Rounding) -> None:
    words = [0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF, 0x7FBFFFFF]
    nans = torch.tensor(words * 20, dtype=torch.int32).view(torch.float32)
    for values in (nans.to(torch.float64), nans):
        rounded = round_to(values, dtype, rounding_mode, _KEY, 0)
        assert rounded.dtype == dtype
        assert bool(torch.isnan(rounded).all())
        quiet = torch.full_like(rounded, torch.nan)
        assert torch.equal(rounded.view(torch.uint8), quiet.view(torch.uint8))


@pytest.mark.parametrize("rounding_mode", ["stochastic", "nearest"])
@pytest.mark.parametrize("dtype", [*_SHORT, torch.float32])
def test_finite_values_stay_finite(dtype: torch.dtype, rounding_mode: rounding.Rounding) -> None:
    largest = torch.finfo(dtype).max
    too_large = [largest * (1 + 2**-10), largest * 1.01, largest * 1e5, 1e300]
    values = torch.tensor([*too_large, *(-v for v in too_large), torch.inf, -torch.inf], dtype=torch.float64)
    rounded = round_to(values.repeat(40, 1), dtype, rounding_mode, _KEY, 0).to(torch.float64)
    assert set(rounded[:, :8].abs().flatten().tolist()) == {largest}
    assert torch.equal(torch.sign(rounded), torch.sign(values).repeat(40, 1))
    assert rounded[:, 8:].tolist() == [[math.inf, -math.inf]] * 40


@pytest.mark.parametrize("dtype", _SHORT)
def test_only_the_two_neighbours_come_out(dtype: torch.dtype) -> None:
    grid = finite_grid(dtype)
    draw = torch.Generator().manual_seed(4)
    exponents = torch.randint(-30, 14, (3000,), generator=draw).to(torch.float64)
    values = torch.randn(3000, generator=draw, dtype=torch.float64) * torch.exp2(exponents)
    values = values[values.abs() < 60000]
    rounded = round_to(values, dtype, "stochastic", _KEY, 17).to(torch.float64).tolist()
    for value, found in zip(values.tolist(), rounded, strict=True):
        at = bisect.bisect_left(grid, value)
        assert found in (grid[at - 1], grid[at])


@pytest.mark.parametrize("dtype", [*_SHORT, torch.float32, torch.float64])
def test_nearest_is_what_torch_does(dtype: torch.dtype) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(round_to(values, dtype, "nearest", _KEY, 0), values.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_round_to_nearest(dtype: torch.dtype) -> None:
    values = torch.randn(700, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.equal(round_to(values, dtype, "stochastic", _KEY, 0), values.to(dtype))


@given(st.lists(st.integers(0, 331), max_size=6), st.sampled_from(_SHORT), st.integers(0, 1 << 40))
def test_blocks_give_what_one_call_gives(cuts: list[int], dtype: torch.dtype, start: int) -> None:
    values = torch.randn(331, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    whole = round_to(values, dtype, "stochastic", _KEY, start)
    edges = [0, *sorted(cuts), 331]
    parts = [
        round_to(values[low:high], dtype, "stochastic", _KEY, start + low) for low, high in itertools.pairwise(edges)
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", _SHORT)
def test_shape_is_kept_and_counts_in_row_order(dtype: torch.dtype) -> None:
    values = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    rounded = round_to(values, dtype, "stochastic", _KEY, 100)
    assert torch.equal(rounded.flatten(), round_to(values.flatten(), dtype, "stochastic", _KEY, 100))
    turned = values.permute(2, 0, 1)
    assert torch.equal(
        round_to(turned, dtype, "stochastic", _KEY, 100),
        round_to(turned.contiguous(), dtype, "stochastic", _KEY, 100),
    )


@pytest.mark.parametrize("dtype", _SHORT)
def test_nothing_in_nothing_out(dtype: torch.dtype) -> None:
    for shape in ((0,), (0, 4), (4, 0)):
        assert round_to(torch.empty(shape, dtype=torch.float64), dtype, "stochastic", 1, 9).shape == shape
    scalar = round_to(torch.tensor(0.1, dtype=torch.float64), dtype, "stochastic", 1, 9)
    assert scalar.shape == ()


def test_tensors_round_independently() -> None:
    values = torch.full((4000,), 1 + 2**-8, dtype=torch.float64)
    one = round_to(values, torch.bfloat16, "stochastic", rounding_key("a.weight"), 0)
    other = round_to(values, torch.bfloat16, "stochastic", rounding_key("b.weight"), 0)
    agree = float((one == other).to(torch.float64).mean())
    assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(4000)


def test_the_key_needs_no_seed() -> None:
    assert rounding_key("lm_head.weight") == stream_key(0, "round", "lm_head.weight")
    assert rounding_key("lm_head.weight") != rounding_key("lm_head.bias")


@pytest.mark.parametrize(
    ("dtype", "digest"),
    [
        (torch.bfloat16, "ab712cff2636898a3cd1b9c2aedf75336b1b390d70c5adb6c335cb02d73b3b03"),
        (torch.float16, "77b879d55ea4d75292ec916bf1c272e8c905b7ae03dca20a365cb3663a474ac9"),
    ],
)
def test_restored_bytes_stay_what_they_are(dtype: torch.dtype, digest: str) -> None:
    # `restored_sha256` of every artifact there is stands on these.
    values = torch.arange(-500, 500, dtype=torch.float64) / 777
    rounded = round_to(values, dtype, "stochastic", rounding_key("model.embed_tokens.weight"), 0)
    assert hashlib.sha256(rounded.view(torch.uint8).numpy().tobytes()).hexdigest() == digest
