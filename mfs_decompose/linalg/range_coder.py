"""The range coder that codecs share (constriction): 32-bit words, and models that are the same doubles everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mfs_decompose.errors import ArtifactInvalid

OVERHEAD = 8
"""Bytes by which coded words can exceed what the models promise."""


def categorical(shares: npt.NDArray[np.int64]) -> Any:
    """A model of symbols 0 to n - 1, n at least 2, with these positive shares, whose sum fp64 holds exactly."""
    import constriction  # type: ignore[import-untyped]

    # A sum of integers and one division: the same doubles everywhere.
    return constriction.stream.model.Categorical(shares.astype(np.float64) / float(shares.sum()), perfect=False)


def range_encoder() -> Any:
    """An encoder without words; `encode(symbols int32, model)`, then `coded_words`."""
    import constriction

    return constriction.stream.queue.RangeEncoder()


def coded_words(encoder: Any) -> bytes:
    """All words of an encoder."""
    data: bytes = encoder.get_compressed().astype("<u4").tobytes()
    return data


def range_decoder(data: bytes) -> Any:
    """A decoder of a whole number of words."""
    import constriction

    return constriction.stream.queue.RangeDecoder(np.frombuffer(data, "<u4").astype(np.uint32))


def decode_symbols(decoder: Any, model: Any, count: int) -> npt.NDArray[np.int32]:
    """The next symbols.

    Raises:
        ArtifactInvalid: the words are none that an encoder writes.
    """
    try:
        found: npt.NDArray[np.int32] = decoder.decode(model, count)
    except AssertionError as error:
        raise ArtifactInvalid("coded integers: the coded words are damaged") from error
    return found
