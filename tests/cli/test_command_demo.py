"""`mfs demo`: the whole of the main job on the family that ships with the package."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from e2e_program import Ran, check_document, refused, run, succeeded, tree

from mfs_decompose import demo

IDS = list(demo.VARIANTS)
HEADS = {"saved", "what it cost, on text of each variant's own kind (KL in nats a token, against its own original)"}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go meanwhile."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def shorten_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the demo the first lines of each text: what is measured again need not take long."""
    folder.mkdir()
    for id in IDS:
        lines = demo.text_of(id).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{id}.jsonl").write_text("".join(lines[:3]), encoding="utf-8")
    monkeypatch.setattr(demo, "text_of", lambda id: folder / f"{id}.jsonl")


def check_closing_table(ran: Ran) -> None:
    """The table says of each variant what it takes and what it costs, served and restored."""
    lines = ran.out.splitlines()
    assert {line for line in lines if line in HEADS} == HEADS
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0] in IDS]
    assert [row[0] for row in rows[:3]] == IDS
    assert all(row[-1] == "%" and 0 < float(row[-2]) <= 5 for row in rows[:3])
    assert [(row[0], row[1]) for row in rows[3:]] == [(id, kind) for id in IDS for kind in ("served", "restored")]
    assert all(0 < float(row[4]) < 0.1 for row in rows[3:])
    assert lines[-1].startswith("base and 3 fine-tunes: ")
    assert "every tensor decoded and verified" in lines[-1]


def test_the_demo_goes_all_the_way_and_keeps_the_artifact(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = tree(demo.DATA), tmp_path / "kept"
    document = succeeded("demo", "--out", out, "--json").document
    check_document(document)
    assert [v["id"] for v in document["variants"]] == IDS
    inspected = succeeded("inspect", out, "--json").document
    assert document["artifact_digest"] == inspected["artifact_digest"]
    assert document["total_bytes"] == inspected["total_bytes"] < document["checkpoints_bytes"] / 2
    for shown, stored in zip(document["variants"], inspected["variants"], strict=True):
        assert shown == {key: stored[key] for key in shown}
        assert shown["footprint"] <= 0.05
    assert [(r["variant"], r["through"], r["corpus"]) for r in document["results"]] == [
        (id, kind, id) for id in IDS for kind in ("served", "restored")
    ]
    for result in document["results"]:
        assert result["tokens"] > 3000
        assert 0 < result["kl_mean"] < 0.1
        assert (result["variant"] == "chat") == (result["recovered"] is None)  # its text has tokens that the base lacks
        assert result["recovered"] is None or 0.5 < result["recovered"] < 1
    files = sum(path.stat().st_size for path in out.rglob("*") if path.is_file() and path.name != "run.json")
    assert document["verified_bytes"] == files
    succeeded("verify", out, "--level", "values")
    assert tree(demo.DATA) == data
    assert list(temporary.glob("mfs-*")) == []

    # Again, for people: what is finished is taken as it is.
    shorten_texts(tmp_path / "texts", monkeypatch)
    before = tree(out)
    again = succeeded("demo", "--out", out)
    check_closing_table(again)
    assert again.talk[-1] == f"the artifact is in {out}: mfs inspect {out}"
    steps = [line[:2] for line in again.talk if line[0].isdigit()]
    assert steps == ["1.", "2.", "3.", "4.", "5.", "6."]
    assert tree(out) == before


def test_the_demo_touches_nothing_of_the_users(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("do not lose me")
    before = tree(tmp_path)
    said, _ = refused(14, "demo", "--out", tmp_path / "mine")
    assert "found a folder with other files" in said
    said, _ = refused(2, "demo", "--budget", "0.01%")
    assert "does not hold what must be stored exactly" in said
    assert "'1%%'" in run("demo", "--budget", "1%%").err
    assert tree(tmp_path) == before
