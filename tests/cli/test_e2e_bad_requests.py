"""Requests that cannot be met: names, places, limits, objectives, recipes. Sources are good in all of them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import Family
from e2e_program import refused, run, succeeded, tree

RECIPE = "schema: mfs.recipe/1\nobjective:\n  budget: 40%\n"


@pytest.fixture
def words(family: Family) -> list[str]:
    """A command that would succeed, but for `--out`."""
    return ["decompose", "--base", str(family.base), "--variants", str(family.variants["math"])]


@pytest.fixture
def untouched(family: Family, tmp_path: Path) -> Callable[[], None]:
    """Asserts that neither the test's folder nor any source has changed since the test began."""
    sources = [family.base, *family.variants.values()]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("do not lose me")
    before = [tree(folder) for folder in (tmp_path, *sources)]

    def check() -> None:
        assert [tree(folder) for folder in (tmp_path, *sources)] == before

    return check


# Names of variants.


@pytest.mark.parametrize(
    ("ids", "message", "hint"),
    [
        (("a={math}", "a={code}"), "--variants: the id 'a' names both ", "give each its own id"),
        (("{math}", "{math}"), "--variants: the id 'math' names both ", "give each its own id"),
        (("Tuned={math}", "tuned={code}"), "two variants are called 'Tuned' and 'tuned'", "an id of its own"),
        (("team/math={math}",), "expected an id of letters, digits and . _ - ", "name it yourself: --variants ID="),
        (("all={math}",), "found 'all'", "name it yourself"),
        (("base={math}",), "found 'base'", "name it yourself"),
        (("{base}",), "found 'base'", "name it yourself"),
        (("={math}",), "found ''", "name it yourself"),
        (("m\x1b[31m={math}",), "found 'm\\x1b[31m'", "name it yourself"),
        (("math=",), "expected ID=REF, found 'math='", ""),
    ],
)
def test_an_id_that_cannot_name_a_variant(
    family: Family, tmp_path: Path, untouched: Callable[[], None], ids: tuple[str, ...], message: str, hint: str
) -> None:
    places = {"base": family.base, **family.variants}
    given = [id.format(**places) for id in ids]
    said, typed = refused(2, "decompose", "--base", family.base, "--variants", *given, "--out", tmp_path / "art")
    assert message in said
    assert hint in typed
    untouched()


def test_a_path_with_an_equals_sign_is_still_a_path(family: Family, tmp_path: Path) -> None:
    folder = shutil.copytree(family.variants["math"], tmp_path / "lr=1e-4" / "step 9")
    ran = run("decompose", "--base", family.base, "--variants", folder, "--out", tmp_path / "art", "--dry-run")
    assert "found 'step 9'" in ran.err  # named by its last part, which is no id
    shutil.move(folder, folder.with_name("step-9"))
    with_base = ("decompose", "--base", family.base, "--variants")
    plan = succeeded(*with_base, folder.with_name("step-9"), "--out", tmp_path / "art", "--dry-run", "--json")
    assert [v["id"] for v in plan.document["variants"]] == ["step-9"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "expected a base or at least two variants, found one variant"),
        (("--base-mode", "known"), "expected a base or at least two variants, found one variant"),
        (("--base-mode", "refined"), "expected a base or at least two variants, found one variant"),
        (
            ("--base-mode", "meen"),
            "base.mode: expected default, known, mean, refined, shared or auto, found 'meen'; did you mean 'mean'?",
        ),
    ],
)
def test_one_variant_without_a_base(
    family: Family, tmp_path: Path, untouched: Callable[[], None], given: tuple[str, ...], message: str
) -> None:
    said, _ = refused(2, "decompose", "--variants", family.variants["math"], *given, "--out", tmp_path / "art")
    assert said == message
    untouched()


# Places.


