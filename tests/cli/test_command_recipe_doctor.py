"""`mfs recipe` and `mfs doctor` through the real program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mfs_decompose.cli.app import main
from mfs_decompose.recipe.load import load_recipe
from mfs_decompose.recipe.presets import preset_names


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_ls_names_every_shipped_recipe_with_its_codec(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "recipe", "ls", "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "mfs.recipes/1"
    assert [recipe["name"] for recipe in document["recipes"]] == list(preset_names())
    for recipe in document["recipes"]:
        assert recipe["deltas"] == load_recipe(recipe["name"]).canonical()["deltas"]


def test_ls_for_people_says_what_each_is(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "recipe", "ls")
    line = next(line for line in out.splitlines() if line.startswith("lossless"))
    assert "bit for bit" in line


def test_cp_then_check_then_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    assert run(capsys, "recipe", "cp", "lowrank-r16", str(mine))[0] == 0
    assert load_recipe(mine).canonical() == load_recipe("lowrank-r16").canonical()
    code, out, _ = run(capsys, "recipe", "check", str(mine))
    assert code == 0 and "valid" in out


def test_show_prints_the_text_that_cp_would_write(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    run(capsys, "recipe", "cp", "sparse", str(mine))
    _, out, _ = run(capsys, "recipe", "show", "sparse")
    assert out == mine.read_text()


def test_cp_never_overwrites(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("precious")
    code, _, err = run(capsys, "recipe", "cp", "sparse", str(mine))
    assert code == 14 and "mine.yaml" in err and mine.read_text() == "precious"


def test_cp_into_a_missing_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "recipe", "cp", "sparse", str(tmp_path / "no" / "mine.yaml"))[0] == 14


def test_check_names_file_line_and_the_key_that_was_meant(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("schema: mfs.recipe/1\ndeltas:\n  default:\n    codecs: lossless\n")
    code, _, err = run(capsys, "recipe", "check", str(mine))
    assert code == 10 and "mine.yaml:4" in err and "codec" in err


def test_an_unknown_recipe_gets_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "recipe", "show", "losless")
    assert code == 10 and "lossless" in err


@pytest.mark.parametrize("words", [("show",), ("cp", "sparse"), ("ls", "sparse"), ("check",)])
def test_a_wrong_number_of_arguments_is_usage(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, _, err = run(capsys, "recipe", *words)
    assert code == 2 and f"mfs recipe {words[0]}" in err


def test_schema_accepts_what_the_loader_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "recipe", "schema", "--json")
    schema = json.loads(out)["json_schema"]
    assert set(load_recipe("lossless").canonical()) <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_doctor_measures_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "doctor", "--at", str(tmp_path), "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "mfs.doctor/1"
    assert document["memory_available"] > 0 and document["disk_free"] > 0 and document["processors"] >= 1
    assert document["versions"]["torch"] and document["device"].startswith(("cpu", "cuda"))


def test_doctor_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mfs_decompose.cli.doctor._PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr("mfs_decompose.provenance.available_memory", lambda: 1_000_000_000)
    code, _, err = run(capsys, "doctor", "--at", str(tmp_path))
    assert code == 0 and "no-such-package" in err and "--max-ram" in err
