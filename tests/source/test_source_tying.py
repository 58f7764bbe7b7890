from __future__ import annotations

import pytest

from mfs_decompose.source.header import TensorSpec
from mfs_decompose.source.tying import find_tied_partner, vocabulary_role


def specs(*names: str) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, "BF16", (5, 3)) for name in names}


@pytest.mark.parametrize(
    ("name", "base", "partner"),
    [
        ("lm_head.weight", ["model.embed_tokens.weight", "model.norm.weight"], "model.embed_tokens.weight"),
        ("lm_head.weight", ["transformer.wte.weight", "transformer.wpe.weight"], "transformer.wte.weight"),
        ("embed_out.weight", ["gpt_neox.embed_in.weight"], "gpt_neox.embed_in.weight"),
        ("lm.lm_head.weight", ["lm.model.embed_tokens.weight"], "lm.model.embed_tokens.weight"),
        ("model.embed_tokens.weight", ["lm_head.weight", "model.norm.weight"], "lm_head.weight"),
        ("lm_head.weight", ["language_model.model.embed_tokens.weight"], "language_model.model.embed_tokens.weight"),
        ("language_model.lm_head.weight", ["model.embed_tokens.weight"], "model.embed_tokens.weight"),
        ("a.lm_head.weight", ["a.m.embed_tokens.weight", "b.embed_tokens.weight"], "a.m.embed_tokens.weight"),
        ("a.m.wte.weight", ["b.lm_head.weight", "a.lm_head.weight"], "a.lm_head.weight"),
        ("a.lm_head.weight", ["a.m.wte.weight", "a.n.wte.weight", "b.wte.weight"], None),
        ("lm_head.weight", ["a.embed_tokens.weight", "b.embed_tokens.weight"], None),
        ("lm_head.weight", ["model.norm.weight"], None),
        ("lm_head.bias", ["model.embed_tokens.weight"], None),
        ("model.norm.weight", ["model.embed_tokens.weight"], None),
        ("weight", ["model.embed_tokens.weight"], None),
        ("my_lm_head.weight", ["model.embed_tokens.weight"], None),
    ],
)
def test_partners(name: str, base: list[str], partner: str | None) -> None:
    found = find_tied_partner(name, specs(*base), {})
    assert (found.name if found else None) == partner


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({}, True),
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": None}, True),
        ({"text_config": {"tie_word_embeddings": False}}, False),
        ({"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": False}, True),
        ({"text_config": {}, "tie_word_embeddings": False}, False),
        ({"text_config": "odd"}, True),
        ({"language_config": {"tie_word_embeddings": False}}, False),
        ({"llm_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True}, False),
    ],
)
def test_the_config_of_the_base_is_believed(config: dict[str, object], tied: bool) -> None:
    found = find_tied_partner("lm_head.weight", specs("model.embed_tokens.weight"), config)
    assert (found is not None) is tied


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("language_model.model.embed_tokens.weight", "embedding"),
        ("wte.weight", "embedding"),
        ("language_model.lm_head.weight", "head"),
        ("embed_out.weight", "head"),
        ("lm_head.bias", None),
        ("model.embed_tokens_per_layer.weight", None),
        ("wpe.weight", None),
        ("weight", None),
    ],
)
def test_roles(name: str, role: str | None) -> None:
    assert vocabulary_role(name) == role
