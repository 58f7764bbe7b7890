"""A folder that holds what the examples of the help and of the docs name, all of it tiny and real."""

from __future__ import annotations

import json
from pathlib import Path

from checkpoints import fine_tune, make_llama

# The windows of an evaluation are 512 tokens by default, and a BOS token may come on top.
POSITIONS = 1024


def fill_example_folder(root: Path) -> Path:
    """Write ./base, ./math (two shards), ./code, humaneval.jsonl and notes.txt into `root`."""
    base = make_llama(root / "base", seed=31)
    config = json.loads((base / "config.json").read_text())
    config["max_position_embeddings"] = POSITIONS
    (base / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    fine_tune(base, root / "math", seed=32, shards=2)
    fine_tune(base, root / "code", seed=33, kind="dense", scale=0.02)
    problems = [
        {"prompt": f"def times_{n}(x):\n", "canonical_solution": f"    return {n} * x\n", "task_id": f"Own/{n}"}
        for n in range(9)
    ]
    (root / "humaneval.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (root / "notes.txt").write_text("What was measured, on which day, and by whom. " * 14)
    return root
