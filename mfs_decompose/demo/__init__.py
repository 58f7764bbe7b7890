"""A small family that ships with the package: a base, three fine-tunes of it, and held-out text for each."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"
VARIANTS = ("chat", "code", "math")


def base_folder() -> Path:
    """The base: a small Llama-style model trained by benchmarks/make_demo_family.py."""
    return DATA / "base"


def variant_folder(id: str) -> Path:
    """A fine-tune: `code` in full, `math` a merged LoRA, `chat` with two added tokens."""
    return DATA / id


def text_of(id: str) -> Path:
    """Text of a variant's own kind that none of the models was trained on."""
    return DATA / "text" / f"{id}.jsonl"
