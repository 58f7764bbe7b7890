"""B12: extraction "succeeds", and applying the result does nothing, or a third of what it should.

Right: both factors carry sqrt(sigma), so neither leaves its type's range; the recorded error is that of the decoded
bytes; and weights that the checkpoint's type cannot tell from the base's are said to be the base's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from report_runs import Tensors, back, run, same_bits, tensors_of, toy

from mfs_decompose.artifact.reader import Family as Artifact
from mfs_decompose.codec.arrays import read_array
from mfs_decompose.codec.opened import OpenedTensor
from mfs_decompose.source.header import TensorSpec

SHAPES = {"mlp.up_proj.weight": (72, 40), "experts.up_proj": (3, 56, 24)}
RANK = 4


def weights(dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(12)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def nudged(base: Tensors, share: float) -> tuple[Tensors, Tensors]:
    """The base with every matrix moved by rank 4, `share` of its norm; and the moves, in fp64."""
    generator = torch.Generator().manual_seed(13)
    own, moves = {}, {}
    for name, weight in base.items():
        lead = weight.shape[:-2]
        left = torch.randn(*lead, weight.shape[-2], RANK, generator=generator, dtype=torch.float64)
        right = torch.randn(*lead, RANK, weight.shape[-1], generator=generator, dtype=torch.float64)
        move = left @ right
        moves[name] = move * share * weight.double().norm() / move.norm()
        own[name] = (weight.double() + moves[name]).to(weight.dtype)
    return own, moves


def decoded(art: Path, name: str) -> torch.Tensor:
    """The delta that the artifact's bytes decode to, fp64."""
    with Artifact.open(art) as artifact:
        found = artifact.variant("v").tensors[name]
        data = artifact.blob("v", name)
        spec = TensorSpec(name, found.dtype, found.shape)
        opened = OpenedTensor(artifact.tree("v", name), lambda at, count: data[at : at + count], spec)
        delta = opened.delta(0, found.shape[0])
        assert delta is not None
        return delta.reshape(found.shape)


@pytest.mark.parametrize("factors", ["int4", "int8", "bf16"])
@pytest.mark.parametrize("share", [1e-6, 1e-30, 1e-3])
def test_a_millionth_of_the_weights_is_kept_and_its_error_is_the_real_one(
    tmp_path: Path, factors: str, share: float
) -> None:
    """In fp64, which can tell such weights from the base's; 1e-30 of them by adding to weights that are zero."""
    base = weights(torch.float64)
    own, moves = nudged(base, share)
    if share == 1e-30:
        base, own = {name: torch.zeros_like(one) for name, one in base.items()}, dict(moves)
    recipe: dict[str, Any] = {"objective.rank": RANK, "deltas.default.factors": factors}
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, recipe)
    for name, move in moves.items():
        found = tensors_of(tmp_path / "art", "v")[name]
        delta = decoded(tmp_path / "art", name)
        assert found["energy"] == pytest.approx(float(move.square().sum()), rel=1e-5)
        error = float((delta - move).square().sum())
        assert found["error"] == pytest.approx(error, rel=1e-3, abs=1e-12 * found["energy"])
        # It does something, at full strength: what comes back lies along the move, and is as long.
        along = float((delta * move).sum() / move.square().sum())
        assert along == pytest.approx(1.0, abs=0.02)
        assert math.sqrt(error / found["energy"]) < {"int4": 0.15, "int8": 0.01, "bf16": 0.005}[factors]


def test_both_factors_are_as_large(tmp_path: Path) -> None:
    base = weights(torch.float64)
    own, _ = nudged(base, 1e-6)
    recipe = {"objective.rank": RANK, "deltas.default.factors": "bf16"}
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, recipe)
    name = "mlp.up_proj.weight"
    with Artifact.open(tmp_path / "art") as artifact:
        data, node = artifact.blob("v", name), artifact.tree("v", name)
    u, v = (
        read_array(node, part, lambda at, count: data[at : at + count], "BF16", (RANK, length)).double()
        for part, length in zip("uv", SHAPES[name], strict=True)
    )
    for one, other in zip(u.norm(dim=1).tolist(), v.norm(dim=1).tolist(), strict=True):
        assert one == pytest.approx(other, rel=0.01) and one > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_type_cannot_hold_is_not_claimed(tmp_path: Path, dtype: torch.dtype) -> None:
    """A millionth lies below half an ulp: only a few elements cross it. Energies are those of the tensors as saved."""
    base = weights(dtype)
    own, moves = nudged(base, 1e-6)
    recipe: dict[str, Any] = {"objective.rank": RANK}
    report = run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, recipe)
    assert 0 <= report.variants[0].rel_error < 1
    for name, move in moves.items():
        found = tensors_of(tmp_path / "art", "v")[name]
        change = own[name].double() - base[name].double()
        assert found["energy"] == pytest.approx(float(change.square().sum()), rel=1e-9)
        assert same_bits(own[name], base[name]) == (found["tree"]["codec"] == "identical")
        assert float(change.count_nonzero()) < 0.02 * change.numel() and move.count_nonzero() == move.numel()


def test_a_restore_in_float32_does_something(tmp_path: Path) -> None:
    """fp32 weights: most of a millionth survives the type, and the restored weights have moved with the original's."""
    base = weights(torch.float32)
    own, _ = nudged(base, 1e-6)
    recipe = {"objective.rank": RANK, "deltas.default.factors": "int8"}
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, recipe)
    restored = back(tmp_path / "art", "v", tmp_path / "out")
    for name, weight in own.items():
        change, found = (one.double() - base[name].double() for one in (weight, restored[name]))
        assert float((found - change).norm() / change.norm()) < 0.1
        assert float((change * found).sum() / change.square().sum()) == pytest.approx(1.0, abs=0.02)
