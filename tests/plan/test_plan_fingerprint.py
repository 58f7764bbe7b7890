"""A fingerprint has a facet for everything that could change a byte of the artifact, and for nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import INDEX, Family
from plan_cases import LLAMA, checkpoint, plan_of

from mfs_decompose.plan.fingerprint import changed_facets, fingerprint
from mfs_decompose.source.checkpoint import open_checkpoint

PLATFORM = {"device": "cpu", "capability": "AVX2"}
TOOL = {"name": "mfs_decompose", "torch": "2.13.0"}


def facets(recipe: dict[str, object] | None = None, **changes: Any) -> dict[str, Any]:
    plan = plan_of(checkpoint("a", LLAMA), checkpoint("b", LLAMA), recipe=recipe)
    given = {
        "plan": plan,
        "base": checkpoint("base", LLAMA),
        "variants": [checkpoint("a", LLAMA), checkpoint("b", LLAMA)],
        "platform": PLATFORM,
        "tool": TOOL,
    }
    return fingerprint(**{**given, **changes})


def test_the_same_run_has_the_same_fingerprint_also_through_json() -> None:
    assert facets() == facets()
    assert changed_facets(json.loads(json.dumps(facets())), facets()) == []


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"recipe": {"objective.budget": "6%"}}, ["the recipe"]),
        ({"recipe": {"seed": 3}}, ["the recipe"]),
        ({"recipe": {"output.shard_size": "1MB"}}, ["the recipe"]),
        ({"platform": {**PLATFORM, "capability": "AVX512"}}, ["the device"]),
        ({"tool": {**TOOL, "torch": "2.14.0"}}, ["the installed libraries"]),
        ({"base": checkpoint("base", LLAMA, mtime=8)}, ["the base"]),
        ({"base": None}, ["the base"]),
        ({"variants": [checkpoint("a", LLAMA), checkpoint("b", LLAMA, mtime=8)]}, ["variant 'b'"]),
        ({"variants": [checkpoint("a", LLAMA, file="other.safetensors"), checkpoint("b", LLAMA)]}, ["variant 'a'"]),
        ({"recipe": {"limits.max_ram": "3GB"}}, []),
        ({"recipe": {"about": "another word"}}, []),
    ],
)
def test_what_changed_is_named(changes: dict[str, Any], names: list[str]) -> None:
    assert changed_facets(facets(), facets(**changes)) == names


def test_other_variants_and_another_store() -> None:
    more = [checkpoint(id, LLAMA) for id in "abc"]
    assert changed_facets(facets(), facets(plan=plan_of(*more), variants=more)) == ["the variants", "variant 'c'"]
    fewer = [checkpoint("a", LLAMA)]
    assert changed_facets(facets(), facets(plan=plan_of(*fewer), variants=fewer)) == ["the variants", "variant 'b'"]
    linked = plan_of(checkpoint("a", LLAMA), checkpoint("b", LLAMA), store="hardlink")
    assert changed_facets(facets(), facets(plan=linked)) == ["the base mode"]


def test_a_header_of_the_same_size_with_other_bytes() -> None:
    other = checkpoint("b", LLAMA)
    other = replace(other, shards=(replace(other.shards[0], sha256="of another header"),))
    assert changed_facets(facets(), facets(variants=[checkpoint("a", LLAMA), other])) == ["variant 'b'"]


def _same_size(folder: Path) -> None:
    config = folder / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"max_position_embeddings": 128', '"max_position_embeddings": 129'))
    assert config.read_text() != text


def _reindent(folder: Path) -> None:
    index = folder / INDEX
    index.write_text(json.dumps(json.loads(index.read_text()), indent=1))


def _touch(folder: Path) -> None:
    os.utime(next(folder.glob("*.safetensors")), ns=(5, 5))


@pytest.mark.parametrize("change", [_same_size, _reindent, _touch])
def test_real_folders(tmp_path: Path, family: Family, change: Callable[[Path], None]) -> None:
    folder = tmp_path / "math"
    shutil.copytree(family.variants["math"], folder)
    variants = [checkpoint("a", LLAMA), open_checkpoint(folder, "math")]
    before = facets(variants=variants)
    assert facets(variants=[variants[0], open_checkpoint(folder, "math")]) == before
    change(folder)
    assert changed_facets(before, facets(variants=[variants[0], open_checkpoint(folder, "math")])) == ["variant 'math'"]
