"""Small numbers as digits packed into bytes, for a byte-wise entropy coder.

A Huffman code spends at least a bit a symbol. Where most numbers are 0, several of them make one symbol: digits of 1,
2, 4 or 8 bits. The digit of all ones says that a number did not fit: it escapes into a list.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Symbols = npt.NDArray[np.uint8]

WIDTHS = (1, 2, 4, 8)
ESCAPE = 255
"""The symbol of a number that escapes, whatever the width of its digit."""


def most(width: int) -> int:
    """The digit that says a number escapes: those below fit."""
    return (1 << width) - 1


def pack(symbols: Symbols, width: int) -> Symbols:
    """Symbols below `most(width)`, or ESCAPE, as digits of `width` bits, 8 / width in a byte.

    The first ceil(n width / 8) stand in the lowest bits of the bytes in turn, the next as many above them, so that
    packing is arithmetic on whole arrays.
    """
    if width == 8:
        return symbols
    length = packed_size(symbols.size, width)
    packed = np.zeros(length, np.uint8)
    for place in range(8 // width):
        part = symbols[place * length : (place + 1) * length] & most(width)
        packed[: part.size] |= np.left_shift(part, width * place, out=part)
    return packed


def unpack(packed: Symbols, width: int, count: int) -> Symbols:
    """Undo `pack`."""
    if width == 8:
        return packed
    symbols = np.empty(count, np.uint8)
    for place in range(8 // width):
        part = symbols[place * packed.size : (place + 1) * packed.size]
        np.right_shift(packed[: part.size], width * place, out=part)
    np.bitwise_and(symbols, most(width), out=symbols)
    escapes = (symbols == most(width)).view(np.uint8)
    np.multiply(escapes, ESCAPE - most(width), out=escapes)
    np.add(symbols, escapes, out=symbols)
    return symbols


def packed_size(count: int, width: int) -> int:
    """Bytes that hold `count` digits."""
    return -(-count * width // 8)
