"""Kinds of PEFT adapters, each on a tiny real model, for tests/adapters.py.

Coincidences are avoided: alpha is not the rank, layers are not square but where that is the point (GPT-2's c_proj, the
experts of gpt-oss), and the vocabulary is odd.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from architectures import ARCHITECTURES

VOCABULARY = 61
TOKENS = torch.tensor([[1, 5, 9, 60, 33, 2, 17], [4, 4, 58, 0, 21, 40, 7]])

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Kind:
    """A kind of adapter: LoraConfig's fields, the model it sits on, and what happens to model, files or config."""

    base: str
    fields: Mapping[str, Any]
    grown: int = 0
    alter: Callable[[dict[str, torch.Tensor], dict[str, Any]], None] | None = None


def _llama(tie: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_SIZES, head_dim=8, tie_word_embeddings=tie)


def _qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_SIZES, tie_word_embeddings=False)


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=24, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**_SIZES, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16)


def _mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**_SIZES, head_dim=8, num_local_experts=3, num_experts_per_tok=2)


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    sizes = {**_SIZES, "intermediate_size": 24}  # so that down_proj is square, as in the released models
    return GptOssConfig(**sizes, head_dim=8, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=False)


BASES: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: _llama(False),
    "tied": lambda: _llama(True),
    "qwen2": _qwen2,
    "gpt2": _gpt2,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    **{name: ARCHITECTURES[name] for name in ("falcon", "gemma3_text", "gemma3_vision", "gpt_neox", "phi3")},
}

_ATTENTION = ["q_proj", "v_proj"]
_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_LORA: Mapping[str, Any] = {"r": 3, "lora_alpha": 7}


def _with_default_names(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del config
    for name in list(tensors):
        tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name)


