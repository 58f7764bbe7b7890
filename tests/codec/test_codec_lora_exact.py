"""A merged LoRA comes back bit by bit from less than its adapter; what is no merge is left to others."""

from __future__ import annotations

import pytest
import torch
from codec_entries import Stored, bits, generator, rows_of
from merged_loras import merged_lora

from mfs_decompose.codec import lora_exact
from mfs_decompose.codec.corrected import open_corrected
from mfs_decompose.codec.fixed import open_fixed
from mfs_decompose.codec.lora_exact import LoraFit, encode_lora_exact, fit_lora_exact
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.source.header import TensorSpec

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16"}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _store(own: torch.Tensor, base: torch.Tensor, fit: LoraFit) -> tuple[Stored, TensorSpec]:
    spec = TensorSpec("w", _NAMES[own.dtype], tuple(own.shape))
    pieces: list[bytes] = []
    node = encode_lora_exact(fit, rows_of(own), rows_of(base), spec, pieces.append)
    return Stored(node, b"".join(pieces)), spec


def _read(stored: Stored, base: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    node = CodecNode.from_json(stored.node.to_json())
    delta = open_fixed(node.children[0], stored.fetch, (spec.shape[0], spec.shape[1]))
    return open_corrected(node, stored.fetch, spec)(0, spec.rows, rows_of(base), delta.rows)


@pytest.mark.parametrize(
    ("shape", "rank", "rms", "dtype", "rounded_first"),
    [
        ((330, 270), 6, 2e-4, torch.bfloat16, False),
        ((270, 330), 6, 1e-3, torch.bfloat16, True),
        ((330, 270), 3, 2e-4, torch.float16, False),
        ((270, 330), 3, 2e-4, torch.float16, True),
    ],
)
def test_a_merge_costs_no_more_than_its_adapter(
    shape: tuple[int, int], rank: int, rms: float, dtype: torch.dtype, rounded_first: bool
) -> None:
    base, own, truth = merged_lora(shape, rank, rms, 5, dtype, rounded_first)
    fit = fit_lora_exact(own, base, 11)
    assert fit is not None and fit.factors.rank == rank
    stored, spec = _store(own, base, fit)
    assert bits(_read(stored, base, spec)) == bits(own)
    adapter = 2 * rank * sum(shape)
    assert stored.node.nbytes < 1.1 * adapter
    error = fit.factors.rows(0, shape[0]) - truth
    assert float(error.square().mean().sqrt()) < 0.03 * rms


def test_how_a_merge_was_rounded_is_found() -> None:
    """A delta of 1e-3 rounded to bf16 is off by 2e-6, which a fit of this size can see."""
    for rounded_first in (False, True):
        base, own, _ = merged_lora((500, 620), 4, 1e-3, 6, torch.bfloat16, rounded_first)
        fit = fit_lora_exact(own, base, 11)
        assert fit is not None and fit.merge == ("twice" if rounded_first else "once")
        right, _ = _store(own, base, fit)
        other: LoraFit = LoraFit(fit.factors, "once" if rounded_first else "twice")
        wrong, _ = _store(own, base, other)
        residual, worse = (stored.node.part("residual").nbytes for stored in (right, wrong))
        assert residual < 0.9 * worse


def test_a_fit_is_deterministic_and_a_hint_is_only_a_hint() -> None:
    base, own, _ = merged_lora((260, 300), 5, 2e-4, 7)
    first, second, hinted = (fit_lora_exact(own, base, 11, hint=hint) for hint in (None, None, 5))
    assert first is not None and second is not None and hinted is not None
    assert _store(own, base, first)[0].data == _store(own, base, second)[0].data
    assert hinted.factors.rank == 5


def test_bits_that_no_merge_made_come_back_too() -> None:
    base, own, _ = merged_lora((260, 300), 5, 2e-4, 8)
    own = own.clone()
    own[3, 4], own[5, 6], own[7, 8], own[9, 10] = torch.nan, -torch.inf, -0.0, 1e-40
    own[100] = torch.randn(300, generator=generator(1)).to(torch.bfloat16)
    fit = fit_lora_exact(own, base, 11)
    assert fit is not None
    stored, spec = _store(own, base, fit)
    assert bits(_read(stored, base, spec)) == bits(own)


def test_what_is_no_merge_is_left_to_others() -> None:
    draw = generator(9)
    base = (torch.randn(260, 300, generator=draw) * 0.02).to(torch.bfloat16)
    dense = (base.float() + torch.randn(260, 300, generator=draw) * 2e-4).to(torch.bfloat16)
    assert fit_lora_exact(dense, base, 11) is None
    assert fit_lora_exact(base.clone(), base, 11) is None
    assert fit_lora_exact(dense.float(), base.float(), 11) is None
    assert fit_lora_exact(dense, base.to(torch.float16), 11) is None
    assert fit_lora_exact(dense[:, :0], base[:, :0], 11) is None
    assert fit_lora_exact(dense[:2], base[:2], 11) is None
    unbounded = torch.full_like(base, torch.nan)
    assert fit_lora_exact(unbounded, base, 11) is None


def test_a_matrix_too_large_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    base, own, _ = merged_lora((100, 120), 2, 2e-4, 10)
    assert fit_lora_exact(own, base, 11) is not None
    monkeypatch.setattr(lora_exact, "MAX_ELEMENTS", 100 * 120 - 1)
    assert fit_lora_exact(own, base, 11) is None


def test_more_directions_than_asked_for_are_left_to_others() -> None:
    base, own, _ = merged_lora((260, 300), 12, 1e-3, 12)
    assert fit_lora_exact(own, base, 11, most=8) is None
