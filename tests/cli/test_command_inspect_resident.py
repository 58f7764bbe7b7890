"""`mfs inspect --resident`: forms and bytes, as a document and as a table."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import fine_tune, make_llama
from e2e_program import refused, succeeded


@pytest.fixture(scope="module")
def art(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resident")
    base = make_llama(root / "base", seed=51)
    refs = [
        f"math={fine_tune(base, root / 'math', seed=52)}",
        f"norms={fine_tune(base, root / 'norms', seed=53, kind='norms')}",
    ]
    succeeded("decompose", "--base", base, "--variants", *refs, "--out", root / "art")
    return root / "art"


def test_the_document(art: Path) -> None:
    document = succeeded("inspect", art, "--resident", "--json").document
    assert document["schema"] == "mfs.resident/1"
    assert set(document) == {
        "schema", "mfs_version", "artifact_digest", "base_bytes", "shared_bytes", "variants", "total_bytes",
    } - ({"mfs_version"} - set(document))  # fmt: skip
    math, norms = document["variants"]
    assert {entry["form"] for entry in math["forms"]} >= {"low rank int8", "whole parameters"}
    assert [entry for entry in norms["forms"] if entry["bytes"]] == [
        {"codec": norms["forms"][-1]["codec"], "form": "whole parameters", "tensors": 5, "bytes": 5 * 64 * 4,
         "stored_bytes": norms["forms"][-1]["stored_bytes"]}
    ]  # fmt: skip
    for one in document["variants"]:
        assert one["bytes"] == sum(entry["bytes"] for entry in one["forms"])
        assert 0 < one["share"] < 0.5
    assert document["total_bytes"] == document["base_bytes"] + sum(one["bytes"] for one in document["variants"])
    alone = succeeded("inspect", art, "--resident", "--variant", "norms", "--json").document
    assert alone["variants"] == [norms]


def test_the_table(art: Path) -> None:
    shown = succeeded("inspect", art, "--resident").out
    assert "low rank int8" in shown
    assert "in memory" in shown
    assert "base in fp32" in shown


def test_wrong_requests(art: Path) -> None:
    refused(2, "inspect", art, "--resident", "--spectrum")
    refused(2, "inspect", art, "--resident", "--variant", "owl")
    refused(2, "inspect", art, "--resident", "--threads", 1)
