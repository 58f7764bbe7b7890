"""A saved plan of models of the Hub: pinned to the commits that were planned, whatever the branch means later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import Family
from hub_stub import HubStub

from mfs_decompose.cli.app import main


def publish(hub: HubStub, name: str, folder: Path) -> str:
    return hub.commit(name, {path.name: path.read_bytes() for path in folder.iterdir()})


def mfs(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, dict[str, object]]:
    code = main([*map(str, words), "--json", "--progress", "none"])
    return code, json.loads(capsys.readouterr().out)


def test_a_plan_runs_the_commits_that_were_planned(
    hub: HubStub, family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = {"base": publish(hub, "org/base", family.base), "math": publish(hub, "org/math", family.variants["math"])}
    plan, out = tmp_path / "plan.json", tmp_path / "art"
    asked = ("decompose", "--base", "org/base", "--variants", "org/math", "--rank", "4", "--threads", "1")
    code, document = mfs(capsys, *asked, "--out", out, "--dry-run", "--save-plan", plan)
    assert code == 0
    assert [source["ref"] for source in document["sources"]] == [  # type: ignore[attr-defined]
        f"hf://org/{id}@{commit}" for id, commit in commits.items()
    ]
    publish(hub, "org/math", family.variants["vocab"])  # the branch moves on
    code, report = mfs(capsys, "decompose", "--plan", plan, "--out", out)
    assert (code, report["written"]) == (0, True)
    stored = json.loads((out / "manifest.json").read_bytes())
    assert stored["variants"][0]["source"]["revision"] == commits["math"]
    assert stored["base"]["store"] == "reference"

    named = ("--variants", "math=hf://org/math@main")
    code, error = mfs(capsys, "decompose", "--plan", plan, "--out", tmp_path / "other", *named)
    assert (code, error["code"]) == (12, "source-incompatible")
    assert str(error["message"]).startswith(f"'math' is not what {plan} was made for: ")


def test_a_copy_of_the_planned_files_may_stand_for_the_model(
    hub: HubStub, family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan refers to the base, so the run does too, although a folder would be copied by itself."""
    publish(hub, "org/base", family.base)
    plan, out = tmp_path / "plan.json", tmp_path / "art"
    source = ("--base", "org/base", "--variants", f"math={family.variants['math']}")
    assert mfs(capsys, "decompose", *source, "--out", out, "--dry-run", "--save-plan", plan)[0] == 0
    code, report = mfs(capsys, "decompose", "--plan", plan, "--base", family.base, "--out", out, "--offline")
    assert (code, report["base_bytes"]) == (0, 0)
