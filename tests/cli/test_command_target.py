"""`mfs decompose --target` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_program import refused, succeeded
from example_folder import fill_example_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill_example_folder(tmp_path_factory.mktemp("target-command"))


def words(folder: Path, out: Path, *more: object) -> list[object]:
    return ["decompose", "--base", folder / "base", "--variants", f"math={folder / 'math'}", "--out", out, *more]


def test_a_target_is_held_and_said(folder: Path, tmp_path: Path) -> None:
    text = ["--text", folder / "notes.txt", "--max-tokens", 300]
    ran = succeeded(*words(folder, tmp_path / "art", "--target", "kl=9", *text))
    (line,) = [line for line in ran.out.splitlines() if line.startswith("math: ")]
    assert line.startswith("math: kl=9.0 holds: KL ")
    assert "over 299 tokens, after 1 evaluation, at" in line and line.endswith(", the smallest possible")
    document = succeeded(*words(folder, tmp_path / "art", "--target", "kl=9", *text, "--json")).document
    assert (document["written"], document["target"]) == (False, "kl=9.0")
    held = document["variants"][0]["target"]
    assert held.keys() == {"kl", "ln_ppl", "tokens", "evaluations", "smallest"}
    assert (held["tokens"], held["evaluations"], held["smallest"], held["ln_ppl"]) == (299, 1, True, None)
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    assert "variants[].target.{kl, ln_ppl, tokens, evaluations, smallest}" in page


def test_a_dry_run_does_not_pretend_to_know(folder: Path, tmp_path: Path) -> None:
    more = ["--target", "ppl=0.01", "--text", folder / "notes.txt", "--dry-run"]
    ran = succeeded(*words(folder, tmp_path / "art", *more))
    assert "target ppl=0.01: sizes are unknown before weights are read" in ran.out


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_what_does_not_go_together(folder: Path, tmp_path: Path, dry: list[str]) -> None:
    out, text = tmp_path / "art", ["--text", folder / "notes.txt"]
    said, hint = refused(2, *words(folder, out, "--target", "kl=1e-3", *dry))
    assert said == "the target kl=0.001 needs text to measure drift on, found none" and "--text" in hint
    said, _ = refused(2, *words(folder, out, "--target", "kl=1e-3", "--budget", "3%", *text, *dry))
    assert "expected one objective, found budget and target" in said
    said, _ = refused(2, *words(folder, out, "--target", "kl=1e-3", "--codec", "lossless", *text, *dry))
    assert "takes no objective, found target" in said
    said, _ = refused(2, *words(folder, out, *text, *dry))
    assert said == "--text goes with a target, and the recipe has none"
    said, _ = refused(2, *words(folder, out, "--target", "top1=0.9", *text, *dry))
    assert "expected a target such as kl=1e-3 or ppl=0.001, found 'top1=0.9'" in said
    assert not out.exists()
