"""`mfs eval` as a program: suites, resume, self-check, exit codes."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from fidelity_models import StoredFamily

from mfs_decompose.cli.app import main
from mfs_decompose.fidelity import artifact_drift
from mfs_decompose.fidelity.evaluate import measure_drift

SUITE = """schema: mfs.suite/1
window: 64
stride: 48
batch_size: 2
corpora:
  - {file: prose.jsonl, max_tokens: 3600}
  - {corpus: python, fields: [prompt], max_tokens: 150}
"""


def run(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def document(*words: object, code: int = 0) -> dict[str, Any]:
    found, out, err = run(*words, "--json")
    assert found == code, err
    content: dict[str, Any] = json.loads(out)
    return content


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"Line {i}: the quick brown fox jumps over {i * i} lazy dogs."}) for i in range(70)]
    (tmp_path / "prose.jsonl").write_text("\n".join(lines))
    (tmp_path / "mine.yaml").write_text(SUITE)
    return tmp_path / "mine.yaml"


def test_a_suite_sets_texts_and_settings(stored: StoredFamily, suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "drift.json"
    words = ("eval", stored.artifact, "--suite", suite, "--variant", "math", "--through", "both")
    content = document(*words, "--out", out)
    assert json.loads(out.read_text()) == content
    rows = content["results"]
    assert [(row["through"], row["corpus"]) for row in rows] == [
        ("served", "prose"), ("restored", "prose"), ("served", "python"), ("restored", "python"),
    ]  # fmt: skip
    settings = content["settings"]
    assert (settings["suite"], settings["window"], settings["stride"], settings["batch_size"]) == ("mine", 64, 48, 2)
    assert [settings["texts"][name]["max_tokens"] for name in ("prose", "python")] == [3600, 150]
    prose, python = rows[0], rows[2]
    assert prose["units"] >= 50 and 0 < prose["kl_ci"][0] <= prose["kl_mean"] <= prose["kl_ci"][1]
    assert prose["ppl_ratio_ci"][0] <= prose["ppl_ratio"] <= prose["ppl_ratio_ci"][1]
    assert prose["top1_ci"][0] <= prose["top1"] <= prose["top1_ci"][1]
    assert 0 <= prose["noise_kl"] < prose["kl_mean"]
    assert (python["kl_ci"], python["ppl_ratio_ci"], python["top1_ci"]) == (None, None, None)
    assert any(note.startswith("math, python, served: no intervals, undecided") for note in settings["notes"])
    assert "self_check" not in content


def test_a_shipped_suite_by_its_name(stored: StoredFamily) -> None:
    code, out, err = run("eval", stored.artifact, "--suite", "smoke", "--variant", "math", "--through", "served")
    # The tiny model has 128 positions, and the shipped suites ask for more.
    assert code == 2 and out == ""
    assert "expected windows of at most the model's 128 positions" in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "expected --text FILE or --suite NAME, found none"),
        (["--suite", "{suite}", "--text", "{text}"], 2, "expected --text FILE or --suite NAME, found both"),
        (["--suite", "{suite}", "--window", "64"], 2, "--window does not go with --suite, which sets it"),
        (["--suite", "{suite}", "--max-tokens", "64"], 2, "--max-tokens does not go with --suite"),
        (["--suite", "smok"], 10, "there is no suite named 'smok'; did you mean 'smoke'?"),
        (["--text", "{text}", "--window", "8", "--stride", "9"], 2, "expected a stride from 1 to the window of 8"),
    ],
)
def test_what_is_refused(stored: StoredFamily, suite: Path, words: list[str], code: int, said: str) -> None:
    filled = [word.format(suite=suite, text=suite.with_name("prose.jsonl")) for word in words]
    found, out, err = run("eval", stored.artifact, *filled)
    assert (found, out) == (code, "")
    assert said in err
    assert document("eval", stored.artifact, *filled, code=code)["schema"] == "mfs.error/1"


def test_options_without_a_suite(stored: StoredFamily, suite: Path) -> None:
    words = ("--text", suite.with_name("prose.jsonl"), "--variant", "math", "--through", "served")
    settings = document("eval", stored.artifact, *words, "--window", 32, "--stride", 20, "--max-tokens", 90)["settings"]
    assert (settings["suite"], settings["window"], settings["stride"], settings["max_tokens"]) == (None, 32, 20, 90)
    plain = document("eval", stored.artifact, *words, "--window", 100, "--max-tokens", 90, "--bos", "off")["settings"]
    assert (plain["window"], plain["stride"], plain["bos_policy"]) == (100, 100, "off")


def test_a_stopped_run_goes_on_and_says_so(
    stored: StoredFamily, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "drift.json"
    words = ("eval", stored.artifact, "--suite", suite, "--through", "served", "--out", out)
    real = measure_drift

    def stop(*args: Any, **more: Any) -> Any:
        if args[5] == "vocab":
            raise KeyboardInterrupt
        return real(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(artifact_drift, "measure_drift", stop)
        assert run(*words)[0] == 130
    assert not out.exists() and (tmp_path / "drift.json.partial").is_dir()
    code, text, err = run(*words)
    assert code == 0
    assert "going on: 2 of 3 variants were measured before (code, math)" in err
    assert "measure math" not in err and "measure vocab" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drift.json", "mine.yaml", "prose.jsonl"]
    resumed = json.loads(out.read_text())
    assert resumed == document("eval", stored.artifact, "--suite", suite, "--through", "served")
    assert [line.split()[0] for line in text.splitlines()[2:8]] == ["code", "code", "math", "math", "vocab", "vocab"]


def test_the_self_check_stands_in_document_and_table(stored: StoredFamily, suite: Path) -> None:
    words = ("eval", stored.artifact, "--suite", suite, "--variant", "math", "--through", "restored", "--self-check")
    checks = document(*words)["self_check"]
    assert [check["seen"] for check in checks] == [True, True, True]
    assert all(check["kl_mean"] > check["limit"] > 0 for check in checks)
    code, out, _ = run(*words)
    assert code == 0
    assert [line.split()[1:3] for line in out.splitlines() if line.endswith(" seen")] == [
        ["layers-swapped", "prose"], ["delta-doubled", "prose"], ["delta-of-another-variant", "prose"],
    ]  # fmt: skip


def test_a_corruption_that_is_not_seen_is_exit_21(stored: StoredFamily, suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "drift.json"
    words = ("eval", stored.artifact, "--suite", suite, "--variant", "code", "--through", "served", "--self-check")
    code, text, err = run(*words, "--out", out)
    assert code == 21
    assert "NOT SEEN" in text
    assert "Error: the self-check did not see delta-doubled in variant 'code' on prose" in err
    assert "Traceback" not in err
    content = document(*words, code=21)
    assert content["schema"] == "mfs.eval/1", "results and checks, and the error on stderr"
    assert [check["seen"] for check in content["self_check"]] == [True, False, True]
    assert json.loads(out.read_text()) == content


def test_a_reference_is_saved_and_used(stored: StoredFamily, suite: Path, tmp_path: Path) -> None:
    path = tmp_path / "math.reference"
    words = ("eval", stored.artifact, "--suite", suite)
    saved = document(*words, "--variant", "math", "--save-reference", path)
    assert document(*words, "--reference", path, "--originals", f"math={tmp_path / 'gone'}") == saved
    code, _, err = run(*words, "--save-reference", tmp_path / "absent" / "x")
    assert (code, "expected a file to write at --save-reference" in err) == (14, True)
    code, _, err = run(*words, "--save-reference", tmp_path / "all.reference")
    assert (code, "expected one variant to save a reference of" in err) == (2, True)
