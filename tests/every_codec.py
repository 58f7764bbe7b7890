"""A family whose tensors go through every codec, and adapters of the main kinds, as artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from adapters import make_adapter
from checkpoints import EMBEDDING, HEAD, random_checkpoint, read_weights
from merged_loras import merged_lora

from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.recipe.load import load_recipe

TIED = '{"model_type": "toy", "tie_word_embeddings": true}\n'
RULES: dict[str, Mapping[str, object]] = {
    "banded": {"codec": "lowrank", "factors": "banded"},
    "int4": {"codec": "lowrank", "factors": "int4"},
    "int8": {"codec": "lowrank", "factors": "int8"},
    "bf16": {"codec": "lowrank", "factors": "bf16"},
    "sparse": {"codec": "sparse", "values": "bf16"},
    "few": {"codec": "sparse", "values": "int8"},
    "sign": {"codec": "sign", "scale": "group"},
    "one": {"codec": "sign", "scale": "tensor"},
    "ternary": {"codec": "ternary"},
    "kbit": {"codec": "kbit", "bits": 3},
    "deadzone": {"codec": "deadzone", "step": 1e-2},
    "rowsparse": {"codec": "rowsparse", "rows": 5},
    "sum": {"codec": "lowrank", "factors": "int4", "rank": 2, "residual": {"codec": "kbit", "bits": 2}},
    "lossless": {"codec": "lossless"},
    "raw": {"codec": "raw"},
    "lora": {"codec": "lora-exact"},
}
"""For tensors called `RULE.weight`, and stacks called `RULE.experts.weight`."""

RECIPE: Mapping[str, object] = {
    "objective.budget": "45%",
    "deltas.rules": [{"match": f"{name}.*", **rule} for name, rule in RULES.items()],
}
EXACT: Mapping[str, object] = {**RECIPE, "deltas.keep_exact": True}
SHARED: Mapping[str, object] = {"base.mode": "shared", "objective.budget": "5%", "deltas.default.factors": "banded"}
ADAPTERS = ("linear", "tokens", "grown", "dora", "dora_conv1d", "experts", "lora_bias")


def make_codecs(root: Path) -> tuple[Path, dict[str, Path]]:
    """A base and the variants `many`, whose tensors go through every codec, and `plain`, which is next to it."""
    draw = torch.Generator().manual_seed(3)
    base: dict[str, torch.Tensor] = {EMBEDDING: torch.randn(37, 24, generator=draw), "norm.weight": torch.ones(24)}
    for number, name in enumerate(RULES):
        base[f"{name}.weight"] = torch.randn(40 + number, 67 - number, generator=draw)
    for name in ("int4", "few", "banded"):
        base[f"{name}.experts.weight"] = torch.randn(3, 20, 18, generator=draw)
    base = {name: weight.to(torch.bfloat16) for name, weight in base.items()}
    for name, columns in {"lossless": 9, "int8": 29, "banded": 31}.items():
        base[f"{name}.float.weight"] = torch.randn(27, columns, generator=draw)
    base["position"] = torch.tensor(9)
    many: dict[str, torch.Tensor] = {}
    for name, weight in base.items():
        columns = weight.shape[-1] if weight.dim() else 1
        change = 0.05 * torch.randn(weight.shape, generator=draw)
        if weight.dim() > 1:
            left = torch.randn(*weight.shape[:-1], 2, generator=draw)
            change = change + 0.3 * left @ torch.randn(2, columns, generator=draw)
        many[name] = (weight.float() + 0.2 * change).to(weight.dtype)
    base["lora.weight"], many["lora.weight"], _ = merged_lora((160, 130), 2, 2e-3, 5)
    many[EMBEDDING] = torch.cat([many[EMBEDDING], many[EMBEDDING][:4]])
    many[HEAD] = many[EMBEDDING].clone()
    plain = {**base, "norm.weight": base["norm.weight"] * 2}
    folders = {id: _checkpoint(root / id, own) for id, own in (("many", many), ("plain", plain))}
    return _checkpoint(root / "base", base), folders


def make_learnt(root: Path) -> dict[str, Path]:
    """Two variants of the base that learnt the same first, and then each a little of its own."""
    draw = torch.Generator().manual_seed(3)
    base = read_weights(root.parent / "sources" / "base")

    def change(weight: torch.Tensor, size: float) -> torch.Tensor:
        if weight.dim() != 2:
            return weight
        left = torch.randn(weight.shape[0], 3, generator=draw)
        return (weight.float() + size * left @ torch.randn(3, weight.shape[1], generator=draw)).to(weight.dtype)

    common = {name: change(weight, 0.1) for name, weight in base.items()}
    return {
        id: _checkpoint(root / id, {name: change(weight, 0.02) for name, weight in common.items()})
        for id in ("one", "two")
    }


def make_artifacts(root: Path, threads: int = 1) -> dict[str, Path]:
    """One artifact of all codecs, one with corrections over them, one with a shared delta, one of each adapter."""
    base, variants = make_codecs(root / "sources")
    _run(root / "lossy", base, variants, RECIPE, threads)
    _run(root / "exact", base, variants, EXACT, threads)
    _run(root / "shared", base, make_learnt(root / "learnt"), SHARED, threads)
    for kind in ADAPTERS:
        made = make_adapter(root / "adapters" / kind, kind)
        _run(root / kind, made.base, {"many": made.adapter}, {}, threads)
    return {name: root / name for name in ("lossy", "exact", "shared", *ADAPTERS)}


def _checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    random_checkpoint(folder, tensors, {"format": "pt"})
    (folder / "config.json").write_text(TIED)
    return folder


def _run(out: Path, base: Path, variants: Mapping[str, Path], recipe: Mapping[str, object], threads: int) -> None:
    places = {id: str(folder) for id, folder in variants.items()}
    asked = load_recipe(None, dict(recipe))
    decompose(DecomposeRequest(places, out, asked, base=str(base), threads=threads, device="cpu"))
