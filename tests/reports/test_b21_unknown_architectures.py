"""B21: in models that are not on a tool's list of architectures, whole families of tensors vanish without a word.

Right: there is no such list. A hybrid of linear attention, a vision tower and odd names: every tensor in is every
tensor out, and the manifest counts them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from report_runs import Tensors, back, run, same_bits, tensors_of, toy

from mfs_decompose import Family
from mfs_decompose.artifact.verify import verify

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (61, 24),
    "model.layers.0.linear_attn.in_proj_qkvz.weight": (56, 24),
    "model.layers.0.linear_attn.conv1d.weight": (40, 1, 4),
    "model.layers.0.linear_attn.A_log": (6,),
    "model.layers.0.linear_attn.dt_bias": (6,),
    "model.layers.0.linear_attn.norm.weight": (8,),
    "model.layers.1.self_attn.q_proj.weight": (36, 24),
    "model.layers.1.self_attn.q_proj.weight_scale_inv": (3, 2),
    "visual.patch_embed.proj.weight": (20, 3, 2, 5, 5),
    "visual.blocks.0.attn.qkv.weight": (60, 20),
    "visual.blocks.0.attn.qkv.bias": (60,),
    "visual.merger.mlp.0.weight": (24, 80),
    "mtp.layers.0.eh_proj.weight": (24, 48),
    "ROOT": (7, 5),
    "a..b": (5,),
    "with space/and-slash": (9, 4),
    "ünïcode.weight": (11, 3),
    "model.layers.00.weight": (4, 3),
    "scalar": (),
    "empty": (0, 5),
}
EXOTIC: Tensors = {
    "model.position_ids": torch.arange(9).reshape(1, 9),
    "model.causal_mask": torch.tensor([[True, False], [True, True]]),
    "model.layers.1.mlp.packed": torch.arange(24, dtype=torch.uint8).reshape(4, 6),
}


def drawn(seed: int, scale: float = 1.0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: (scale * torch.randn(shape, generator=generator)).bfloat16() for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    "recipe", [{"objective.budget": "45%"}, {"objective.rank": 2}, {"deltas.default.codec": "lossless"}]
)
def test_every_tensor_in_is_every_tensor_out(tmp_path: Path, recipe: dict[str, object]) -> None:
    base = drawn(1) | EXOTIC
    sources: dict[str, Tensors] = {}
    for at, id in enumerate(("one", "two"), start=2):
        change = drawn(at, 0.02)
        sources[id] = {name: (base[name].float() + change[name].float()).bfloat16() for name in SHAPES} | EXOTIC
    del sources["two"]["visual.blocks.0.attn.qkv.bias"]
    sources["two"]["another.family.lambda"] = torch.ones(3, dtype=torch.float64)
    folders = {id: toy(tmp_path / id, weights) for id, weights in sources.items()}
    run(tmp_path / "art", toy(tmp_path / "base", base), folders, recipe)
    total = len(base)
    for id, weights in sources.items():
        records, restored = tensors_of(tmp_path / "art", id), back(tmp_path / "art", id, tmp_path / f"{id}-back")
        assert records.keys() == restored.keys() == weights.keys()
        for name, weight in weights.items():
            assert (restored[name].dtype, restored[name].shape) == (weight.dtype, weight.shape)
            assert same_bits(restored[name], weight) or not records[name]["exact"]
        assert all(records[name]["exact"] for name in EXOTIC)
        total += len(weights)
    with Family.open(tmp_path / "art") as family:
        assert family.manifest.coverage.tensors == total
        assert family.variant("two").missing == ("visual.blocks.0.attn.qkv.bias",)
    assert verify(tmp_path / "art", "values").ok
