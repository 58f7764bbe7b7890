"""A family decomposed by the real program, beside copies of its checkpoints that may be moved."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from checkpoints import Family
from e2e_program import succeeded

BUDGET = "30%"
IDS = ["code", "math", "vocab"]


@dataclass(frozen=True)
class Made:
    """An artifact, and copies of the checkpoints it was made from; tests read and never write."""

    root: Path
    base: Path
    variants: dict[str, Path]
    command: list[str]
    document: dict[str, object]

    @property
    def art(self) -> Path:
        return self.root / "art"


def make(family: Family, root: Path, *more: str) -> Made:
    base = shutil.copytree(family.base, root / "base")
    variants = {id: shutil.copytree(family.variants[id], root / "tuned" / id) for id in IDS}
    refs = [f"{id}={folder}" for id, folder in variants.items()]
    command = ["decompose", "--base", str(base), "--variants", *refs, "--out", str(root / "art"), *more]
    return Made(root, base, variants, command, succeeded(*command, "--json").document)
