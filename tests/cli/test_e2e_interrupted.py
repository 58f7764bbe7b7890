"""Ctrl-C, SIGTERM and SIGKILL in the middle of a real run; the same command finishes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import Family, random_checkpoint
from e2e_program import refused, run, succeeded, tree

SHAPES = [(640 + 64 * n, 1000 - 40 * n) for n in range(12)]
RESUMES = "interrupted; the same command resumes"


@dataclass(frozen=True)
class Large:
    """A family of 18 MB a checkpoint in 12 shapes, so 12 units of work in each pass, and what it decomposes to."""

    words: list[str]
    expected: dict[str, str]


def heed_interrupts() -> None:
    """A runner in the background may have left SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def artifact_tree(art: Path) -> dict[str, str]:
    return {name: digest for name, digest in tree(art).items() if name != "run.json"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Large:
    root = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(3)
    base = {f"layers.{n}.weight": torch.randn(shape, generator=generator) for n, shape in enumerate(SHAPES)}
    random_checkpoint(root / "base", {name: weight.bfloat16() for name, weight in base.items()})
    for id in ("code", "math"):
        tuned = {}
        for name, weight in base.items():
            left = torch.randn(weight.shape[0], 3, generator=generator)
            tuned[name] = (weight + 0.1 * left @ torch.randn(3, weight.shape[1], generator=generator)).bfloat16()
        random_checkpoint(root / id, tuned)
    words = ["decompose", "--base", root / "base", "--variants", root / "code", root / "math"]
    words += ["--rank", "48", "--threads", "1", "--out"]
    succeeded(*words, root / "art")
    return Large([str(word) for word in words], artifact_tree(root / "art"))


def stop_in_the_middle(
    words: list[str], out: Path, sent: signal.Signals, kind: str, count: int
) -> tuple[int, str, str]:
    """Start the program, and send it a signal once `count` units of a pass are in the journal."""
    journal = out.with_name(f"{out.name}.partial") / "journal.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "mfs_decompose", *words, str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(f'"{kind}"'.encode()) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(sent)
    said, talked = process.communicate(timeout=60)
    return process.returncode, said, talked


@pytest.mark.parametrize(
    ("sent", "kind", "code", "flags"),
    [
        (signal.SIGINT, "survey", 130, []),
        (signal.SIGTERM, "encode", 143, ["--json"]),
        (signal.SIGKILL, "encode", -9, []),
    ],
    ids=["ctrl-c", "sigterm", "sigkill"],
)
def test_a_stopped_run_is_resumed_by_the_same_command(
    large: Large, tmp_path: Path, sent: signal.Signals, kind: str, code: int, flags: list[str]
) -> None:
    out = tmp_path / "art"
    returned, said, talked = stop_in_the_middle([*flags, *large.words], out, sent, kind, 3)
    assert returned == code, talked
    assert not out.exists()
    left = {"art.partial", "art.lock"} if sent == signal.SIGKILL else {"art.partial"}
    assert {path.name for path in tmp_path.iterdir()} == left
    if sent != signal.SIGKILL:
        assert talked.splitlines()[-1] == f"Error: {RESUMES}"
        assert "Traceback" not in talked
    if flags:
        document = json.loads(said)
        assert (document["code"], document["exit_code"], document["message"]) == ("interrupted", code, RESUMES)
    else:
        assert said == ""

    # Another command does not take it over, nor destroy it.
    words, before = [*large.words, str(out)], tree(out.with_name("art.partial"))
    message, hint = refused(15, *words, "--seed", "5")
    assert message.startswith(
        f"the unfinished run in {out}.partial was started from something else; what differs: the recipe"
    )
    assert "--no-resume to start over" in hint
    assert tree(out.with_name("art.partial")) == before

    done = succeeded(*words, "--json")
    assert done.document["written"] is True
    # Every unit of pass 1 was done where pass 2 was under way.
    assert done.document["resumed_units"] >= (3 if kind == "survey" else len(SHAPES) + 3)
    assert f"{done.document['resumed_units']} units taken from the run before" in done.talk[-2]
    assert artifact_tree(out) == large.expected
    assert [path.name for path in tmp_path.iterdir()] == ["art"]


# The moments that are hard to hit from outside.


def test_an_interrupt_in_the_middle_of_a_restore_leaves_nothing(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mfs_decompose.artifact.values import row_bytes

    art = tmp_path / "art"
    succeeded("decompose", "--base", family.base, "--variants", family.variants["math"], "--rank", "9", "--out", art)
    before, calls = tree(tmp_path), []

    def interrupted(values: torch.Tensor) -> memoryview:
        calls.append(values)
        if len(calls) > 11:
            os.kill(os.getpid(), signal.SIGINT)
        return row_bytes(values)

    monkeypatch.setattr("mfs_decompose.pipeline.checkpoint_job.row_bytes", interrupted)
    ran = run("restore", art, "--variant", "math", "--out", tmp_path / "back", "--json")
    assert ran.code == 130
    assert ran.document["message"] == "interrupted"
    assert tree(tmp_path) == before
    monkeypatch.undo()
    succeeded("restore", art, "--variant", "math", "--out", tmp_path / "back")


def test_starting_over_takes_nothing_from_before(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mfs_decompose.pipeline.workspace import Workspace

    out = tmp_path / "art"
    words = ("decompose", "--base", family.base, "--variants", family.variants["math"], "--budget", "30%", "--out", out)

    def interrupted(workspace: Workspace, unit: int, items: list[object]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "record_encoding", interrupted)
        for _ in range(2):
            ran = run(*words)
            assert (ran.code, ran.talk[-1]) == (130, f"Error: {RESUMES}")
    done = succeeded(*words, "--no-resume", "--json")
    assert done.document["resumed_units"] == 0
    assert "taken from" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["art"]


def test_an_interrupt_while_publishing_leaves_all_or_nothing(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "art"
    words = ("decompose", "--base", family.base, "--variants", family.variants["math"], "--budget", "30%", "--out", out)

    def interrupted(*paths: Path, **kwargs: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mfs_decompose.pipeline.workspace.publish_dir", interrupted)
        assert run(*words).code == 130
    assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        assert run(*words).code == 130
    assert (out / "manifest.json").exists()  # it has its name; only the sweeping was left
    again = succeeded(*words, "--json")
    assert again.document["written"] is False
    assert [path.name for path in tmp_path.iterdir()] == ["art"]
    succeeded("verify", out, "--level", "values")


def test_an_interrupted_overwrite_leaves_the_artifact_that_was_there(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "art"
    words = ("decompose", "--base", family.base, "--variants", family.variants["math"], "--out", out)
    succeeded(*words, "--budget", "30%")
    before = tree(out)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mfs_decompose.pipeline.workspace.Workspace.record_encoding", interrupted)
        assert run(*words, "--budget", "20%", "--overwrite", "--yes").code == 130
    assert tree(out) == before
    assert succeeded(*words, "--budget", "30%", "--json").document["written"] is False
    resumed = succeeded(*words, "--budget", "20%", "--overwrite", "--yes", "--json").document
    assert resumed["resumed_units"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["art"]
    succeeded("verify", out, "--level", "values")
