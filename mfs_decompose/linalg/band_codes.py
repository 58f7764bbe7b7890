"""Codes of banded factors, range coded: those of 2 bits take 1.6, of 3 bits 2.4, of 8 bits 7.2.

Directions are normally distributed (kurtosis 3.1 to 3.3 on fine-tunes), so one model for each width serves all of them:
odd integers under a normal density, from one ratio. A table of a tensor's own would save 0.2 % of its codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.linalg.range_coder import (
    OVERHEAD,
    categorical,
    coded_words,
    decode_symbols,
    range_decoder,
    range_encoder,
)

_RATIO = {8: 1_047_693, 6: 1_033_823, 4: 865_195, 3: 567_934, 2: 172_099}
"""How much rarer 3 is than 1, in units of 2^-20; 5 is rarer than 3 by the square of that, 7 than 5 by the cube.
Fitted to the directions of three fine-tunes at the widths that they are given."""

_RATIO_LONG = {8: 1_048_052, 6: 1_039_483, 4: 920_232, 3: 603_587, 2: 149_108}
"""The same where 64 values have a scale."""

_FLOOR = 16  # of 2^20: no code costs more than 16 bits more than the commonest


def encode_codes(bands: Sequence[tuple[torch.Tensor, int]], long: bool) -> bytes:
    """The words of uint8 codes [R, N] and their bits, band after band; `long` if 64 of them have a scale."""
    encoder = range_encoder()
    for codes, bits in bands:
        encoder.encode(codes.reshape(-1).numpy().astype(np.int32), _model(bits, long))
    return coded_words(encoder)


def decode_codes(data: bytes, bands: Sequence[tuple[int, int]], length: int, long: bool) -> list[torch.Tensor]:
    """The uint8 codes [R, N] of bands of R directions and some bits.

    Raises:
        ArtifactInvalid: the bytes are no such words.
    """
    least = sum(count * length * float(_costs(bits, long).min()) for count, bits in bands)
    if len(data) % 4 or 8 * (len(data) + OVERHEAD) < least:  # so that few bytes cannot ask for much memory
        raise ArtifactInvalid(f"codec 'banded': {len(data)} bytes of codes, at least {least / 8:.0f} expected")
    decoder = range_decoder(data)
    found = [decode_symbols(decoder, _model(bits, long), count * length) for count, bits in bands]
    if not decoder.maybe_exhausted():
        raise ArtifactInvalid("codec 'banded': more words than codes")
    return [torch.from_numpy(one.astype(np.uint8)).view(-1, length) for one in found]


def code_bits(codes: torch.Tensor, bits: int, long: bool) -> float:
    """About how many bits these uint8 codes take, coded."""
    counts = torch.bincount(codes.reshape(-1), minlength=1 << bits).numpy()
    return float(counts @ _costs(bits, long))


@lru_cache(maxsize=16)
def shares(bits: int, long: bool) -> npt.NDArray[np.int64]:
    """How common each code is, [2^bits]; the same integers on every machine."""
    ratio, step, weight, half = (_RATIO_LONG if long else _RATIO)[bits], 1 << 20, 1 << 20, []
    for _ in range(1 << (bits - 1)):
        half.append(max(weight, _FLOOR))
        step = step * ratio >> 20
        weight = weight * step >> 20
    return np.array([*reversed(half), *half], np.int64)


@lru_cache(maxsize=16)
def _model(bits: int, long: bool) -> Any:
    return categorical(shares(bits, long))


@lru_cache(maxsize=16)
def _costs(bits: int, long: bool) -> npt.NDArray[np.float64]:
    whole = shares(bits, long)
    costs: npt.NDArray[np.float64] = -np.log2(whole / whole.sum())
    return costs
