"""Whether two factors fit a parameter, and which way round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mfs_decompose.source.adapter_keys import Factors

TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "aria", "aria_text", "openai_privacy_filter"})
"""Model types whose experts are [E, in, out]. Elsewhere transformers has [E, out, in], and PEFT treats it as that."""

CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
CONV1D_MODULES = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
"""transformers' Conv1D: a linear layer whose weight is [in, out]."""


@dataclass(frozen=True, slots=True)
class Fit:
    """`outputs` is the length of the output dimension, `experts` the number of matrices in a stack, None for one."""

    orientation: str
    outputs: int
    experts: int | None = None


def fit_factors(
    factors: Factors,
    shape: tuple[int, ...],
    rank: int,
    model_type: str,
    fan_in_fan_out: bool,
    module_class: Callable[[], str | None],
) -> Fit | str:
    """How the product of the factors lies in a parameter of `shape`, or in a few words why it does not fit.

    A square parameter fits both ways round, so its module decides: `module_class` is asked where the model type and
    `fan_in_fan_out` leave it open.
    """
    assert factors.a is not None
    assert factors.b is not None
    a, b = factors.a.shape, factors.b.shape
    if len(shape) > 2 and len(a) == len(shape):
        return _fit_convolution(a, b, shape, rank)
    if len(a) != 2 or len(b) != 2 or len(shape) not in (2, 3):
        return f"lora_A is {list(a)} and lora_B {list(b)} where the base has {list(shape)}"
    experts = shape[0] if len(shape) == 3 else 1
    wanted = rank * experts
    if (a[0], b[1]) != (wanted, wanted):
        each = f" for each of {experts} experts" if len(shape) == 3 else ""
        return f"lora_A is {list(a)} and lora_B {list(b)} where adapter_config.json gives rank {rank}{each}"
    outs, ins = b[0], a[1]
    ways = [way for way, size in (("out_in", (outs, ins)), ("in_out", (ins, outs))) if size == shape[-2:]]
    if factors.is_embedding:
        ways = [way for way in ways if way == "in_out"]
    elif len(shape) == 2 and "in_out" in ways and not _is_conv1d(factors.module, model_type):
        ways = _ways_of_strangers(ways, fan_in_fan_out, module_class)
    elif len(ways) == 2:
        ways = ["in_out" if len(shape) == 2 or model_type in TRANSPOSED_EXPERTS else "out_in"]
    if not ways:
        return (
            f"its update is {[outs, ins] if not factors.is_embedding else [ins, outs]} where the base has {list(shape)}"
        )
    return Fit(ways[0], outs, experts if len(shape) == 3 else None)


def _fit_convolution(a: tuple[int, ...], b: tuple[int, ...], shape: tuple[int, ...], rank: int) -> Fit | str:
    if a[0] != rank or b[1] != rank:
        return f"lora_A is {list(a)} and lora_B {list(b)} where adapter_config.json gives rank {rank}"
    if a[1:] != shape[1:] or b[0] != shape[0] or math.prod(b[2:]) != 1:
        return f"lora_A is {list(a)} and lora_B {list(b)} where the base has a convolution {list(shape)}"
    return Fit("out_in", shape[0])


def _is_conv1d(module: str, model_type: str) -> bool:
    return model_type in CONV1D_MODELS and module.rpartition(".")[2] in CONV1D_MODULES


def _ways_of_strangers(ways: list[str], fan_in_fan_out: bool, module_class: Callable[[], str | None]) -> list[str]:
    """Outside of models known to have Conv1D only the flag can make a weight [in, out], and the module confirms."""
    if not fan_in_fan_out:
        return [way for way in ways if way == "out_in"]
    if len(ways) == 1:
        return ways
    return ["in_out" if module_class() == "Conv1D" else "out_in"]
