"""fp32 products stay fp32 products, and what was set before is set again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from linalg_matrices import generator

from mfs_decompose.linalg import svd
from mfs_decompose.linalg.blocked import blocked_svd
from mfs_decompose.linalg.precision import full_fp32
from mfs_decompose.linalg.svd import truncated_svd


def now() -> tuple[str, str]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = now()
    yield
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = before  # type: ignore[attr-defined]


@pytest.mark.parametrize("ambient", ["highest", "high", "medium"])
def test_ambient_settings_come_back(ambient: str) -> None:
    torch.set_float32_matmul_precision(ambient)
    before = now()
    with full_fp32():
        assert now() == ("ieee", "ieee")
        with full_fp32():
            assert now() == ("ieee", "ieee")
        assert now() == ("ieee", "ieee")
    assert now() == before
    assert torch.get_float32_matmul_precision() == ambient


def test_they_come_back_after_an_error() -> None:
    torch.set_float32_matmul_precision("high")
    with pytest.raises(ZeroDivisionError), full_fp32():
        raise ZeroDivisionError
    assert now() == ("tf32", "tf32")


def test_of_threads_that_overlap_the_last_one_restores() -> None:
    torch.set_float32_matmul_precision("high")
    inside, out = Barrier(2, timeout=20), Barrier(2, timeout=20)

    def first() -> tuple[str, str]:
        with full_fp32():
            inside.wait()
            out.wait()
            return now()

    def second() -> tuple[str, str]:
        with full_fp32():
            inside.wait()
        found = now()
        out.wait()
        return found

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(first), pool.submit(second)]
        assert [future.result() for future in futures] == [("ieee", "ieee")] * 2
    assert now() == ("tf32", "tf32")


def test_factorisations_run_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    real = svd._strongest

    def watched(gram: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        seen.append(now())
        return real(gram, rank)

    monkeypatch.setattr(svd, "_strongest", watched)
    torch.set_float32_matmul_precision("high")
    matrix = torch.randn(90, 70, generator=generator(1))
    truncated_svd(matrix[None], 5, [1])
    blocked_svd(lambda: iter([(0, matrix[:50]), (50, matrix[50:])]), (90, 70), 5, 1)
    assert seen == [("ieee", "ieee")] * 2
    assert now() == ("tf32", "tf32")
