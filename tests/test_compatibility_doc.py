"""docs/compatibility.md promises nothing without a test, and leaves out nothing that the code knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from adapter_kinds import KINDS
from architectures import ARCHITECTURES

from mfs_decompose.source import dtypes
from mfs_decompose.source.adapter_fields import REFUSED, SELF_CONTAINED_STARTS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ACCEPTED = (
    *(1, 2, 4, 5, 7, 8, 10, 11, 12, 13, 14, 15, 18, 19, 20, 21, 22, 24, 25, 26, 28, 30, 31, 32, 33, 34, 36, 37, 38, 39),
    *(41, 43, 44, 46, 47, 48, 49, 51, 52, 63, 65, 66, 67, 68),
)
"""Numbers of the bug reports that tests are named after; those between them that are not here are of later work."""


def rows() -> Iterator[tuple[str, list[str]]]:
    """The section and the cells of every row of every table, headings left out."""
    section = ""
    for line in TEXT.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("|") and not line.startswith(("|---", "| given |", "| refused |")):
            yield section, [cell.strip() for cell in line.strip().strip("|").split(" | ")]


ROWS = list(rows())


@cache
def names_in(file: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def test_there_are_tables_in_every_section() -> None:
    sections = [line.removeprefix("## ") for line in TEXT.splitlines() if line.startswith("## ")]
    assert list(dict.fromkeys(section for section, _ in ROWS)) == sections
    assert len(ROWS) > 80


@pytest.mark.parametrize(("section", "cells"), ROWS, ids=[f"{section}: {cells[0][:40]}" for section, cells in ROWS])
def test_a_row_names_one_test_that_exists(section: str, cells: list[str]) -> None:
    assert len(cells) in (3, 4), section
    found = TEST.fullmatch(cells[-1])
    assert found, cells[-1]
    file = ROOT / found[1]
    assert file.is_file(), found[1]
    assert found[2] in names_in(file), cells[-1]
    assert not any(TEST.search(cell) for cell in cells[:-1])


def test_no_row_stands_there_twice() -> None:
    given = [(section, cells[0]) for section, cells in ROWS]
    assert len(given) == len(set(given))


def test_every_type_that_can_be_read_is_named() -> None:
    named = set(re.findall(r"`([A-Z]\w*)`", " ".join(cells[0] for section, cells in ROWS if section == "Types")))
    candidates = {"F4", "F6_E2M3", "F6_E3M2", *named, *dtypes._SIZES}
    assert {name for name in candidates if dtypes.is_known(name)} == named


def test_every_architecture_of_the_round_trip_is_named() -> None:
    named = re.findall(r"`(\w+)`", " ".join(cells[0] for section, cells in ROWS if section == "Architectures"))
    assert sorted(named) == sorted(ARCHITECTURES)
    assert len(ARCHITECTURES) >= 13


def test_every_adapter_field_that_is_refused_is_named() -> None:
    named = " ".join(cells[0] for section, cells in ROWS if section == "Adapters")
    assert [field for field in REFUSED if f"`{field}`" not in named] == []
    assert [start for start in SELF_CONTAINED_STARTS - {"true", "false"} if f"`{start}`" not in named] == []
    set_somewhere = {field for kind in KINDS.values() for field, value in kind.fields.items() if value}
    unsaid = {field for field in set_somewhere if f"`{field}`" not in named}
    assert unsaid <= {"r", "lora_alpha", "target_modules"}


def test_every_report_has_a_file() -> None:
    folder = ROOT / "tests" / "reports"
    for number in ACCEPTED:
        files = sorted(folder.glob(f"test_b{number:02d}_*.py"))
        assert files, f"B{number:02d}"
        for file in files:
            assert any(name.startswith("test_") for name in names_in(file)), file.name
            document = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            assert document.startswith(f"B{number:02d}"), file.name


def test_every_report_is_said_here() -> None:
    """By a row with one of its tests."""
    named = {int(number) for number in re.findall(r"test_b(\d+)_", TEXT)}
    assert set(ACCEPTED) == named
