"""A tensor of an adapter's merge, opened: its rows as served, and as restored.

Its original is the fp32 merge, which is what is served: nothing is lost but by rounding to the base's dtype on restore.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mfs_decompose.codec.adapter import open_adapter_tensor
from mfs_decompose.codec.base import Rows
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.rounding import Rounding, round_to, rounding_key
from mfs_decompose.source.dtypes import torch_dtype
from mfs_decompose.source.header import TensorSpec


class OpenedAdapterTensor:
    """Reads one tensor of a merge by rows of its first dimension, as `OpenedTensor` does."""

    exact = False

    def __init__(
        self, node: CodecNode, fetch: Callable[[str], torch.Tensor], spec: TensorSpec, base: TensorSpec | None
    ) -> None:
        """Open `node`; `fetch` reads a tensor of the adapter by its name, `base` is the tensor that is changed.

        Raises:
            ArtifactInvalid: its parameters make no sense, or do not fit the adapter's tensors.
        """
        self.spec = spec
        self._key = rounding_key(spec.name)
        self._merged = open_adapter_tensor(node.params, fetch, spec, base)

    def merged(self, start: int, stop: int, base: Rows | None) -> torch.Tensor:
        """Rows start..stop of the merge, fp64 [stop - start, ...]: the same bits on every machine."""
        return self._merged.rows(start, stop, base)

    def restored(
        self,
        start: int,
        stop: int,
        base: Rows | None,
        dtype: torch.dtype | None = None,
        rounding: Rounding = "stochastic",
    ) -> torch.Tensor:
        """Rows start..stop in `dtype` (default: that of the restored checkpoint)."""
        return self.rounded(self.merged(start, stop, base), start, dtype or torch_dtype(self.spec.dtype), rounding)

    def rounded(self, merged: torch.Tensor, start: int, target: torch.dtype, rounding: Rounding) -> torch.Tensor:
        """What `merged` gave for rows from `start` on, in `target`."""
        row_elements = self.spec.numel // max(self.spec.rows, 1)
        return round_to(merged, target, rounding, self._key, start * row_elements)

    def served(self, start: int, stop: int, base: Rows | None) -> torch.Tensor:
        """Rows start..stop in fp32: the fp32 merge."""
        return self.restored(start, stop, base, torch.float32, "nearest")