def _with_old_bias_names(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del config
    for name in list(tensors):
        tensors[name.replace(".base_layer.bias", ".bias")] = tensors.pop(name)


def _one_half(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["target_modules"] = ["gate_proj", "v_proj"]
    for name in [name for name in tensors if "gate_proj" not in name and "v_proj" not in name]:
        del tensors[name]


def _experts_one_by_one(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """As transformers 4 named them: each expert's projections are modules of their own."""
    config["target_modules"] = ["w1", "w2", "w3"]
    for name in [name for name in tensors if "self_attn" in name]:
        layer, rank = name.split(".self_attn")[0], 3
        for expert in range(3):
            for module, outs, ins in (("w1", 40, 24), ("w3", 40, 24), ("w2", 24, 40)):
                stem = f"{layer}.block_sparse_moe.experts.{expert}.{module}"
                tensors[f"{stem}.lora_A.weight"] = 0.3 * noise(f"{stem} a", (rank, ins))
                tensors[f"{stem}.lora_B.weight"] = 0.3 * noise(f"{stem} b", (outs, rank))
        tensors.pop(name)


def _kinds() -> dict[str, Kind]:
    patterns = {
        "rank_pattern": {"q_proj": 5, r"layers\.1\.self_attn\.v_proj": 2},
        "alpha_pattern": {"v_proj": 11},
    }
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return {
        "linear": Kind("llama", {**_LORA, "target_modules": _LINEAR}),
        "rslora": Kind("llama", {"r": 5, "lora_alpha": 6, "use_rslora": True, "target_modules": _LINEAR}),
        "patterns": Kind("llama", {**_LORA, **patterns, "target_modules": _LINEAR}),
        "rslora_patterns": Kind("llama", {**_LORA, **patterns, "use_rslora": True, "target_modules": _LINEAR}),
        "half": Kind("llama", {**_LORA, "target_modules": _LINEAR}, alter=_one_half),
        "default_names": Kind("llama", {**_LORA, "target_modules": _ATTENTION}, alter=_with_default_names),
        "bf16": Kind("llama", {**_LORA, "target_modules": _LINEAR}, alter=_in_bf16),
        "conv1d": Kind("gpt2", {**_LORA, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
        "conv1d_flag_forgotten": Kind(
            "gpt2", {**_LORA, "target_modules": ["c_attn", "c_proj"]}, alter=_forget("fan_in_fan_out")
        ),
        "saved": Kind("llama", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["lm_head", "norm"]}),
        "saved_embeddings": Kind(
            "llama", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}
        ),
        "grown": Kind(
            "llama", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}, grown=3
        ),
        "bias_lora_only": Kind("qwen2", {**_LORA, "target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
        "bias_old_names": Kind(
            "qwen2",
            {**_LORA, "target_modules": ["q_proj", "k_proj"], "bias": "lora_only"},
            alter=_with_old_bias_names,
        ),
        "bias_all": Kind("gpt2", {**_LORA, "target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
        "lora_bias": Kind("qwen2", {**_LORA, "target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
        "dora": Kind("llama", {**_LORA, "target_modules": _LINEAR, "use_dora": True}),
        "dora_bias": Kind("qwen2", {**_LORA, "target_modules": ["q_proj", "down_proj"], "use_dora": True}),
        "dora_conv1d": Kind(
            "gpt2", {**_LORA, "target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True}
        ),
        "dora_embedding": Kind("llama", {**_LORA, "target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
        "embedding": Kind("llama", {**_LORA, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
        "tied_embedding": Kind("tied", {**_LORA, "target_modules": ["embed_tokens", "q_proj"]}),
        "tied_head": Kind("tied", {**_LORA, "target_modules": ["lm_head", "q_proj"]}),
        "tied_both": Kind("tied", {**_LORA, "target_modules": ["embed_tokens", "lm_head"]}),
        "tied_ensured": Kind(
            "tied", {**_LORA, "target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
        ),
        "tied_saved_both": Kind(
            "tied", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}
        ),
        "tied_saved_embedding": Kind(
            "tied", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["embed_tokens"]}
        ),
        "tied_saved_head": Kind("tied", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["lm_head"]}),
        "tied_grown": Kind(
            "tied", {**_LORA, "target_modules": _ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}, grown=3
        ),
        "tied_gpt2_embedding": Kind("gpt2", {**_LORA, "target_modules": ["wte", "c_attn"], "fan_in_fan_out": True}),
        "tokens": Kind("llama", {**_LORA, "target_modules": _ATTENTION, "trainable_token_indices": [60, 3, 17]}),
        "tied_tokens": Kind("tied", {**_LORA, "target_modules": _ATTENTION, "trainable_token_indices": [9, 60]}),
        "tokens_of_both": Kind(
            "tied",
            {
                **_LORA,
                "target_modules": _ATTENTION,
                "trainable_token_indices": {"embed_tokens": [9, 60], "lm_head": [3]},
            },
        ),
        "parameter": Kind("llama", {**_LORA, "target_modules": [], "target_parameters": ["q_proj.weight"]}),
        "experts": Kind("qwen3_moe", {**_LORA, "target_modules": _ATTENTION, "target_parameters": experts}),
        "mixtral_experts": Kind("mixtral", {**_LORA, "target_modules": [], "target_parameters": experts}),
        "one_expert_parameter": Kind(
            "mixtral", {**_LORA, "target_modules": [], "target_parameters": ["experts.down_proj"]}
        ),
        "all_linear": Kind("qwen3_moe", {**_LORA, "target_modules": "all-linear"}),
        "fused": Kind("phi3", {**_LORA, "target_modules": ["qkv_proj", "gate_up_proj"]}),
        "wrapper": Kind("gemma3_vision", {**_LORA, "target_modules": ["q_proj", "down_proj"]}),
        "tied_by_default": Kind("gemma3_text", {**_LORA, "target_modules": ["embed_tokens", "q_proj"]}),
        "tied_falcon": Kind("falcon", {**_LORA, "target_modules": ["word_embeddings", "query_key_value"]}),
        "neox": Kind("gpt_neox", {**_LORA, "target_modules": ["query_key_value", "embed_in"]}),
        "old_experts": Kind("mixtral", {**_LORA, "target_modules": ["q_proj"]}, alter=_experts_one_by_one),
        "transposed_experts": Kind("gpt_oss", {**_LORA, "target_modules": [], "target_parameters": experts}),
    }


def _in_bf16(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del config
    for name in tensors:
        tensors[name] = tensors[name].to(torch.bfloat16)


def _forget(field: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def alter(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        del tensors, config[field]

    return alter


KINDS: Mapping[str, Kind] = _kinds()


def noise(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal values that depend on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator)
