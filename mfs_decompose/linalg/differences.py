"""Differences of weights, in fp32."""

from __future__ import annotations

import torch

_CHUNK = 1 << 17  # half a MiB in fp32: stays in the cache between its two steps


def difference(own: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """`own - base` in fp32, element by element, of one shape; the subtraction is in fp64 where either is.

    In the dtype of the weights the difference of two neighbours would be rounded away. Chunk by chunk into the result:
    whole temporaries would pass through memory three times, and their pages be cleared by the kernel each time.
    """
    assert own.shape == base.shape, f"{tuple(own.shape)} - {tuple(base.shape)}"
    result = torch.empty(own.shape, dtype=torch.float32, device=own.device)
    wide = torch.float64 in (own.dtype, base.dtype)
    flat, left, right = result.view(-1), own.reshape(-1), base.reshape(-1)
    for at in range(0, flat.numel(), _CHUNK):
        part = flat[at : at + _CHUNK]
        if wide:
            part.copy_(left[at : at + _CHUNK].to(torch.float64) - right[at : at + _CHUNK].to(torch.float64))
        else:
            part.copy_(left[at : at + _CHUNK]).sub_(right[at : at + _CHUNK].to(torch.float32))
    return result
