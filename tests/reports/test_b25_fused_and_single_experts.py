"""B25: experts fused on one side and single on the other, of a shape that says nothing; both are known by their names.

With hidden = 2 * intermediate a fused gate and up of one expert is square, as is a transposed one: what is guessed from
shapes goes wrong without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build, load, save
from checkpoints import random_checkpoint, read_weights

from mfs_decompose import Family, decompose, restore
from mfs_decompose.errors import UsageError
from mfs_decompose.events import NullSink
from mfs_decompose.source.checkpoint import open_checkpoint
from mfs_decompose.source.tensor_map import Part, TensorMap, assemble, load_tensor_map

HIDDEN, INTER, EXPERTS = 64, 32, 3
GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


class Notes(NullSink):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def note(self, message: str, level: str = "info") -> None:
        self.heard.append(message)


def small_mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=301,
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
    )


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts one by one, as Mixtral was released."""
    return save(build(small_mixtral(), seed=4), tmp_path_factory.mktemp("b25") / "single", "single")


@pytest.fixture(scope="module")
def fused(single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model under the names that it has in memory, experts stacked."""
    folder = tmp_path_factory.mktemp("b25") / "fused"
    model = load(single).to(torch.bfloat16)
    random_checkpoint(folder, {name: value.clone() for name, value in model.state_dict().items()}, {"format": "pt"})
    (folder / "config.json").write_bytes((single / "config.json").read_bytes())
    return folder


def mapped(folder: Path) -> TensorMap:
    found = load_tensor_map(open_checkpoint(folder, folder.name))
    assert (found.unused, found.shadowed, found.unfilled, found.mismatched, found.failed) == ((), {}, (), (), ())
    return found


def test_both_layouts_are_mapped_by_name(single: Path, fused: Path) -> None:
    ones, stacks = mapped(single), mapped(fused)
    assert ones.parameters[GATE_UP].shape == stacks.parameters[GATE_UP].shape == (EXPERTS, 2 * INTER, HIDDEN)
    inside = "model.layers.1.block_sparse_moe.experts."
    assert ones.parameters[GATE_UP].parts() == (
        *(Part(f"{inside}{i}.w1.weight", i, (0, INTER), False) for i in range(EXPERTS)),
        *(Part(f"{inside}{i}.w3.weight", i, (INTER, 2 * INTER), False) for i in range(EXPERTS)),
    )
    assert ones.parameters[DOWN].parts() == tuple(
        Part(f"{inside}{i}.w2.weight", i, None, False) for i in range(EXPERTS)
    )
    assert stacks.parameters[GATE_UP].parts() == (Part(GATE_UP, None, None, False),)
    assert stacks.parameters[DOWN].parts() == (Part(DOWN, None, None, False),)


def test_both_layouts_are_the_same_model(single: Path, fused: Path) -> None:
    truth = load(single).state_dict()
    ones, stacks = read_weights(single), read_weights(fused)
    for name, value in truth.items():
        assert torch.equal(assemble(mapped(single).parameters[name], ones.__getitem__).float(), value)
        assert torch.equal(assemble(mapped(fused).parameters[name], stacks.__getitem__).float(), value)


def test_one_layout_against_the_other_is_said_aloud_and_loses_nothing(
    single: Path, fused: Path, tmp_path: Path
) -> None:
    """Never aligned by a shape that happens to fit: both sides' experts are named, and every bit comes back."""
    notes = Notes()
    decompose(single, {"tuned": fused}, tmp_path / "art", codec="lossless", device="cpu", threads=1, progress=notes)
    with Family.open(tmp_path / "art") as family:
        records = family.variant("tuned").tensors
        assert {record.base_name for name, record in records.items() if ".experts." in name} == {None}
        assert sum(".experts." in name for name in family.variant("tuned").missing) == 2 * EXPERTS * 3
    assert any("stored whole: model.layers.0.mlp.experts.down_proj" in note for note in notes.heard)
    assert any("of the base left out: model.layers.0.block_sparse_moe.experts.0.w1" in note for note in notes.heard)
    restore(tmp_path / "art", "tuned", tmp_path / "back", exact=True)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (fused / "model.safetensors").read_bytes()


def test_with_loss_it_costs_what_it_costs_or_is_refused(single: Path, fused: Path, tmp_path: Path) -> None:
    """Experts stored whole do not fit the default budget: no artifact that quietly leaves them out."""
    with pytest.raises(UsageError, match="does not hold what must be stored exactly"):
        decompose(single, {"tuned": fused}, tmp_path / "art", device="cpu", threads=1)
    assert not (tmp_path / "art").exists()
