"""Merged rows against slow oracles, in any blocks, and parameters that an attacker wrote."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.codec.adapter import MergedRows, check_adapter_values, open_adapter_tensor
from mfs_decompose.codec.adapter_params import read_adapter_params
from mfs_decompose.errors import ArtifactInvalid, SourceIncompatible
from mfs_decompose.source.header import TensorSpec

Tensors = Mapping[str, torch.Tensor]
FACTOR = {"a": "a", "b": "b", "scale": 1.75, "orientation": "out_in"}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spec(*shape: int) -> TensorSpec:
    return TensorSpec("w", "BF16", shape)


def merge(
    params: Mapping[str, Any], tensors: Tensors, base: torch.Tensor | None, shape: tuple[int, ...], blocks: int = 1
) -> torch.Tensor:
    """All rows, read in `blocks` blocks."""
    start = None if base is None else TensorSpec("start", "BF16", tuple(base.shape))
    opened = open_adapter_tensor(params, tensors.__getitem__, spec(*shape), start)
    rows = opened.spec.rows
    edges = [rows * at // blocks for at in range(blocks + 1)]
    read = None if base is None else lambda low, high: base[low:high]
    parts = [opened.rows(low, high, read) for low, high in pairwise(edges)]
    assert all(part.dtype == torch.float64 for part in parts)
    return torch.cat(parts) if shape else parts[0]


@pytest.fixture
def linear() -> dict[str, torch.Tensor]:
    return {"a": draw(1, 3, 7), "b": draw(2, 5, 3), "m": draw(3, 5).abs() + 0.5, "m_in": draw(3, 5).abs() + 0.5}


class TestAgainstSlowOracles:
    def test_a_linear_layer(self, linear: dict[str, torch.Tensor]) -> None:
        base = draw(4, 5, 7).to(torch.bfloat16)
        delta = 1.75 * linear["b"].double() @ linear["a"].double()
        torch.testing.assert_close(merge({"factors": [FACTOR]}, linear, base, (5, 7)), base.double() + delta)
        turned = {**FACTOR, "orientation": "in_out"}
        torch.testing.assert_close(
            merge({"factors": [turned]}, linear, base.mT.contiguous(), (7, 5)), (base.double() + delta).mT
        )

    @pytest.mark.parametrize("turned", [False, True])
    def test_dora(self, linear: dict[str, torch.Tensor], turned: bool) -> None:
        base = draw(4, 5, 7)
        moved = base.double() + 1.75 * linear["b"].double() @ linear["a"].double()
        expected = moved * (linear["m"].double() / moved.norm(dim=1))[:, None]
        params = {"factors": [{**FACTOR, "orientation": "in_out" if turned else "out_in"}], "magnitude": "m"}
        for blocks in (1, 3):
            start, shape = (base.mT.contiguous(), (7, 5)) if turned else (base, (5, 7))
            found = merge(params, linear, start, shape, blocks)
            torch.testing.assert_close(found.mT if turned else found, expected)

    def test_an_output_of_zeros_has_no_direction(self) -> None:
        tensors = {"a": torch.ones(1, 4), "b": torch.tensor([[0.0], [1.0]]), "m": torch.tensor([3.0, 4.0])}
        params = {"factors": [{**FACTOR, "scale": 1.0}], "magnitude": "m"}
        assert merge(params, tensors, torch.zeros(2, 4), (2, 4)).tolist() == [[0.0] * 4, [2.0] * 4]

    @pytest.mark.parametrize("orientation", ["out_in", "in_out"])
    def test_stacked_experts(self, orientation: str) -> None:
        tensors = {"a": draw(1, 8, 7), "b": draw(2, 5, 8)}  # four experts of rank two
        stacked = torch.einsum(
            "ore,eri->eoi", tensors["b"].double().reshape(5, 2, 4), tensors["a"].double().reshape(4, 2, 7)
        )
        shape = (4, 5, 7) if orientation == "out_in" else (4, 7, 5)
        base = draw(3, *shape)
        expected = base.double() + 1.75 * (stacked if orientation == "out_in" else stacked.mT)
        params = {"factors": [{**FACTOR, "experts": 4, "orientation": orientation}]}
        torch.testing.assert_close(merge(params, tensors, base, shape, blocks=3), expected)

    @pytest.mark.parametrize("kernel", [(3,), (3, 2), (1, 1)])
    @pytest.mark.parametrize("dora", [False, True])
    def test_convolutions_as_in_peft(self, kernel: tuple[int, ...], dora: bool) -> None:
        from peft import LoraConfig, get_peft_model

        layer = torch.nn.Conv1d(4, 6, kernel) if len(kernel) == 1 else torch.nn.Conv2d(4, 6, kernel)
        with torch.no_grad():
            layer.weight.copy_(draw(7, *layer.weight.shape))
        base = layer.weight.detach().clone()
        config = LoraConfig(r=3, lora_alpha=7, target_modules=["conv"], use_dora=dora)
        model = get_peft_model(torch.nn.ModuleDict({"conv": layer}), config)  # type: ignore[arg-type]
        wrapped: Any = model.base_model.model["conv"]  # type: ignore[index]
        tensors = {"a": draw(8, *wrapped.lora_A["default"].weight.shape), "b": draw(9, 6, 3, *[1] * len(kernel))}
        params: dict[str, Any] = {"factors": [{**FACTOR, "scale": 7 / 3}]}
        with torch.no_grad():
            wrapped.lora_A["default"].weight.copy_(tensors["a"])
            wrapped.lora_B["default"].weight.copy_(tensors["b"])
            if dora:
                magnitude = wrapped.lora_magnitude_vector["default"].weight
                magnitude.copy_(draw(10, *magnitude.shape).abs() + 0.5)
                tensors["m"], params["magnitude"] = magnitude.detach().clone(), "m"
        wrapped.merge()
        expected = wrapped.get_base_layer().weight.detach()
        torch.testing.assert_close(merge(params, tensors, base, tuple(base.shape), blocks=4).float(), expected)

    def test_vectors(self) -> None:
        tensors = {"l": draw(1, 6), "r": draw(2, 6)}
        base = draw(3, 6)
        added = {"add": [{"tensor": "l", "scale": 1.5}]}
        torch.testing.assert_close(merge(added, tensors, base, (6,), 2), base.double() + 1.5 * tensors["l"].double())
        both = {**added, "replace": "r"}
        torch.testing.assert_close(
            merge(both, tensors, base, (6,), 2), tensors["r"].double() + 1.5 * tensors["l"].double()
        )

    @pytest.mark.parametrize("shape", [(), (4,), (9, 3), (2, 3, 4)])
    def test_what_replaces_needs_no_base(self, shape: tuple[int, ...]) -> None:
        value = draw(1, *shape).to(torch.bfloat16)
        assert torch.equal(merge({"replace": "r"}, {"r": value}, None, shape, 2 if shape else 1), value.double())

    def test_tokens_replaced_and_added(self) -> None:
        base, rows = draw(1, 6, 4), draw(2, 4, 4)
        params = {"tokens": {"tensor": "t", "rows": [7, 2, 6, 5]}}
        expected = torch.cat([base, torch.zeros(2, 4)])
        expected[[7, 2, 6, 5]] = rows
        for blocks in (1, 3, 8):
            assert torch.equal(merge(params, {"t": rows}, base, (8, 4), blocks), expected.double())

    def test_a_delta_under_what_replaces(self, linear: dict[str, torch.Tensor]) -> None:
        tensors = {**linear, "r": draw(9, 5, 7)}
        found = merge({"replace": "r", "factors": [FACTOR]}, tensors, None, (5, 7), 2)
        torch.testing.assert_close(found, tensors["r"].double() + 1.75 * tensors["b"].double() @ tensors["a"].double())

    @given(cut=st.integers(0, 12), seed=st.integers(0, 3), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
    def test_any_blocks_have_the_bits_of_the_whole(self, cut: int, seed: int, dtype: torch.dtype) -> None:
        tensors = {"a": draw(seed, 5, 9).to(dtype), "b": draw(seed + 9, 12, 5).to(dtype), "m": draw(seed, 9).abs()}
        base = draw(seed + 20, 12, 9)
        turned = {"a": tensors["b"].mT.contiguous(), "b": tensors["a"].mT.contiguous(), "m": tensors["m"]}
        for params, held in (
            ({"factors": [FACTOR]}, tensors),
            ({"factors": [{**FACTOR, "orientation": "in_out"}], "magnitude": "m"}, turned),
        ):
            opened = open_adapter_tensor(params, held.__getitem__, spec(12, 9), spec(12, 9))
            parts = [opened.rows(*span, lambda low, high: base[low:high]) for span in ((0, cut), (cut, 12))]
            assert torch.equal(torch.cat(parts), merge(params, held, base, (12, 9)))


class TestHostileParameters:
    tensors: ClassVar[Tensors] = {
        "a": draw(1, 3, 7),
        "b": draw(2, 5, 3),
        "m": torch.ones(5),
        "t": torch.ones(2, 7),
        "v": torch.ones(5),
        "ints": torch.ones(3, 7, dtype=torch.int64),
        "inf": torch.full((3, 7), torch.inf),
        "empty": torch.ones(0, 7),
        "f8": torch.ones(3, 7).to(torch.float8_e4m3fn),
    }

    def open(
        self, params: object, shape: tuple[int, ...] = (5, 7), base: tuple[int, ...] | None = (5, 7)
    ) -> MergedRows:
        start = None if base is None else TensorSpec("start", "F32", base)
        return open_adapter_tensor(params, self.tensors.__getitem__, spec(*shape), start)  # type: ignore[arg-type]

    def test_the_honest_one_opens(self) -> None:
        assert self.open({"factors": [FACTOR], "magnitude": "m"}).spec == spec(5, 7)

    @pytest.mark.parametrize(
        "params",
        [
            {},
            {"other": 1},
            {"factors": {}},
            {"factors": [1]},
            {"factors": [FACTOR] * 65_537},
            {"replace": 3},
            {"replace": ""},
            {"add": [{"tensor": "v"}]},
            {"add": [{"tensor": "v", "scale": 1.0, "more": 1}]},
            {"tokens": [1]},
            {"tokens": {"tensor": "t", "rows": [0, 0]}},
            {"tokens": {"tensor": "t", "rows": [0, -1]}},
            {"tokens": {"tensor": "t", "rows": [0, True]}},
            {"tokens": {"tensor": "t", "rows": [0, 2**40]}},
            {"tokens": {"tensor": "t", "rows": [0, 5]}},
            {"tokens": {"tensor": "t", "rows": [1]}},
            {"tokens": {"tensor": "t", "rows": [0, 1]}, "factors": [FACTOR]},
            {"magnitude": "m"},
            {"magnitude": "t", "factors": [FACTOR]},
            {"magnitude": "m", "factors": [FACTOR, FACTOR]},
            {"replace": "a"},
            {"replace": "ints"},
            {"add": [{"tensor": "v", "scale": 1.0}]},
        ],
        ids=lambda params: str(params)[:60],
    )
    def test_things_that_are_none(self, params: object) -> None:
        with pytest.raises(ArtifactInvalid, match="codec 'adapter' of 'w'"):
            self.open(params)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("a", None),
            ("a", "b"),
            ("a", "ints"),
            ("a", "inf"),
            ("a", "empty"),
            ("a", "f8"),
            ("b", "a"),
            ("scale", None),
            ("scale", "1"),
            ("scale", True),
            ("scale", float("nan")),
            ("scale", float("inf")),
            ("orientation", "in_out"),
            ("orientation", "up"),
            ("experts", 0),
            ("experts", 2),
            ("experts", 1.0),
            ("experts", 10**9),
            ("out", [0, 5]),
            ("of", [0, 1]),
            ("more", 1),
            ("at", [[0, 5]]),
            ("at", [[0, 5], [0, 8]]),
            ("at", [[0, 6], [0, 7]]),
            ("at", [[0, 4], [0, 7]]),
            ("at", [[0, 5], [7, 0]]),
            ("at", [[0, 5], [0.0, 7]]),
            ("at", [[0, 5], [0, 7], [0, 1]]),
            ("at", [[-1, 4], [0, 7]]),
        ],
        ids=str,
    )
    def test_a_factor_with_one_field_wrong(self, field: str, value: object) -> None:
        with pytest.raises(ArtifactInvalid, match="codec 'adapter' of 'w'"):
            self.open({"factors": [{**FACTOR, field: value}]})

    @pytest.mark.parametrize(
        "parts",
        [
            {"at": [[0, 2], [0, 7]], "out": [4, 6]},
            {"at": [[0, 2], [0, 7]], "out": [0, 3]},
            {"at": [[0, 5], [0, 3]], "in": [5, 8]},
            {"at": [[0, 5], [0, 7]], "experts": 3, "of": [0, 2]},
            {"at": [[0, 5], [0, 7]], "experts": 3, "of": [3, 4]},
        ],
        ids=str,
    )
    def test_parts_beyond_the_product_or_the_tensor(self, parts: dict[str, object]) -> None:
        with pytest.raises(ArtifactInvalid, match="do not fit"):
            self.open({"factors": [{**FACTOR, **parts}]})

    @pytest.mark.parametrize(
        ("shape", "base"),
        [((6, 7), (5, 7)), ((4, 7), (5, 7)), ((5, 7), None), ((5,), (5,)), ((), ()), ((5, 7, 1, 1), (5, 7, 1, 1))],
    )
    def test_tensors_that_the_factors_do_not_make(self, shape: tuple[int, ...], base: tuple[int, ...] | None) -> None:
        with pytest.raises(ArtifactInvalid):
            self.open({"factors": [FACTOR]}, shape, base)

    def test_a_huge_tensor_is_refused_before_it_is_made(self) -> None:
        with pytest.raises(ArtifactInvalid):
            self.open({"tokens": {"tensor": "t", "rows": [0, 2**30]}}, (2**30 + 1, 7), (5, 7))

    def test_no_base_where_one_is_needed(self) -> None:
        with pytest.raises(ArtifactInvalid, match="has no base tensor"):
            self.open({"factors": [FACTOR]}).rows(0, 1, None)

    def test_the_names_that_are_needed(self) -> None:
        params = {"replace": "r", "factors": [FACTOR, FACTOR], "magnitude": "m", "add": [{"tensor": "v", "scale": 1}]}
        assert sorted(read_adapter_params(params, "w").tensors) == ["a", "b", "m", "r", "v"]

    def test_parameters_are_not_changed(self) -> None:
        params = {"factors": [dict(FACTOR)], "magnitude": "m"}
        before = copy.deepcopy(params)
        self.open(params).rows(0, 5, lambda low, high: torch.ones(high - low, 7))
        assert params == before


@pytest.mark.parametrize("spoil", [lambda v: v, lambda v: v.to(torch.bfloat16), lambda v: v.to(torch.int32)])
def test_finite_values_pass(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check_adapter_values("x", spoil(torch.ones(3, 4)))


def test_broken_values_are_counted_apart() -> None:
    values = torch.ones(4, 5)
    values[0, :3], values[1, 1], values[2, 2] = torch.nan, torch.inf, -torch.inf
    with pytest.raises(
        SourceIncompatible, match=r"'m\.lora_A' is broken: 3 of its 20 values are NaN and 2 infinite"
    ) as caught:
        check_adapter_values("m.lora_A", values)
    assert caught.value.exit_code == 12
    assert caught.value.hint
