"""Layers that are given the same tensor: their right factors are one product, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from runtime_families import store_architecture
from torch import nn

from mfs_decompose.runtime import integer_rights, nibbles
from mfs_decompose.runtime.batch_plan import BASE, BatchPlan, PlanSlot
from mfs_decompose.runtime.changes import Change, Delta
from mfs_decompose.runtime.digits import has_exact_products
from mfs_decompose.runtime.integer_rights import Rights
from mfs_decompose.runtime.load_trial import see_shared_inputs
from mfs_decompose.runtime.modules_linear import FamilyLinear
from mfs_decompose.runtime.nibbles import pack_nibbles
from mfs_decompose.runtime.ops.cpu import CpuOps
from mfs_decompose.runtime.ops.reference import ReferenceOps
from mfs_decompose.runtime.resident_forms import Factor, Form, LowRank, Placed

IN, OUTS = 21, (37, 12, 12)
MIXES = ((0, BASE, 1, 1), (2, 1, 0, BASE), (1, 1, 1, 1), (BASE, 2, BASE, 2), (BASE,) * 4, (0, 1, 2, 0))

fast = pytest.mark.skipif(not has_exact_products(), reason="this CPU has no exact products of int8")


def factors(out: int, rank: int, seed: int, *, size: float = 0.003, half: bool = True) -> LowRank:
    draw = torch.Generator().manual_seed(seed)
    sides = []
    for length in (out, IN):
        codes = torch.randint(-128, 128, (rank, length), generator=draw, dtype=torch.int8)
        codes[rank // 2 :] = codes[rank // 2 :] >> 4
        sides.append(Factor(codes, size * torch.rand(rank, 1, generator=draw), half))
    return LowRank(*sides)


def whole(form: Form, out: int) -> Change:
    return Change("linear", Delta((Placed(form, 0, out),), out))


class Siblings:
    """Three layers, the same by the oracle, and the same that know nothing of each other."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.slot = PlanSlot()
        originals = [nn.Linear(IN, out) for out in OUTS]
        self.slow = [FamilyLinear(one, self.slot, ReferenceOps()) for one in originals]
        self.alone = [FamilyLinear(one, self.slot, CpuOps()) for one in originals]
        self.joined = [FamilyLinear(one, self.slot, CpuOps()) for one in originals]
        for one in self.joined:
            one.join(self.joined)

    def attach(self, at: int, variant: int, form: LowRank) -> None:
        for layers in (self.slow, self.alone, self.joined):
            layers[at].attach(variant, whole(pack_nibbles(factors_like(form)), OUTS[at]))

    def detach(self, at: int, variant: int) -> None:
        for layers in (self.slow, self.alone, self.joined):
            layers[at].detach(variant)

    @torch.inference_mode()
    def answers(self, layers: list[FamilyLinear], rows: tuple[int, ...], x: torch.Tensor) -> list[torch.Tensor]:
        with self.slot.use(BatchPlan.for_rows(rows)):
            return [layer(x)[0] for layer in layers]

    def check(self, size: float = 1.0) -> None:
        x = size * torch.randn(1, 4, IN, generator=torch.Generator().manual_seed(7))
        for rows in MIXES:
            slow, alone, joined = (self.answers(layers, rows, x) for layers in (self.slow, self.alone, self.joined))
            for one, two, three in zip(slow, alone, joined, strict=True):
                scale = float(one.abs().max())
                assert torch.allclose(one, three, rtol=1e-5, atol=2e-6 * scale)
                assert torch.allclose(two, three, rtol=1e-5, atol=2e-6 * scale)


def factors_like(form: LowRank) -> LowRank:
    """A form of its own memory: stacks let tensors be views of theirs."""
    return LowRank(*(Factor(one.codes.clone(), one.scales, one.half) for one in (form.left, form.right)))


@fast
@pytest.mark.parametrize("large", [0, 100, 1 << 20])
@pytest.mark.parametrize("piece", [256, 1 << 21])
def test_joined_layers_answer_as_the_oracle(large: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nibbles, "LARGE", large)
    monkeypatch.setattr(integer_rights, "PIECE", piece)
    found = Siblings()
    for at, out in enumerate(OUTS):
        for variant in range(3):
            if (at, variant) != (1, 2):  # a variant does not change every layer
                found.attach(at, variant, factors(out, 3 + at + variant, 10 * at + variant, half=variant != 1))
        found.check()
    found.detach(0, 1)
    found.check(1e-3)
    found.detach(2, 0)
    found.detach(2, 1)
    found.detach(2, 2)
    found.check(1e3)


