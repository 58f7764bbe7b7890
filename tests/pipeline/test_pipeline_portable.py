"""The whole main path on one machine, verified on another: every codec, corrections over them, and adapters.

Decomposed here with two threads; verified in processes with one thread, other vector instructions and other kernels of
the matrix library. A decode planted in fp32 must be caught.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import portable_verify
import pytest
import torch
from every_codec import RULES, make_artifacts

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.verify import verify
from mfs_decompose.codec.registry import COMPOSED, EXACT, LOSSY
from mfs_decompose.codec.tree import CodecNode

ENVIRONMENTS = {
    "one thread": {},
    "plain vector instructions": {"ATEN_CPU_CAPABILITY": "default"},
    "compatible matrix kernels": {"MKL_CBWR": "COMPATIBLE"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return make_artifacts(tmp_path_factory.mktemp("portable"), threads=2)
    finally:
        torch.set_num_threads(before)


def start(made: dict[str, Path], changes: dict[str, str]) -> subprocess.Popen[bytes]:
    clean = {key: value for key, value in os.environ.items() if key not in ("ATEN_CPU_CAPABILITY", "MKL_CBWR")}
    return subprocess.Popen(
        [sys.executable, portable_verify.__file__, *map(str, made.values())],
        env={**clean, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **changes},
        stdout=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def elsewhere(made: dict[str, Path]) -> dict[str, Any]:
    """What each environment finds wrong; their processes run side by side."""
    running = {name: start(made, changes) for name, changes in ENVIRONMENTS.items()}
    found = {}
    for name, process in running.items():
        output, _ = process.communicate()
        assert process.returncode == 0
        found[name] = json.loads(output)
    return found


def codecs(node: CodecNode) -> set[str]:
    return {node.codec}.union(*map(codecs, node.children))


def test_every_codec_is_in_it(made: dict[str, Path]) -> None:
    found: set[str] = set()
    for artifact in made.values():
        with Family.open(artifact) as family:
            for id in family.variant_ids:
                for name in family.variant(id).tensors:
                    found |= codecs(family.tree(id, name))
    assert found == {*LOSSY, *EXACT, *COMPOSED}


def test_the_environments_are_what_they_say(elsewhere: dict[str, Any]) -> None:
    assert [elsewhere[name]["threads"] for name in ENVIRONMENTS] == [1, 1, 1]
    assert elsewhere["plain vector instructions"]["capability"] == "DEFAULT"


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_artifacts_verify_elsewhere(environment: str, elsewhere: dict[str, Any], made: dict[str, Path]) -> None:
    assert elsewhere[environment]["honest"] == {str(artifact): [] for artifact in made.values()}


def test_artifacts_verify_with_the_threads_that_made_them(made: dict[str, Path]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert all(verify(artifact, "values").ok for artifact in made.values())
    finally:
        torch.set_num_threads(before)


def test_a_planted_fp32_decode_is_caught(elsewhere: dict[str, Any], made: dict[str, Path]) -> None:
    planted = elsewhere["one thread"]["planted"]
    found = {name: {what.split(":")[0] for what in planted[str(artifact)]} for name, artifact in made.items()}
    # An fp32 weight shows the last bit of its delta; a shorter one is rounded otherwise once in a while.
    assert {"int8.float.weight", "banded.float.weight"} <= found["lossy"]
    products = (*(name for name, rule in RULES.items() if "lo" in str(rule["codec"])), "lm_head", "model.embed")
    assert all(tensor.startswith(products) for tensor in found["lossy"] | found["exact"])
    assert not any(wrong for name, wrong in found.items() if name not in ("lossy", "exact", "shared"))
