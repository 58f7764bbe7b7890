"""The spellings of an adapter's tensors, old and new."""

from __future__ import annotations

import pytest

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.adapter_keys import AdapterKeys, sort_keys
from mfs_decompose.source.header import TensorSpec


def sort(*names: str, shape: tuple[int, ...] = (2, 3)) -> AdapterKeys:
    return sort_keys({name: TensorSpec(name, "F32", shape) for name in names}, "here")


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.", "", "base_model.model._orig_mod."])
@pytest.mark.parametrize("name", ["", ".default", ".my-adapter_2"])
def test_factors(prefix: str, name: str) -> None:
    a, b = f"{prefix}m.q.lora_A{name}.weight", f"{prefix}m.q.lora_B{name}.weight"
    found = sort(a, b)
    assert list(found.factors) == [("m.q", 0)]
    factors = found.factors["m.q", 0]
    assert factors.a is not None
    assert factors.b is not None
    assert (factors.a.name, factors.b.name, factors.is_embedding) == (a, b, False)


@pytest.mark.parametrize("name", ["", ".default"])
def test_embeddings(name: str) -> None:
    found = sort(f"m.e.lora_embedding_A{name}", f"m.e.lora_embedding_B{name}")
    assert found.factors["m.e", 0].is_embedding


@pytest.mark.parametrize("end", ["", ".default", ".weight", ".default.weight"])
def test_magnitudes(end: str) -> None:
    magnitude = sort(f"m.q.lora_magnitude_vector{end}").factors["m.q", 0].magnitude
    assert magnitude is not None
    assert magnitude.name == f"m.q.lora_magnitude_vector{end}"


@pytest.mark.parametrize("end", ["lora_B.bias", "lora_B.default.bias"])
def test_biases_of_factors(end: str) -> None:
    assert sort(f"m.q.{end}").factors["m.q", 0].bias is not None


@pytest.mark.parametrize(
    ("key", "name", "way"),
    [
        ("base_model.model.lm_head.weight", "lm_head.weight", "plain"),
        ("lm_head.modules_to_save.weight", "lm_head.weight", "saved"),
        ("lm_head.modules_to_save.default.weight", "lm_head.weight", "saved"),
        ("score.modules_to_save.default.dense.weight", "score.dense.weight", "saved"),
        ("m.q.base_layer.bias", "m.q.bias", "base"),
        ("m.q.bias", "m.q.bias", "plain"),
        ("m.e.base_layer.weight", "m.e.weight", "base"),
        ("m.e.token_adapter.base_layer.weight", "m.e.weight", "base"),
    ],
)
def test_whole_tensors(key: str, name: str, way: str) -> None:
    found = sort(key)
    assert list(found.whole) == [name]
    assert (found.whole[name][0].name, found.whole[name][1]) == (key, way)


def test_tokens_and_copies() -> None:
    found = sort(
        "m.e.token_adapter.trainable_tokens_delta",
        "m.e.token_adapter.trainable_tokens_original",
        "lm_head.original_module.weight",
    )
    assert list(found.tokens) == ["m.e"]
    assert found.copies == ["lm_head.original_module.weight", "m.e.token_adapter.trainable_tokens_original"]


def test_what_peft_writes_for_a_resized_vocabulary() -> None:
    found = sort("lm_head.modules_to_save.weight", "lm_head.original_module.weight", "lm_head.weight")
    assert (found.whole["lm_head.weight"][0].name, found.whole["lm_head.weight"][1]) == ("lm_head.weight", "saved")
    assert sorted(found.copies) == ["lm_head.modules_to_save.weight", "lm_head.original_module.weight"]


def test_nested_parameters() -> None:
    found = sort("x.experts.lora_A.weight", "x.experts.base_layer.lora_A.weight", "x.base_layer.out.lora_A.weight")
    assert sorted(found.factors) == [("x.experts", 0), ("x.experts", 1), ("x.out", 0)]
    assert found.factors["x.experts", 1].label == "x.experts.base_layer"


@pytest.mark.parametrize(
    ("names", "gist"),
    [
        (("m.q.lora_A.weight", "m.q.lora_A.default.weight"), "a second time under another spelling"),
        (("base_model.model.m.q.lora_A.weight", "m.q.lora_A.weight"), "a second time"),
        (("m.q.lora_A.bias",), "belongs to no method"),
        (("m.q.bias", "m.q.base_layer.bias"), "a second time"),
        (("m.q.lora_A.one.weight", "m.q.lora_B.two.weight"), "expected one adapter in here, found one, two"),
        (
            ("m.q.lora_A.one.weight", "m.q.lora_B.one.weight", "m.q.lora_A.two.weight", "m.q.lora_B.two.weight"),
            "expected one adapter in here, found one, two",
        ),
        (("m.q.lora_diag",), "'m.q.lora_diag' belongs to no method"),
        (("m.q.lora_monteclora_sampler.std",), "belongs to no method"),
    ],
)
def test_what_is_refused(names: tuple[str, ...], gist: str) -> None:
    with pytest.raises(SourceIncompatible, match=gist) as caught:
        sort(*names)
    assert caught.value.hint
