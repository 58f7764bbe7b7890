"""Measuring against the originals, and life without them: all but eval works, and eval says what to type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import Family
from e2e_made import BUDGET, Made, make
from e2e_program import check_document, refused, succeeded, tree


@pytest.fixture(scope="module")
def made(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(family, tmp_path_factory.mktemp("main-path"), "--budget", BUDGET)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and sleeps in the sun.")
    return path


def test_eval_measures_what_is_served_and_what_is_restored(made: Made, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "drift.json"
    words = ("eval", made.art, "--text", text, "--window", "32", "--max-tokens", "60")
    document = succeeded(*words, "--variant", "math", "--through", "both", "--out", out, "--json").document
    check_document(document)
    assert json.loads(out.read_text()) == document
    assert document["artifact_digest"] == made.document["artifact_digest"]
    assert [(r["variant"], r["through"], r["corpus"]) for r in document["results"]] == [
        ("math", "served", "prose"),
        ("math", "restored", "prose"),
    ]
    served, restored = document["results"]
    assert served["tokens"] == restored["tokens"] == 58
    assert served["ppl_original"] == restored["ppl_original"]
    assert served["kl_base"] == restored["kl_base"] > served["kl_mean"] > 0
    for row in (served, restored):
        assert row["recovered"] == pytest.approx(1 - row["kl_mean"] / row["kl_base"], rel=1e-9)
        assert row["ppl_ratio"] == pytest.approx(row["ppl_x"] / row["ppl_original"], rel=1e-9)
        assert 0 <= row["top1"] <= 1
    assert document["settings"]["window"] == 32
    assert document["tasks"] == []
    plain = succeeded(*words, "--variant", "code")
    assert [line.split()[:3] for line in plain.out.splitlines()[2:3]] == [["code", "served", "prose"]]


def test_eval_refuses_before_it_measures(made: Made, text: Path, tmp_path: Path) -> None:
    words = ("eval", made.art, "--text")
    said, hint = refused(14, *words, text, "--out", tmp_path / "absent" / "drift.json")
    assert said.startswith(f"expected a file to write at --out {tmp_path}/absent/drift.json, found no folder")
    assert hint == "choose another --out"
    assert "found a folder" in refused(14, *words, text, "--out", tmp_path)[0]
    said, hint = refused(14, *words, text, "--scratch", tmp_path / "absent")
    assert "expected a folder at --scratch" in said
    assert hint == "make it, or leave --scratch out"
    assert "expected a text file" in refused(11, *words, tmp_path / "absent.txt")[0]
    assert "expected no fields for a .txt file" in refused(2, *words, f"{text}:prompt")[0]
    assert "expected a .txt or .jsonl file" in refused(2, *words, made.art / "README.md")[0]
    said, hint = refused(12, *words, text, "--originals", f"math={made.variants['code']}")
    assert "is not the original of variant 'math'" in said
    assert hint == "Give the checkpoint that was decomposed: --originals math=FOLDER"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def alone(made: Made, tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """An artifact far from its sources: a copy whose run.json points at nothing, and where the sources are now."""
    art = shutil.copytree(made.art, tmp_path / "art")
    record = json.loads((art / "run.json").read_text())
    record["hints"] = json.loads(json.dumps(record["hints"]).replace(str(made.root), str(tmp_path / "gone")))
    (art / "run.json").write_text(json.dumps(record))
    return art, {"base": made.base, **made.variants}


def test_without_the_originals_all_but_eval_works(
    alone: tuple[Path, dict[str, Path]], tmp_path: Path, text: Path
) -> None:
    art, moved = alone
    succeeded("verify", art, "--level", "values")
    succeeded("inspect", art)
    succeeded("restore", art, "--variant", "all", "--out", tmp_path / "back")
    words = ("eval", art, "--text", text, "--window", "32", "--max-tokens", "20", "--through", "served")
    said, hint = refused(11, *words, "--variant", "math")
    gone = tmp_path / "gone" / "tuned" / "math"
    assert said == f"the original of variant 'math' is not to be had: no such folder: {gone}"
    assert hint == "Say where it is: --originals math=FOLDER"
    document = succeeded(*words, "--variant", "math", "--originals", f"math={moved['math']}", "--json").document
    check_document(document)
    assert refused(11, *words, "--originals", f"math={moved['math']}")[1] == "Say where it is: --originals code=FOLDER"


def test_without_any_record_of_places_eval_still_says_what_to_type(
    alone: tuple[Path, dict[str, Path]], text: Path
) -> None:
    art, _ = alone
    (art / "run.json").unlink()
    succeeded("verify", art)
    said, hint = refused(11, "eval", art, "--text", text, "--variant", "code")
    assert said == "the artifact does not say where the original of variant 'code' is"
    assert hint == "Say where it is: --originals code=FOLDER"


def test_a_base_by_reference_that_was_moved(family: Family, tmp_path: Path, text: Path) -> None:
    made = make(family, tmp_path / "here", "--budget", BUDGET, "--base-store", "reference")
    assert list(made.art.glob("base-*")) == []
    assert made.document["base_bytes"] == 0
    succeeded("verify", made.art, "--level", "values")
    succeeded("restore", made.art, "--variant", "math", "--out", tmp_path / "first")
    moved = made.base.rename(tmp_path / "elsewhere")
    succeeded("verify", made.art)  # checksums are of what is in the artifact
    succeeded("inspect", made.art)
    commands = {
        "verify": ("verify", made.art, "--level", "values"),
        "restore": ("restore", made.art, "--variant", "math", "--out", tmp_path / "second"),
        "eval": ("eval", made.art, "--text", text, "--window", "32", "--variant", "math", "--through", "restored"),
    }
    for words in commands.values():
        assert refused(11, *words) == (
            "expected the base that this artifact refers to, found none",
            "pass it with --base REF",
        )
        said, hint = refused(12, *words, "--base", family.variants["code"])
        assert "expected the base this artifact was made against, found other values in its tensor" in said
        assert hint == "pass the right base with --base REF"
    assert not (tmp_path / "second").exists()
    for words in commands.values():
        succeeded(*words, "--base", moved)
    assert tree(tmp_path / "first") == tree(tmp_path / "second")
