"""What kind of layer a tensor belongs to, and how deep it lies: read off its name, never off a model class."""

from __future__ import annotations

from collections.abc import Mapping

LayerType = str

LAYER_TYPES: tuple[LayerType, ...] = (
    "query", "key", "value", "attention", "output", "gate", "up", "down", "embedding", "other",
)  # fmt: skip
"""`attention` is a fused query, key and value; `other` whatever no name below fits."""

DEPTHS = 3
"""Thirds of a model, first to last."""

_WORDS: Mapping[LayerType, tuple[str, ...]] = {
    "query": ("q_proj", "q", "wq", "query", "to_q", "q_a_proj", "q_b_proj"),
    "key": ("k_proj", "k", "wk", "key", "to_k"),
    "value": ("v_proj", "v", "wv", "value", "to_v"),
    "attention": ("c_attn", "qkv_proj", "qkv", "query_key_value", "wqkv", "kv_a_proj_with_mqa", "kv_b_proj"),
    "output": ("o_proj", "o", "wo", "out_proj", "to_out", "out_lin"),
    "gate": ("gate_proj", "w1", "gate_up_proj", "wi_0"),
    "up": ("up_proj", "w3", "fc1", "c_fc", "wi", "wi_1", "dense_h_to_4h", "fc_in"),
    "down": ("down_proj", "w2", "fc2", "wo_mlp", "dense_4h_to_h", "fc_out"),
    "embedding": ("embed_tokens", "wte", "word_embeddings", "lm_head", "embed_out", "tok_embeddings", "embed_in"),
}
_TYPE_OF = {word: kind for kind, words in _WORDS.items() for word in words}


def layer_type(name: str) -> LayerType:
    """The type of the layer that a tensor's name says."""
    parts = [part for part in name.split(".") if part not in ("weight", "bias", "base_layer")]
    for part in reversed(parts):
        if part == "c_proj":  # GPT-2 calls two layers so
            return "down" if "mlp" in parts else "output"
        if part == "dense" and ("attention" in parts or "self_attn" in parts or "self_attention" in parts):
            return "output"
        if part in _TYPE_OF:
            return _TYPE_OF[part]
    return "other"


def layer_number(name: str) -> int | None:
    """The number of a tensor's layer: the first number in its name; None where there is none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def depth_of(number: int | None, layers: int) -> int:
    """Which third of a model's `layers` a layer lies in, 0 to 2; what is in no layer counts to the middle."""
    if number is None or layers <= 0:
        return DEPTHS // 2
    return min(number * DEPTHS // layers, DEPTHS - 1)
