"""Quantised weights are recognised by the names and types that their writers use, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.header import TensorInfo, TensorSpec
from mfs_decompose.source.quantised import Quantised, describe_quantised, find_quantised

Specs = dict[str, tuple[str, tuple[int, ...]]]

FP8: Specs = {
    "a.q.weight": ("F8_E4M3", (24, 16)),
    "a.q.weight_scale": ("F32", ()),
    "a.q.input_scale": ("F32", (1,)),
    "a.q.bias": ("BF16", (24,)),
    "norm.weight": ("BF16", (16,)),
}
CASES: dict[str, tuple[Specs, str, list[str], list[str]]] = {
    "fp8": (FP8, "FP8", ["a.q.weight"], ["a.q.input_scale", "a.q.weight_scale"]),
    "fp8 in blocks, as DeepSeek": (
        {
            "a.q.weight": ("F8_E4M3", (256, 128)),
            "a.q.weight_scale_inv": ("F32", (2, 1)),
            "a.k.weight": ("BF16", (8, 8)),
        },
        "FP8",
        ["a.q.weight"],
        ["a.q.weight_scale_inv"],
    ),
    "fp8 of fused experts": (
        {"e.gate_up_proj": ("F8_E5M2", (3, 24, 16)), "e.gate_up_proj_scale": ("F32", (3, 1, 1))},
        "FP8",
        ["e.gate_up_proj"],
        ["e.gate_up_proj_scale"],
    ),
    "fp8 without scales": ({"z.weight": ("F8_E4M3", (9, 5))}, "FP8", ["z.weight"], []),
    "gptq": (
        {
            "a.q.qweight": ("I32", (2, 24)),
            "a.q.qzeros": ("I32", (1, 3)),
            "a.q.scales": ("F16", (1, 24)),
            "a.q.g_idx": ("I32", (16,)),
            "a.q.bias": ("F16", (24,)),
        },
        "GPTQ or AWQ",
        ["a.q.qweight"],
        ["a.q.g_idx", "a.q.qzeros", "a.q.scales"],
    ),
    "compressed-tensors": (
        {
            "a.q.weight_packed": ("I32", (24, 2)),
            "a.q.weight_scale": ("BF16", (24, 1)),
            "a.q.weight_shape": ("I64", (2,)),
            "a.q.weight_zero_point": ("I32", (3, 1)),
        },
        "compressed-tensors",
        ["a.q.weight_packed"],
        ["a.q.weight_scale", "a.q.weight_shape", "a.q.weight_zero_point"],
    ),
    "int8": (
        {"a.q.weight": ("I8", (24, 16)), "a.q.weight_scale": ("F32", (24, 1))},
        "INT8",
        ["a.q.weight"],
        ["a.q.weight_scale"],
    ),
    "bitsandbytes 4-bit": (
        {
            "a.q.weight": ("U8", (192, 1)),
            "a.q.weight.absmax": ("U8", (6,)),
            "a.q.weight.nested_absmax": ("F32", (1,)),
            "a.q.weight.quant_map": ("F32", (16,)),
            "a.q.weight.quant_state.bitsandbytes__nf4": ("U8", (90,)),
        },
        "bitsandbytes 4-bit",
        ["a.q.weight"],
        [
            "a.q.weight.absmax",
            "a.q.weight.nested_absmax",
            "a.q.weight.quant_map",
            "a.q.weight.quant_state.bitsandbytes__nf4",
        ],
    ),
    "bitsandbytes 8-bit": (
        {"a.q.weight": ("I8", (24, 16)), "a.q.SCB": ("F32", (24,)), "a.q.weight_format": ("U8", ())},
        "bitsandbytes 8-bit",
        ["a.q.weight"],
        ["a.q.SCB", "a.q.weight_format"],
    ),
    "mxfp4 of gpt-oss": (
        {
            "e.gate_up_proj_blocks": ("U8", (3, 24, 2, 16)),
            "e.gate_up_proj_scales": ("U8", (3, 24, 2)),
            "e.gate_up_proj_bias": ("BF16", (3, 24)),
        },
        "MXFP4",
        ["e.gate_up_proj_blocks"],
        ["e.gate_up_proj_scales"],
    ),
}
PLAIN: Specs = {
    "a.q.weight": ("BF16", (24, 16)),
    "a.scale": ("F32", ()),  # a learned scale, as some norms have one
    "a.layer_scale": ("BF16", (16,)),
    "steps": ("I64", ()),
    "mask": ("U8", (24, 24)),
    "table.weight": ("I8", (24, 16)),  # integers alone say nothing
    "e_blocks": ("U8", (3, 4)),
    "scales": ("F32", (3,)),
}


def specs(tensors: Specs) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, dtype, shape) for name, (dtype, shape) in tensors.items()}


def checkpoint(id: str, tensors: Specs, config: dict[str, object] | None = None, adapter: bool = False) -> Checkpoint:
    infos = {name: TensorInfo(name, dtype, shape, "model.safetensors", 8) for name, (dtype, shape) in tensors.items()}
    return Checkpoint(id, Path(id), (), None, infos, (), (), config or {}, adapter={"r": 3} if adapter else None)


@pytest.mark.parametrize("case", CASES)
def test_codes_and_what_belongs_to_them(case: str) -> None:
    tensors, kind, codes, beside = CASES[case]
    found = find_quantised(specs({**PLAIN, **tensors} if "a.q.weight" not in tensors else tensors))
    assert found == Quantised(tuple(codes), tuple(beside), (kind,))
    assert found.exact == {*codes, *beside}


def test_plain_weights_are_no_codes() -> None:
    assert find_quantised(specs(PLAIN)) == Quantised((), (), ())


def test_a_sentence_for_each_that_has_some() -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    base, plain = checkpoint("b", FP8, config), {**PLAIN, "more.weight": ("BF16", (99, 99))}
    said = list(describe_quantised(base, [checkpoint("two", FP8), checkpoint("one", plain)]))
    rest = "and 2 with their scales are stored exactly and not compared: a.q.weight"
    assert said == [
        f"base: 1 tensor of quantised weights (FP8; config.json: fp8) {rest}",
        f"two: 1 tensor of quantised weights (FP8) {rest}",
    ]
    assert list(describe_quantised(checkpoint("b", PLAIN), [checkpoint("one", PLAIN)])) == []


def test_a_config_alone_is_said_too_and_an_adapter_says_nothing() -> None:
    config: dict[str, object] = {"quantization_config": {"load_in_4bit": True}}
    said = list(describe_quantised(checkpoint("b", PLAIN), [checkpoint("one", PLAIN, config)]))
    assert said == ["one: config.json speaks of quantised weights, and no tensor is: they are stored as they stand"]
    assert list(describe_quantised(checkpoint("b", PLAIN), [checkpoint("one", FP8, config, adapter=True)])) == []


def test_codes_have_no_mean() -> None:
    with pytest.raises(
        SourceIncompatible, match=r"'two' is quantised \(FP8\), and codes have no mean: 1 tensor, among"
    ):
        list(describe_quantised(None, [checkpoint("one", PLAIN), checkpoint("two", FP8)]))


NUMBERS: Specs = {"a.q.weight": ("BF16", (24, 16)), "norm.weight": ("BF16", (16,))}


@pytest.mark.parametrize(
    ("base", "own", "said"),
    [
        (NUMBERS, FP8, r"variant 'v' is quantised \(FP8\) and the base is not: 3 tensors, 83\.1 % of its bytes"),
        (FP8, NUMBERS, r"the base is quantised \(FP8\) and variant 'v' is not: 1 tensor, 96 % of its bytes"),
        (FP8, CASES["gptq"][0], r"'v' is quantised \(GPTQ or AWQ\) in another way than the base \(FP8\): 4 tensors"),
        (CASES["mxfp4 of gpt-oss"][0], {"e.gate_up_proj": ("BF16", (3, 24, 64))}, r"the base is quantised \(MXFP4\)"),
    ],
    ids=["variant", "base", "two ways", "fused"],
)
def test_codes_against_numbers_are_refused_with_what_to_give(base: Specs, own: Specs, said: str) -> None:
    with pytest.raises(SourceIncompatible, match=said) as refused:
        list(describe_quantised(checkpoint("b", base), [checkpoint("v", own)]))
    assert refused.value.hint is not None and "before" in refused.value.hint


def test_another_architecture_is_left_to_the_alignment() -> None:
    """Codes whose weight the base does not have at all are not the reason."""
    other: Specs = {"z.q.weight": ("F8_E4M3", (240, 16)), "z.q.weight_scale": ("F32", ())}
    assert len(list(describe_quantised(checkpoint("b", NUMBERS), [checkpoint("v", other)]))) == 1
