"""Checkpoints of headers alone, and plans made of them: this floor never reads a weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mfs_decompose.plan.build import build_plan
from mfs_decompose.plan.model import Plan
from mfs_decompose.recipe.load import load_recipe
from mfs_decompose.source.align import align, mean_base_tensors
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.header import ShardHeader, TensorInfo, TensorSpec

Specs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (dtype, shape)."""

LLAMA: Specs = {
    "model.embed_tokens.weight": ("BF16", (259, 40)),
    "model.layers.0.self_attn.q_proj.weight": ("BF16", (56, 40)),
    "model.layers.0.self_attn.k_proj.weight": ("BF16", (24, 40)),
    "model.layers.0.mlp.up_proj.weight": ("BF16", (96, 40)),
    "model.layers.0.mlp.down_proj.weight": ("BF16", (40, 96)),
    "model.layers.0.input_layernorm.weight": ("BF16", (40,)),
    "model.layers.1.self_attn.q_proj.weight": ("BF16", (56, 40)),
    "model.layers.1.self_attn.k_proj.weight": ("BF16", (24, 40)),
    "model.layers.1.mlp.up_proj.weight": ("BF16", (96, 40)),
    "model.layers.1.mlp.down_proj.weight": ("BF16", (40, 96)),
    "model.layers.1.input_layernorm.weight": ("BF16", (40,)),
    "model.norm.weight": ("BF16", (40,)),
}


def checkpoint(id: str, specs: Specs, *, file: str = "model.safetensors", mtime: int = 7) -> Checkpoint:
    """A checkpoint whose files nobody will open."""
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for name, (dtype, shape) in sorted(specs.items()):
        tensors[name] = TensorInfo(name, dtype, shape, file, 64 + end)
        end += tensors[name].nbytes
    raw = f"header of {id}".encode()
    shard = ShardHeader(file, 64 + end, mtime, raw, f"digest of {id}", {}, tuple(tensors.values()))
    return Checkpoint(id, Path("nowhere") / id, (shard,), None, tensors, (), (), {})


def plan_of(
    *variants: Checkpoint, base: Specs | None = LLAMA, recipe: Mapping[str, object] | None = None, store: str = "copy"
) -> Plan:
    """The plan of variants against `base`, or against their mean where it is None."""
    effective = load_recipe(None, dict(recipe or {}))
    if base is None:
        tensors: Mapping[str, TensorSpec] = mean_base_tensors(variants)
        alignment = align(tensors, variants, {})
        return build_plan(effective, alignment, variants, tensors, "mean", "copy")
    tensors = {name: TensorSpec(name, dtype, shape) for name, (dtype, shape) in base.items()}
    alignment = align(tensors, variants, {})
    assert store in ("copy", "reference", "hardlink")
    return build_plan(effective, alignment, variants, tensors, "known", store)  # type: ignore[arg-type]


def grown(specs: Specs, rows: int) -> Specs:
    """The same with more rows of the embedding."""
    dtype, shape = specs["model.embed_tokens.weight"]
    return {**specs, "model.embed_tokens.weight": (dtype, (shape[0] + rows, *shape[1:]))}


def without(specs: Specs, *names: str) -> Specs:
    return {name: spec for name, spec in specs.items() if name not in names}
