"""B32, of all that is trained: what the config promises and the file lacks is said aloud, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_cases import Q, Tensors, draw, factors, merge, toy_base
from adapters import make_adapter

from mfs_decompose.source.adapter import resolve_adapter
from mfs_decompose.source.checkpoint import open_checkpoint

UP = "model.layers.0.mlp.up_proj"
P = "base_model.model."


def incomplete(root: Path, tensors: Tensors, base: Tensors | None = None, **config: Any) -> list[str]:
    _, found = merge(root, base or toy_base(), tensors, config)
    return [warning for warning in found.warnings if "incomplete" in warning]


def test_a_whole_module_that_is_not_there(tmp_path: Path) -> None:
    (warning,) = incomplete(tmp_path, factors(Q, 12, 8, 4), modules_to_save=["lm_head"])
    assert "modules_to_save" in warning
    assert "lm_head.weight" in warning
    assert "embed_tokens" not in warning


def test_a_part_of_the_whole_modules(tmp_path: Path) -> None:
    base = toy_base() | {f"model.layers.{n}.norm.weight": draw(f"n{n}", 8) for n in (0, 1)}
    tensors = factors(Q, 12, 8, 4) | {f"{P}model.layers.1.norm.weight": draw("new", 8)}
    (warning,) = incomplete(tmp_path, tensors, base, modules_to_save=["norm"])
    assert "lacks model.layers.0.norm.weight:" in warning


@pytest.mark.parametrize("modules", [["classifier", "score"], [], None])
def test_lists_longer_than_the_model_promise_nothing(tmp_path: Path, modules: list[str] | None) -> None:
    assert incomplete(tmp_path, factors(Q, 12, 8, 4), modules_to_save=modules) == []


def test_one_of_a_pair_that_may_be_tied_is_enough(tmp_path: Path) -> None:
    tensors = factors(Q, 12, 8, 4) | {f"{P}lm_head.weight": draw("head", 512, 8)}
    assert incomplete(tmp_path, tensors, modules_to_save=["embed_tokens", "lm_head"]) == []


@pytest.mark.parametrize("rows", [[3, 5], {"embed_tokens": [1]}])
def test_token_rows_that_are_not_there(tmp_path: Path, rows: object) -> None:
    (warning,) = incomplete(tmp_path, factors(Q, 12, 8, 4), trainable_token_indices=rows)
    assert "trainable_token_indices" in warning


@pytest.mark.parametrize("rows", [[], {}, {"embed_tokens": []}])
def test_no_token_rows_are_promised(tmp_path: Path, rows: object) -> None:
    assert incomplete(tmp_path, factors(Q, 12, 8, 4), trainable_token_indices=rows) == []


def test_targets_without_factors(tmp_path: Path) -> None:
    tensors = factors(Q, 12, 8, 4)
    (warning,) = incomplete(tmp_path, tensors, target_modules=["q_proj", "v_proj", "up_proj", "elsewhere"])
    assert "factors of up_proj, v_proj were trained" in warning


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["up_proj"]},
        {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 0}},
        {"target_modules": ["roj"]},
        {"target_modules": [3, None]},
        {"target_modules": {"q_proj": 1}},
    ],
    ids=str,
)
def test_targets_that_promise_nothing(tmp_path: Path, config: dict[str, Any]) -> None:
    assert incomplete(tmp_path, factors(Q, 12, 8, 4), **config) == []


def test_targets_inside_of_a_whole_module_and_experts(tmp_path: Path) -> None:
    base = toy_base() | {"model.layers.0.mlp.experts.1.w1.weight": draw("e", 14, 8)}
    del base[f"{UP}.weight"]
    tensors = factors(Q, 12, 8, 4) | {f"{P}model.layers.0.mlp.gate_proj.weight": draw("g", 14, 8)}
    names = ["q_proj", "gate_proj", "w1"]
    assert incomplete(tmp_path, tensors, base, modules_to_save=["gate_proj"], target_modules=names) == []


@pytest.mark.parametrize("kind", ["saved", "tied_saved_both", "tied_tokens", "tied_ensured", "experts", "all_linear"])
def test_what_peft_saves_is_whole(kind: str, tmp_path: Path) -> None:
    made = make_adapter(tmp_path, kind)
    found = resolve_adapter(open_checkpoint(made.adapter, "x"), open_checkpoint(made.base, "base"))
    assert found.warnings == ()


class TestNotes:
    def notes(self, root: Path, tensors: Tensors, **config: Any) -> tuple[str, ...]:
        _, found = merge(root, toy_base(), tensors, config)
        return tuple(found.notes)

    def test_new_tensors_are_not_counted_among_the_bases(self, tmp_path: Path) -> None:
        tensors = factors(Q, 12, 8, 4) | {f"{P}score.weight": draw("score", 2, 8)}
        found = self.notes(tmp_path, tensors, modules_to_save=["score"])
        assert found[0] == "adapter: changes 1 of the base's 6 tensors"
        assert any("brings score.weight" in note for note in found)

    @pytest.mark.parametrize("name", ["org/other-model", "/somewhere/else/tuned", "C:\\models\\tuned", "tuned/"])
    def test_another_base_by_name_is_named(self, tmp_path: Path, name: str) -> None:
        (note,) = [
            one for one in self.notes(tmp_path, factors(Q, 12, 8, 4), base_model_name_or_path=name) if "says" in one
        ]
        assert name in note
        assert note.endswith("the base given is base")

    @pytest.mark.parametrize("name", ["org/base", "/somewhere/base/", "Base", "", None])
    def test_the_same_name_is_not(self, tmp_path: Path, name: str | None) -> None:
        found = self.notes(tmp_path, factors(Q, 12, 8, 4), base_model_name_or_path=name)
        assert not any("says" in one for one in found)

    def test_a_snapshot_of_the_cache_has_the_name_of_its_model(self, tmp_path: Path) -> None:
        place = tmp_path / "models--org--nice-7b" / "snapshots"
        merge(tmp_path, toy_base(), factors(Q, 12, 8, 4), {"base_model_name_or_path": "org/Nice-7B"})
        place.mkdir(parents=True)
        (tmp_path / "base").rename(place / "0123")
        found = resolve_adapter(open_checkpoint(tmp_path / "adapter", "x"), open_checkpoint(place / "0123", "base"))
        assert not any("says" in one for one in found.notes)
