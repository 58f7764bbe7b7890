"""Factors of integers: nibbles, products of digits and stacks of several variants, against the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from mfs_decompose.runtime import integer_rights, integer_stacks, modules_linear, nibbles
from mfs_decompose.runtime.batch_plan import BASE, BatchPlan, PlanSlot
from mfs_decompose.runtime.changes import Change, Delta
from mfs_decompose.runtime.digits import has_exact_products, input_digits, join_digits, to_digits
from mfs_decompose.runtime.modules_linear import FamilyLinear
from mfs_decompose.runtime.nibbles import pack_nibbles, spread
from mfs_decompose.runtime.ops.cpu import CpuOps
from mfs_decompose.runtime.ops.reference import ReferenceOps
from mfs_decompose.runtime.resident_forms import Factor, LowRank, Placed, Rows, cut_rows, move

OUT, IN = 37, 21
ROWS = (1, BASE, 0, 0, 2, BASE, 3, 3, BASE)

fast = pytest.mark.skipif(not has_exact_products(), reason="this CPU has no exact products of int8")


def factors(rank: int, seed: int, *, half: bool = True, small: int = 0, out: int = OUT, width: int = IN) -> LowRank:
    """Codes of 8 bits, the last `small` directions of 4."""
    draw = torch.Generator().manual_seed(seed)
    sides = []
    for length in (out, width):
        codes = torch.randint(-128, 128, (rank, length), generator=draw, dtype=torch.int8)
        codes[rank - small :] = codes[rank - small :] >> 4
        sides.append(Factor(codes, 0.003 * torch.rand(rank, 1, generator=draw), half))
    return LowRank(*sides)


@pytest.fixture
def packs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nibbles, "LARGE", 0)


@given(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.integers(0, 3))
def test_nibbles_hold_the_same_values(whole: int, small: int, half: bool, which: int) -> None:
    form = factors(whole + small, 1, half=half, small=small)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nibbles, "LARGE", (0, (whole + small) * (IN + 1), 1 << 20, (whole + small) * OUT)[which])
        packed = pack_nibbles(form)
    assert isinstance(packed, LowRank) and packed.left.rank == packed.right.rank == whole + small
    if which in (0, 3) and small > 1:
        assert packed.left.nibbles is not None and packed.left.nibbles.shape[0] == small // 2
        assert (packed.right.nibbles is None) == (which == 3)
    expected = form.left.values().mT @ form.right.values()
    assert torch.allclose(packed.left.values().mT @ packed.right.values(), expected, atol=1e-4)
    assert pack_nibbles(packed) is packed


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_side_is_packed_where_the_other_has_8_bits(packs_all: None, side: str) -> None:
    """As across from a vocabulary."""
    wide, few = factors(9, 2), factors(9, 3, small=9)
    form = LowRank(few.left, wide.right) if side == "left" else LowRank(wide.left, few.right)
    packed = pack_nibbles(form)
    assert isinstance(packed, LowRank)
    own, other = (packed.left, packed.right) if side == "left" else (packed.right, packed.left)
    assert own.nibbles is not None and own.nibbles.shape[0] == 4
    assert other.nibbles is None and other.codes.shape[0] == 9
    expected = form.left.values().mT @ form.right.values()
    assert torch.allclose(packed.left.values().mT @ packed.right.values(), expected, atol=1e-4)


def test_what_is_not_of_small_integers_is_not_packed(packs_all: None) -> None:
    form = factors(6, 1, small=6)
    for other in (
        LowRank(Factor(torch.randn(6, OUT)), form.right),
        factors(6, 2),
        Rows(None, torch.ones(2, IN), None, False),
    ):
        assert pack_nibbles(other) is other


def test_packed_forms_are_cut_moved_named_and_looked_up(packs_all: None) -> None:
    form = factors(7, 3, small=5)
    packed = pack_nibbles(form)
    assert isinstance(packed, LowRank) and packed.name == "low rank int4/int8"
    assert pack_nibbles(factors(4, 3, small=4)).name == "low rank int4"
    assert sum(one.nbytes for one in packed.tensors()) == 5 * (OUT + IN) + 2 * 4 * 7
    dense = form.left.values().mT @ form.right.values()
    part = cut_rows(move(packed, "cpu"), 5, 20)
    ids = torch.tensor([3, 0, 14])
    y, z = torch.zeros(3, IN), torch.zeros(3, 15)
    CpuOps().look_up(part, ids, 15, y)
    assert torch.allclose(y, dense[5:20][ids], atol=1e-4)
    x = torch.randn(3, IN)
    CpuOps().add(part, x, z)
    assert torch.allclose(z, x @ dense[5:20].mT, atol=1e-3)


def test_spread_codes_are_sixteenfold(packs_all: None) -> None:
    form = factors(6, 4, small=4)
    packed = pack_nibbles(form)
    assert isinstance(packed, LowRank) and packed.left.nibbles is not None
    wide = spread(packed.left.codes, packed.left.nibbles)
    assert torch.equal(wide[:2], form.left.codes[:2]) and torch.equal(wide[2:], form.left.codes[2:] * 16)


@given(st.integers(1, 9), st.integers(1, 200), st.integers(-30, 30))
def test_digits_keep_what_fp32_keeps(rows: int, length: int, power: int) -> None:
    x = torch.ldexp(torch.randn(rows, length, generator=torch.Generator().manual_seed(rows)), torch.tensor(power))
    x[0] = 0
    found = to_digits(x)
    peak = x.abs().amax(dim=1, keepdim=True)
    back = join_digits(found.codes.to(torch.int32)) * found.unit
    assert bool(((back - x).abs() <= peak * 2.5e-7).all())


def test_digits_of_what_is_not_finite_are_zeros() -> None:
    assert input_digits(torch.tensor([[1.0, -2.0]])).endless is None
    for bad in (torch.inf, -torch.inf, torch.nan):
        found = input_digits(torch.tensor([[1.0, 2.0], [bad, 0.0]]))
        assert found.endless is not None and found.endless.tolist() == [False, True]
        assert torch.isfinite(found.unit).all() and not found.codes.view(3, 2, 2)[:, 1].any()


def layers(*, conv: bool = False) -> tuple[PlanSlot, list[FamilyLinear]]:
    torch.manual_seed(0)
    original: nn.Module = Conv1D(OUT, IN) if conv else nn.Linear(IN, OUT)
    slot = PlanSlot()
    return slot, [FamilyLinear(original, slot, ops, stored_in_out=conv) for ops in (ReferenceOps(), CpuOps())]


def whole(form: LowRank) -> Change:
    return Change("linear", Delta((Placed(form, 0, OUT),), OUT))


def attach(both: list[FamilyLinear], variant: int, form: LowRank) -> None:
    packed = pack_nibbles(form)
    assert isinstance(packed, LowRank)
    for layer, one in zip(both, (form, packed), strict=True):
        layer.attach(variant, whole(one))


@torch.inference_mode()
def check(slot: PlanSlot, both: list[FamilyLinear], rows: tuple[int, ...], x: torch.Tensor | None = None) -> None:
    if x is None:
        x = torch.randn(1, len(rows), IN, generator=torch.Generator().manual_seed(5))
    with slot.use(BatchPlan.for_rows(rows)):
        slow, found = (layer(x) for layer in both)
    assert torch.allclose(slow, found, rtol=1e-5, atol=2e-6 * float(slow.nan_to_num().abs().max()), equal_nan=True)


def integer_stacks_of(layer: FamilyLinear) -> list[integer_stacks.IntegerStack]:
    assert layer._stacks is not None
    return layer._stacks._integers


@fast
@pytest.mark.parametrize("large", [0, 100, 1 << 20])
@pytest.mark.parametrize("conv", [False, True])
def test_stacks_of_integers(large: int, conv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nibbles, "LARGE", large)
    monkeypatch.setattr(integer_stacks, "PIECE", 256)
    monkeypatch.setattr(integer_rights, "PIECE", 256)
    slot, both = layers(conv=conv)
    for variant, (rank, small, half) in enumerate([(3, 2, True), (8, 7, False), (1, 0, True), (6, 6, True)]):
        form = factors(rank, variant, half=half, small=small)
        packed = pack_nibbles(form)
        assert isinstance(packed, LowRank)
        for layer, one in zip(both, (form, packed), strict=True):
            turned = variant % 2 == 0
            lies, rows = (one.transposed, IN) if turned else (one, OUT)
            layer.attach(variant, Change("linear", Delta((Placed(lies, 0, rows),), rows, turned != conv)))
    assert [len(stack.members) for stack in integer_stacks_of(both[1])] == [4]
    for rows in (ROWS, (3,) * 4, (BASE, 1, BASE), (0, 1) * 40):
        check(slot, both, rows)


@fast
@torch.inference_mode()
def test_rows_that_are_not_finite_get_what_fp32_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, (_, layer) = layers()
    for variant in range(2):
        layer.attach(variant, whole(factors(3, variant)))
    x = torch.randn(1, 4, IN)
    plan = BatchPlan.for_rows((0, 1, BASE, 1))
    with slot.use(plan):
        finite = layer(x)[0]
    for bad in (torch.inf, torch.nan):
        x[0, 1, 3] = bad
        with slot.use(plan):
            found = layer(x)[0]
        with monkeypatch.context() as patched, slot.use(plan):
            patched.setattr(modules_linear, "MOST_ROWS", 0)
            slow = layer(x)[0]
        assert torch.equal(found[1].nan_to_num(nan=7.0), slow[1].nan_to_num(nan=7.0))
        assert torch.equal(found[[0, 2, 3]], finite[[0, 2, 3]])


@fast
def test_rows_of_zeros_and_ends_of_fp32() -> None:
    slot, both = layers()
    for variant in range(2):
        attach(both, variant, factors(3, variant))
    for size in (0.0, 1e-38, 1e-30, 1e30):
        check(slot, both, (0, 1, BASE, 1), size * torch.randn(1, 4, IN))


@fast
def test_no_bit_depends_on_neighbours_or_on_the_stack(packs_all: None) -> None:
    slot, both = layers()
    layer = both[1]
    for variant in range(4):
        attach(both, variant, factors(3 + variant, variant, half=False, small=variant))
    x = torch.randn(1, 4, IN)

    @torch.inference_mode()
    def answer(*rows: int) -> torch.Tensor:
        with slot.use(BatchPlan.for_rows(rows)):
            found: torch.Tensor = layer(x)[0]
        return found

    mixes = [(0, 2, 2, 1), (3, 2, 2, 1), (BASE, 2, 2, BASE), (2, 2, 2, 2), (BASE, 2, 2, 0)]
    found = [answer(*rows)[1:3] for rows in mixes]
    assert all(torch.equal(found[0], other) for other in found[1:])
    plain = answer(BASE, BASE, BASE, BASE)
    assert torch.equal(answer(BASE, 2, 1, BASE)[[0, 3]], plain[[0, 3]])
    layer.detach(0)
    assert torch.equal(found[0], answer(3, 2, 2, BASE)[1:3])


@fast
def test_members_are_held_once_and_leave_whole(packs_all: None) -> None:
    slot, both = layers()
    for variant in range(3):
        attach(both, variant, factors(4 + variant, variant, small=3))
    held = {one.data_ptr(): one.nbytes for stack in integer_stacks_of(both[1]) for one in stack.joined}
    assert sum(held.values()) == (2 + 3 + 4 + 3) * (OUT + IN)
    forms = [both[1]._deltas[variant].placed[0].form for variant in range(3)]
    check(slot, both, (0, 1, 2, BASE))
    for layer in both:
        layer.detach(1)
    check(slot, both, (0, 2, 2, BASE))
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in forms[1].tensors())
    assert torch.allclose(forms[1].left.values()[:2], factors(5, 1, small=3).left.values()[:2])  # type: ignore[union-attr]


@fast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations(dtype: torch.dtype) -> None:
    slot, both = layers()
    for layer in both:
        layer.original.to(dtype)
    for variant in range(2):
        attach(both, variant, factors(3, variant, small=2))
    x = torch.randn(1, 4, IN).to(dtype)
    with torch.inference_mode(), slot.use(BatchPlan.for_rows([0, 1, BASE, 1])):
        slow, found = (layer(x) for layer in both)
    assert found.dtype == dtype and torch.allclose(slow.float(), found.float(), rtol=2e-2, atol=2e-2)


@fast
def test_siblings_share_digits_unless_inputs_change(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, (_, one) = layers()
    calls: list[int] = []
    monkeypatch.setattr(
        "mfs_decompose.runtime.modules_linear.input_digits", lambda x: (calls.append(1), input_digits(x))[1]
    )
    for variant in range(2):
        one.attach(variant, whole(factors(3, variant)))
    x = torch.randn(1, 2, IN)
    with torch.inference_mode(), slot.use(BatchPlan.for_rows([0, 1])):
        assert torch.equal(one(x), one(x)) and len(calls) == 1
        slot.shares = False
        one(x)
    assert len(calls) == 2
