"""A family whose checkpoints are models of the Hub: decomposed, restored and compared through the real program."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import Family, read_weights
from hub_stub import HubStub

from mfs_decompose.cli.app import main


def publish(hub: HubStub, name: str, folder: Path) -> str:
    return hub.commit(name, {path.name: path.read_bytes() for path in folder.iterdir()})


def mfs(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, dict[str, object], str]:
    code = main([*map(str, words), "--json", "--progress", "none"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


@pytest.fixture
def commits(hub: HubStub, family: Family) -> dict[str, str]:
    return {
        "base": publish(hub, "org/base", family.base),
        "math": publish(hub, "org/math", family.variants["math"]),
    }


def decompose(capsys: pytest.CaptureFixture[str], out: Path, *more: str) -> tuple[int, dict[str, object], str]:
    words = ("decompose", "--base", "org/base", "--variants", "hf://org/math@main", "--out", out, "--budget", "30%")
    return mfs(capsys, *words, "--threads", "1", *more)


def test_the_commit_is_recorded_and_the_base_is_referred_to(
    commits: dict[str, str], family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "art"
    code, report, _ = decompose(capsys, out)
    assert code == 0 and report["base_bytes"] == 0
    stored = json.loads((out / "manifest.json").read_bytes())
    assert (stored["base"]["store"], stored["base"]["source"]["revision"]) == ("reference", commits["base"])
    (variant,) = stored["variants"]
    assert (variant["id"], variant["source"]["repo"]) == ("math", "org/math")
    assert variant["source"]["revision"] == commits["math"]
    assert str(tmp_path) not in (out / "manifest.json").read_text()

    assert mfs(capsys, "verify", out, "--level", "values")[0] == 0
    assert mfs(capsys, "restore", out, "--variant", "base", "--out", tmp_path / "base")[0] == 0
    original, restored = read_weights(family.base), read_weights(tmp_path / "base")
    assert all(restored[name].equal(original[name]) for name in original)


def test_the_same_command_writes_nothing_again(
    commits: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decompose(capsys, tmp_path / "art")[1]["written"] is True
    assert decompose(capsys, tmp_path / "art")[1]["written"] is False
    assert decompose(capsys, tmp_path / "art", "--offline")[1]["written"] is False


def test_a_moved_branch_is_another_family(
    hub: HubStub, commits: dict[str, str], family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decompose(capsys, tmp_path / "art")
    publish(hub, "org/math", family.variants["code"])
    code, error, _ = decompose(capsys, tmp_path / "art")
    assert (code, error["code"]) == (14, "output-busy")


def test_the_artifact_travels_without_its_hints(
    commits: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit in the manifest is enough to find the base again, on a machine that has never seen it."""
    decompose(capsys, tmp_path / "art")
    (tmp_path / "art" / "run.json").unlink()
    shutil.rmtree(tmp_path / "hub")
    code, done, _ = mfs(capsys, "restore", tmp_path / "art", "--variant", "math", "--out", tmp_path / "math")
    assert code == 0 and done["restored"][0]["checked"] is True  # type: ignore[index]


def test_a_dry_run_fetches_headers_alone(
    hub: HubStub, commits: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, plan, _ = decompose(capsys, tmp_path / "art", "--dry-run")
    assert code == 0 and plan["base"] == {"mode": "known", "store": "reference", "bytes": 0}
    assert not (tmp_path / "hub").exists() and not (tmp_path / "art").exists()
    weights = [seen for seen in hub.seen if seen.file and seen.file.endswith(".safetensors")]
    gets = [seen for seen in weights if seen.method == "GET"]
    assert gets and all("range" in {name.lower() for name in seen.headers} for seen in gets)


@pytest.mark.parametrize(("name", "code"), [("org/nothing", 11), ("org/base@nowhere", 11)])
def test_what_is_not_there_is_said(
    commits: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    words = ("decompose", "--base", name, "--variants", "org/math", "--out", tmp_path / "art")
    found, error, talk = mfs(capsys, *words)
    assert (found, error["code"]) == (code, "source-not-found") and error["hint"] and "Traceback" not in talk
    assert not (tmp_path / "art").exists()


def test_a_hub_that_cannot_be_reached_is_a_network_failure(
    hub: HubStub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    code, error, talk = decompose(capsys, tmp_path / "art")
    assert (code, error["exit_code"]) == (30, 30) and error["hint"] and "Traceback" not in talk
    assert not (tmp_path / "art").exists() and not (tmp_path / "art.partial").exists()
