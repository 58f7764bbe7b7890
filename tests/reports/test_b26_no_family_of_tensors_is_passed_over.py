"""B26: two thirds of each expert silently untouched, because a pattern matched only down_proj.

Right: what changed is found by its bits, whatever its name, and the artifact says for every tensor what became of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from report_runs import Tensors, back, run, same_bits, tensors_of, toy

from mfs_decompose.pipeline.inspect import inspect, inspect_tensors

FAMILIES = ("gate_proj", "up_proj", "down_proj")


def unfused() -> Tensors:
    """One 3-D tensor for each projection of all experts, and the rest of a layer."""
    generator = torch.Generator().manual_seed(26)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    shapes = {"gate_proj": (3, 24, 40), "up_proj": (3, 24, 40), "down_proj": (3, 40, 24)}
    return {f"layers.0.experts.{name}": draw(*shape) for name, shape in shapes.items()} | {
        "layers.0.router.weight": draw(9, 40),
        "layers.0.norm.weight": draw(40),
        "layers.0.router.bias": draw(3),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", [{}, {"objective.rank": 2}, {"deltas.default.codec": "lossless"}])
def test_a_change_in_one_projection_alone_is_found_there_and_nowhere_else(
    tmp_path: Path, family: str, recipe: dict[str, object]
) -> None:
    base = unfused()
    name = f"layers.0.experts.{family}"
    own = {**base, name: (base[name].float() * 1.01).bfloat16()}
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, recipe)
    energies = {row["tensor"]: row["energy"] for row in inspect_tensors(tmp_path / "art", "v")}
    assert energies.keys() == own.keys()
    assert [tensor for tensor, energy in energies.items() if energy > 0] == [name]
    (variant,) = inspect(tmp_path / "art")["variants"]
    assert variant["codecs"]["identical"] == len(own) - 1
    assert sum(variant["codecs"].values()) == len(own)


def test_nothing_that_changed_is_stored_as_identical(tmp_path: Path) -> None:
    """By construction: `identical` is a comparison of bits. Here the smallest change there is, one bit of one slice."""
    base = unfused()
    own = {name: weight.clone() for name, weight in base.items()}
    name = "layers.0.experts.up_proj"
    own[name].view(torch.int16)[1, 5, 7] ^= 1
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, {"objective.rank": 1})
    tensors = tensors_of(tmp_path / "art", "v")
    for tensor, found in tensors.items():
        identical = found["tree"]["codec"] == "identical"
        assert identical == same_bits(own[tensor], base[tensor]) == (found["energy"] == 0)
    tree = tensors[name]["tree"]
    assert [child["codec"] for child in tree["children"]] == ["identical", "lowrank", "identical"]
    served = back(tmp_path / "art", "v", tmp_path / "out", dtype="float32")
    assert served[name][1, 5, 7] == pytest.approx(float(own[name][1, 5, 7]), rel=1e-3)
