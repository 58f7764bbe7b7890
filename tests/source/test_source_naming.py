from __future__ import annotations

import pytest

from mfs_decompose.source.naming import first_few


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], "a"),
        (["a", "b", "c"], "a, b, c"),
        (["a", "b", "c", "d"], "a, b, c and 1 more"),
        (["a" * 300], "a" * 200),
        (["\x1b[2J", "b\n", "grün"], "'\\x1b[2J', 'b\\n', grün"),
        ([str(number) for number in range(1000)], "0, 1, 2 and 997 more"),
    ],
)
def test_first_few(names: list[str], text: str) -> None:
    assert first_few(names) == text
    assert first_few(names).isprintable()
