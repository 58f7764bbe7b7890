"""The low-rank codec: prefixes, errors, and entries that are not what they say."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from codec_entries import Stored, blocks_of, decaying, fit_one, generator, part_bytes, store_fit

from mfs_decompose.codec.lowrank import LowRank
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg import svd
from mfs_decompose.linalg.svd import truncated_svd

_CODEC = LowRank()
_FACTORS = ["int4", "int8", "bf16"]
_SHAPES = [(65, 33), (40, 131), (64, 64)]


def decode(stored: Stored, shape: tuple[int, int]) -> torch.Tensor:
    return _CODEC.open(stored.node, stored.fetch, shape).rows(0, shape[0])


def relative_error(delta: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((decoded - delta.to(torch.float64)).norm() / delta.to(torch.float64).norm())


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("factors", _FACTORS)
def test_fewer_steps_are_a_prefix_of_more(factors: str, shape: tuple[int, int]) -> None:
    params = {"factors": factors}
    fit = fit_one("lowrank", decaying(*shape, seed=1), 12, params)
    assert fit.steps == 12
    whole = store_fit("lowrank", fit, 12, params)
    for steps in range(13):
        stored = store_fit("lowrank", fit, steps, params)
        assert [part.name for part in stored.node.parts] == list(_CODEC.array_names(params))
        for part in stored.node.parts:
            full = part_bytes(whole, whole.node.part(part.name))
            assert part_bytes(stored, part) == full[: part.nbytes]


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("factors", _FACTORS)
def test_the_error_falls_with_every_step(factors: str, shape: tuple[int, int]) -> None:
    params = {"factors": factors}
    delta = decaying(*shape, seed=2)
    fit = fit_one("lowrank", delta, 16, params)
    errors = [relative_error(delta, decode(store_fit("lowrank", fit, s, params), shape)) for s in range(17)]
    assert errors[0] == 1.0
    assert all(after < before for before, after in itertools.pairwise(errors))


@pytest.mark.parametrize(("factors", "noise"), [("int4", 0.11), ("int8", 6e-3), ("bf16", 3e-3)])
@pytest.mark.parametrize("shape", _SHAPES)
def test_the_error_is_that_of_the_rank_and_of_the_factors(factors: str, noise: float, shape: tuple[int, int]) -> None:
    delta = decaying(*shape, seed=3)
    fit = fit_one("lowrank", delta, 20, {"factors": factors})
    assert fit.total == pytest.approx(float(delta.to(torch.float64).square().sum()))
    for steps in (1, 7, 20):
        decoded = decode(store_fit("lowrank", fit, steps, {"factors": factors}), shape)
        error = float((decoded - delta).square().sum())
        left_over, explained = fit.total - float(fit.energy[:steps].sum()), float(fit.energy[:steps].sum())
        # Quantisation errors are nearly orthogonal to what the rank leaves behind: their squares add.
        assert left_over * (1 - 1e-6) <= error * (1 + 3 * noise)
        assert error <= left_over * (1 + noise) + 2 * noise**2 * explained


@pytest.mark.parametrize("factors", _FACTORS)
def test_decoding_is_the_exact_product_of_the_stored_factors(factors: str) -> None:
    shape, params = (65, 33), {"factors": factors}
    fit = fit_one("lowrank", decaying(*shape, seed=4), 9, params)
    stored = store_fit("lowrank", fit, 9, params)
    sides = {}
    for side, length in zip("uv", shape, strict=True):
        data = part_bytes(stored, stored.node.part(side))
        if factors == "bf16":
            sides[side] = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(9, length).tolist()
            continue
        raw = part_bytes(stored, stored.node.part(side + "s"))
        scales = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).reshape(9, -1).tolist()
        width = -(-length // 2) if factors == "int4" else length
        rows = [data[at * width : (at + 1) * width] for at in range(9)]
        if factors == "int4":
            codes = [[half - 16 * (half > 7) for byte in row for half in (byte & 15, byte >> 4)] for row in rows]
        else:
            codes = [[byte - 256 * (byte > 127) for byte in row] for row in rows]
        sides[side] = [[codes[r][i] * scales[r][i // 64] for i in range(length)] for r in range(9)]
    decoded = decode(stored, shape)
    for row in (0, 31, 64):
        for column in (0, 17, 32):
            terms = (Fraction(sides["u"][r][row]) * Fraction(sides["v"][r][column]) for r in range(9))
            assert Fraction(float(decoded[row, column])) == sum(terms)


@pytest.mark.parametrize("factors", _FACTORS)
def test_any_window_of_rows_equals_the_whole(factors: str) -> None:
    shape, params = (133, 40), {"factors": factors}
    stored = store_fit("lowrank", fit_one("lowrank", decaying(*shape, seed=5), 6, params), 6, params)
    opened = _CODEC.open(stored.node, stored.fetch, shape)
    whole = opened.rows(0, 133)
    assert whole.dtype == torch.float64
    for start, stop in ((0, 0), (0, 1), (63, 65), (64, 128), (100, 133), (133, 133), (7, 119)):
        assert torch.equal(opened.rows(start, stop), whole[start:stop])


@pytest.mark.parametrize("factors", _FACTORS)
@pytest.mark.parametrize("shape", [(65, 33), (33, 65)])
def test_a_batch_and_blocks_fit_like_one_matrix(factors: str, shape: tuple[int, int]) -> None:
    params = {"factors": factors}
    batch = torch.stack([decaying(*shape, seed=seed) for seed in (6, 7)])
    for at, fit in enumerate(_CODEC.fit(batch, 5, [8, 9], params)):
        assert fit is not None
        blocks = _CODEC.fit_blocks(lambda at=at: blocks_of(batch[at], 20), shape, 5, 8 + at, params)  # type: ignore[misc]
        alone = fit_one("lowrank", batch[at], 5, params, key=8 + at)
        assert blocks is not None
        for other in (blocks, alone):
            assert torch.allclose(other.energy, fit.energy, rtol=1e-4)
            decoded = [decode(store_fit("lowrank", each, 5, params), shape) for each in (fit, other)]
            # Codes may differ by one where a value lies on the edge between two.
            assert relative_error(decoded[0], decoded[1]) < 0.01


@pytest.mark.parametrize("factors", _FACTORS)
def test_the_factors_are_those_of_the_svd(factors: str) -> None:
    delta = decaying(50, 90, seed=8)
    fit = fit_one("lowrank", delta, 7, {"factors": factors}, key=4)
    found = truncated_svd(delta[None], 7, [4])[0]
    assert found is not None
    assert torch.equal(fit.energy, found.energy) and fit.total == found.total


@pytest.mark.parametrize("factors", _FACTORS)
def test_a_delta_of_zero_fits_in_no_step(factors: str) -> None:
    params = {"factors": factors}
    batch = torch.stack((decaying(40, 30, seed=9), torch.zeros(40, 30)))
    some, none = _CODEC.fit(batch, 4, [1, 2], params)
    assert some is not None and some.steps == 4
    assert none is not None and none.steps == 0 and none.total == 0.0
    stored = store_fit("lowrank", none, 0, params)
    assert stored.data == b""
    assert torch.equal(decode(stored, (40, 30)), torch.zeros(40, 30, dtype=torch.float64))


@pytest.mark.parametrize("factors", _FACTORS)
def test_a_delta_of_fewer_directions_ends_early(factors: str) -> None:
    delta = torch.outer(torch.arange(1.0, 41), torch.linspace(-1, 2, 30))
    fit = fit_one("lowrank", delta, 8, {"factors": factors})
    assert fit.steps < 8
    decoded = decode(store_fit("lowrank", fit, fit.steps, {"factors": factors}), (40, 30))
    assert relative_error(delta, decoded) < {"int4": 0.12, "int8": 0.01, "bf16": 0.01}[factors]


def test_a_delta_that_nothing_can_factorise_has_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("_randomised", "_gram", "_lapack_fp32", "_lapack_fp64"):
        monkeypatch.setattr(svd, method, lambda *_: None)
    assert _CODEC.fit(torch.randn(2, 30, 20, generator=generator(1)), 3, [1, 2], {"factors": "int8"}) == [None, None]


def test_a_delta_that_is_not_finite_has_no_fit() -> None:
    delta = torch.randn(1, 30, 20, generator=generator(2))
    delta[0, 3, 4] = torch.inf
    assert _CODEC.fit(delta, 3, [1], {"factors": "int8"}) == [None]
    assert _CODEC.fit_blocks(lambda: blocks_of(delta[0], 7), (30, 20), 3, 1, {"factors": "int8"}) is None


@pytest.fixture(params=_FACTORS)
def entry(request: pytest.FixtureRequest) -> Stored:
    """Five directions of a [65, 33] delta."""
    params = {"factors": request.param}
    return store_fit("lowrank", fit_one("lowrank", decaying(65, 33, seed=10), 5, params), 5, params)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 4},
        {"steps": 6},
        {"steps": -1},
        {"steps": "5"},
        {"steps": None},
        {"factors": "int3"},
        {"factors": None},
        {"factors": []},
        {"factors": {}},
        {"factors": 4},
        {"group": 32},
        {"group": None},
        {"group": "64"},
    ],
)
def test_wrong_parameters_are_refused(entry: Stored, change: dict[str, object]) -> None:
    with pytest.raises(ArtifactInvalid, match="lowrank"):
        _CODEC.open(entry.with_params(**change), entry.fetch, (65, 33))


@pytest.mark.parametrize("side", ["u", "v"])
@pytest.mark.parametrize(
    "change", [{"dtype": "F32"}, {"shape": (4, 65)}, {"shape": (5,)}, {"nbytes": 1}, {"nbytes": 10**15}]
)
def test_wrong_arrays_are_refused(entry: Stored, side: str, change: dict[str, object]) -> None:
    with pytest.raises(ArtifactInvalid, match=f"array '{side}' of codec 'lowrank': expected"):
        _CODEC.open(entry.with_part(side, **change), entry.fetch, (65, 33))
    with pytest.raises(ArtifactInvalid, match=f"needs an array '{side}'"):
        _CODEC.open(entry.without_part(side), entry.fetch, (65, 33))


@pytest.mark.parametrize("shape", [(33, 65), (65, 31), (69, 33), (650, 33)])
def test_a_tensor_of_another_shape_is_refused(entry: Stored, shape: tuple[int, int]) -> None:
    with pytest.raises(ArtifactInvalid, match="expected"):
        _CODEC.open(entry.node, entry.fetch, shape)


def test_factors_of_another_format_are_refused(entry: Stored) -> None:
    for factors in _FACTORS:
        if factors != entry.node.params["factors"]:
            with pytest.raises(ArtifactInvalid, match="lowrank"):
                _CODEC.open(entry.with_params(factors=factors), entry.fetch, (65, 33))


def test_bytes_that_end_too_early_are_refused(entry: Stored) -> None:
    with pytest.raises(ArtifactInvalid, match=r"expected .* bytes, found"):
        _CODEC.open(entry.node, lambda offset, count: entry.fetch(offset, count)[:-1], (65, 33))


def test_a_node_without_arrays_is_refused() -> None:
    node = CodecNode("lowrank", params={"factors": "int8", "group": 64, "steps": 2})
    with pytest.raises(ArtifactInvalid, match="needs an array 'u'"):
        _CODEC.open(node, lambda offset, count: b"", (65, 33))
