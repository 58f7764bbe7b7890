"""A linear layer that answers few rows of several variants together, against the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mfs_decompose.runtime import modules_linear
from mfs_decompose.runtime.batch_plan import BASE, FEW_ROWS, BatchPlan, PlanSlot
from mfs_decompose.runtime.changes import Change, Delta
from mfs_decompose.runtime.modules_linear import FamilyLinear
from mfs_decompose.runtime.ops import cpu
from mfs_decompose.runtime.ops.cpu import CpuOps
from mfs_decompose.runtime.ops.program import Program
from mfs_decompose.runtime.ops.reference import ReferenceOps
from mfs_decompose.runtime.resident_forms import Factor, Form, LowRank, Placed, Rows

OUT, IN = 37, 21
RANKS = (3, 7, 1, 24, 30)
ROWS = (1, BASE, 0, 0, 2, BASE, 3, 4, 4, BASE)


def low_rank(rank: int, seed: int, out: int = OUT, width: int = IN) -> LowRank:
    draw = torch.Generator().manual_seed(seed)
    return LowRank(*(Factor(0.1 * torch.randn(rank, length, generator=draw)) for length in (out, width)))


def whole(form: Form, rows: int = OUT) -> Change:
    return Change("linear", Delta((Placed(form, 0, rows),), rows))


def layers(*, conv: bool = False, bias: bool = True, **options: object) -> tuple[PlanSlot, list[FamilyLinear]]:
    """The same layer over the oracle's ops and over those that are compiled."""
    torch.manual_seed(0)
    original: nn.Module = Conv1D(OUT, IN) if conv else nn.Linear(IN, OUT, bias=bias)
    slot = PlanSlot()
    return slot, [
        FamilyLinear(original, slot, ops, stored_in_out=conv, **options)  # type: ignore[arg-type]
        for ops in (ReferenceOps(), CpuOps())
    ]


@torch.inference_mode()
def answers(slot: PlanSlot, layer: FamilyLinear, rows: tuple[int, ...] = ROWS, seed: int = 5) -> torch.Tensor:
    x = torch.randn(1, len(rows), IN, generator=torch.Generator().manual_seed(seed))
    with slot.use(BatchPlan.for_rows(rows)):
        found: torch.Tensor = layer(x)[0]
    return found


def check(slot: PlanSlot, both: list[FamilyLinear], rows: tuple[int, ...] = ROWS) -> None:
    slow, fast = (answers(slot, layer, rows) for layer in both)
    assert torch.allclose(slow, fast, atol=1e-5)


@pytest.mark.parametrize("conv", [False, True])
def test_ranks_that_differ_and_base_rows_between(conv: bool) -> None:
    slot, both = layers(conv=conv)
    forms = {variant: low_rank(rank, variant) for variant, rank in enumerate(RANKS)}
    for layer in both:
        for variant, form in forms.items():
            turned = variant % 2 == 0  # a tensor of the checkpoint may lie either way
            lies = form.transposed if turned else form
            rows = IN if turned else OUT
            layer.attach(variant, Change("linear", Delta((Placed(lies, 0, rows),), rows, turned != conv)))
    check(slot, both)
    plain = answers(slot, both[1], (BASE,) * len(ROWS))
    found = answers(slot, both[1])
    for row, variant in enumerate(ROWS):
        assert torch.equal(found[row], plain[row]) == (variant == BASE)


def test_forms_of_every_kind_beside_a_program() -> None:
    slot, both = layers()
    draw = torch.Generator().manual_seed(1)
    rows = Rows(torch.tensor([2, 30], dtype=torch.int32), torch.randn(2, IN, generator=draw), None, True)
    narrow = LowRank(
        Factor(torch.ones(2, OUT, dtype=torch.int8), torch.full((2, 1), 0.1)),
        Factor(torch.ones(2, IN, dtype=torch.int8), torch.full((2, 1), 0.1)),
    )
    changes = [
        Change("linear", bias=torch.randn(OUT, generator=draw)),
        whole(low_rank(4, 2)),
        Change("linear", Delta((Placed(low_rank(2, 3), 0, OUT), Placed(low_rank(5, 4), 0, OUT)), OUT)),
        Change("linear", Delta((Placed(low_rank(3, 5, 20), 7, 27), Placed(rows, 0, OUT)), OUT)),
        Change("linear", Delta((Placed(low_rank(40, 6), 0, OUT), Placed(narrow, 0, OUT)), OUT), torch.ones(OUT)),
    ]
    for layer in both:
        for variant, change in enumerate(changes):
            layer.attach(variant, change)
    check(slot, both)
    way = both[1]._last[2]  # type: ignore[index]
    assert way.program is not None and len(way.program._parts) == 6
    assert [group.variant for group in way.apart] == [0, 3, 4]
    assert [one.form for one in way.rest[3].placed] == [rows] and way.rest.keys() == {3}


