"""`mfs eval --card`: the artifact's card with the drift that was measured, outside of the artifact."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_family
from fidelity_models import StoredFamily

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.verify import verify
from mfs_decompose.cli import eval_card
from mfs_decompose.cli.app import main
from mfs_decompose.cli.eval_card import check_card_place, repeat_command
from mfs_decompose.errors import ArtifactInvalid, UsageError
from mfs_decompose.fidelity.card import render_drift_card
from mfs_decompose.fidelity.document import EvalDocument
from mfs_decompose.fidelity.result import DriftResult
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.recipe.load import load_recipe

ROW = DriftResult(
    variant="math",
    through="served",
    corpus="prose",
    tokens=12345,
    ppl_original=10.0,
    ppl_x=10.1,
    ppl_base=20.0,
    ppl_ratio=1.01,
    ppl_ratio_ci=(1.0012345, 1.02),
    kl_base=0.5,
    kl_mean=0.01234,
    kl_p99=0.3,
    top1=0.98765,
    recovered=0.97531,
    kl_ci=(0.011, 0.0135),
    top1_ci=(0.98, 0.99),
    units=193,
)
NOTHING = replace(
    ROW, through="restored", kl_mean=None, kl_ci=None, recovered=None, top1=None, ppl_ratio=None, ppl_ratio_ci=None
)
SETTINGS: dict[str, Any] = {
    "suite": "ci",
    "window": 512,
    "stride": 256,
    "bos_policy": "auto",
    "bos": {"math": "<s>", "code": "<s>"},
    "max_tokens": 8192,
    "texts": {"prose": {"sha256": "ab" * 32, "documents": 70, "bytes": 4321, "max_tokens": 3600}},
    "convention": "words",
    "dtype": "float32",
    "batch_size": 2,
    "padding": "right",
    "attention": "eager",
    "device": "cpu",
    "threads": 1,
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "notes": [],
}
COMMAND = ["mfs", "eval", ".", "--suite", "ci"]


@pytest.fixture(scope="module")
def licensed(tmp_path_factory: pytest.TempPathFactory) -> StoredFamily:
    """An artifact whose base and one variant say their licence, the other's being hostile."""
    root = tmp_path_factory.mktemp("licensed")
    family = make_family(root / "folders", tie=True)
    (family.base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    (family.variants["math"] / "README.md").write_text('---\nlicense: "x | <b>\\n# y"\n---\n')
    (family.variants["code"] / "LICENSE").write_text("terms\n")
    variants = {id: family.variants[id] for id in ("code", "math")}
    request = DecomposeRequest(
        variants={id: str(folder) for id, folder in variants.items()},
        out=root / "art",
        recipe=load_recipe(None, {"objective.budget": "10%"}),
        base=str(family.base),
        device="cpu",
        threads=1,
    )
    decompose(request)
    return StoredFamily(root / "art", family.base, variants)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"Line {i}: the quick brown fox jumps over {i * i} lazy dogs."}) for i in range(9)]
    (tmp_path / "prose.jsonl").write_text("\n".join(lines))
    return tmp_path / "prose.jsonl"


