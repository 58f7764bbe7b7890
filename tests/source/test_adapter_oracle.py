"""PEFT is the oracle: our merge, loaded as a checkpoint, computes what the unmerged adapter computes in PEFT.

PEFT runs in a process of its own (report B62), on the adapters that it saved itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_kinds import BASES, KINDS
from adapters import Made, logits_of, make_adapter, make_base, merge_by_us, peft_logits

# PEFT drops the old spelling of biases without a word; we read it, as the adapter's author meant it.
_READ_BY_US_ALONE = {"bias_old_names": "bias_same_names"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """Every kind of adapter, each base made once."""
    root = tmp_path_factory.mktemp("adapters")
    bases = {name: make_base(root / f"base-{name}", name) for name in BASES}
    found = {name: make_adapter(root / name, kind, bases[kind.base]) for name, kind in KINDS.items()}
    for old, new in _READ_BY_US_ALONE.items():
        kind = replace(KINDS[old], alter=None)
        found[new] = make_adapter(root / new, kind, bases[kind.base])
    return found


@pytest.fixture(scope="module")
def oracle(made: dict[str, Made], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return peft_logits(made, tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def untouched(made: dict[str, Made]) -> dict[Path, torch.Tensor]:
    return {one.base: logits_of(one.base) for one in made.values()}


@pytest.mark.parametrize("name", KINDS)
def test_our_merge_computes_what_peft_computes(
    name: str,
    made: dict[str, Made],
    oracle: dict[str, torch.Tensor],
    untouched: dict[Path, torch.Tensor],
    tmp_path: Path,
) -> None:
    expected = oracle[_READ_BY_US_ALONE.get(name, name)]
    found = logits_of(merge_by_us(made[name], tmp_path / "merged"))
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-4
    shared = untouched[made[name].base]
    assert (expected[..., : shared.shape[-1]] - shared).abs().max() > 0.1  # the adapter does something


def test_every_base_and_every_way_of_storing_it_has_a_kind() -> None:
    assert {kind.base for kind in KINDS.values()} == set(BASES)
