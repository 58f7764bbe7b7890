from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from mfs_decompose.source.rope_spelling import join_rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}

OLD: list[tuple[str, dict[str, Any]]] = [
    ("LlamaConfig", {"rope_theta": 500000.0, "rope_scaling": None}),
    ("LlamaConfig", {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("LlamaConfig", {"rope_theta": 7.0, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 128}}),
    ("LlamaConfig", {"rope_theta": 7.0, "rope_scaling": LLAMA3, "max_position_embeddings": 999}),
    ("MistralConfig", {"rope_theta": 1e6}),
    ("Qwen2Config", {"rope_theta": 1e6, "rope_scaling": YARN, "max_position_embeddings": 77}),
    ("GPTNeoXConfig", {"rotary_emb_base": 12345, "rotary_pct": 0.5}),
    ("Gemma3TextConfig", {"rope_theta": 1e6, "rope_local_base_freq": 5.0, "rope_scaling": LINEAR}),
    ("ModernBertConfig", {"global_rope_theta": 3.0, "local_rope_theta": 2.0}),
    (
        "Phi3Config",
        {
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 8192,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 36, "long_factor": [2.0] * 36},
        },
    ),
]


@pytest.mark.parametrize(("kind", "old"), OLD)
def test_the_old_spelling_reads_as_transformers_reads_it(kind: str, old: dict[str, Any]) -> None:
    import transformers

    config = getattr(transformers, kind)(**json.loads(json.dumps(old)))
    new = json.loads(config.to_json_string(use_diff=False))
    assert "rope_parameters" in new
    written_old = {key: value for key, value in new.items() if key != "rope_parameters"} | old
    assert join_rope(written_old)["rope_parameters"] == join_rope(new)["rope_parameters"]
    given = old.get("rope_theta", old.get("rotary_emb_base", old.get("global_rope_theta")))
    joined = join_rope(old)["rope_parameters"]
    assert isinstance(joined, Mapping)
    assert joined.get("full_attention", joined)["rope_theta"] == given


def test_what_is_given_is_not_changed() -> None:
    config = {"rope_theta": 3.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None, "a": 1}
    before = json.dumps(config)
    assert join_rope(config) == {"a": 1, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3.0}}
    assert json.dumps(config) == before


@pytest.mark.parametrize("config", [{}, {"a": 1}, {"rope_scaling": [1, 2]}, {"rope_parameters": "x", "rope_theta": 1}])
def test_what_is_no_spelling_stays(config: dict[str, Any]) -> None:
    assert join_rope(config) == config


def test_a_default_type_alone_says_nothing() -> None:
    assert join_rope({"rope_scaling": None}) == {}
    assert join_rope({"rope_scaling": {"type": "default"}}) == {}
    assert join_rope({"rope_parameters": {"rope_type": "default"}, "a": 1}) == {"a": 1}


def test_layer_kinds_stay_apart() -> None:
    config = {
        "rope_theta": 9.0,
        "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 2.0}},
    }
    assert join_rope(config)["rope_parameters"] == {
        "full_attention": {"rope_type": "default", "rope_theta": 9.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2.0},
    }
