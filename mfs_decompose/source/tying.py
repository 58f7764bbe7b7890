"""Tied embeddings: a checkpoint whose head is its embedding matrix stores only one of the two."""

from __future__ import annotations

from collections.abc import Mapping

from mfs_decompose.source.header import TensorSpec

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings", "shared")
_HEADS = ("lm_head", "embed_out")


def find_tied_partner(
    name: str, base_tensors: Mapping[str, TensorSpec], base_config: Mapping[str, object]
) -> TensorSpec | None:
    """The tensor of the base that does the work of `name`, which the base itself does not store.

    A head finds the base's only embedding, an embedding the base's only head; None where there is no such tensor, more
    than one, or a config that says that the two are not tied.
    """
    wanted = _HEADS if _module(name) in _EMBEDDINGS else _EMBEDDINGS if _module(name) in _HEADS else ()
    if not wanted or _tie_flag(base_config) is False:
        return None
    partners = [spec for other, spec in base_tensors.items() if _module(other) in wanted]
    return partners[0] if len(partners) == 1 else None


def _module(name: str) -> str | None:
    """The last module of a weight's name: `wte` for `transformer.wte.weight`."""
    parts = name.split(".")
    return parts[-2] if len(parts) >= 2 and parts[-1] == "weight" else None


def _tie_flag(config: Mapping[str, object]) -> object:
    inner = config.get("text_config")
    if isinstance(inner, dict) and "tie_word_embeddings" in inner:
        return inner["tie_word_embeddings"]
    return config.get("tie_word_embeddings")
