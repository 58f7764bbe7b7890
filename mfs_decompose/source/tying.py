"""Tied embeddings: a checkpoint whose head is its embedding matrix stores only one of the two."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Literal

from mfs_decompose.source.header import TensorSpec

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings", "shared")
_HEADS = ("lm_head", "embed_out")
_TEXT_CONFIGS = ("text_config", "language_config", "llm_config")  # what wrappers of language models call them


def vocabulary_role(name: str) -> Literal["embedding", "head"] | None:
    """What a tensor with a row for each token is, by its name; those grow and shrink between base and variant."""
    module = _module(name)
    return "embedding" if module in _EMBEDDINGS else "head" if module in _HEADS else None


def find_tied_partner(
    name: str, base_tensors: Mapping[str, TensorSpec], base_config: Mapping[str, object]
) -> TensorSpec | None:
    """The tensor of the base that does the work of `name`, which the base itself does not store.

    A head finds the base's only embedding, an embedding the base's only head; of several the one that is nearest in
    the tree of modules. None where there is no such tensor, no nearest, or a config that says that the two are not
    tied.
    """
    role = vocabulary_role(name)
    if role is None or _tie_flag(base_config) is False:
        return None
    wanted = "head" if role == "embedding" else "embedding"
    partners = [spec for other, spec in base_tensors.items() if vocabulary_role(other) == wanted]
    nearest = max((_common_modules(name, spec.name) for spec in partners), default=0)
    partners = [spec for spec in partners if _common_modules(name, spec.name) == nearest]
    return partners[0] if len(partners) == 1 else None


def _module(name: str) -> str | None:
    """The last module of a weight's name: `wte` for `transformer.wte.weight`."""
    parts = name.split(".")
    return parts[-2] if len(parts) >= 2 and parts[-1] == "weight" else None


def _common_modules(one: str, other: str) -> int:
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _tie_flag(config: Mapping[str, object]) -> object:
    for key in _TEXT_CONFIGS:
        inner = config.get(key)
        if isinstance(inner, dict) and "tie_word_embeddings" in inner:
            return inner["tie_word_embeddings"]
    return config.get("tie_word_embeddings")
