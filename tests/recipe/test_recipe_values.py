from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.recipe.values import Budget, read_budget, read_bytes, read_share, shown


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        ("5%", Budget(share=0.05)),
        ("7.5 %", Budget(share=0.075)),
        (0.05, Budget(share=0.05)),
        ("0.05", Budget(share=0.05)),
        ("80MB", Budget(nbytes=80_000_000)),
        ("3B", Budget(nbytes=3)),
        (80_000_000, Budget(nbytes=80_000_000)),
        ("80000000", Budget(nbytes=80_000_000)),
        (1, Budget(share=1.0)),
        (1.0, Budget(share=1.0)),
    ],
)
def test_a_budget_is_a_share_or_bytes(value: object, budget: Budget) -> None:
    assert read_budget(value) == budget


@pytest.mark.parametrize("value", [5, "5", 5.0, 999, 1.5, 0, -3, "0", "-5%", "120%", "MB", "five", "", True, None, [1]])
def test_what_could_be_meant_as_both_or_is_neither_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        read_budget(value)


def test_a_forgotten_percent_sign_is_guessed() -> None:
    with pytest.raises(ValueError, match=r"write 5% or 5B"):
        read_budget(5)


@given(
    st.one_of(
        st.integers(1000, 2**50).map(lambda n: Budget(nbytes=n)), st.floats(1e-9, 1.0).map(lambda f: Budget(share=f))
    )
)
def test_a_budget_reads_back_from_its_plain_value(budget: Budget) -> None:
    assert read_budget(budget.plain()) == budget


def test_a_cap_is_in_bytes_of_the_checkpoint() -> None:
    assert Budget(share=0.05).cap(1001) == 50
    assert Budget(nbytes=77).cap(1001) == 77
    assert (str(Budget(share=0.05)), str(Budget(nbytes=80_000_000))) == ("5 %", "80 MB")


@given(st.floats(1e-6, 1.0), st.integers(0, 2**45))
def test_a_cap_never_exceeds_its_share(share: float, checkpoint_bytes: int) -> None:
    assert Budget(share=share).cap(checkpoint_bytes) <= share * checkpoint_bytes


@pytest.mark.parametrize(("value", "count"), [("2GB", 2_000_000_000), (1, 1), ("1KiB", 1024)])
def test_bytes_are_read(value: object, count: int) -> None:
    assert read_bytes(value) == count


@pytest.mark.parametrize("value", [0, "0GB", -1, 1.5, True, None, "2 apples", {}])
def test_what_is_not_bytes_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected an amount of bytes"):
        read_bytes(value)


@pytest.mark.parametrize(("value", "share"), [("2%", 0.02), (0.02, 0.02), (1, 1.0), (1e-5, 1e-5)])
def test_shares_are_read(value: object, share: float) -> None:
    assert read_share(value) == pytest.approx(share)


@pytest.mark.parametrize("value", [0, 2, "2", "0%", True, None, float("nan"), "80MB", []])
def test_what_is_not_a_share_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected a share"):
        read_share(value)


def test_long_values_are_cut_in_messages() -> None:
    assert shown("short") == "'short'"
    assert len(shown("x" * 1000)) == 60
