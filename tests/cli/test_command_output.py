"""What the real commands put on stdout and stderr: one document, no stray word, nothing a log cannot hold."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Family
from e2e_program import COMPARED, SHAPES, TENSOR, Ran, check_document, run, succeeded

from mfs_decompose.cli.app import main

DOCS = Path(__file__).parents[2] / "docs" / "json.md"


@pytest.fixture(scope="module")
def art(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("output") / "art"
    succeeded(
        "decompose", "--base", family.base, "--variants", family.variants["math"], "--budget", "30%", "--out", out
    )
    return out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("A line of prose, and one more.")
    return path


@pytest.fixture
def run_fd(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run in this process, and take whatever reaches the descriptors, also what libraries say behind our back."""

    def run_words(*words: object) -> Ran:
        code = main([str(word) for word in words])
        return Ran(code, *capfd.readouterr())

    return run_words


def every_command(family: Family, art: Path, text: Path, tmp_path: Path) -> dict[str, list[object]]:
    source = ["--base", family.base, "--variants", family.variants["code"], "--budget", "30%"]
    return {
        "plan": ["decompose", *source, "--out", tmp_path / "new", "--dry-run"],
        "decompose": ["decompose", *source, "--out", tmp_path / "new"],
        "again": ["decompose", *source, "--out", tmp_path / "new"],
        "inspect": ["inspect", art],
        "inspect one": ["inspect", art, "--variant", "math"],
        "inspect spectrum": ["inspect", art, "--spectrum"],
        "diff": ["diff", family.variants["vocab"], f"{art}::math"],
        "diff artifacts": ["diff", art, art, "--exit-code"],
        "verify": ["verify", art, "--level", "values", "--against", f"math={family.variants['math']}"],
        "restore": ["restore", art, "--variant", "math", "--out", tmp_path / "back"],
        "eval": ["eval", art, "--text", text, "--window", "16"],
    }


def wrong_commands(family: Family, art: Path, tmp_path: Path) -> list[tuple[int, list[object]]]:
    return [
        (2, []),
        (2, ["decompse"]),
        (2, ["decompose", "--out", tmp_path / "x"]),
        (2, ["inspect"]),
        (2, ["inspect", art, "--tpo", "3"]),
        (2, ["inspect", art, "--variant", "mth"]),
        (2, ["verify", art, "--level", "deep"]),
        (2, ["diff", art]),
        (2, ["diff", art, family.base]),
        (2, ["diff", f"{art}::mth", family.base]),
        (11, ["diff", family.base, tmp_path / "absent"]),
        (
            10,
            [
                "decompose",
                "--base",
                family.base,
                "--variants",
                family.variants["math"],
                "--recipe",
                "x.yaml",
                "--out",
                tmp_path / "x",
            ],
        ),
        (11, ["restore", tmp_path / "absent", "--variant", "all", "--out", tmp_path / "x"]),
        (11, ["eval", art, "--text", tmp_path / "absent.txt"]),
        (14, ["restore", art, "--variant", "math", "--out", art]),
        (20, ["verify", family.base]),
    ]


MORE: dict[str, dict[str, Any]] = {"verify": {"against": [COMPARED]}, "inspect one": {"tensors": [TENSOR]}}


def test_json_is_exactly_one_document_for_every_command(
    family: Family, art: Path, text: Path, tmp_path: Path, run_fd: Callable[..., Ran]
) -> None:
    for name, words in every_command(family, art, text, tmp_path).items():
        ran = run_fd(*words, "--json")
        assert ran.code == 0, (name, ran.err)
        check_document(ran.document, **MORE.get(name, {}))
        assert ran.out.startswith("{\n")
        assert ran.out.endswith("}\n")
    for code, words in wrong_commands(family, art, tmp_path):
        ran = run_fd(*words, "--json")
        assert ran.code == code, (words, ran.err)
        assert ran.document["schema"] == ("mfs.verify/1" if words[:1] == ["verify"] and code == 20 else "mfs.error/1")


def test_without_json_an_error_leaves_stdout_empty(
    family: Family, art: Path, tmp_path: Path, run_fd: Callable[..., Ran]
) -> None:
    for code, words in wrong_commands(family, art, tmp_path)[:-1]:
        ran = run_fd(*words)
        assert (ran.code, ran.out) == (code, ""), words
        assert ran.err.startswith("Error: ")


def test_what_is_piped_holds_no_control_characters(
    family: Family, art: Path, text: Path, tmp_path: Path, run_fd: Callable[..., Ran]
) -> None:
    for mode in ("auto", "plain", "none", "bar"):
        (tmp_path / mode).mkdir()
        for name, words in every_command(family, art, text, tmp_path / mode).items():
            if mode != "auto" and name == "eval":
                continue
            ran = run_fd(*words, "--progress", mode)
            assert ran.code == 0, (name, ran.err)
            assert all(char == "\n" or char.isprintable() for char in ran.out + ran.err), (mode, name)


