from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_command import TABLE

from mfs_decompose.cli import reference

FAKE = {name: entry for name, entry in TABLE.items() if name != "absent"}


@pytest.fixture
def page() -> str:
    return reference.render(FAKE)


def test_every_command_is_there_with_its_usage(page: str) -> None:
    assert page.startswith("# The command line\n")
    assert page.index("## Global options") < page.index("## mfs make") < page.index("## mfs look")
    assert "```\nmfs make [OPTIONS] {ARTIFACT}\n```\n" in page


def test_options_are_tables_by_panel(page: str) -> None:
    assert (
        "| Arguments | | default |\n|---|---|---|\n| `ARTIFACT` | Folder of a family artifact. | required |\n" in page
    )
    assert "| `-V`, `--variants` ID=REF | Fine-tunes [a\\|b]; takes several. |  |" in page
    assert "| `--rank` N | How many directions. | `4` |" in page
    assert "| `--resume`, `--no-resume` | Go on where it stopped. | `--resume` |" in page
    assert "| `--device` NAME | auto (cuda where there is one), cpu, cuda or cuda:N. | `auto` |" in page
    assert "| `--json` | Print one JSON document on stdout. |  |" in page
    assert "`--progress`" in page
    assert "--does" not in page


def test_examples_are_code_and_angle_brackets_are_text(page: str) -> None:
    assert (
        "Make a \\<thing> out of others.\n\nThe first sentence is followed by some more,\non two lines.\n\n"
        "Examples:\n\n```\nmfs make art --variants code=./code math=./math\nmfs make art --rank 8\n```\n" in page
    )


def test_the_page_does_not_know_the_terminal(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in ("20", "300"):
        monkeypatch.setenv("COLUMNS", width)
        monkeypatch.setenv("TERMINAL_WIDTH", width)
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert reference.render(FAKE) == page
    assert "\x1b" not in page
    assert page.endswith("\n")
    assert not page.endswith("\n\n")


def test_check_says_by_the_exit_code_whether_a_file_is_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], page: str
) -> None:
    monkeypatch.setattr(reference, "render", lambda: page)
    file = tmp_path / "cli.md"
    assert reference.main([]) == 0
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert reference.main(["--check", str(file)]) == 0
    assert capsys.readouterr() == ("", "")
    file.write_text(page + " ", encoding="utf-8")
    assert reference.main(["--check", str(file)]) == 1
    assert "make docs" in capsys.readouterr().err
    assert reference.main(["--check", str(tmp_path / "absent.md")]) == 1
    assert reference.main(["--chek", "x"]) == 2


def test_rendering_leaves_no_command_behind(page: str) -> None:
    assert page == reference.render(FAKE)
    assert "no_such_module_at_all" not in sys.modules
