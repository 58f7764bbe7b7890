"""`--save-plan`, `--plan` and the origins of the recipe, through the real program."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Family, fine_tune
from e2e_program import check_document, refused, run, succeeded, tree

from mfs_decompose.recipe.load import load_recipe


@pytest.fixture
def sources(family: Family, tmp_path: Path) -> dict[str, Path]:
    """Copies that a test may change."""
    folders = {id: shutil.copytree(family.variants[id], tmp_path / "tuned" / id) for id in ("math", "vocab")}
    return {"base": shutil.copytree(family.base, tmp_path / "base"), **folders}


def words(sources: dict[str, Path], out: Path, *more: object) -> list[object]:
    refs = [f"{id}={folder}" for id, folder in sources.items() if id != "base"]
    return ["decompose", "--base", sources["base"], "--variants", *refs, "--out", out, *more]


@pytest.fixture
def plan(sources: dict[str, Path], tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    succeeded(*words(sources, tmp_path / "art", "--rank", 5, "--seed", 3), "--dry-run", "--save-plan", path)
    return path


# Origins.


def test_a_verbose_dry_run_says_where_each_value_came_from(sources: dict[str, Path], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("schema: mfs.recipe/1\nseed: 4\ndeltas:\n  default:\n    factors: int8\n    codec: lowrank\n")
    asked = words(sources, tmp_path / "art", "-r", mine, "--set", "output.shard_size=64kB", "--budget", "40%",
                  "--max-ram", "9GB", "--dry-run")  # fmt: skip
    document = succeeded(*asked, "--json").document
    check_document(document)
    assert document["recipe_origins"] == {
        "base.mode": "default",
        "base.store": "default",
        "objective.budget": "--budget",
        "deltas.default.codec": f"recipe {mine}:6",
        "deltas.default.factors": f"recipe {mine}:5",
        "deltas.keep_exact": "default",
        "output.shard_size": "--set",
        "limits.max_ram": "--max-ram",
        "seed": f"recipe {mine}:2",
    }
    said = succeeded(*asked, "-v").out.splitlines()
    head = next(at for at, line in enumerate(said) if line.split() == ["key", "value", "from"])
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in said[head + 2 : head + 11]}
    assert rows["objective.budget"] == ["0.4", "--budget"]
    assert rows["deltas.default.factors"] == ["int8", f"recipe {mine}:5"]
    assert rows["output.shard_size"] == ["64000", "--set"]
    assert rows["limits.max_ram"] == ["9000000000", "--max-ram"]
    assert rows["base.mode"] == ["default", "default"]
    assert {key: origin for key, (_, origin) in rows.items()} == document["recipe_origins"]
    assert "--budget" not in succeeded(*asked).out


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (("--base-mode", "known"), "base.mode"),
        (("--base-store", "reference"), "base.store"),
        (("--codec", "lossless"), "deltas.default.codec"),
        (("--budget", "90%"), "objective.budget"),
        (("--rank", "2"), "objective.rank"),
        (("--seed", "2"), "seed"),
        (("--shard-size", "1GB"), "output.shard_size"),
        (("--max-ram", "8GB"), "limits.max_ram"),
        (("--max-disk", "8GB"), "limits.max_disk"),
    ],
)
def test_every_option_of_a_key_is_named(
    sources: dict[str, Path], tmp_path: Path, given: tuple[str, str], key: str
) -> None:
    document = succeeded(*words(sources, tmp_path / "art", *given, "--set", "seed=1", "--dry-run", "--json")).document
    assert document["recipe_origins"][key] == given[0]
    density = ("--codec", "sparse", "--density", "2%", "--recipe", "lowrank-int4")
    document = succeeded(*words(sources, tmp_path / "art", *density, "--dry-run", "--json")).document
    assert document["recipe_origins"]["objective.density"] == "--density"


def test_a_preset_is_named(sources: dict[str, Path], tmp_path: Path) -> None:
    document = succeeded(*words(sources, tmp_path / "art", "-r", "lowrank-r16", "--dry-run", "--json")).document
    assert document["recipe_origins"]["objective.rank"] == "preset lowrank-r16:6"


# Saving.


def test_a_saved_plan_is_the_document_of_the_dry_run(sources: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = words(sources, tmp_path / "art", "--rank", 5, "--dry-run")
    ran = succeeded(*asked, "--save-plan", path, "--json")
    check_document(ran.document)
    timed = {"seconds_estimated", "hashing_measured"}
    assert json.loads(path.read_text()) == {key: value for key, value in ran.document.items() if key not in timed}
    ids = [source["id"] for source in ran.document["sources"]]
    assert ids == ["base", "math", "vocab"]
    for source in ran.document["sources"]:
        assert Path(source["ref"]) == sources[source["id"]]
        for shard in source["shards"]:
            assert (sources[source["id"]] / shard["file"]).stat().st_size == shard["bytes"]
    assert len(ran.document["sources"][1]["shards"]) == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "plan.json", "tuned"]
    assert f"only the plan was written: {path}" in ran.err
    assert f"next: mfs decompose --plan {path} --out {tmp_path / 'art'}" in ran.err
    succeeded(*asked, "--seed", 9, "--save-plan", path)  # an older plan may be replaced
    assert json.loads(path.read_text())["recipe"]["seed"] == 9


def test_a_plan_is_saved_by_a_dry_run_alone(sources: dict[str, Path], tmp_path: Path) -> None:
    message, _ = refused(2, *words(sources, tmp_path / "art", "--save-plan", tmp_path / "plan.json"))
    assert message == "--save-plan needs --dry-run"
    assert not (tmp_path / "plan.json").exists()


def test_a_plan_replaces_nothing_but_a_plan(sources: dict[str, Path], tmp_path: Path) -> None:
    config = sources["base"] / "config.json"
    before = tree(tmp_path)
    asked = words(sources, tmp_path / "art", "--dry-run")
    message, hint = refused(14, *asked, "--save-plan", config)
    assert message == f"expected no file or a plan at {config}, found something else"
    assert hint == "Choose another file for --save-plan."
    assert refused(14, *asked, "--save-plan", sources["base"])[0].startswith("expected no file or a plan at ")
    message, _ = refused(14, *asked, "--save-plan", tmp_path / "no" / "plan.json")
    assert message == f"{tmp_path / 'no'} is not a folder that can be written to"
    assert tree(tmp_path) == before


# Running it.


def test_a_plan_gives_the_artifact_of_its_command(sources: dict[str, Path], plan: Path, tmp_path: Path) -> None:
    direct = succeeded(*words(sources, tmp_path / "direct", "--rank", 5, "--seed", 3, "--json")).document
    document = succeeded("decompose", "--plan", plan, "--out", tmp_path / "art", "--threads", 1, "--json").document
    assert document["written"]
    assert document["artifact_digest"] == direct["artifact_digest"]
    again = succeeded("decompose", "--plan", plan, "--out", tmp_path / "art", "--json").document
    assert not again["written"]
    succeeded("verify", tmp_path / "art", "--level", "values")


def test_a_planned_dry_run_shows_the_plan(plan: Path, tmp_path: Path) -> None:
    document = succeeded("decompose", "--plan", plan, "--out", tmp_path / "art", "--max-ram", "8GB", "-n", "--json")
    saved = json.loads(plan.read_text())
    different = {"recipe_origins", "disk_free", "peak_ram", "seconds_estimated", "hashing_measured"}
    assert {k: v for k, v in document.document.items() if k not in different} == {
        k: v for k, v in saved.items() if k not in different
    }
    origins = document.document["recipe_origins"]
    assert origins.pop("limits.max_ram") == "--max-ram"
    assert set(origins.values()) == {f"plan {plan}"}
    assert set(origins) == set(saved["recipe_origins"])


def test_a_mean_is_planned_too(sources: dict[str, Path], family: Family, tmp_path: Path) -> None:
    asked = ("--variants", f"m={sources['math']}", f"c={family.variants['code']}", "--rank", 4, "--out", tmp_path / "a")
    direct = succeeded("decompose", *asked, "--json").document
    plan = tmp_path / "plan.json"
    succeeded("decompose", *asked[:-1], tmp_path / "b", "--dry-run", "--save-plan", plan)
    found = succeeded("decompose", "--plan", plan, "--out", tmp_path / "b", "--json").document
    assert found["artifact_digest"] == direct["artifact_digest"]
    message, _ = refused(2, "decompose", "--plan", plan, "--base", sources["base"], "--out", tmp_path / "c")
    assert message == f"--base contradicts the plan {plan}, which has no base"


def test_sources_may_have_moved(sources: dict[str, Path], plan: Path, tmp_path: Path) -> None:
    elsewhere = {id: folder.rename(tmp_path / f"new-{id}") for id, folder in sources.items()}
    asked = ("decompose", "--plan", plan, "--out", tmp_path / "art")
    assert str(sources["base"]) in refused(11, *asked)[0]
    message, _ = refused(11, *asked, "--base", elsewhere["base"])
    assert str(sources["math"]) in message
    moved = ("--base", elsewhere["base"], "--variants", f"vocab={elsewhere['vocab']}", f"math={elsewhere['math']}")
    assert succeeded(*asked, *moved, "--json").document["written"]


def test_a_source_that_changed_is_refused_by_name(
    sources: dict[str, Path], family: Family, plan: Path, tmp_path: Path
) -> None:
    shutil.rmtree(sources["math"])
    fine_tune(family.base, sources["math"], seed=77, kind="dense")
    asked = ("decompose", "--plan", plan, "--out", tmp_path / "art")
    for more in ((), ("--dry-run",)):
        message, hint = refused(12, *asked, *more)
        assert message.startswith(f"'math' is not what {plan} was made for: {sources['math']}/model")
        assert hint == "Make the plan again: mfs decompose ... --dry-run --save-plan FILE"
    swapped = ("--base", family.variants["vocab"], "--variants", f"math={family.variants['math']}")
    assert refused(12, *asked, *swapped)[0].startswith("base is not what ")
    assert not (tmp_path / "art").exists()


def test_other_weights_under_the_same_headers_are_the_same_plan(
    sources: dict[str, Path], plan: Path, tmp_path: Path
) -> None:
    shard = min(sources["math"].glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert succeeded("decompose", "--plan", plan, "--out", tmp_path / "art", "--json").document["written"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--rank", "6"), "--rank contradicts"),
        (("--budget", "40%"), "--budget contradicts"),
        (("--seed", "4"), "--seed contradicts"),
        (("--codec", "raw", "--seed", "4"), None),
        (("--shard-size", "1kB"), "--shard-size contradicts"),
        (("--base-mode", "mean"), "--base-mode contradicts"),
        (("--base-store", "reference"), "--base-store contradicts"),
        (("--set", "deltas.default.factors=int8"), "--set deltas.default.factors contradicts"),
        (("--seed", "4", "--rank", "6"), "--rank and --seed contradict"),
        (("--recipe", "lowrank-r16"), "--recipe contradicts"),
    ],
)
def test_what_contradicts_the_plan_is_a_mistake(
    plan: Path, tmp_path: Path, given: tuple[str, ...], named: str | None
) -> None:
    message, _ = refused(2, "decompose", "--plan", plan, "--out", tmp_path / "art", *given)
    assert named is None or message == f"{named} the plan {plan}"


def test_what_repeats_the_plan_is_none(plan: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("schema: mfs.recipe/1\nobjective: {rank: 5}\nseed: 3\n")
    same = ("--rank", "5", "--seed", "3", "--codec", "lowrank", "--base-mode", "known", "--base-store", "copy",
            "--set", "deltas.default.factors=int4", "--shard-size", "2GB", "--max-disk", "9GB")  # fmt: skip
    ran = run("decompose", "--plan", plan, "--out", tmp_path / "art", *same, "-n", "--json")
    assert ran.code == 0, ran.err
    assert ran.document["recipe"] == load_recipe(mine).canonical()
    succeeded("decompose", "--plan", plan, "--out", tmp_path / "art", "--recipe", mine, "-n")


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        (("maths=x",), "has no variant 'maths'; did you mean 'math'?"),
        (("math=a", "other=b"), "has no variant 'other'"),
    ],
)
def test_ids_are_those_of_the_plan(plan: Path, tmp_path: Path, variants: tuple[str, ...], said: str) -> None:
    message, hint = refused(2, "decompose", "--plan", plan, "--out", tmp_path / "art", "--variants", *variants)
    assert message == f"the plan {plan} {said}"
    assert hint == "It has math, vocab: --variants ID=REF says where one is now"


def test_a_bad_plan_file_is_refused(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "art"
    assert refused(10, "decompose", "--plan", tmp_path / "none", "--out", out)[0].startswith("cannot read the plan")
    document: dict[str, Any] = json.loads(plan.read_text())
    document["variants"][0]["max_bytes"] += 1
    plan.write_text(json.dumps(document))
    message, _ = refused(10, "decompose", "--plan", plan, "--out", out)
    assert message.startswith(f"the plan {plan} would come out otherwise now: it was edited")
    plan.write_text("{}")
    assert "expected the schema mfs.plan/1" in refused(10, "decompose", "--plan", plan, "--out", out)[0]
    assert not out.exists()


def test_without_a_plan_variants_are_needed(tmp_path: Path) -> None:
    message, hint = refused(2, "decompose", "--base", tmp_path, "--out", tmp_path / "art")
    assert message == "expected --variants, found none"
    assert "--variants math=./math" in hint
