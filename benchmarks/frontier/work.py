"""A base and one variant of it in memory, and what every codec asks of them: computed once, kept for all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.rate_drift_rows import Pair
from mfs_decompose.linalg.seeds import stream_key
from mfs_decompose.linalg.svd import Truncation, truncated_svd

TABLES = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of embeddings and heads."""


@dataclass
class Work(Pair):
    """All tensors of both checkpoints, in the dtypes they are stored in.

    Attributes:
        linears: names of the matrices, embeddings and heads left out.
        tables: names of embeddings and heads.
        grams: for each linear layer X^T X [I, I] of its inputs on held-in text, fp32; empty without such a text.
        scales: of BitDelta for each linear layer, where they were trained.
        adapter: for each linear layer B [O, R] and A [R, I] as mergekit wrote them; empty where it was not run.
        adapter_rest: bytes of that adapter beside the factors of the linear layers, its header included.
    """

    grams: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    adapter: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    adapter_rest: int = 0

    def __post_init__(self) -> None:
        unlike = [name for name, own in self.variant.items() if self.base.get(name, own[:0]).shape != own.shape]
        if unlike or set(self.base) != set(self.variant):
            raise ValueError(f"expected the same tensors in base and variant, found others: {unlike[:3]}")
        matrices = [name for name, tensor in self.base.items() if tensor.dim() == 2]
        self.tables = [name for name in matrices if any(part in name for part in TABLES)]
        self.linears = [name for name in matrices if name not in self.tables]

    @property
    def rest(self) -> list[str]:
        """Names of norms and biases."""
        return [name for name in self.base if name not in self.linears and name not in self.tables]

    @property
    def checkpoint_bytes(self) -> int:
        return self.stored_bytes(self.variant)

    def stored_bytes(self, names: Iterable[str]) -> int:
        """Bytes of tensors as the variant's checkpoint stores them."""
        return sum(self.variant[name].numel() * self.variant[name].itemsize for name in names)

    def shape(self, name: str) -> tuple[int, int]:
        rows, columns = self.base[name].shape
        return rows, columns

    def factor(self, name: str) -> Truncation:
        """All directions of a delta, strongest first; each is factored once."""
        if name not in self.factors:
            key = stream_key(0, "frontier", name)
            found = truncated_svd(self.delta(name)[None], min(self.base[name].shape), [key])[0]
            assert found is not None, f"the delta of {name} is not finite"
            self.factors[name] = found
        return self.factors[name]


def read_work(base: Path, variant: Path) -> Work:
    """Every tensor of both folders.

    Raises:
        ValueError: they do not hold tensors of the same names and shapes.
    """
    return Work(_read(base), _read(variant))


def _read(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
