"""Attention of single rows over paged keys and values, by a compiled kernel on a CPU."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from mfs_decompose.runtime.ops import pages_kernel as to
from mfs_decompose.runtime.ops.compiled import Kernel, compile_kernel
from mfs_decompose.runtime.ops.team import team_for, torch_team


def can_attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel reads these: fp32, on a CPU, keys and values one after another."""
    return (
        query.dtype == keys.dtype == values.dtype == torch.float32
        and query.device.type == keys.device.type == "cpu"
        and keys.is_contiguous()
        and values.is_contiguous()
    )


class Pages:
    """Which keys each row of a step sees; the same for all layers of a window.

    Args:
        table: int64 [B, blocks of a row].
        spans: int64 [B, 2], the first key that a row sees and the one behind its last, counted in its blocks.
    """

    def __init__(self, table: torch.Tensor, spans: torch.Tensor) -> None:
        self._held = (table.contiguous(), spans.contiguous())
        self._words = np.zeros(to.WORDS, np.int64)
        self._words[[to.TABLES, to.SPANS]] = [one.data_ptr() for one in self._held]
        self._words[[to.ROWS, to.WIDTH]] = table.shape
        self._shape: tuple[object, ...] = ()
        self._threads = 1

    def attend(
        self,
        query_BHD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Answers [B, H, D].

        Args:
            keys: [blocks, block_size, Hkv, D], values alike; H is a multiple of Hkv.
            scale: of scores, 1 / sqrt(D) where it is None.
            new: key and value [Hkv, B, D] of the last token that each row sees, which is written to its place first.
        """
        query, words = query_BHD.contiguous(), self._words
        shape = (query.shape[1], keys.shape[1:], scale)
        if shape != self._shape:
            self._shape = shape
            self._fit(query, keys, scale)
        answer = torch.empty_like(query)
        words[to.QUERY], words[to.ANSWER] = query.data_ptr(), answer.data_ptr()
        words[to.KEYS], words[to.VALUES] = keys.data_ptr(), values.data_ptr()
        self._write(new)
        _kernel().run(words, self._threads)
        return answer

    def _write(self, new: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        words = self._words
        if new is None:
            words[to.NEW_KEY] = 0
            return
        key, value = new
        words[to.NEW_KEY : to.NEW_KEY + 3] = key.data_ptr(), key.stride(1), key.stride(0)
        words[to.NEW_VALUE : to.NEW_VALUE + 3] = value.data_ptr(), value.stride(1), value.stride(0)

    def _fit(self, query_BHD: torch.Tensor, keys: torch.Tensor, scale: float | None) -> None:
        words, (_, heads, size) = self._words, query_BHD.shape
        words[[to.HEADS, to.GROUPS]] = keys.shape[2], heads // keys.shape[2]
        words[[to.SIZE, to.BLOCK]] = size, keys.shape[1]
        words[to.SCALE] = np.float32(size**-0.5 if scale is None else scale).view(np.uint32)
        self._threads = team_for(self._held[0].numel() * keys[0].nbytes)
        team = torch_team()
        words[[to.THREAD, to.THREADS]] = (team.thread, team.threads) if self._threads > 1 else (0, 0)


@cache
def _kernel() -> Kernel:
    return compile_kernel(to.attend_pages)
