"""Low rank and a residual: the sum of what children decode to, in the order of the tree."""

from __future__ import annotations

import pytest
import torch
from codec_entries import Stored, decaying, generator
from direct_entries import CASES, Case, base_of

from mfs_decompose.codec.banded import Banded
from mfs_decompose.codec.deadzone import DeadZone
from mfs_decompose.codec.direct import Context
from mfs_decompose.codec.kbit import KBit
from mfs_decompose.codec.summed import Summed, encode_residual, sum_node
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.linalg.svd import truncated_svd

_SHAPE = (70, 43)
_BANDS = (1, 0, 2, 2, 3)


def noisy(seed: int) -> torch.Tensor:
    """A concentrated part and a flat one."""
    return decaying(*_SHAPE, seed) + torch.randn(_SHAPE, generator=generator(seed + 50)) * 3e-4


def store_sum(delta: torch.Tensor, case: Case) -> Stored:
    found = truncated_svd(delta[None], 8, [1])[0]
    assert found is not None
    pieces: list[bytes] = []
    low = Banded().encode(found.left, found.right, _BANDS, pieces.append)
    first = Banded().open(low, Stored(low, b"".join(pieces)).fetch, _SHAPE)
    base = base_of(_SHAPE, 3)
    context = Context(lambda start, stop: base[start:stop])
    rest = encode_residual(
        lambda start, stop: delta[start:stop], _SHAPE, first, case.codec, case.params, pieces.append, context=context
    )
    return Stored(sum_node([low, rest]), b"".join(pieces))


def open_children(stored: Stored, case: Case) -> list[torch.Tensor]:
    low, rest = stored.node.children
    opened = (Banded().open(low, stored.fetch, _SHAPE), case.codec.open(rest, stored.fetch, _SHAPE))
    return [child.rows(0, _SHAPE[0]) for child in opened]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bytes_of_children_follow_one_another(case: Case) -> None:
    stored = store_sum(noisy(1), case)
    assert stored.node.text().startswith("sum(banded+")
    assert stored.node.nbytes == len(stored.data)
    spans = sorted((part.offset, part.nbytes) for child in stored.node.children for part in child.parts)
    at = 0
    for offset, nbytes in spans:
        assert offset == at
        at += nbytes
    assert CodecNode.from_json(stored.node.to_json()) == stored.node


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_the_sum_of_the_rows_of_children(case: Case) -> None:
    stored = store_sum(noisy(2), case)
    low, rest = open_children(stored, case)
    opened = Summed(
        [
            Banded().open(stored.node.children[0], stored.fetch, _SHAPE),
            case.codec.open(stored.node.children[1], stored.fetch, _SHAPE),
        ]
    )
    assert torch.equal(opened.rows(0, 70), low + rest)
    for start, stop in ((0, 0), (0, 1), (11, 50), (69, 70)):
        assert torch.equal(opened.rows(start, stop), (low + rest)[start:stop])
    # In plain Python: one rounding an element, nothing to reorder.
    assert float(opened.rows(3, 4)[0, 5]) == float(low[3, 5]) + float(rest[3, 5])


@pytest.mark.parametrize("case", [Case(KBit(), {"bits": 4, "fit": "mse"}), Case(DeadZone(), {"step": 3e-4})], ids=str)
def test_the_residual_is_what_the_first_leaves(case: Case) -> None:
    delta = noisy(3)
    low, rest = open_children(store_sum(delta, case), case)
    left = delta.to(torch.float64) - low
    assert float((rest - left).norm()) < 0.35 * float(left.norm())
    assert float((low + rest - delta).norm()) < 0.35 * float((low - delta).norm())


def test_one_child_is_itself() -> None:
    stored = store_sum(noisy(4), CASES[0])
    only = Banded().open(stored.node.children[0], stored.fetch, _SHAPE)
    assert torch.equal(Summed([only]).rows(2, 9), only.rows(2, 9))
