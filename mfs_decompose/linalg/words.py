"""Numbers as unsigned words of their bits, seen so that small changes are small numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.unsignedinteger[Any]]
"""Bit patterns, one dimension, little-endian, of 1, 2, 4 or 8 bytes."""


def word_type(size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned type of `size` bytes."""
    return np.dtype(f"<u{size}")


def zigzag_difference(own: Words, base: Words, out: Words | None = None) -> Words:
    """`own - base` modulo the word: 0, -1, 1, -2 ... become 0, 1, 2, 3 ...; a bijection for every base."""
    difference = np.subtract(own, base, out=out)
    signed = np.dtype(f"<i{difference.itemsize}")
    sign = difference.view(signed) >> (8 * difference.itemsize - 1)
    np.left_shift(difference, 1, out=difference)
    return np.bitwise_xor(difference, sign.view(difference.dtype), out=difference)


def unzigzag(numbers: Words) -> None:
    """Turn 0, 1, 2, 3 ... into 0, -1, 1, -2 ... modulo the word, in place."""
    odd = np.bitwise_and(numbers, 1)
    np.negative(odd, out=odd)
    np.right_shift(numbers, 1, out=numbers)
    np.bitwise_xor(numbers, odd, out=numbers)


def undo_zigzag(numbers: Words, base: Words) -> None:
    """Turn what `zigzag_difference` gave back into `own`, in place."""
    unzigzag(numbers)
    np.add(numbers, base, out=numbers)


def trailing_zeros(words: Words) -> int:
    """How many of the lowest bits are zero in every word; 0 where all of them are."""
    seen = int(np.bitwise_or.reduce(words)) if words.size else 0
    return (seen & -seen).bit_length() - 1 if seen else 0


def narrow(words: Words, dropped: int) -> Words:
    """Words without their `dropped` lowest bits, in the smallest type that holds the others."""
    if not dropped:
        return words
    return (words >> dropped).astype(word_type(narrow_size(words.itemsize, dropped)))


def widen(words: Words, dropped: int, size: int) -> Words:
    """Undo `narrow`: words of `size` bytes, zeros for what was dropped."""
    return np.left_shift(words, dropped, dtype=word_type(size)) if dropped else words


def narrow_size(size: int, dropped: int) -> int:
    """Bytes of the smallest word that holds what is left of words of `size` bytes."""
    left = 8 * size - dropped
    return next(fit for fit in (1, 2, 4, 8) if 8 * fit >= left)


def rotate(words: Words, bits: int, by: int) -> Words:
    """The lowest `bits` bits rotated left by `by` (0 to bits): the sign goes behind the mantissa and the exponent
    gets bytes of its own."""
    kept = np.left_shift(words, by)
    np.bitwise_or(kept, np.right_shift(words, bits - by), out=kept)
    return np.bitwise_and(kept, (1 << bits) - 1, out=kept)


def to_planes(words: Words) -> bytes:
    """All lowest bytes, then all second bytes, and so on."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.itemsize).T).tobytes()


def from_planes(data: bytes, size: int) -> Words:
    """Undo `to_planes`, for words of `size` bytes."""
    planes = np.frombuffer(data, np.uint8).reshape(size, -1)
    return np.array(planes.T, order="C").reshape(-1).view(word_type(size))
