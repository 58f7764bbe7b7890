"""A folder that holds what the examples of the help and of the docs name, all of it tiny and real."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from adapters import write_adapter
from checkpoints import fine_tune, make_llama, read_weights

# The windows of an evaluation are 512 tokens by default, and a BOS token may come on top.
POSITIONS = 1024


def fill_example_folder(root: Path) -> Path:
    """Write ./base, ./math (two shards), ./code, an adapter ./tuned-lora, humaneval.jsonl and notes.txt to `root`."""
    base = make_llama(root / "base", seed=31)
    config = json.loads((base / "config.json").read_text())
    config["max_position_embeddings"] = POSITIONS
    (base / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    fine_tune(base, root / "math", seed=32, shards=2)
    fine_tune(base, root / "code", seed=33, kind="dense", scale=0.02)
    _write_lora(base, root / "tuned-lora")
    problems = [
        {"prompt": f"def times_{n}(x):\n", "canonical_solution": f"    return {n} * x\n", "task_id": f"Own/{n}"}
        for n in range(9)
    ]
    (root / "humaneval.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (root / "notes.txt").write_text("What was measured, on which day, and by whom. " * 14)
    return root


def _write_lora(base: Path, folder: Path) -> None:
    """A LoRA of rank 3 on two projections of every layer, as PEFT names it."""
    generator = torch.Generator().manual_seed(34)
    tensors = {}
    for name, weight in read_weights(base).items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = 0.1 * torch.randn(3, weight.shape[1], generator=generator)
            tensors[f"{stem}.lora_B.weight"] = 0.1 * torch.randn(weight.shape[0], 3, generator=generator)
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    write_adapter(folder, tensors, config)