@pytest.mark.parametrize("flags", [(), ("--overwrite", "--yes"), ("--no-resume",)])
def test_an_output_with_other_files_is_never_touched(
    words: list[str], tmp_path: Path, untouched: Callable[[], None], flags: tuple[str, ...]
) -> None:
    said, hint = refused(14, *words, *flags, "--out", tmp_path / "mine")
    assert said.endswith("to be absent or an artifact, found a folder with other files")
    assert hint == "Choose another --out."
    said, _ = refused(14, *words, *flags, "--out", tmp_path / "mine" / "notes.txt")
    assert "found something that is no folder" in said
    untouched()


@pytest.mark.parametrize("place", ["{math}", "{base}", "{base}/inside", "{math}/deep/inside", "{base}/.."])
def test_an_output_must_not_overlap_a_source(
    family: Family, words: list[str], untouched: Callable[[], None], place: str
) -> None:
    out = place.format(base=family.base, **family.variants)
    for flags in ((), ("--overwrite", "--yes")):
        said, hint = refused(14, *words, *flags, "--out", out)
        assert "overlaps the source" in said
        assert hint == "Choose another --out."
    untouched()


def test_a_link_to_a_source_is_that_source(family: Family, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(family.variants["math"], target_is_directory=True)
    before = tree(family.variants["math"])
    said, _ = refused(14, *words, "--out", tmp_path / "link")
    assert "overlaps the source" in said
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    said, _ = refused(14, *words, "--out", tmp_path / "nowhere")
    assert "found something that is no folder" in said
    assert tree(family.variants["math"]) == before


def test_an_output_that_cannot_be_made(
    words: list[str], tmp_path: Path, untouched: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, hint = refused(14, *words, "--out", tmp_path / "mine" / "notes.txt" / "art")
    assert said.endswith("notes.txt is not a folder that can be written to")
    assert hint == "Choose another --out."
    # The tests may run as root, who may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    said, _ = refused(14, *words, "--out", tmp_path / "new" / "art")
    assert said == f"{tmp_path} is not a folder that can be written to"
    untouched()


def test_a_place_that_turns_out_to_be_closed_is_no_bug(
    words: list[str], tmp_path: Path, untouched: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system has the last word, whatever it said when it was asked before."""

    def closed(path: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", closed)
    said, hint = refused(14, *words, "--out", tmp_path / "art")
    assert said == f"no access to {tmp_path}: Permission denied"
    assert hint == "choose another place"
    monkeypatch.undo()
    untouched()


def test_a_finished_artifact_of_something_else_is_kept(family: Family, words: list[str], tmp_path: Path) -> None:
    succeeded(*words, "--budget", "30%", "--out", tmp_path / "art")
    before = tree(tmp_path)
    for other in (("--budget", "20%"), ("--budget", "30%", "--seed", "7"), ("--rank", "3"), ("--codec", "lossless")):
        said, hint = refused(14, *words, *other, "--out", tmp_path / "art")
        assert "holds a finished artifact that was made from something else" in said
        assert "--overwrite" in hint
    said, hint = refused(2, *words, "--budget", "20%", "--overwrite", "--out", tmp_path / "art")
    assert (said, hint) == (f"replace {tmp_path / 'art'}: nobody is there to answer", "add --yes")
    assert tree(tmp_path) == before
    succeeded(*words, "--budget", "20%", "--overwrite", "--yes", "--out", tmp_path / "art")
    assert run("inspect", tmp_path / "art", "--json").document["recipe"]["objective"] == {"budget": 0.2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["art"]


def test_a_running_command_is_not_disturbed(words: list[str], tmp_path: Path) -> None:
    from mfs_decompose.artifact.lock import exclusive_lock

    out = tmp_path / "art"
    with exclusive_lock(tmp_path / "art.lock", out):
        said, hint = refused(14, *words, "--budget", "30%", "--out", out)
        assert f"expected {out} to be free, found process {os.getpid()} on " in said
        assert "wait for it to end" in hint
    assert list(tmp_path.iterdir()) == []


# Limits.


def test_too_small_a_disk(
    words: list[str], tmp_path: Path, untouched: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--budget", "30%", "--out", tmp_path / "art")
    said, hint = refused(13, *words, *more, "--max-disk", "10kB")
    assert re.fullmatch(r"the run needs \S+ MB of disk, and 10 kB was allowed", said)
    enough = re.search(r"--max-disk (\S+) or more", hint)
    assert enough is not None
    untouched()
    monkeypatch.setattr("mfs_decompose.pipeline.prepare.free_disk", lambda folder: 12_345)
    said, hint = refused(13, *words, *more)
    assert re.fullmatch(rf"the run needs \S+ MB of disk at {re.escape(str(tmp_path))}, and 12.3 kB is free", said)
    assert hint.startswith("Free some space")
    untouched()
    monkeypatch.undo()
    succeeded(*words, *more, "--max-disk", enough[1])


def test_too_little_memory(words: list[str], tmp_path: Path, untouched: Callable[[], None]) -> None:
    more = ("--budget", "30%", "--out", tmp_path / "art")
    said, hint = refused(13, *words, *more, "--max-ram", "100MB")
    assert re.fullmatch(r"the run needs \S+ MB of memory for its largest tensors, and 100 MB was allowed", said)
    enough = re.fullmatch(r"Use --max-ram (\S+) or more\.", hint)
    assert enough is not None
    untouched()
    succeeded(*words, *more, "--max-ram", enough[1])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-ram", "lots", "limits.max_ram: expected an amount of bytes such as 80MB or 1.5GiB, found 'lots'"),
        ("--max-disk", "5 parsec", "limits.max_disk: expected an amount of bytes"),
        ("--budget", "500%", "objective.budget: expected a share above 0 and at most 100%, found '500%'"),
        ("--budget", "0", "objective.budget: expected"),
        ("--rank", "0", "objective.rank: expected at least 1, found 0"),
        ("--rank", "some", "invalid value for '--rank': expected a valid integer"),
        ("--seed", "-3", "seed: expected at least 0, found -3"),
        ("--threads", "0", "invalid value for '--threads': expected greater than or equal to 1"),
        ("--device", "tpu", "expected a device among auto, cpu, cuda and cuda:N, found 'tpu'"),
        ("--codec", "lowrnk", "found 'lowrnk'; did you mean 'lowrank'?"),
        ("--base-store", "symlink", "base.store: expected"),
        ("--progress", "loud", "expected one of 'auto', 'bar', 'plain', 'json', 'none', found 'loud'"),
        ("--set", "seed", "expected --set KEY=VALUE, found 'seed'"),
        ("--set", "objectve.rank=4", "objectve: unknown key; did you mean 'objective'?"),
    ],
)
def test_a_value_that_means_nothing(
    words: list[str], tmp_path: Path, untouched: Callable[[], None], option: str, value: str, message: str
) -> None:
    said, _ = refused(2, *words, "--out", tmp_path / "art", option, value)
    assert message in said
    untouched()


# Objectives.


@pytest.mark.parametrize(
    "two",
    [
        ("--budget", "5%", "--rank", "4"),
        ("--rank", "4", "--density", "2%"),
        ("--budget", "5%", "--set", "objective.rank=4"),
        ("--codec", "lossless", "--budget", "5%"),
        ("--codec", "raw", "--rank", "4"),
    ],
)
def test_two_objectives(words: list[str], tmp_path: Path, untouched: Callable[[], None], two: tuple[str, ...]) -> None:
    said, _ = refused(2, *words, "--out", tmp_path / "art", *two)
    assert re.search(r"expected one objective, found \w+ and \w+|takes no objective, found \w+", said)
    untouched()


@pytest.mark.parametrize(("budget", "exact"), [("0.5%", "share"), ("600B", "bytes"), ("1.6kB", "bytes")])
def test_a_budget_that_what_is_exact_exceeds_names_the_smallest(
    family: Family, tmp_path: Path, untouched: Callable[[], None], budget: str, exact: str
) -> None:
    start = ("decompose", "--base", family.base, "--variants", family.variants["vocab"], "--out", tmp_path / "art")
    said, hint = refused(2, *start, "--budget", budget)
    assert "for variant 'vocab' does not hold what must be stored exactly" in said
    smallest = re.fullmatch(r"The smallest budget that holds is --budget (\S+)", hint)
    assert smallest is not None
    assert smallest[1].endswith("%" if exact == "share" else "B")
    untouched()
    ran = succeeded(*start, "--budget", smallest[1], "--json")
    (variant,) = ran.document["variants"]
    cap = float(smallest[1][:-1]) * (variant["checkpoint_bytes"] / 100 if exact == "share" else 1)
    assert variant["bytes"] <= cap


# Options and recipes.


@pytest.mark.parametrize(
    ("command", "option", "meant"),
    [
        ("decompose", "--budgt", "--budget"),
        ("decompose", "--varients", "--variants"),
        ("restore", "--variants-id", "--variant"),
        ("restore", "--roundng", "--rounding"),
        ("verify", "--levl", "--level"),
        ("inspect", "--tip", "--top"),
        ("eval", "--txt", "--text"),
        ("demo", "--ouit", "--out"),
    ],
)
def test_an_unknown_option_says_which_was_meant(command: str, option: str, meant: str) -> None:
    said, hint = refused(2, command, option, "x")
    assert said == f"no such option: {option}"
    assert hint == f"did you mean {meant}?"


@pytest.mark.parametrize("command", ["decompse", "restor", "inspekt"])
def test_an_unknown_command_says_which_was_meant(command: str) -> None:
    said, _ = refused(2, command)
    assert said.startswith(f"no such command '{command}'. Did you mean '")


@pytest.mark.parametrize(
    ("text", "where", "message", "hint"),
    [
        (
            "schema: mfs.recipe/1\nobjective:\n  budgt: 4%\n",
            3,
            "unknown key; did you mean 'budget'?",
            "objective takes",
        ),
        (RECIPE + "sede: 4\n", 4, "sede: unknown key; did you mean 'seed'?", "a recipe takes schema"),
        (
            RECIPE + "base: {mode: maen}\n",
            4,
            "base.mode: expected default, known, mean, refined, shared or auto, found 'maen'",
            "",
        ),
        (RECIPE + "seed: 1\nseed: 2\n", 5, "seed", ""),
        (RECIPE + "deltas:\n  default: {codec: lowrank\n", 6, "", ""),
    ],
)
def test_a_mistake_in_a_recipe_is_shown_with_its_line(
    words: list[str], tmp_path: Path, text: str, where: int, message: str, hint: str
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    said, typed = refused(10, *words, "--recipe", recipe, "--out", tmp_path / "art")
    assert said.startswith(f"{recipe}:{where}: ")
    assert message in said
    assert hint in typed
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{tmp}/absent.yaml", "expected a recipe at {tmp}/absent.yaml, found nothing there"),
        ("lowrank-int", "there is no recipe named 'lowrank-int'; did you mean 'lowrank-int4'?"),
        ("{tmp}", "cannot read the recipe {tmp}: Is a directory"),
    ],
)
def test_a_recipe_that_is_not_there(
    words: list[str], tmp_path: Path, untouched: Callable[[], None], name: str, message: str
) -> None:
    said, _ = refused(10, *words, "--recipe", name.format(tmp=tmp_path), "--out", tmp_path / "art")
    assert said == message.format(tmp=tmp_path)
    untouched()


def test_a_rule_that_fits_nothing(words: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        RECIPE + 'deltas:\n  rules:\n    - {match: "*.mlp.*", codec: raw}\n    - {match: "*.moe.*", codec: raw}\n'
    )
    said, hint = refused(2, *words, "--recipe", recipe, "--out", tmp_path / "art")
    assert said == "the rule for *.moe.* fits none of the 20 tensors"
    assert hint.startswith("Give a glob that fits")
    assert list(tmp_path.iterdir()) == [recipe]


def test_a_dry_run_refuses_what_the_run_would_refuse(words: list[str], tmp_path: Path) -> None:
    for more in (("--max-ram", "100MB"), ("--max-disk", "1kB")):
        said = refused(13, *words, "--out", tmp_path / "art", *more)
        assert refused(13, *words, "--out", tmp_path / "art", *more, "--dry-run") == said
