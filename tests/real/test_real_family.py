"""A real family: SmolLM2-135M and fine-tunes of it, where a machine has them.

    MFS_FAMILY=FOLDER MFS_HUMANEVAL=humaneval.jsonl make test-slow

FOLDER holds `base`, `code`, `math` and `lora-merged`, as transformers saves them in bf16: full fine-tunes of 120 steps
on Python source and on grade-school maths, and a merged LoRA of rank 16. The limits are those that were promised.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

FAMILY = os.environ.get("MFS_FAMILY", "")
HUMANEVAL = os.environ.get("MFS_HUMANEVAL", "")
VARIANTS = {"code": "code", "math": "math", "lora": "lora-merged"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FAMILY, reason="MFS_FAMILY names no folder with the 135M family"),
]


def mfs(*words: str | Path) -> Any:
    """Run the program in a process of its own; its JSON document."""
    command = [sys.executable, "-m", "mfs_decompose", *map(str, words), "--json", "--progress", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def arguments(out: Path, *more: str, order: list[str] | None = None) -> list[str]:
    ids = order or list(VARIANTS)
    named = [f"{id}={Path(FAMILY) / VARIANTS[id]}" for id in ids]
    return ["decompose", "--base", f"{FAMILY}/base", "--variants", *named, "--out", str(out), *more]


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "run.json"
    }


@pytest.fixture(scope="module")
def art(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("real") / "art"
    mfs(*arguments(out))
    return out


def test_every_variant_stays_under_five_per_cent_and_verifies(art: Path) -> None:
    found = mfs("inspect", art)
    assert all(variant["footprint"] <= 0.05 for variant in found["variants"])
    assert found["coverage"] == 1.0
    assert mfs("verify", art, "--level", "values")["ok"]


def test_what_is_restored_loads_in_transformers(art: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    mfs("restore", art, "--variant", "all", "--out", tmp_path / "all")
    for id in VARIANTS:
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "all" / id, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "all" / id)
        assert model(**tokenizer("def add(a, b):", return_tensors="pt")).logits.isfinite().all()


@pytest.mark.skipif(not HUMANEVAL, reason="MFS_HUMANEVAL names no file")
def test_drift_on_humaneval(art: Path) -> None:
    text = f"{HUMANEVAL}:prompt+canonical_solution"
    results = mfs("eval", art, "--variant", "code", "--text", text, "--through", "both")["results"]
    kl = {result["through"]: result["kl_mean"] for result in results}
    assert kl["served"] <= 6e-4 and kl["restored"] <= 8e-4
    assert all(result["recovered"] > 0.99 for result in results)


def test_lossless_gives_every_file_back(tmp_path: Path) -> None:
    out = tmp_path / "art"
    mfs(*arguments(out, "--codec", "lossless"))
    mfs("restore", out, "--variant", "all", "--out", tmp_path / "all", "--exact")
    for id, folder in VARIANTS.items():
        original, restored = contents(Path(FAMILY) / folder), contents(tmp_path / "all" / id)
        assert restored == original


@pytest.mark.parametrize("threads", ["1", "4"])
def test_bytes_do_not_depend_on_threads_or_order(art: Path, tmp_path: Path, threads: str) -> None:
    out = tmp_path / "art"
    mfs(*arguments(out, "--threads", threads, order=["math", "lora", "code"]))
    assert contents(out) == contents(art)


def test_killed_again_and_again_it_ends_with_the_same_bytes(art: Path, tmp_path: Path) -> None:
    out = tmp_path / "art"
    draw = random.Random(7)
    command = [sys.executable, "-m", "mfs_decompose", *arguments(out), "--progress", "none"]
    for _ in range(10):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(4.0, 9.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists() or (out / "manifest.json").exists()
    mfs(*arguments(out))
    assert contents(out) == contents(art)