@fast
def test_right_factors_of_siblings_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Siblings()
    for at, out in enumerate(OUTS):
        for variant in range(2):
            found.attach(at, variant, factors(out, 3, 10 * at + variant))
    calls: list[int] = []
    before = Rights.shrink
    monkeypatch.setattr(Rights, "shrink", lambda self, *rest: (calls.append(len(self.stacks)), before(self, *rest))[1])
    x = torch.randn(1, 4, IN)
    found.answers(found.joined, MIXES[0], x)
    assert calls == [3]
    found.answers(found.alone, MIXES[0], x)
    assert calls == [3, 1, 1, 1]
    with found.slot.use(BatchPlan.for_rows(MIXES[0])), torch.inference_mode():
        for layer in found.joined:  # each its own inputs: what was made for others is not taken
            y = torch.randn(1, 4, IN)
            assert torch.allclose(layer(y), found.slow[found.joined.index(layer)](y), atol=1e-4)


@fast
def test_a_sibling_of_another_size_spoils_no_digits() -> None:
    found = Siblings()
    for at, (out, size) in enumerate(zip(OUTS, (3e-3, 3e-7, 30.0), strict=True)):
        for variant in range(2):
            found.attach(at, variant, factors(out, 5, 10 * at + variant, size=size * 10.0**variant, half=False))
    x = torch.randn(1, 4, IN, generator=torch.Generator().manual_seed(3))
    changes = []
    for layers in (found.slow, found.joined):
        plain, changed = (found.answers(layers, rows, x) for rows in ((BASE,) * 4, (0, 1, 1, 0)))
        changes.append([one - two for one, two in zip(changed, plain, strict=True)])
    for slow, fast_one, base in zip(*changes, found.answers(found.slow, (BASE,) * 4, x), strict=True):
        rounding = 2e-7 * float(base.abs().max())
        assert torch.allclose(slow, fast_one, rtol=1e-5, atol=rounding + 2e-6 * float(slow.abs().max()))


@fast
def test_no_bit_depends_on_neighbours() -> None:
    found = Siblings()
    for at, out in enumerate(OUTS):
        for variant in range(3):
            found.attach(at, variant, factors(out, 4, 10 * at + variant, half=False))
    x = torch.randn(1, 4, IN)
    rows = ((0, 2, 2, 1), (1, 2, 2, 1), (BASE, 2, 2, BASE), (2, 2, 2, 2), (0, 2, 2, 0))
    answers = [[one[1:3] for one in found.answers(found.joined, mix, x)] for mix in rows]
    for other in answers[1:]:
        assert all(torch.equal(one, two) for one, two in zip(answers[0], other, strict=True))


@pytest.mark.parametrize(("name", "groups"), [("llama", 4), ("gpt2", 0)])
def test_siblings_are_seen_in_a_trial(name: str, groups: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    family = store_architecture(tmp_path_factory.mktemp("siblings"), name).load(precision="int8")
    layers = {path: one for path, one in family.model.named_modules() if isinstance(one, FamilyLinear)}
    joined = {tuple(map(id, one._siblings)) for one in layers.values() if len(one._siblings) > 1}
    assert len(joined) == groups
    for path, one in layers.items():
        assert one in one._siblings
        if path.endswith("up_proj"):
            assert one._siblings[0] is layers[path.replace("up", "gate")]


def test_a_module_that_writes_to_its_inputs_is_seen() -> None:
    class Writes(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.one, self.two, self.three, self.twice = (nn.Linear(4, 4) for _ in range(4))
            self.writes = writes
            self.device = torch.device("cpu")

        def forward(self, input_ids: torch.Tensor, **other: object) -> torch.Tensor:
            x = torch.ones(*input_ids.shape, 4)
            first = self.one(x)
            if self.writes:
                x += 1
            second: torch.Tensor = self.two(x)
            return first + second + self.three(second) + self.twice(self.twice(second))

    for writes in (False, True):
        seen = see_shared_inputs(Writes(writes), ["one", "two", "three", "twice"])
        assert seen.kept != writes and seen.siblings == (("one", "two"),)
