"""The same inputs and recipe give the same bytes, whatever the threads, the memory, the order and the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EMBEDDING, Family, read_weights
from pipeline_runs import asked, back, contents, measured_error, moved, record, run, toy

from mfs_decompose.artifact.verify import verify
from mfs_decompose.pipeline import base_stage, encode, reading, survey
from mfs_decompose.pipeline.prepare import prepare
from mfs_decompose.plan import units


@pytest.mark.parametrize("threads", [2, 4])
def test_at_any_number_of_threads(tmp_path: Path, art: Path, family: Family, threads: int) -> None:
    run(tmp_path / "art", family.base, family.variants, threads=threads)
    assert contents(tmp_path / "art") == contents(art)


def test_in_any_order_of_the_variants(tmp_path: Path, art: Path, family: Family) -> None:
    backwards = dict(sorted(family.variants.items(), reverse=True))
    run(tmp_path / "art", family.base, backwards)
    assert contents(tmp_path / "art") == contents(art)


def test_under_any_limit_of_memory(tmp_path: Path, art: Path, family: Family) -> None:
    plan = prepare(asked(tmp_path / "art", family.base, family.variants)).plan
    least = 350_000_000 + max(unit.peak_bytes for unit in plan.units)
    run(tmp_path / "art", family.base, family.variants, {"limits.max_ram": least}, threads=3)
    assert contents(tmp_path / "art") == contents(art)


def test_in_another_process_with_other_hashes(tmp_path: Path, art: Path, family: Family) -> None:
    arguments = {
        "variants": {id: str(folder) for id, folder in family.variants.items()},
        "base": str(family.base),
        "out": str(tmp_path / "art"),
    }
    code = (
        "import json, sys, pathlib\n"
        "from mfs_decompose.pipeline.decompose import decompose\n"
        "from mfs_decompose.pipeline.request import DecomposeRequest\n"
        "from mfs_decompose.recipe.load import load_recipe\n"
        "given = json.loads(sys.argv[1])\n"
        "out = pathlib.Path(given['out'])\n"
        "decompose(DecomposeRequest(given['variants'], out, load_recipe(), base=given['base'], device='cpu'))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code, json.dumps(arguments)], check=True, env=environment, cwd=tmp_path)
    assert contents(tmp_path / "art") == contents(art)


def test_a_seed_changes_sketches_and_is_written_down(tmp_path: Path, art: Path, family: Family) -> None:
    run(tmp_path / "art", family.base, family.variants, {"seed": 5})
    assert contents(tmp_path / "art") != contents(art)
    again = {
        variant["id"]: variant for variant in json.loads((tmp_path / "art" / "manifest.json").read_bytes())["variants"]
    }
    for id in family.variants:
        one, two = (sum(tensor["error"] for tensor in v["tensors"].values()) for v in (again[id], record(art, id)))
        assert one == pytest.approx(two, rel=0.05)


@pytest.mark.parametrize("recipe", [{"base.mode": "mean"}, {"deltas.default.codec": "lossless"}])
def test_other_ways_at_other_threads_and_orders(tmp_path: Path, family: Family, recipe: dict[str, object]) -> None:
    found = []
    for threads, reverse in ((1, False), (3, True)):
        variants = dict(sorted(family.variants.items(), reverse=reverse))
        base = None if recipe.get("base.mode") == "mean" else family.base
        run(tmp_path / str(threads), base, variants, recipe, threads=threads)
        found.append(contents(tmp_path / str(threads)))
    assert found[0] == found[1]


@pytest.mark.slow
def test_matrices_large_enough_for_threads_to_matter(tmp_path: Path) -> None:
    """LAPACK shares out work by its threads from a few hundred columns on, and gives other last bits."""
    generator = torch.Generator().manual_seed(3)
    base = {f"layer.{at}.weight": torch.randn(900, 640, generator=generator).bfloat16() for at in range(3)}
    base["embed.weight"] = torch.randn(6007, 320, generator=generator).bfloat16()
    folders = {id: toy(tmp_path / id, moved(base, seed)) for seed, id in enumerate(("one", "two"), start=1)}
    toy(tmp_path / "base", base)
    found = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        try:
            run(tmp_path / str(threads), tmp_path / "base", folders, {"objective.budget": "9%"}, threads=threads)
        finally:
            torch.set_num_threads(1)
        found.append(contents(tmp_path / str(threads)))
    assert found[0] == found[1] == found[2]


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row blocks of 2,000 elements: every matrix but k_proj and v_proj is larger than one."""
    monkeypatch.setattr(units, "BLOCK_ELEMENTS", 2000)
    for module in (reading, survey):
        monkeypatch.setattr(module, "ROW_BLOCK_ELEMENTS", 2000)
    for module in (units, encode, survey, base_stage):
        monkeypatch.setattr(module, "DECODE_ELEMENTS", 700)


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("recipe", [{}, {"deltas.default.codec": "sparse", "objective.density": "9%"}])
def test_large_tensors_go_in_row_blocks(tmp_path: Path, family: Family, art: Path, recipe: dict[str, object]) -> None:
    plan = prepare(asked(tmp_path / "art", family.base, family.variants, recipe)).plan
    blocked = {unit.items[0].name.rpartition(".")[0].rpartition(".")[2] for unit in plan.units if unit.kind == "blocks"}
    assert blocked == {"embed_tokens", "up_proj", "gate_proj", "down_proj", "q_proj", "o_proj"}
    report = run(tmp_path / "art", family.base, family.variants, recipe)
    run(tmp_path / "two", family.base, dict(reversed(family.variants.items())), recipe, threads=2)
    assert contents(tmp_path / "two") == contents(tmp_path / "art")
    assert verify(tmp_path / "art", "values").ok
    base = read_weights(family.base)
    for variant in report.variants:
        _, served = back(tmp_path / "art", variant.id, tmp_path / variant.id, dtype="float32")
        found = measured_error(read_weights(family.variants[variant.id]), base, served)
        assert found == pytest.approx(variant.rel_error, rel=1e-6)
        if not recipe:
            whole = sum(tensor["error"] for tensor in record(art, variant.id)["tensors"].values())
            cut = sum(tensor["error"] for tensor in record(tmp_path / "art", variant.id)["tensors"].values())
            assert cut == pytest.approx(whole, rel=0.05)


