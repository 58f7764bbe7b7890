"""A tiny family for the engine: one model that adds a delta to the rows of each variant, and every variant alone.

The variants alone are ordinary transformers models with the deltas merged in fp32: the slow oracle. Deltas here are
added by the simplest hook there is, so that the engine is tested without the runtime's own modules.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from architectures import ARCHITECTURES, build
from torch import nn

from mfs_decompose.runtime.batch_plan import BASE, PlanSlot
from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.requests import VariantInfo
from mfs_decompose.runtime.scheduler import Limits

CONTEXT = 256
TIE = 1e-4


class DeltaLinear(nn.Module):
    """A Linear or Conv1D, and for the rows of variant v a product of rank 3."""

    def __init__(self, inner: nn.Module, deltas_OI: list[torch.Tensor], slot: PlanSlot, *, head: bool) -> None:
        super().__init__()
        self.inner = inner
        self.deltas_OI = deltas_OI
        self.slot = slot
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        plan = self.slot.logits_plan if self.head else self.slot.plan
        rows = x.reshape(-1, x.shape[-1])
        flat = out.view(-1, out.shape[-1])
        for variant, start, stop in plan.over(rows.shape[0]):
            if variant != BASE:
                flat[start:stop] += rows[start:stop] @ self.deltas_OI[variant].T
        return out


@dataclass
class EngineFamily:
    """`model` answers for all; `alone` are merged, by id; `infos` are what an engine is told."""

    model: Any
    slot: PlanSlot
    infos: dict[str, VariantInfo]
    alone: dict[str, Any]

    def engine(self, **options: Any) -> Engine:
        limits = options.pop("limits", Limits(tokens=24, patience=4))
        options = {"kv_tokens": 2048, "block_size": 4, "check": False, **options}
        return Engine(self.model, self.slot, self.infos.values(), limits=limits, **options)


def config_of(architecture: str) -> Any:
    """As in `architectures`, untied, for tied ones repeat their last token, and with room for longer prompts."""
    config = ARCHITECTURES[architecture]()
    config.tie_word_embeddings = False
    config.max_position_embeddings = CONTEXT
    return config


def make_engine_family(config: Any, *, variants: int = 4, seed: int = 5, scale: float = 2.0) -> EngineFamily:
    """The base and variants `v0`, `v1` ... of random weights with logits that are not flat."""
    base = build(config, seed=seed).eval().requires_grad_(False)
    for parameter in base.parameters():
        if parameter.dim() >= 2:
            parameter.mul_(scale)
    model, slot = copy.deepcopy(base), PlanSlot()
    alone = {"base": base} | {f"v{at}": copy.deepcopy(base) for at in range(variants)}
    generator = torch.Generator().manual_seed(seed)
    for name, inner in list(model.named_modules()):
        transposed = type(inner).__name__ == "Conv1D"
        if not (transposed or type(inner) is nn.Linear) or "vision" in name or "router" in name:
            continue
        size_out, size_in = inner.weight.shape[::-1] if transposed else inner.weight.shape
        deltas = []
        for at in range(variants):
            left, right = (torch.randn(size, 3, generator=generator) for size in (size_out, size_in))
            delta_OI = 0.5 * float(inner.weight.std()) * left @ right.T / 3**0.5
            alone[f"v{at}"].get_submodule(name).weight.add_(delta_OI.T if transposed else delta_OI)
            deltas.append(delta_OI)
        parent, _, last = name.rpartition(".")
        head = inner is model.get_output_embeddings()
        setattr(model.get_submodule(parent), last, DeltaLinear(inner, deltas, slot, head=head))
    infos = {"base": VariantInfo("base", BASE, b"digest of base")}
    infos |= {f"v{at}": VariantInfo(f"v{at}", at, b"digest of v%d" % at) for at in range(variants)}
    return EngineFamily(model, slot, infos, alone)


def greedy_alone(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """What transformers' generate answers."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        repetition_penalty=1.0,
    )
    return list(out[0, len(prompt) :].tolist())


def ties(model: Any, prompt: list[int], expected: list[int], found: list[int]) -> int:
    """0 where two answers are equal, 1 where they part at two logits that lie within TIE; anything else fails."""
    if expected == found:
        return 0
    at = next((at for at, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    assert at is not None, f"answers of unlike lengths: {expected} and {found}"
    logits = model(torch.tensor([prompt + expected[:at]])).logits[0, -1]
    best = logits.topk(2)
    assert {expected[at], found[at]} <= set(best.indices.tolist()), f"{expected} and {found} part at {at}"
    gap = float(best.values[0] - best.values[1])
    assert gap <= TIE, f"{expected} and {found} part at {at}, where the best logits lie {gap} apart"
    return 1


def random_prompt(seed: int, length: int, vocabulary: int = 301) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(3, vocabulary, (length,), generator=generator).tolist())
