"""The deepest level of verify: what decodes is held against what was promised; what does not decode is a finding."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from artifact_families import Made, edit_manifest, make_artifact, oracle_sha256

from mfs_decompose.artifact.canonical import canonical_bytes, digest_of
from mfs_decompose.artifact.layout import MANIFEST
from mfs_decompose.artifact.report import VerifyReport
from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import ArtifactInvalid, ResourceShortage, SourceIncompatible, SourceNotFound


def files_of(report: VerifyReport) -> set[str]:
    return {problem.file for problem in report.problems}


def test_values_name_the_tensor_of_a_flipped_bit(made: Made, values: None) -> None:
    shard = made.path / "v0002-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    report = verify(made.path, "values")
    assert files_of(report) == {shard.name}
    named = [problem.tensor for problem in report.problems if problem.tensor]
    assert named == ["layer.0.weight"] or named == ["embed.weight"]
    assert verify(made.path, "values", variants=["alpha"]).problems == verify(made.path, "checksums").problems


def test_values_name_tensors_whose_base_is_damaged(made: Made, values: None) -> None:
    shard = made.path / "base-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    report = verify(made.path, "values")
    assert shard.name in files_of(report)
    assert any(problem.tensor and problem.file == "base" for problem in report.problems)


def test_values_that_were_promised_otherwise(made: Made, values: None) -> None:
    def edit(document: dict[str, Any]) -> None:
        document["variants"][0]["tensors"]["layer.1.weight"].update(restored_sha256="ab" * 32, exact=False)

    edit_manifest(made.path, edit)
    assert verify(made.path, "checksums").ok
    (problem,) = verify(made.path, "values").problems
    assert problem.tensor == "layer.1.weight"
    assert problem.what.startswith("variant 'alpha': expected restored sha256 abab")


@pytest.mark.parametrize(
    "failure", [ArtifactInvalid("bad planes"), ValueError("bad planes"), MemoryError("bad planes")]
)
def test_what_a_decoder_makes_of_damage_is_a_finding(
    made: Made, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(family: Any, variant: str, name: str, progress: Any) -> str:
        if (variant, name) == ("zeta", "embed.weight"):
            raise failure
        return oracle_sha256(family, variant, name, progress)

    fake = SimpleNamespace(restored_sha256=fail)
    monkeypatch.setitem(sys.modules, "mfs_decompose.artifact.values", fake)
    (problem,) = verify(made.path, "values").problems
    assert problem.tensor == "embed.weight"
    assert "cannot be decoded" in problem.what
    assert "bad planes" in problem.what


@pytest.mark.parametrize("failure", [ResourceShortage("full"), KeyboardInterrupt()])
def test_what_the_machine_or_the_user_does_is_no_finding(
    made: Made, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fail(*_: Any) -> str:
        raise failure

    fake = SimpleNamespace(restored_sha256=fail)
    monkeypatch.setitem(sys.modules, "mfs_decompose.artifact.values", fake)
    with pytest.raises(type(failure)):
        verify(made.path, "values")


def test_values_of_a_referenced_base(tmp_path: Path, values: None) -> None:
    made = make_artifact(tmp_path, "reference")
    with pytest.raises(SourceNotFound, match="the base that this artifact refers to"):
        verify(made.path, "values")
    assert verify(made.path, "checksums").ok
    assert verify(made.path, "values", base=made.base).ok
    shard = made.base / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(SourceIncompatible, match="other values in its tensor"):
        verify(made.path, "values", base=made.base)


HOSTILE: list[Any] = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    0.5,
    1e308,
    "",
    "../x",
    "x" * 300,
    "\0",
    [],
    [[]],
    {},
    {"a": 1},
    ["a"],
]


def test_random_edits_of_a_manifest_never_crash(made: Made, values: None) -> None:
    """A right digest over a wrong manifest: verify reports or accepts, and raises nothing."""
    dice = random.Random(7)
    right = json.loads((made.path / MANIFEST).read_bytes())
    verdicts: set[bool] = set()
    for _ in range(250):
        document = json.loads(json.dumps(right))
        places = list(walk(document))
        for _ in range(dice.choice([1, 1, 2])):
            parent, key = dice.choice(places)
            if dice.random() < 0.2 and isinstance(parent, dict):
                parent.pop(key, None)
            elif isinstance(parent, dict) or key < len(parent):
                parent[key] = dice.choice(HOSTILE)
        (made.path / MANIFEST).write_bytes(canonical_bytes({**document, "digest": digest_of(document)}))
        verdicts.add(verify(made.path, "values").ok)
    assert verdicts == {True, False}


def walk(node: Any) -> Any:
    """Every (container, key) of a JSON document."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, child in items:
        yield node, key
        yield from walk(child)
