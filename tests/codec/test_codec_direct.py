"""What holds for every codec that writes a delta from its rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from codec_entries import generator
from direct_entries import CASES, SHAPES, Case, base_of, decode_direct, delta_of, shape_of, store_direct
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.codec import direct
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.errors import ArtifactInvalid

_CASES = pytest.mark.parametrize("case", CASES, ids=str)


@_CASES
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_written_is_what_the_node_says(case: Case, shape: tuple[int, int]) -> None:
    stored = store_direct(case, delta_of(shape, seed=1))
    assert stored.node.nbytes == len(stored.data)
    assert CodecNode.from_json(stored.node.to_json()) == stored.node
    expected = case.codec.nbytes(shape, case.params)
    if case.codec.name == "rowsparse":
        assert expected is not None and len(stored.data) <= expected
    elif expected is not None:
        assert expected == len(stored.data)
    else:
        assert case.codec.name == "deadzone"


@_CASES
@pytest.mark.parametrize("shape", SHAPES)
def test_any_window_equals_the_whole(case: Case, shape: tuple[int, int]) -> None:
    stored = store_direct(case, delta_of(shape, seed=2))
    opened = case.codec.open(stored.node, stored.fetch, shape)
    whole = opened.rows(0, shape[0])
    assert whole.dtype == torch.float64 and whole.shape == shape
    assert bool(torch.isfinite(whole).all())
    last = shape[0]
    for start, stop in ((0, 0), (0, 1), (1, 7), (last - 1, last), (last, last), (3, last)):
        assert torch.equal(opened.rows(start, stop), whole[start:stop])


@_CASES
def test_blocks_do_not_change_what_is_decoded(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    delta = delta_of((65, 33), seed=3)
    whole = decode_direct(case, store_direct(case, delta), (65, 33))
    monkeypatch.setattr(direct, "DECODE_ELEMENTS", 600)  # 16 rows
    assert len(direct.row_blocks((65, 33))) == 5
    assert torch.equal(decode_direct(case, store_direct(case, delta), (65, 33)), whole)


@_CASES
def test_encoding_twice_gives_the_same_bytes(case: Case) -> None:
    delta = delta_of((40, 131), seed=4)
    assert store_direct(case, delta) == store_direct(case, delta)


@_CASES
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30, 3e36])
def test_extreme_magnitudes_stay_finite_and_no_worse_than_nothing(case: Case, scale: float) -> None:
    case = Case(case.codec, {**case.params, "step": scale}) if case.codec.name == "deadzone" else case
    delta = (torch.randn((24, 70), generator=generator(5)) * scale).clamp(-3e38, 3e38)
    decoded = decode_direct(case, store_direct(case, delta), (24, 70))
    assert bool(torch.isfinite(decoded).all())
    unit = float(delta.abs().max())
    error = ((decoded - delta) / unit).square().sum()
    assert float(error) <= float((delta.to(torch.float64) / unit).square().sum()) * (1.02 if scale > 1e-40 else 2.0)


@_CASES
def test_zeros_and_constants(case: Case) -> None:
    for value in (0.0, -0.0, 2.0**-9, -(2.0**-9)):
        delta = torch.full((9, 70), value)
        decoded = decode_direct(case, store_direct(case, delta), (9, 70))
        if value == 0:
            assert not decoded.any()
        elif case.codec.name in ("sign", "ternary", "rowsparse") or case.params.get("fit") == "absmax":
            assert torch.allclose(decoded, delta.to(torch.float64), rtol=0.01)


@_CASES
def test_a_tensor_without_rows(case: Case) -> None:
    stored = store_direct(case, torch.zeros(0, 70), torch.zeros(0, 70, dtype=torch.bfloat16))
    assert stored.node.nbytes == len(stored.data)
    assert decode_direct(case, stored, (0, 70)).shape == (0, 70)


@given(
    st.sampled_from(CASES),
    st.integers(8, 30),
    st.integers(8, 140),
    st.integers(0, 99),
    st.sampled_from([1e-38, 1e-5, 1e-3, 10.0]),
)
def test_any_shape_and_scale(case: Case, rows: int, columns: int, seed: int, scale: float) -> None:
    delta = delta_of((rows, columns), seed, scale)
    stored = store_direct(case, delta, base_of((rows, columns), seed + 1))
    assert stored.node.nbytes == len(stored.data)
    decoded = decode_direct(case, stored, shape_of(delta))
    assert bool(torch.isfinite(decoded).all())
    unit = max(scale, 1e-38)
    before, after = (float((x.to(torch.float64) / unit).square().sum()) for x in (delta, decoded - delta))
    assert after <= before * 1.01 + 1e-9 and not math.isnan(after)


@_CASES
def test_hostile_arrays_are_refused(case: Case) -> None:
    shape = (19, 64)
    stored = store_direct(case, delta_of(shape, seed=6))
    for part in stored.node.parts:
        broken = [
            stored.without_part(part.name),
            stored.with_part(part.name, dtype="F64"),
            stored.with_part(part.name, shape=(part.shape[0] + 1, *part.shape[1:]), nbytes=part.nbytes + 1),
        ]
        for node in broken:
            with pytest.raises(ArtifactInvalid):
                case.codec.open(node, stored.fetch, shape).rows(0, shape[0])


@_CASES
def test_another_shape_is_refused(case: Case) -> None:
    stored = store_direct(case, delta_of((19, 64), seed=7))
    for shape in ((20, 64), (19, 200)):
        if (case.codec.name, shape) in (("rowsparse", (20, 64)), ("significant", (19, 200))):
            continue  # what is stored is there in either
        with pytest.raises(ArtifactInvalid):
            case.codec.open(stored.node, stored.fetch, shape).rows(0, shape[0])


@_CASES
@pytest.mark.parametrize("value", [None, -1, 1.5, "row ", [1], True, 1 << 40, float("nan")])
def test_hostile_parameters_are_refused(case: Case, value: object) -> None:
    stored = store_direct(case, delta_of((19, 64), seed=8))
    for key in stored.node.params:
        if key == "values" or stored.node.params[key] == value:
            continue
        node = replace(stored.node, params={**stored.node.params, key: value})  # type: ignore[dict-item]
        if case.codec.name == "deadzone" and key == "step" and value == 1.5:
            continue  # a step as good as any other
        with pytest.raises(ArtifactInvalid):
            case.codec.open(node, stored.fetch, (19, 64)).rows(0, 19)


@_CASES
def test_bytes_that_end_early_are_refused(case: Case) -> None:
    shape = (19, 64)
    stored = store_direct(case, delta_of(shape, seed=9))
    short = stored.data[: len(stored.data) // 2]
    with pytest.raises(ArtifactInvalid):
        case.codec.open(stored.node, lambda offset, count: short[offset : offset + count], shape).rows(0, 19)


@pytest.mark.parametrize("name", ["sign", "kbit", "ternary", "rowsparse"])
def test_a_scale_that_is_not_finite_is_refused(name: str) -> None:
    case = next(case for case in CASES if case.codec.name == name)
    stored = store_direct(case, delta_of((19, 64), seed=10))
    part = stored.node.part("scale")
    data = bytearray(stored.data)
    data[part.offset : part.offset + 2] = b"\xc0\x7f"  # NaN
    with pytest.raises(ArtifactInvalid, match="finite"):
        case.codec.open(stored.node, lambda offset, count: bytes(data[offset : offset + count]), (19, 64))
