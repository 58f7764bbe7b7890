"""The sparse codec against a slow one in Python, and entries that are not what they say."""

from __future__ import annotations

import itertools

import pytest
import torch
from codec_entries import Stored, blocks_of, decaying, fit_one, generator, part_bytes, store_fit
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.codec.sparse import Sparse
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.runtime.resident_read import read_forms

_CODEC = Sparse()
_VALUES = ["bf16", "int8"]


def decode(stored: Stored, shape: tuple[int, int]) -> torch.Tensor:
    return _CODEC.open(stored.node, stored.fetch, shape).rows(0, shape[0])


def slow_order(row: list[float], steps: int) -> list[int]:
    """The columns of the largest magnitudes, largest first, ties to the lower column."""
    return sorted(range(len(row)), key=lambda column: (-abs(row[column]), column))[:steps]


def indices(stored: Stored, steps: int, rows: int) -> torch.Tensor:
    part = stored.node.part("index")
    dtype = {"U16": torch.uint16, "I32": torch.int32}[part.dtype]
    return torch.frombuffer(bytearray(part_bytes(stored, part)), dtype=dtype).reshape(steps, rows).to(torch.int64)


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 35), st.integers(0, 10**6))
def test_against_a_slow_selection_full_of_ties(rows: int, columns: int, steps: int, seed: int) -> None:
    delta = torch.randint(-3, 4, (rows, columns), generator=generator(seed)).to(torch.float32) / 8
    fit = fit_one("sparse", delta, steps, {"values": "bf16"})
    kept = min(steps, columns)
    assert fit.steps == kept
    stored = store_fit("sparse", fit, kept, {"values": "bf16"})
    decoded = decode(stored, (rows, columns))
    energy = [0.0] * kept
    for row in range(rows):
        values = delta[row].tolist()
        order = slow_order(values, kept)
        assert indices(stored, kept, rows)[:, row].tolist() == order
        assert decoded[row].tolist() == [value if at in order else 0.0 for at, value in enumerate(values)]
        for step, column in enumerate(order):
            energy[step] += values[column] ** 2
    assert fit.energy.tolist() == pytest.approx(energy)
    assert fit.total == pytest.approx(float(delta.square().sum()))


@pytest.mark.parametrize("values", _VALUES)
def test_fewer_steps_are_a_prefix_of_more(values: str) -> None:
    params = {"values": values}
    fit = fit_one("sparse", decaying(70, 41, seed=1), 12, params)
    whole = store_fit("sparse", fit, 12, params)
    for steps in range(13):
        stored = store_fit("sparse", fit, steps, params)
        assert [part.name for part in stored.node.parts] == list(_CODEC.array_names(params))
        for part in stored.node.parts:
            assert part_bytes(stored, part) == part_bytes(whole, whole.node.part(part.name))[: part.nbytes]


@pytest.mark.parametrize("values", _VALUES)
def test_the_error_falls_with_every_step_as_recorded(values: str) -> None:
    shape, params = (70, 41), {"values": values}
    delta = decaying(*shape, seed=2)
    fit = fit_one("sparse", delta, 41, params)
    assert bool((fit.energy[1:] <= fit.energy[:-1]).all())
    errors = []
    for steps in range(42):
        decoded = decode(store_fit("sparse", fit, steps, params), shape)
        errors.append(float((decoded - delta).square().sum()))
        explained = float(fit.energy[:steps].sum())
        # int8 shares a scale among 64 rows: a step is up to 1/127 of the largest value of the group.
        noise = 2**-16 * explained if values == "bf16" else float(delta.abs().max() / 254) ** 2 * steps * 70
        assert errors[-1] == pytest.approx(fit.total - explained, abs=noise + 1e-12 * fit.total)
    assert all(after <= before for before, after in itertools.pairwise(errors))
    assert errors[0] == pytest.approx(fit.total)


def test_int8_values_are_within_half_a_step() -> None:
    delta = decaying(130, 20, seed=3)
    fit = fit_one("sparse", delta, 20, {"values": "int8"})
    stored = store_fit("sparse", fit, 20, {"values": "int8"})
    scale = part_bytes(stored, stored.node.part("scale"))
    steps = torch.frombuffer(bytearray(scale), dtype=torch.bfloat16).reshape(20, 3).to(torch.float64)
    order = indices(stored, 20, 130)
    error = (decode(stored, (130, 20)) - delta).abs().gather(1, order.mT).mT
    assert bool((error <= 0.5001 * steps.repeat_interleave(64, dim=1)[:, :130]).all())


