"""Choices that follow from shapes alone."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.linalg.shapes import passes, sketch_width, uses_gram

_SIZES = st.integers(1, 5000)


@given(_SIZES, _SIZES)
def test_a_sketch_is_wide_enough_and_no_wider_than_the_matrix(rank: int, short: int) -> None:
    width = sketch_width(rank, short)
    assert min(rank, short) <= width <= short
    assert width == short or width >= max(2 * rank, rank + 8)


@given(_SIZES, _SIZES)
def test_more_rank_never_goes_back_to_the_sketch(rank: int, short: int) -> None:
    assert sketch_width(rank, short) <= sketch_width(rank + 1, short)
    assert uses_gram(rank + 1, short) or not uses_gram(rank, short)


@given(_SIZES)
def test_the_full_spectrum_comes_from_the_gram_matrix(short: int) -> None:
    assert uses_gram(short, short)


@given(_SIZES, _SIZES, _SIZES)
def test_passes_are_few(rows: int, columns: int, rank: int) -> None:
    assert passes((rows, columns), rank) in ((2, 3) if rows >= columns else (5,))


def test_no_tensor_library_is_needed() -> None:
    code = "import sys, mfs_decompose.linalg.shapes, mfs_decompose.codec.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
