"""The commands of README.md run as they stand, one after another, in a folder that holds what they name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from e2e_program import succeeded
from example_folder import fill_example_folder

from mfs_decompose.recipe.load import load_recipe

PAGE = Path(__file__).parents[2] / "README.md"


def commands() -> list[list[str]]:
    """The words of each command in the first block under Use."""
    block = PAGE.read_text(encoding="utf-8").split("## Use")[1].split("```")[1]
    return [shlex.split(line, comments=True) for line in block.splitlines() if line]


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fill_example_folder(tmp_path))
    assert len(commands()) > 6
    for words in commands():
        assert words[0] == "mfs"
        succeeded(*words[1:])
    assert (tmp_path / "lora" / "adapter_config.json").exists()
    assert (tmp_path / "math-restored" / "config.json").exists()


def test_the_table_of_codecs_is_what_there_is() -> None:
    from typing import get_args

    from mfs_decompose.recipe.schema import CodecName

    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([a-z]+[a-z-]*)`", row)]
    assert sorted(named) == sorted(get_args(CodecName))


def test_the_settings_and_recipes_it_shows_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    codec_of = {"factors": "lowrank", "step": "deadzone", "rows": "rowsparse"}
    settings = re.findall(r"`--set (deltas\.default\.([a-z]+))=(\S+)`", text)
    assert {option for _, option, _ in settings} == codec_of.keys()
    for key, option, value in settings:
        wanted = {"step": float, "rows": int}.get(option, str)(value)
        load_recipe(None, {"deltas.default.codec": codec_of[option], key: wanted})
    for name in re.findall(r"--recipe ([a-z0-9-]+)", text):
        load_recipe(name, {})
