"""Small families of the architectures that people have: config classes as released, files as transformers saves them.

Sizes avoid coincidences: no square projection where the architecture allows it, fewer key-value heads than heads, an
odd vocabulary, and for experts neither as many rows as columns nor twice as many. Where an architecture has many biases
it is wider than the others: they are stored exactly, and have to fit into the default budget.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 301
NEW_TOKENS = 3

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WIDE_HEADS: Mapping[str, Any] = {**_SIZES, "head_dim": 12}


@dataclass(frozen=True)
class ArchitectureFamily:
    """Folders that tests read and never write: a base, its fine-tune `chat`, and `words`, one with new tokens."""

    base: Path
    variants: dict[str, Path]


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_WIDE_HEADS, tie_word_embeddings=False)


def _qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_SIZES, tie_word_embeddings=True)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_WIDE_HEADS, tie_word_embeddings=True)


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_WIDE_HEADS, sliding_window=16)


def _gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(**_WIDE_HEADS, query_pre_attn_scalar=12, sliding_window=16)


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**_WIDE_HEADS, query_pre_attn_scalar=12, sliding_window=16)


def _phi3() -> Any:
    from transformers import Phi3Config

    return Phi3Config(**_SIZES)


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=72,
        n_layer=2,
        n_head=4,
        n_inner=104,
        bos_token_id=1,
        eos_token_id=2,
    )


def _gpt_neox() -> Any:
    from transformers import GPTNeoXConfig

    sizes = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
    return GPTNeoXConfig(**{**sizes, "hidden_size": 56, "intermediate_size": 88})


def _falcon() -> Any:
    from transformers import FalconConfig

    sizes = {key: _SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    return FalconConfig(**sizes, ffn_hidden_size=56, bos_token_id=1, eos_token_id=2)


def _mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**_WIDE_HEADS, num_local_experts=5, num_experts_per_tok=2)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_WIDE_HEADS, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0]
    )


def _olmo2() -> Any:
    from transformers import Olmo2Config

    return Olmo2Config(**_SIZES)


def _gemma3_vision() -> Any:
    from transformers import Gemma3Config

    vision = {
        "hidden_size": 48,
        "intermediate_size": 68,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
    }
    text = {
        **_WIDE_HEADS,
        "hidden_size": 56,
        "intermediate_size": 88,
        "query_pre_attn_scalar": 12,
        "sliding_window": 16,
    }
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=9)


ARCHITECTURES: Mapping[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmo2": _olmo2,
    "gemma3_vision": _gemma3_vision,
}


def make_architecture_family(root: Path, name: str) -> ArchitectureFamily:
    """A base, and two fine-tunes of it, saved in bf16 by save_pretrained; the second has NEW_TOKENS more tokens."""
    base = build(ARCHITECTURES[name](), seed=1)
    folders = {"base": save(base, root / "base", "base")}
    for id, seed in (("chat", 2), ("words", 3)):
        model = load(folders["base"])
        if id == "words":
            model.resize_token_embeddings(VOCABULARY + NEW_TOKENS, mean_resizing=False)
        fine_tune(model, seed)
        folders[id] = save(model, root / id, id)
    return ArchitectureFamily(folders.pop("base"), folders)


def build(config: Any, *, seed: int) -> Any:
    """A model of random weights, those of matrices of one size everywhere, and none a constant.

    Norms of ones would hide a lost norm. An image tower begins ten times larger than the language model; fine-tuned in
    proportion, it would take the whole budget.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = auto_loader(config).from_config(config)
        for name, weight in model.named_parameters():
            noise = _noise(name, weight.shape, seed)
            if weight.dim() < 2:
                weight.add_(0.1 * noise)
            else:
                weight.copy_(0.5 * noise / weight[0].numel() ** 0.5)
    return model


def fine_tune(model: Any, seed: int, scale: float = 0.05) -> None:
    """Move every parameter: matrices, those of experts one by one, by rank 3 and a little noise; the rest by noise."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = _noise(name, weight.shape, seed)
            if weight.dim() < 2:
                weight.add_(scale * 0.1 * noise)
                continue
            matrix = weight.flatten(1) if weight.dim() > 3 else weight  # convolutions
            left = _noise(name + " left", (*matrix.shape[:-1], 3), seed)
            right = _noise(name + " right", (*matrix.shape[:-2], 3, matrix.shape[-1]), seed)
            weight.add_(scale * weight.std() * ((left @ right / 3**0.5).view(weight.shape) + 0.02 * noise))


def save(model: Any, folder: Path, id: str) -> Path:
    """Weights in bf16 as transformers writes them, with files of a tokenizer's names beside them."""
    model.to(torch.bfloat16).save_pretrained(folder)
    model.to(torch.float32)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64, "name": id}) + "\n")
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [id]}) + "\n")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}" + id)
    return folder


def load(folder: Path) -> Any:
    """The model in fp32, with every tensor of the file in it and none drawn at random, or this raises."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    model, info = auto_loader(config).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def auto_loader(config: Any) -> Any:
    """AutoModelForCausalLM, or AutoModelForImageTextToText for wrappers that it does not know."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def _noise(name: str, shape: tuple[int, ...] | torch.Size, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator)
