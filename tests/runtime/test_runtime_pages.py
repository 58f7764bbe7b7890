"""Attention over pages by the compiled kernel, against torch's over keys that were gathered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from mfs_decompose.runtime.ops import team
from mfs_decompose.runtime.ops.pages import Pages, can_attend
from mfs_decompose.runtime.ops.team import Team

FREE = -1


class Case:
    """Rows over blocks of a store that holds NaN wherever none of them may look."""

    def __init__(
        self, spans: list[tuple[int, int]], *, heads: int = 2, groups: int = 3, size: int = 16, block: int = 4
    ):
        draw = torch.Generator().manual_seed(len(spans) + size)
        needed = [-(-last // block) for _, last in spans]
        order = torch.randperm(sum(needed) + 2, generator=draw).tolist()
        self.query = torch.randn(len(spans), heads * groups, size, generator=draw)
        self.keys = torch.full((len(order), block, heads, size), torch.nan)
        self.values = self.keys.clone()
        self.table = torch.full((len(spans), max(needed)), FREE)
        self.spans = torch.tensor(spans)
        for row, (first, last) in enumerate(spans):
            for at in range(needed[row]):
                self.table[row, at] = order.pop()
            for at in range(first, last):
                place = int(self.table[row, at // block]), at % block
                self.keys[place], self.values[place] = torch.randn(2, heads, size, generator=draw)

    def expected(self, scale: float | None) -> torch.Tensor:
        answers = []
        for row, (first, last) in enumerate(self.spans.tolist()):
            block = self.keys.shape[1]
            places = [(int(self.table[row, at // block]), at % block) for at in range(first, last)]
            key, value = (torch.stack([pages[place] for place in places]).transpose(0, 1) for pages in self.pages)
            query = self.query[row, :, None]
            answers.append(
                functional.scaled_dot_product_attention(
                    query[None].double(), key[None].double(), value[None].double(), scale=scale, enable_gqa=True
                )[0, :, 0]
            )
        return torch.stack(answers)

    @property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    def answer(self, scale: float | None = None) -> torch.Tensor:
        return Pages(self.table, self.spans).attend(self.query, *self.pages, scale)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 3]),
    st.sampled_from([8, 17, 64]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([None, 1.0, 0.03]),
)
def test_rows_of_unlike_lengths(
    spans: list[tuple[int, int]], heads: int, groups: int, size: int, block: int, scale: float | None
) -> None:
    case = Case([(first, first + more) for first, more in spans], heads=heads, groups=groups, size=size, block=block)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(team, "_FEW", 0)
        found = case.answer(scale)
    assert found.shape == case.query.shape
    assert float((found - case.expected(scale)).abs().max()) < 2e-6


def test_neighbours_and_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(0, 90), (3, 70), (0, 1), (10, 33)], size=64, block=16)
    found = case.answer()
    for row in range(4):
        alone = Pages(case.table[row : row + 1], case.spans[row : row + 1])
        assert torch.equal(alone.attend(case.query[row : row + 1], *case.pages, None)[0], found[row])
    monkeypatch.setattr(team, "torch_team", lambda: Team(0, 0, 0, None))
    assert torch.equal(case.answer(), found)


def test_layers_of_other_shapes_over_the_same_pages() -> None:
    """One window, but heads of other sizes: what was laid out for one layer is not taken for the next."""
    one, two = Case([(0, 9), (2, 7)], size=8), Case([(0, 9), (2, 7)], size=24, heads=1, groups=2)
    shared = Pages(one.table, one.spans)
    two.keys = torch.randn(one.keys.shape[0], 4, 1, 24)
    two.values = torch.randn(one.keys.shape[0], 4, 1, 24)
    two.table = one.table
    for case, scale in ((one, None), (two, None), (two, 0.5), (one, None)):
        found = shared.attend(case.query, *case.pages, scale)
        assert float((found - case.expected(scale)).abs().max()) < 2e-6


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_new_keys_are_written_first(rows_first: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_FEW", 0)
    case = Case([(0, 9), (2, 8), (0, 1)][:count], size=24)
    wanted = case.expected(None)
    places = [
        (int(case.table[row, (last - 1) // 4]), (last - 1) % 4) for row, (_, last) in enumerate(case.spans.tolist())
    ]
    new = []
    for pages in case.pages:
        taken = torch.stack([pages[place] for place in places], dim=0 if rows_first else 1)
        new.append(taken.transpose(0, 1) if rows_first else taken)  # [heads, rows, size], lying either way
        for place in places:
            pages[place] = torch.nan
    found = Pages(case.table, case.spans).attend(case.query, *case.pages, None, (new[0], new[1]))
    assert float((found - wanted).abs().max()) < 2e-6
    assert torch.equal(case.answer(), found)


def test_large_scores_and_queries_that_lie_otherwise() -> None:
    case = Case([(0, 30), (0, 5)], size=32)
    case.query = 200 * case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not case.query.is_contiguous()
    found = case.answer()
    assert torch.isfinite(found).all()
    assert float((found - case.expected(None)).abs().max()) < 1e-4


def test_what_the_kernel_reads() -> None:
    query, pages = torch.ones(2, 4, 8), torch.ones(3, 4, 2, 8)
    assert can_attend(query, pages, pages)
    assert not can_attend(query.half(), pages, pages)
    assert not can_attend(query, pages.bfloat16(), pages)
    assert not can_attend(query, pages, pages.transpose(1, 2))
    assert not can_attend(query.to("meta"), pages, pages)
