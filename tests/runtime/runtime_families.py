"""Tiny families of real architectures as artifacts, loaded into the runtime, and what they must answer.

The oracle is `mfs restore --dtype float32` and transformers on what it wrote. Budgets are large: a variant whose delta
was lost would be far from its restore.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, load, make_architecture_family

from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.pipeline.restore import RestoreOptions, restore
from mfs_decompose.recipe.load import load_recipe
from mfs_decompose.runtime import modules, modules_linear
from mfs_decompose.runtime.load import LoadedFamily, load_family
from mfs_decompose.runtime.ops import cpu

BUDGET: Mapping[str, object] = {
    "objective.budget": "45%",
    "deltas.default": {"codec": "lowrank", "factors": "banded"},
}
TOLERANCE = 1e-4
KL = 1e-6

assert ARCHITECTURES


@dataclass(frozen=True)
class Stored:
    """An artifact, the folders it was made from, and its fp32 restores."""

    artifact: Path
    base: Path
    variants: Mapping[str, Path]
    scratch: Path

    def restored(self, id: str) -> Any:
        """The model of a variant, or of `base`, as transformers loads its fp32 restore."""
        folder = self.scratch / f"restored-{id}"
        if not folder.exists():
            restore(self.artifact, [id], folder, RestoreOptions(dtype="float32"))
        return load(folder)

    def load(self, **options: Any) -> LoadedFamily:
        return load_family(self.artifact, **options)


def store(
    root: Path, base: Path, variants: Mapping[str, Path], recipe: Mapping[str, object] = BUDGET, name: str = "art"
) -> Stored:
    """Decompose folders."""
    asked = load_recipe(None, dict(recipe))
    places = {id: str(folder) for id, folder in variants.items()}
    decompose(DecomposeRequest(places, root / name, asked, base=str(base), threads=1, device="cpu"))
    return Stored(root / name, base, variants, root / f"{name}-scratch")


def store_architecture(root: Path, name: str, recipe: Mapping[str, object] = BUDGET) -> Stored:
    """The base of an architecture with its variants `chat` and `words`, which has new tokens."""
    made = make_architecture_family(root / name, name)
    return store(root / name, made.base, made.variants, recipe)


@cache
def texts(count: int, longest: int = 14, below: int = 300) -> tuple[tuple[int, ...], ...]:
    """Token ids of unlike lengths."""
    draw = torch.Generator().manual_seed(7)
    lengths = [3 + (5 * at) % (longest - 3) for at in range(count)]
    return tuple(tuple(torch.randint(3, below, (n,), generator=draw).tolist()) for n in lengths)


@torch.inference_mode()
def packed_logits(
    family: LoadedFamily, ids: Sequence[str], texts: Sequence[Sequence[int]], keep: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """The logits of many texts, one variant each, in one packed call: [T, vocabulary] a text.

    Attention is kept inside each text by a mask; texts come in the order given, which need not be that of slots.

    Args:
        keep: rows of the packed sequence whose logits are asked for; what comes back is then one tensor.
    """
    rows = [id for id, text in zip(ids, texts, strict=True) for _ in text]
    packed = [token for text in texts for token in text]
    positions = [at for text in texts for at in range(len(text))]
    owner = torch.tensor([at for at, text in enumerate(texts) for _ in text])
    order = torch.arange(len(packed))
    seen = (owner[:, None] == owner[None, :]) & (order[:, None] >= order[None, :])
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    plan = family.plan(rows)
    asked: dict[str, Any] = {} if keep is None else {"logits_to_keep": torch.tensor(keep)}
    with family.slot.use(plan, None if keep is None else plan.select(keep)):
        logits = family.model(
            input_ids=torch.tensor([packed]),
            position_ids=torch.tensor([positions]),
            attention_mask=mask,
            use_cache=False,
            **asked,
        ).logits[0]
    if keep is not None:
        return [logits]
    return list(torch.split(logits, [len(text) for text in texts]))


@contextmanager
def few_rows(most: int) -> Iterator[None]:
    """Inside, steps of up to `most` rows count as few."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (cpu, modules, modules_linear):
            patched.setattr(module, "FEW_ROWS", most)
        yield


@torch.inference_mode()
def alone(model: Any, text: Sequence[int]) -> torch.Tensor:
    """[T, vocabulary] of one text and one model."""
    return model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0]  # type: ignore[no-any-return]


def check_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Alike to the tolerance of the runtime; what lies beyond the variant's own vocabulary is minus infinity."""
    own = expected.shape[-1]
    assert torch.isneginf(found[:, own:]).all()
    assert float((found[:, :own] - expected).abs().max()) <= TOLERANCE
    logs = [values.double().log_softmax(-1) for values in (expected, found[:, :own])]
    assert float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).max()) <= KL


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes) + "\n")