def test_names_are_shown_as_they_are(family: Family, art: Path, tmp_path: Path, run_fd: Callable[..., Ran]) -> None:
    out = tmp_path / "red\x1b[31m [bold]\u202eback"
    ran = run_fd("restore", art, "--variant", "math", "--out", out)
    assert ran.code == 0
    assert "red\\x1b[31m [bold]\\u202eback" in ran.out
    assert run_fd("restore", art, "--variant", "math", "--out", tmp_path / "b", "--json").code == 0
    again = run_fd("restore", art, "--variant", "math", "--out", out)
    assert again.code == 14
    assert "red\\x1b[31m [bold]\\u202eback" in again.err
    document = run_fd("restore", art, "--variant", "math", "--out", out, "--json").document
    assert str(out) in document["message"]  # JSON has its own way to write it


def test_libraries_that_talk_do_not_reach_stdout(art: Path, text: Path) -> None:
    """In a fresh process, where everything is imported for the first time."""
    words = ["eval", str(art), "--text", str(text), "--window", "16", "--json"]
    process = subprocess.run(
        [sys.executable, "-m", "mfs_decompose", *words], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    check_document(json.loads(process.stdout))
    assert all(char == "\n" or char.isprintable() for char in process.stderr)
    assert not re.search(r"Warning:|Loading weights|it/s", process.stderr)


# Progress.


def decompose_words(family: Family, out: Path) -> list[object]:
    return ["decompose", "--base", family.base, "--variants", family.variants["vocab"], "--budget", "30%", "--out", out]


STAGES = ["base: copy", "base: digests", "pass 1: read and factorise", "pass 2: encode and measure", "writing shards"]
WARNING = "vocab: 1 tensor with 259 rows where the base has 257, the new rows stored whole: model.embed_tokens.weight"


def test_plain_progress_is_a_line_a_stage(family: Family, tmp_path: Path) -> None:
    ran = succeeded(*decompose_words(family, tmp_path / "art"), "--progress", "plain")
    assert ran.talk[0] == f"Warning: {WARNING}"
    # Sizes are counted as often as they need; the toy's deltas are low rank, which is said.
    stages = [line for line in ran.talk[1:] if not line.startswith("sizes: ") and "a merged LoRA" not in line]
    for stage, line in zip(STAGES, stages, strict=False):
        assert re.fullmatch(rf"{re.escape(stage)}: \S+ k?B in \d+\.\d s", line)
    assert ran.talk[-2].startswith(f"wrote {tmp_path / 'art'}: ")
    assert ran.talk[-1] == f"next: mfs verify {tmp_path / 'art'} --level values"
    assert "0 B in" not in ran.err  # a stage without an amount does not claim one


def test_no_progress_leaves_warnings_and_talk(family: Family, tmp_path: Path) -> None:
    ran = succeeded(*decompose_words(family, tmp_path / "art"), "--progress", "none")
    assert ran.talk[0] == f"Warning: {WARNING}"
    talk = [line.split()[0] for line in ran.talk[1:] if "a merged LoRA" not in line]
    assert talk == ["note:", "wrote", "next:"]
    quiet = succeeded(*decompose_words(family, tmp_path / "art2"), "-q")
    assert quiet.talk == [f"Warning: {WARNING}"]


def test_json_progress_is_lines_of_json(family: Family, tmp_path: Path) -> None:
    ran = succeeded(*decompose_words(family, tmp_path / "art"), "--progress", "json", "--json")
    check_document(ran.document)
    events = [json.loads(line) for line in ran.talk]
    assert events[0] == {"event": "note", "level": "warning", "message": WARNING}
    assert {event["event"] for event in events} <= {"start", "progress", "finish", "note"}
    for stage in STAGES:
        started, *_, finished = [event for event in events if event.get("stage") == stage]
        assert (started["event"], finished["event"], started["done_bytes"]) == ("start", "finish", 0)
        assert finished["done_bytes"] == finished["total_bytes"] > 0, stage
        assert finished["elapsed_s"] >= 0
    wrong = run("inspect", tmp_path / "art", "--variant", "x", "--progress", "json")
    levels = [json.loads(line)["level"] for line in wrong.talk]
    assert (wrong.code, levels) == (2, ["error", "hint"])


def test_the_stages_of_verify_end_at_their_totals(art: Path) -> None:
    talk = succeeded("verify", art, "--level", "values", "--progress", "json").talk
    finished = [event for event in map(json.loads, talk) if event["event"] == "finish"]
    assert [event["stage"] for event in finished] == ["checksums", "values"]
    assert all(event["done_bytes"] == event["total_bytes"] > 0 for event in finished)


# The documentation.


@pytest.mark.parametrize("schema", SHAPES)
def test_every_key_stands_in_the_documentation(schema: str) -> None:
    sections = {section.split("`")[2]: section for section in DOCS.read_text().split("\n## `")[1:] if "/1`" in section}
    shape = dict(SHAPES[schema])
    if schema == "mfs.demo/1":
        shape["results"] = list  # as of eval
    missing = [key for key in sorted(keys(shape)) if not re.search(rf"\b{key}\b", sections[schema])]
    assert missing == []


def keys(shape: Any) -> set[str]:
    """Every key of a shape, however deep."""
    if isinstance(shape, list):
        return keys(shape[0])
    return set(shape).union(*(keys(inner) for inner in shape.values())) if isinstance(shape, dict) else set()


def test_a_closed_stdout_is_no_bug(art: Path) -> None:
    """`mfs inspect art >&-`: there is nowhere to print to, and nothing else is wrong."""
    command = f"{shlex.quote(sys.executable)} -m mfs_decompose inspect {shlex.quote(str(art))} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
