"""mergekit-extract-lora itself, run once a variant at the largest rank that a cell asks for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.frontier.work import Work

if TYPE_CHECKING:
    from benchmarks.frontier.variant import Setup


def extract(work: Work, setup: Setup, share: float) -> None:
    """Fill `work.adapter` with what mergekit makes of the variant, enough for linear layers of that share.

    Raises:
        RuntimeError: mergekit wrote no adapter.
    """
    assert setup.mergekit is not None
    cost = sum(2 * sum(work.shape(name)) for name in work.linears)
    widest = max(min(work.shape(name)) for name in work.linears)
    rank = max(1, min(widest, int(2 * share * work.checkpoint_bytes / cost)))
    out = setup.scratch / "mergekit"
    shutil.rmtree(out, ignore_errors=True)
    read_adapter(work, run(setup.mergekit, setup.base, setup.variant, rank, out))
    shutil.rmtree(out)


def run(python: Path, base: Path, variant: Path, rank: int, out: Path) -> Path:
    """The adapter's weights; that the model card after them fails without a network does not matter."""
    script = "import sys; from mergekit.scripts.extract_lora import main; sys.exit(main())"
    argv = ["--model", str(variant), "--base-model", str(base), "--out-path", str(out), "--max-rank", str(rank)]
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([python, "-c", script, *argv], env=environment, capture_output=True, text=True)
    if not (out / "adapter_config.json").exists() or not (out / "adapter_model.safetensors").exists():
        raise RuntimeError(f"mergekit wrote no adapter:\n{(done.stdout + done.stderr)[-2000:]}")
    return out / "adapter_model.safetensors"


def read_adapter(work: Work, path: Path) -> None:
    """Take the factors of the linear layers, and count the rest of the file."""
    from safetensors.torch import load_file

    found, used = load_file(path), 0
    for name in work.linears:
        stem = "base_model.model." + name.removesuffix(".weight")
        b, a = found[f"{stem}.lora_B.weight"], found[f"{stem}.lora_A.weight"]
        work.adapter[name] = b, a
        used += b.numel() * b.itemsize + a.numel() * a.itemsize
    work.adapter_rest = path.stat().st_size - used
