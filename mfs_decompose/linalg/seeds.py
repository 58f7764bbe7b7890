"""Random numbers that are the same on every machine: a counter-based integer generator.

`torch.randn` differs between CPU capabilities, so nothing that reaches a file may come from it. Here value `i`
under a key is a pure function of both (SplitMix64, Steele, Lea and Flood 2014), so any part of a stream can be
made alone, in any order, by any number of threads.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_CHUNK = 1 << 15  # 256 KiB of state: stays in the cache through all ten operations


def stream_key(seed: int, purpose: str, name: str) -> int:
    """A 64-bit key for one stream: the user's seed, what it is for, and the tensor's name."""
    text = f"{seed}\0{purpose}\0{name}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def _mix(key: int, start: int, count: int) -> npt.NDArray[np.uint64]:
    state = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    state *= _GOLDEN
    state += np.uint64(key)
    state ^= state >> np.uint64(30)
    state *= _MIX_1
    state ^= state >> np.uint64(27)
    state *= _MIX_2
    state ^= state >> np.uint64(31)
    return state


def random_bits16(key: int, start: int, count: int) -> torch.Tensor:
    """Values `start .. start + count` of the 16-bit stream under `key`, as int32 [count] in 0..65535.

    One 64-bit word holds four values, so value i lies in word i // 4.
    """
    first, last = start // 4, (start + count + 3) // 4
    words = np.empty(max(last - first, 0), dtype="<u8")
    for at in range(0, words.size, _CHUNK):
        stop = min(at + _CHUNK, words.size)
        words[at:stop] = _mix(key, first + at, stop - at)
    lanes = words.view("<u2")[start - 4 * first :][:count]
    return torch.from_numpy(lanes.astype(np.int32))


def random_matrix(key: int, rows: int, columns: int) -> torch.Tensor:
    """A [rows, columns] float32 matrix with independent entries, uniform in (-1, 1), mean 0.

    Range finders need independence, not normality (Halko, Martinsson and Tropp 2011, section 4.6).
    """
    lanes = random_bits16(key, 0, rows * columns).to(torch.float32)
    return ((lanes + 0.5) / 32768.0 - 1.0).reshape(rows, columns)
