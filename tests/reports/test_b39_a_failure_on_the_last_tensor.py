"""B39: minutes of work, a crash at tensor 288 of 289 and an empty folder; or exit 0 and no output at all.

A failure on the very last tensor ends with an exit code that is not 0, publishes nothing, and the same command finishes
the run without repeating what was done; exit 0 means that the artifact is there.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_checkpoint
from report_program import Ran, run, succeeded
from report_runs import Tensors

from mfs_decompose.codec.base import Rows
from mfs_decompose.pipeline.encode import Encoder
from mfs_decompose.pipeline.passes import Surveyor
from mfs_decompose.source.checkpoint import TensorReader

SHAPES = [(18 + 2 * at, 43 - at) for at in range(11)]


def layers(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{at}.weight": torch.randn(shape, generator=generator) for at, shape in enumerate(SHAPES)}


@pytest.fixture
def words(tmp_path: Path) -> list[object]:
    """A command with 11 units of work in each pass, at one thread: always in one order."""
    base = layers(0)
    folders = [random_checkpoint(tmp_path / "base", base)]
    for seed, id in ((1, "code"), (2, "math")):
        own = {name: weight + 0.02 * layers(seed)[name] for name, weight in base.items()}
        folders.append(random_checkpoint(tmp_path / id, own))
    words: list[object] = ["decompose", "--base", folders[0], "--variants", *folders[1:], "--rank", "3"]
    return [*words, "--threads", "1", "--out", tmp_path / "art"]


class Counted:
    """Counts the calls of a method, and lets one of them fail."""

    def __init__(self, owner: type, name: str, failing: int | None = None, error: BaseException | None = None) -> None:
        self.calls = 0
        self.owner, self.name = owner, name
        self.plain: Callable[..., Any] = getattr(owner, name)
        self.failing, self.error = failing, error

    def put(self, patch: pytest.MonkeyPatch) -> Counted:
        counted = self

        def call(own: object, *args: Any, **kwargs: Any) -> Any:
            counted.calls += 1
            if counted.calls == counted.failing:
                assert counted.error is not None
                raise counted.error
            return counted.plain(own, *args, **kwargs)

        patch.setattr(self.owner, self.name, call)
        return self


def failed(words: list[object], owner: type, name: str, error: BaseException) -> tuple[Ran, int]:
    """Run until the very last call of a method, which fails; how often it is called when nothing does."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(owner, name).put(patch)
        out = Path(str(words[-1]))
        succeeded(*words[:-1], out.with_name("rehearsal"))
        total = counted.calls
    with pytest.MonkeyPatch.context() as patch:
        Counted(owner, name, total, error).put(patch)
        return run(*words, "--json"), total


def expected(words: list[object]) -> dict[str, bytes]:
    return artifact(Path(str(words[-1])).with_name("rehearsal"))


def artifact(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != "run.json"}


@pytest.mark.parametrize(
    ("owner", "name", "units"), [(Surveyor, "survey", 11), (Encoder, "encode", 22)], ids=["pass 1", "pass 2"]
)
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RuntimeError("a layer of another kind"), 1, "a layer of another kind"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 13, "expected room for"),
        (MemoryError(), 13, "not enough memory"),
    ],
    ids=["bug", "disk", "memory"],
)
def test_the_last_tensor_fails(
    words: list[object], owner: type, name: str, units: int, error: BaseException, code: int, said: str
) -> None:
    out = Path(str(words[-1]))
    ran, total = failed(words, owner, name, error)
    assert total == units
    assert (ran.code, ran.document["exit_code"]) == (code, code)
    assert said in ran.document["message"]
    assert not out.exists()

    with pytest.MonkeyPatch.context() as patch:
        surveys, encodings = Counted(Surveyor, "survey").put(patch), Counted(Encoder, "encode").put(patch)
        done = succeeded(*words, "--json").document
    in_pass_1 = name == "survey"
    assert surveys.calls == (1 if in_pass_1 else 0)
    assert encodings.calls == (22 if in_pass_1 else 2)  # the last unit is a shape, and two variants have it
    assert done["resumed_units"] == (10 if in_pass_1 else 11 + 10) + 1  # and the base's digests
    assert artifact(out) == expected(words)


def test_the_last_write_fails(words: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is computed; only the manifest is lacking, and without it there is no artifact."""
    out = Path(str(words[-1]))
    succeeded(*words[:-1], out.with_name("rehearsal"))

    def full(*args: object) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("mfs_decompose.artifact.writer.manifest_bytes", full)
        assert run(*words).code != 0
    assert not out.exists()
    with monkeypatch.context() as patch:
        surveys, encodings = Counted(Surveyor, "survey").put(patch), Counted(Encoder, "encode").put(patch)
        succeeded(*words)
    assert (surveys.calls, encodings.calls) == (0, 0)
    assert artifact(out) == expected(words)


def test_a_source_that_vanishes_before_its_last_tensor_is_read(
    words: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No exception is planted: the file is gone, and put back before the same command is run again."""
    out, weights = Path(str(words[-1])), tmp_path / "math" / "model.safetensors"
    succeeded(*words[:-1], out.with_name("rehearsal"))
    plain: Callable[..., Rows] = TensorReader.rows
    last = "layers.0.weight"  # the cheapest shape is the last unit

    def rows(reader: TensorReader, name: str, *args: Any, **kwargs: Any) -> Any:
        if (reader.checkpoint.id, name) == ("math", last) and weights.exists():
            weights.rename(tmp_path / "aside")
        return plain(reader, name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TensorReader, "rows", rows)
        ran = run(*words, "--json")
    assert ran.code == 12
    assert f"{weights} changed while it was being read" in ran.document["message"]
    assert not out.exists()
    assert run(*words).code == 11  # still gone, and said before anything else
    (tmp_path / "aside").rename(weights)
    done = succeeded(*words, "--json").document
    assert done["resumed_units"] >= 10
    assert artifact(out) == expected(words)


def test_exit_0_of_the_program_means_that_the_artifact_is_there(words: list[object]) -> None:
    out = Path(str(words[-1]))
    command = [sys.executable, "-m", "mfs_decompose", "--json", *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["written"] is True and (out / "manifest.json").is_file()
    one = out.with_name("elsewhere") / "deep"
    out.with_name("elsewhere").write_text("a file where a folder must be")
    assert run(*words[:-1], one).code == 14 and not one.exists()
