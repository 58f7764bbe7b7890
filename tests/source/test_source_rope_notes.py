"""B41: variants of different rotary embeddings are not averaged without a word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from checkpoints import random_checkpoint
from rename_trees import checkpoint, text

from mfs_decompose.source.align import align, align_mean
from mfs_decompose.source.checkpoint import open_checkpoint
from mfs_decompose.source.rope_notes import describe_rope_differences

Config = Mapping[str, object]


def notes(*configs: Config) -> list[str]:
    return list(describe_rope_differences([checkpoint(f"v{at}", text(), one) for at, one in enumerate(configs)]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 500000}),
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ({"rope_theta": 10000.0, "rope_scaling": None}, {"hidden_size": 64}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6}},
        ),
        ({"rope_theta": 5e5}, {"text_config": {"rope_theta": 5e5}, "rope_theta": 3.0}),
        ({"rope_theta": 5e5}, {}),
        (
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
        ),
    ],
)
def test_equal_settings_in_either_spelling(one: Config, other: Config) -> None:
    assert notes(one, other) == []


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 2e7}, "rope_theta: 500000.0 (v0), 20000000.0 (v1);"),
        (
            {"rope_theta": 5e5},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_theta: 500000.0 (v0), 10000.0 (v1);",
        ),
        ({"rope_theta": 5e5}, {"hidden_size": 64}, "rope_theta: 500000.0 (v0), 10000.0 (v1);"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "factor: 4.0 (v0), 2.0 (v1);",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_theta": 1e4},
            "factor: 4.0 (v0), none (v1);",
        ),
        ({"text_config": {"rope_theta": 5e5}}, {"rope_theta": 1e6}, "rope_theta: 500000.0 (v0), 1000000.0 (v1);"),
    ],
)
def test_other_settings_are_named_with_both_values(one: Config, other: Config, said: str) -> None:
    assert any(note.startswith(f"the variants that are averaged differ in {said}") for note in notes(one, other))


def test_every_value_has_its_variants() -> None:
    (note,) = notes({"rope_theta": 5e5}, {"rope_theta": 1e6}, {"rope_theta": 5e5}, {})
    assert "500000.0 (v0, v2), 1000000.0 (v1);" in note


def test_odd_configs_are_no_error() -> None:
    assert notes({"rope_parameters": "odd"}, {"rope_theta": [1]}, {"text_config": 3}) != []


def test_only_what_is_averaged_is_warned_of(tmp_path: Path) -> None:
    import torch

    variants = []
    for id, theta in (("a", 5e5), ("b", 2e7)):
        folder = random_checkpoint(tmp_path / id, {"model.w.weight": torch.ones(5, 3)})
        (folder / "config.json").write_text(json.dumps({"rope_theta": theta}))
        variants.append(open_checkpoint(folder, id))
    tensors, found = align_mean(variants)
    assert [note for note in found.notes if "rope_theta: 500000.0 (a), 20000000.0 (b)" in note]
    assert align(tensors, variants, {}).notes == ()