def run(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def render(artifact: Path, *rows: DriftResult, command: list[str] = COMMAND, **settings: Any) -> str:
    with Family.open(artifact) as family:
        document = EvalDocument(rows, {**SETTINGS, **settings}, family.artifact_digest)
        return render_drift_card(family, document, command)


def drift_of(card: str) -> list[str]:
    return card.split("\n## Drift\n", 1)[1].splitlines()


def test_figures_are_those_of_the_results_and_what_is_not_there_is_a_dash(licensed: StoredFamily) -> None:
    lines = drift_of(render(licensed.artifact, ROW, replace(ROW, kl_ci=None, ppl_ratio_ci=None), NOTHING))
    assert lines[3:6] == [
        "| math | served | prose | 12,345 | 0.0123 (0.011 to 0.0135) | 0.9753 | 0.9877 "
        "| 1.01000 (1.00123 to 1.02000) |",
        "| math | served | prose | 12,345 | 0.0123 (-) | 0.9753 | 0.9877 | 1.01000 (-) |",
        "| math | restored | prose | 12,345 | - | - | - | - |",
    ]


def test_settings_texts_digest_and_command(licensed: StoredFamily) -> None:
    lines = drift_of(render(licensed.artifact, ROW))
    assert (
        r"Settings: suite ci; window 512; stride 256; BOS auto \(\<s\>\); float32; batches of 2; right padding; "
        "eager attention; cpu, threads 1; torch 2.13.0; transformers 5.24.0."
    ) in lines
    assert f"Texts: prose (70 documents, 4,321 bytes, at most 3,600 tokens, sha256 {'ab' * 32})." in lines
    with Family.open(licensed.artifact) as family:
        assert any(f"digest `{family.artifact_digest}`" in line for line in lines)
    assert lines[-3:] == ["```", "mfs eval . --suite ci", "```"]


def test_the_artifact_s_card_comes_first_unchanged(licensed: StoredFamily) -> None:
    own = (licensed.artifact / "README.md").read_text("utf-8")
    assert render(licensed.artifact, ROW).startswith(own)
    assert "| base | apache-2.0 | README.md |" in own
    assert "| code | unknown | LICENSE |" in own
    assert r"| math | x \| \<b\> \# y | README.md |" in own
    assert "--set objective.budget=0.1" in own
    assert str(licensed.base.parent) not in own


def test_what_results_say_of_themselves_is_a_list(licensed: StoredFamily) -> None:
    with Family.open(licensed.artifact) as family:
        check = {"variant": "math", "corpus": "prose", "corruption": "delta-doubled", "seen": False}
        unplanted = {**check, "corruption": "layers-swapped", "seen": None}
        settings = {**SETTINGS, "notes": ["math, prose, served: no intervals, undecided: <b>50</b>"]}
        document = EvalDocument((ROW,), settings, family.artifact_digest, self_check=(check, unplanted))
        lines = drift_of(render_drift_card(family, document, COMMAND))
    assert r"- math, prose, served\: no intervals, undecided\: \<b\>50\</b\>" in lines
    assert r"- self-check\: delta-doubled in math on prose\: NOT SEEN" in lines
    assert r"- self-check\: layers-swapped in math on prose\: not planted" in lines


@pytest.mark.parametrize(
    "name", ["a|b", "<script>", "x\n# y", "`z`", "\x1b[2J", "[l](https://evil.example)", "{0}", "\ud800"]
)
def test_hostile_names_stay_text(licensed: StoredFamily, name: str) -> None:
    plain = drift_of(render(licensed.artifact, ROW))
    texts = {name: SETTINGS["texts"]["prose"]}
    card = render(
        licensed.artifact,
        replace(ROW, corpus=name),
        command=["mfs", "eval", ".", "--text", f"{name}\n```\n# free"],
        texts=texts,
        suite=name,
        bos={"math": name},
    )
    lines = drift_of(card)
    assert len(card.encode("utf-8").splitlines()) == len(render(licensed.artifact, ROW).splitlines())
    assert len(lines) == len(plain)
    assert lines[3].replace("\\|", "").count("|") == 9
    prose = re.sub(r"\\.", "", "\n".join(line for line in lines[:-4] if "digest `" not in line))
    for markup in ("<script", "`z`", "](", "https:", "\x1b"):
        assert markup not in prose


def test_results_of_another_artifact_are_refused(licensed: StoredFamily) -> None:
    with Family.open(licensed.artifact) as family, pytest.raises(ArtifactInvalid, match="that was measured"):
        render_drift_card(family, EvalDocument((ROW,), SETTINGS, "0" * 64), COMMAND)


def test_the_command_writes_what_it_measured(licensed: StoredFamily, text: Path, tmp_path: Path) -> None:
    card = tmp_path / "CARD.md"
    card.write_text("an earlier one")
    words = ("eval", licensed.artifact, "--text", f"{text}:text", "--max-tokens", 90, "--variant", "math")
    code, out, err = run(*words, "--through", "served", "--base", licensed.base, "--card", card, "--json")
    assert code == 0, err
    (row,) = json.loads(out)["results"]
    content = card.read_text("utf-8")
    assert content.startswith((licensed.artifact / "README.md").read_text("utf-8"))
    lines = drift_of(content)
    assert lines[3] == (
        f"| math | served | prose | {row['tokens']} | {row['kl_mean']:.3g} (-) | {row['recovered']:.4f} | "
        f"{row['top1']:.4f} | {row['ppl_ratio']:.5f} (-) |"
    )
    assert lines[4] == ""
    assert lines[-2] == (
        "mfs eval . --text prose.jsonl:text --variant math --through served --max-tokens 90 --device cpu --base PATH"
    )
    assert any("no intervals, undecided" in line for line in lines)
    assert str(tmp_path) not in content and str(licensed.base.parent) not in content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CARD.md", "prose.jsonl"]
    assert verify(licensed.artifact).ok


@pytest.mark.parametrize(
    ("card", "code", "said"),
    [
        ("{art}/CARD.md", 2, "expected --card outside of the artifact"),
        ("{art}/README.md", 2, "expected --card outside of the artifact"),
        ("{art}/files/CARD.md", 2, "expected --card outside of the artifact"),
        ("{art}/absent/CARD.md", 2, "expected --card outside of the artifact"),
        ("{tmp}/x/../link/CARD.md", 2, "expected --card outside of the artifact"),
        ("{tmp}/drift.json", 2, "--card and --out name the same file"),
        ("{tmp}/x/../drift.json", 2, "--card and --out name the same file"),
        ("{tmp}/absent/CARD.md", 14, "expected a file to write at --card"),
        ("{tmp}/x", 14, "expected a file to write at --card"),
    ],
)
def test_a_place_that_will_not_do_is_refused_before_measuring(
    stored: StoredFamily, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str, code: int, said: str
) -> None:
    def measured(*_: Any) -> Any:
        raise AssertionError("it measures")

    monkeypatch.setattr("mfs_decompose.fidelity.artifact_drift.measure_artifact", measured)
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(stored.artifact)
    before = sorted(path.name for path in tmp_path.iterdir())
    place = card.format(art=stored.artifact, tmp=tmp_path)
    found, _, err = run("eval", stored.artifact, "--text", text, "--out", tmp_path / "drift.json", "--card", place)
    assert (found, said in err) == (code, True), err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert verify(stored.artifact, "quick").ok


def test_a_link_is_replaced_and_not_written_through(stored: StoredFamily, tmp_path: Path) -> None:
    link = tmp_path / "CARD.md"
    link.symlink_to(stored.artifact / "README.md")
    check_card_place(link, stored.artifact, {})
    (tmp_path / "art").symlink_to(stored.artifact)
    with pytest.raises(UsageError, match="inside"):
        check_card_place(stored.artifact / "CARD.md", tmp_path / "art", {})
    before = (stored.artifact / "README.md").read_bytes()
    with Family.open(stored.artifact) as family:
        document = EvalDocument((ROW,), SETTINGS, family.artifact_digest)
    eval_card.write_card(link, stored.artifact, document, COMMAND)
    assert (stored.artifact / "README.md").read_bytes() == before
    assert not link.is_symlink() and "## Drift" in link.read_text("utf-8")


def test_the_command_shows_no_path() -> None:
    words = repeat_command(
        text=["/home/me/a.jsonl:x/y+z", "b.txt", "C.TXT"],
        suite=None,
        options={"--variant": None, "--window": 64},
        refs={"--originals": ["math=/home/me/math", "code=hf://org/code@main"], "--base": ["../base"]},
        self_check=True,
    )
    assert words == [
        "mfs", "eval", ".", "--text", "a.jsonl:x/y+z", "--text", "b.txt", "--text", "C.TXT", "--window", "64",
        "--originals", "math=PATH", "--originals", "code=hf://org/code@main", "--base", "PATH", "--self-check",
    ]  # fmt: skip
    suite = repeat_command(text=None, suite="/home/me/s.yaml", options={}, refs={}, self_check=False)
    assert suite == ["mfs", "eval", ".", "--suite", "s.yaml"]
