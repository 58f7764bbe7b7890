"""Asking for help must not cost seconds: heavy packages and commands are imported where they are used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "scipy", "lm_eval", "safetensors", "numpy", "zstandard", "accelerate"}

PROGRAM = """
import json, sys
from mfs_decompose.cli.app import main
code = main(sys.argv[1:])
print()
print(json.dumps([code, sorted(sys.modules)]))
"""


def run(*words: str) -> tuple[int, set[str], str]:
    """The exit code, the names of all modules that were imported, and what was said."""
    process = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    said, _, last = process.stdout.rstrip().rpartition("\n")
    code, modules = json.loads(last)
    return code, set(modules), said + process.stderr


@pytest.mark.parametrize(
    ("words", "code"), [(("--help",), 0), (("--version",), 0), ((), 2), (("dempo",), 2), (("--jsn",), 2)]
)
def test_the_group_alone_imports_nothing_heavy(words: tuple[str, ...], code: int) -> None:
    actual, modules, said = run(*words)
    assert (actual, modules & HEAVY) == (code, set())
    assert said
    commands = {"decompose", "restore", "verify", "inspect", "diff", "eval", "demo"}
    assert not {f"mfs_decompose.cli.{name}" for name in commands} & modules


def test_the_check_sees_what_is_imported() -> None:
    process = subprocess.run(
        [sys.executable, "-c", f"import safetensors\n{PROGRAM}", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "safetensors" in json.loads(process.stdout.splitlines()[-1])[1]


def test_recipes_are_read_without_torch() -> None:
    program = "import sys; from mfs_decompose.recipe.load import load_recipe; load_recipe('sparse'); "
    program += "print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"