def test_bf16_values_are_rounded_and_tiny_ones_dropped() -> None:
    delta = torch.zeros(8, 9)
    delta[:, 4] = torch.tensor([1.0, -1.003, 0.1, 2.0**-39, 2.0**-41, -(2.0**-45), 3e-39, 0.0])
    fit = fit_one("sparse", delta, 1, {"values": "bf16"})
    decoded = decode(store_fit("sparse", fit, 1, {"values": "bf16"}), (8, 9))
    expected = delta.to(torch.bfloat16).to(torch.float64)
    expected[4:] = 0
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize("values", _VALUES)
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e30, 1e38])
def test_tiny_and_huge_deltas_stay_finite(values: str, scale: float) -> None:
    delta = torch.randn(70, 20, generator=generator(4)).clamp(-3, 3) * scale
    decoded = decode(
        store_fit("sparse", fit_one("sparse", delta, 20, {"values": values}), 20, {"values": values}), (70, 20)
    )
    assert bool(torch.isfinite(decoded).all())
    if scale > 1e-35:  # scales below are subnormal in bf16
        assert float((decoded - delta).norm() / delta.to(torch.float64).norm()) < 0.02


@pytest.mark.parametrize("values", _VALUES)
def test_any_window_of_rows_equals_the_whole(values: str) -> None:
    shape, params = (131, 30), {"values": values}
    stored = store_fit("sparse", fit_one("sparse", decaying(*shape, seed=5), 4, params), 4, params)
    opened = _CODEC.open(stored.node, stored.fetch, shape)
    whole = opened.rows(0, 131)
    assert whole.dtype == torch.float64
    for start, stop in ((0, 0), (0, 1), (63, 65), (64, 128), (131, 131), (7, 119)):
        assert torch.equal(opened.rows(start, stop), whole[start:stop])


@pytest.mark.parametrize("values", _VALUES)
@pytest.mark.parametrize("step", [1, 33, 64, 200])
def test_blocks_fit_like_the_whole(values: str, step: int) -> None:
    params = {"values": values}
    delta = decaying(131, 30, seed=6)
    whole = fit_one("sparse", delta, 5, params)
    fit = _CODEC.fit_blocks(lambda: blocks_of(delta, step), (131, 30), 5, 0, params)
    assert fit is not None
    assert torch.equal(fit.energy, whole.energy)
    assert fit.total == pytest.approx(whole.total, rel=1e-14)
    assert store_fit("sparse", fit, 5, params) == store_fit("sparse", whole, 5, params)


@pytest.mark.parametrize("values", _VALUES)
def test_a_batch_fits_like_each_matrix(values: str) -> None:
    batch = torch.stack([decaying(40, 30, seed=seed) for seed in (7, 8, 9)])
    for delta, fit in zip(batch, _CODEC.fit(batch, 3, [1, 2, 3], {"values": values}), strict=True):
        assert fit is not None
        expected = store_fit("sparse", fit_one("sparse", delta, 3, {"values": values}), 3, {"values": values})
        assert store_fit("sparse", fit, 3, {"values": values}) == expected


@pytest.mark.parametrize(("columns", "dtype"), [(65_535, "U16"), (65_536, "U16"), (65_537, "I32")])
@pytest.mark.parametrize("values", _VALUES)
def test_indices_grow_when_columns_need_it(columns: int, dtype: str, values: str) -> None:
    delta = torch.zeros(3, columns)
    delta[0, columns - 1], delta[1, 32_768], delta[2, 0] = 1.0, -2.0, 3.0
    fit = fit_one("sparse", delta, 2, {"values": values})
    stored = store_fit("sparse", fit, 2, {"values": values})
    assert stored.node.part("index").dtype == dtype
    assert indices(stored, 2, 3)[0].tolist() == [columns - 1, 32_768, 0]
    decoded = decode(stored, (3, columns))
    assert float((decoded - delta).abs().max()) < 3 / 254 * 1.01