def test_many_rows_go_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, both = layers()
    for layer in both:
        for variant in range(2):
            layer.attach(variant, whole(low_rank(3, variant)))
    calls: list[int] = []
    before = Program.add
    monkeypatch.setattr(Program, "add", lambda self, x, y: (calls.append(x.shape[0]), before(self, x, y)))
    for rows in ((0, 1) * (FEW_ROWS // 2), (0,) * 5, (0, *(1,) * FEW_ROWS, *(0,) * FEW_ROWS), (BASE, 1, BASE)):
        check(slot, both, rows)
    # Of many rows a group may still have few.
    assert calls == [FEW_ROWS, 5, 1, FEW_ROWS, FEW_ROWS, 3]


def test_what_is_kept_of_a_plan_ends_when_variants_come_or_go() -> None:
    slot, both = layers()
    for step in range(5):
        for layer in both:
            if step < 3:
                layer.attach(step, whole(low_rank(3 + step, step)))
            else:
                layer.detach(step - 3)
        check(slot, both)
        check(slot, both, (0,) * 9)


@torch.inference_mode()
def test_a_plan_for_any_rows_answers_as_many_as_come() -> None:
    slot, both = layers()
    for layer in both:
        layer.attach(0, whole(low_rank(3, 1)))
    with slot.use(BatchPlan.only(0)):
        for rows in (1, 5, 5, FEW_ROWS + 1, 2):
            x = torch.randn(1, rows, IN)
            slow, found = (layer(x) for layer in both)
            assert torch.allclose(slow, found, rtol=1e-5, atol=1e-5)


def test_other_variants_in_the_other_rows_change_no_bit() -> None:
    slot, (_, layer) = layers()
    for variant in range(4):
        layer.attach(variant, whole(low_rank(3 + variant, variant)))
    mixes = [(0, 2, 2, 1), (3, 2, 2, 1), (3, 2, 2, 3), (BASE, 2, 2, BASE), (BASE, 2, 2, 0)]
    found = [answers(slot, layer, rows)[1:3] for rows in mixes]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_neighbour_with_infinite_factors_spoils_its_own_rows_only() -> None:
    slot, both = layers()
    endless = low_rank(2, 1)
    endless.left.codes[0, 0] = torch.inf
    for layer in both:
        layer.attach(0, whole(low_rank(3, 0)))
        layer.attach(1, whole(endless))
    found = answers(slot, both[1], (0, 1, BASE))
    assert torch.isfinite(found[[0, 2]]).all() and not torch.isfinite(found[1]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_are_added_to_in_fp32(dtype: torch.dtype) -> None:
    slot, both = layers()
    forms = [low_rank(3, variant) for variant in range(2)]
    for layer in both:
        layer.original.to(dtype)
        for variant, form in enumerate(forms):
            layer.attach(variant, whole(LowRank(*(Factor(side.codes.clone()) for side in (form.left, form.right)))))
    x = torch.randn(1, 4, IN, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.inference_mode(), slot.use(BatchPlan.for_rows([0, 1, BASE, 1])):
        slow, fast = (layer(x) for layer in both)
    assert fast.dtype == dtype and torch.allclose(slow.float(), fast.float(), rtol=2e-2, atol=2e-2)


@torch.inference_mode()
def test_rows_that_are_not_finite_get_what_fp32_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, (_, layer) = layers()
    for variant in range(2):
        layer.attach(variant, whole(low_rank(3, variant)))
    x = torch.randn(1, 4, IN)
    plan = BatchPlan.for_rows((0, 1, BASE, 1))
    with slot.use(plan):
        finite = layer(x)[0]
    for bad in (torch.inf, torch.nan):
        x[0, 1, 3] = bad
        with slot.use(plan):
            found = layer(x)[0]
        layer._note()
        with monkeypatch.context() as patched, slot.use(plan):
            patched.setattr(modules_linear, "FEW_ROWS", 0)
            patched.setattr(cpu, "FEW_ROWS", 0)
            slow = layer(x)[0]
        layer._note()
        assert torch.equal(found[1].nan_to_num(nan=7.0), slow[1].nan_to_num(nan=7.0))
        assert torch.equal(found[[0, 2, 3]], finite[[0, 2, 3]])
