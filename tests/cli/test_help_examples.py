"""Every example that a command's help shows runs as it stands, in a folder that holds what it names."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from e2e_program import run, succeeded
from example_folder import fill_example_folder

from mfs_decompose import demo
from mfs_decompose.cli.app import COMMANDS
from mfs_decompose.fidelity import suite

# Examples that do not run here, each with the reason.
NOT_RUN = {
    "mfs demo --out demo-art": "test_command_demo.py runs it, on whole texts",
}

# Options whose file or folder is there after the command; a dry run leaves --out alone.
WRITES = ("--out", "--save-plan", "--save-reference", "--card")


def examples_of(name: str) -> list[str]:
    """The lines below `Examples:` in the help of a command, as it is printed."""
    lines = [line.strip() for line in succeeded(name, "--help").out.splitlines()]
    block = lines[lines.index("Examples:") + 1 :] if "Examples:" in lines else []
    return block[: block.index("")] if "" in block else block


@pytest.fixture(scope="module")
def example_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples name, and the artifact `art` of it."""
    root = fill_example_folder(tmp_path_factory.mktemp("examples"))
    refs = [*(f"{id}={root / id}" for id in ("math", "code")), f"lora={root / 'tuned-lora'}"]
    succeeded("decompose", "--base", root / "base", "--variants", *refs, "--out", root / "art")
    return root


@pytest.fixture
def short_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped suites under their own names at 1,024 tokens a text, and the demo's texts cut to two documents."""
    shipped, short = suite.eval_folder(), tmp_path / "eval"
    (short / "suites").mkdir(parents=True)
    (short / "corpora").symlink_to(shipped / "corpora")
    for file in (shipped / "suites").glob("*.yaml"):
        text = re.sub(r"max_tokens: \d+", "max_tokens: 1024", file.read_text(encoding="utf-8"))
        (short / "suites" / file.name).write_text(text, encoding="utf-8")
    for id in demo.VARIANTS:
        lines = demo.text_of(id).read_text(encoding="utf-8").splitlines(keepends=True)
        (short / f"{id}.jsonl").write_text("".join(lines[:2]), encoding="utf-8")
    monkeypatch.setattr(suite, "eval_folder", lambda: short)
    monkeypatch.setattr(demo, "text_of", lambda id: short / f"{id}.jsonl")


def check_written(words: list[str]) -> None:
    """What the command line names as its output is there, beside what it started with."""
    for option in WRITES:
        if option in words:
            written = Path(words[words.index(option) + 1]).exists()
            assert written == (option != "--out" or "--dry-run" not in words), option


@pytest.mark.usefixtures("short_texts")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_the_help_run(
    name: str, example_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = examples_of(name)
    assert examples
    made: dict[str, bytes] = {}  # files of earlier examples: a saved plan, a copied recipe
    for number, line in enumerate(examples):
        words = shlex.split(line)
        assert words[:2] == ["mfs", name]
        if line in NOT_RUN:
            continue
        folder = tmp_path / str(number)
        ignored = shutil.ignore_patterns("art") if name == "decompose" else None
        shutil.copytree(example_folder, folder, ignore=ignored)
        for file, content in made.items():
            (folder / file).write_bytes(content)
        before = set(folder.iterdir())
        monkeypatch.chdir(folder)
        ran = run(*words[1:])
        assert ran.code == 0, f"{line}\n{ran.err}"
        assert ran.out or ran.err, line
        check_written(words)
        made |= {path.name: path.read_bytes() for path in set(folder.iterdir()) - before if path.is_file()}


def test_what_does_not_run_is_an_example_still() -> None:
    assert NOT_RUN.keys() <= {line for name in COMMANDS for line in examples_of(name)}
