"""Trees of tensor names as real models have them, small, with shapes that tell projections apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mfs_decompose.source.align import Alignment
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.header import TensorInfo, TensorSpec

Specs = dict[str, TensorSpec]

_TEXT = {
    "self_attn.q_proj.weight": (20, 12), "self_attn.k_proj.weight": (10, 12), "self_attn.v_proj.weight": (10, 12),
    "self_attn.o_proj.weight": (12, 20), "mlp.gate_proj.weight": (28, 12), "mlp.up_proj.weight": (28, 12),
    "mlp.down_proj.weight": (12, 28), "input_layernorm.weight": (12,), "post_attention_layernorm.weight": (12,),
}  # fmt: skip
_VISION = {
    "self_attn.q_proj.weight": (14, 12), "self_attn.q_proj.bias": (14,), "mlp.fc1.weight": (22, 12),
    "mlp.fc2.weight": (12, 22), "layer_norm1.weight": (12,), "layer_norm2.weight": (12,),
}  # fmt: skip


def tensors(shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> Specs:
    return {name: TensorSpec(name, dtype, shape) for name, shape in shapes.items()}


def text(prefix: str = "model.", head: str | None = "lm_head.", layers: int = 3, vocab: int = 101) -> Specs:
    """A language model: embeddings, layers, a norm, and a head unless it is tied (None)."""
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (vocab, 12), f"{prefix}norm.weight": (12,)}
    shapes |= {f"{prefix}layers.{at}.{name}": shape for at in range(layers) for name, shape in _TEXT.items()}
    return tensors(shapes | ({} if head is None else {f"{head}weight": (vocab, 12)}))


def vision(prefix: str, layers: int = 2) -> Specs:
    """A vision tower: patches and layers."""
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embeddings.patch_embedding.weight": (12, 3, 2, 2)}
    return tensors(
        shapes
        | {f"{prefix}encoder.layers.{at}.{name}": shape for at in range(layers) for name, shape in _VISION.items()}
    )


def joined(*parts: Mapping[str, TensorSpec]) -> Specs:
    return {name: spec for part in parts for name, spec in part.items()}


def called(specs: Iterable[TensorSpec], old: str, new: str) -> Specs:
    """The same tensors with another prefix; all have the old one."""
    found = {}
    for spec in specs:
        assert spec.name.startswith(old)
        name = new + spec.name[len(old) :]
        found[name] = TensorSpec(name, spec.dtype, spec.shape)
    return found


def checkpoint(id: str, specs: Mapping[str, TensorSpec], config: Mapping[str, object] | None = None) -> Checkpoint:
    """A checkpoint without files: alignment reads headers only."""
    infos = {name: TensorInfo(name, spec.dtype, spec.shape, "model.safetensors", 0) for name, spec in specs.items()}
    return Checkpoint(id, Path(id), (), None, infos, (), (), config or {})


def partners(found: Alignment, id: str) -> dict[str, str]:
    """Of a variant, its own name of each tensor of the base that it has whole or resized."""
    return {
        group.base_name or "": group.name
        for group in found.groups
        for member in group.members
        if member.variant == id and member.kind in ("same", "resized")
    }


def kinds(found: Alignment, id: str) -> dict[str, str]:
    """Of a variant, the kind of each group that it is in, by the group's name."""
    return {group.name: m.kind for group in found.groups for m in group.members if m.variant == id}