@pytest.mark.usefixtures("tiny_blocks")
def test_blocks_of_a_grown_vocabulary_and_of_exact_tensors(tmp_path: Path, family: Family) -> None:
    rules: list[dict[str, Any]] = [{"match": "*mlp*", "codec": "lossless"}, {"match": "*norm*", "codec": "raw"}]
    recipe = {"deltas.rules": rules, "objective.rank": 2}
    run(tmp_path / "art", family.base, {"vocab": family.variants["vocab"]}, recipe)
    original = read_weights(family.variants["vocab"])
    _, weights = back(tmp_path / "art", "vocab", tmp_path / "out")
    for name, tensor in record(tmp_path / "art", "vocab")["tensors"].items():
        assert tensor["exact"] == ("mlp" in name or "norm" in name)
        assert not tensor["exact"] or weights[name].equal(original[name])
    assert weights[EMBEDDING][257:].equal(original[EMBEDDING][257:])


@pytest.mark.usefixtures("tiny_blocks")
def test_a_mean_base_in_blocks(tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = {id: family.variants[id] for id in ("math", "code")}
    run(tmp_path / "blocks", None, variants, {"objective.rank": 2})
    assert verify(tmp_path / "blocks", "values").ok
    monkeypatch.undo()
    run(tmp_path / "whole", None, variants, {"objective.rank": 2})
    name = "base-00001-of-00001.safetensors"
    assert (tmp_path / "blocks" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