def test_energy_does_not_depend_on_threads() -> None:
    delta = torch.randn(300_000, 2, generator=generator(10))
    before, found = torch.get_num_threads(), set()
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        fit = fit_one("sparse", delta, 1, {"values": "bf16"})
        found.add((float(fit.energy).hex(), fit.total.hex()))
    torch.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.parametrize("values", _VALUES)
def test_zero(values: str) -> None:
    fit = fit_one("sparse", torch.zeros(10, 9), 3, {"values": values})
    assert fit.total == 0.0 and not bool(fit.energy.any())
    assert not bool(decode(store_fit("sparse", fit, 3, {"values": values}), (10, 9)).any())
    assert not bool(decode(store_fit("sparse", fit, 0, {"values": values}), (10, 9)).any())


@pytest.fixture(params=_VALUES)
def entry(request: pytest.FixtureRequest) -> Stored:
    """Five entries in each row of a [65, 33] delta."""
    params = {"values": request.param}
    return store_fit("sparse", fit_one("sparse", decaying(65, 33, seed=11), 5, params), 5, params)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 4},
        {"steps": 6},
        {"steps": -1},
        {"steps": None},
        {"values": "fp8"},
        {"values": None},
        {"values": []},
        {"values": {}},
    ],
)
def test_wrong_parameters_are_refused(entry: Stored, change: dict[str, object]) -> None:
    with pytest.raises(ArtifactInvalid, match="sparse"):
        _CODEC.open(entry.with_params(**change), entry.fetch, (65, 33))


@pytest.mark.parametrize("name", ["index", "value"])
@pytest.mark.parametrize("change", [{"dtype": "F32"}, {"shape": (65, 5)}, {"nbytes": 0}, {"nbytes": 10**15}])
def test_wrong_arrays_are_refused(entry: Stored, name: str, change: dict[str, object]) -> None:
    with pytest.raises(ArtifactInvalid, match=f"array '{name}' of codec 'sparse': expected"):
        _CODEC.open(entry.with_part(name, **change), entry.fetch, (65, 33))
    with pytest.raises(ArtifactInvalid, match=f"needs an array '{name}'"):
        _CODEC.open(entry.without_part(name), entry.fetch, (65, 33))


@pytest.mark.parametrize("shape", [(33, 65), (64, 33), (65, 70_000)])
def test_a_tensor_of_another_shape_is_refused(entry: Stored, shape: tuple[int, int]) -> None:
    with pytest.raises(ArtifactInvalid, match="sparse"):
        _CODEC.open(entry.node, entry.fetch, shape)


@pytest.mark.parametrize("index", [33, 65_535])
def test_an_index_outside_the_row_is_refused(entry: Stored, index: int) -> None:
    start = entry.node.part("index").offset + 2 * 100
    data = entry.data[:start] + index.to_bytes(2, "little") + entry.data[start + 2 :]
    with pytest.raises(ArtifactInvalid, match=r"index lies outside 0\.\.32"):
        _CODEC.open(entry.node, Stored(entry.node, data).fetch, (65, 33))
    # As the runtime reads them, whose kernels go by addresses.
    with pytest.raises(ArtifactInvalid, match=r"index lies outside 0\.\.32"):
        read_forms(entry.node, Stored(entry.node, data).fetch, (65, 33))


def test_a_negative_index_is_refused() -> None:
    delta = torch.zeros(3, 65_537)
    delta[:, 65_536] = 1.0
    stored = store_fit("sparse", fit_one("sparse", delta, 1, {"values": "bf16"}), 1, {"values": "bf16"})
    part = stored.node.part("index")
    data = bytearray(stored.data)
    data[part.offset : part.offset + 4] = (-1).to_bytes(4, "little", signed=True)
    with pytest.raises(ArtifactInvalid, match=r"index lies outside 0\.\.65536"):
        _CODEC.open(stored.node, Stored(stored.node, bytes(data)).fetch, (3, 65_537))


def test_bytes_that_end_too_early_are_refused(entry: Stored) -> None:
    with pytest.raises(ArtifactInvalid, match=r"expected .* bytes, found"):
        _CODEC.open(entry.node, lambda offset, count: entry.fetch(offset, count)[:-1], (65, 33))
