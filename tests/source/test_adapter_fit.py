"""Which way round a product lies in a parameter, above all where the shape cannot say."""

from __future__ import annotations

from typing import NoReturn

import pytest

from mfs_decompose.source.adapter_fit import Fit, fit_factors
from mfs_decompose.source.adapter_keys import Factors
from mfs_decompose.source.header import TensorSpec


def factors(a: tuple[int, ...], b: tuple[int, ...], module: str = "m.q_proj", *, embedding: bool = False) -> Factors:
    specs = TensorSpec("a", "F32", a), TensorSpec("b", "F32", b)
    return Factors(module, a=specs[0], b=specs[1], is_embedding=embedding)


def nobody() -> NoReturn:
    raise AssertionError("a map of the base is not needed to tell")


def fit(found: Factors, shape: tuple[int, ...], rank: int = 3, model: str = "llama", flag: bool = False) -> Fit | str:
    return fit_factors(found, shape, rank, model, flag, nobody)


def test_linear_layers() -> None:
    assert fit(factors((3, 7), (5, 3)), (5, 7)) == Fit("out_in", 5)
    assert fit(factors((3, 7), (7, 3)), (7, 7)) == Fit("out_in", 7)
    assert fit(factors((3, 7), (7, 3)), (7, 7), flag=False, model="unheard_of") == Fit("out_in", 7)


@pytest.mark.parametrize("flag", [False, True])
def test_conv1d_by_its_model_and_name_whatever_the_flag(flag: bool) -> None:
    assert fit(factors((3, 7), (21, 3), "h.0.attn.c_attn"), (7, 21), model="gpt2", flag=flag) == Fit("in_out", 21)
    assert fit(factors((3, 7), (7, 3), "h.0.attn.c_proj"), (7, 7), model="gpt2", flag=flag) == Fit("in_out", 7)
    assert fit(factors((3, 7), (61, 3), "lm_head"), (61, 7), model="gpt2", flag=flag) == Fit("out_in", 61)


def test_a_transposed_layer_without_a_reason_is_refused() -> None:
    found = fit(factors((3, 7), (5, 3)), (7, 5))
    assert found == "its update is [5, 7] where the base has [7, 5]"


def test_a_flag_and_a_square_layer_ask_the_module() -> None:
    square = factors((3, 7), (7, 3))
    asked = [fit_factors(square, (7, 7), 3, "x", True, lambda name=name: name) for name in ("Conv1D", "Linear", None)]
    assert asked == [Fit("in_out", 7), Fit("out_in", 7), Fit("out_in", 7)]
    assert fit(factors((3, 7), (5, 3)), (7, 5), flag=True) == Fit("in_out", 5)
    assert fit(factors((3, 7), (5, 3)), (5, 7), flag=True) == Fit("out_in", 5)


def test_embeddings() -> None:
    found = factors((3, 61), (7, 3), "m.embed_tokens", embedding=True)
    assert fit(found, (61, 7)) == Fit("in_out", 7)
    assert fit(found, (64, 7)) == "its update is [61, 7] where the base has [64, 7]"
    assert fit(factors((3, 7), (7, 3), "e", embedding=True), (7, 7)) == Fit("in_out", 7)


def test_stacks_of_experts() -> None:
    found = factors((12, 7), (5, 12))
    assert fit(found, (4, 5, 7)) == Fit("out_in", 5, 4)
    assert fit(found, (4, 7, 5)) == Fit("in_out", 5, 4)
    square = factors((12, 7), (7, 12))
    assert fit(square, (4, 7, 7), model="qwen3_moe") == Fit("out_in", 7, 4)
    assert fit(square, (4, 7, 7), model="gpt_oss") == Fit("in_out", 7, 4)


def test_convolutions() -> None:
    found = factors((3, 7, 5), (11, 3, 1))
    assert fit(found, (11, 7, 5)) == Fit("out_in", 11)
    assert fit(factors((3, 7, 5, 2), (11, 3, 1, 1)), (11, 7, 5, 2)) == Fit("out_in", 11)
    for wrong in ((11, 7, 3), (12, 7, 5), (11, 14, 5)):
        assert isinstance(fit(found, wrong), str)
    assert isinstance(fit(factors((6, 7, 5), (11, 3, 1)), (11, 7, 5)), str)  # groups


@pytest.mark.parametrize(
    ("a", "b", "shape"),
    [
        ((4, 7), (5, 4), (5, 7)),
        ((3, 7), (5, 4), (5, 7)),
        ((3, 7), (5, 3), (4, 5, 7)),
        ((12, 7), (5, 12), (5, 7)),
        ((3, 7), (5, 3), (5, 7, 2, 2)),
        ((3,), (5, 3), (5, 7)),
        ((3, 7), (5, 3), (5,)),
        ((3, 7), (5, 3), ()),
    ],
)
def test_ranks_and_dimensions_that_do_not_fit(a: tuple[int, ...], b: tuple[int, ...], shape: tuple[int, ...]) -> None:
    found = fit(factors(a, b), shape)
    assert isinstance(found, str)
    assert str(list(a)) in found
