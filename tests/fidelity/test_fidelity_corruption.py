from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EMBEDDING, INDEX, read_weights
from fidelity_models import StoredFamily
from safetensors.torch import save_file

from mfs_decompose.fidelity.artifact_drift import SERVED
from mfs_decompose.fidelity.corruption import (
    Change,
    FloatFolder,
    borrow_delta,
    double_delta,
    swap_layers,
    write_corrupted,
)
from mfs_decompose.pipeline.restore import restore

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(stored: StoredFamily, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    for id in ("math", "vocab", "base"):
        restore(stored.artifact, [id], root / id, SERVED)
    return {id: root / id for id in ("math", "vocab", "base")}


def folder_of(root: Path, weights: Weights) -> Path:
    root.mkdir(parents=True)
    save_file(weights, root / "model.safetensors", {"format": "pt"})
    return root


def corrupt(served: Path, out: Path, change: Change) -> Weights:
    assert write_corrupted(served, out, change)
    return read_weights(out)


def test_an_unchanged_copy_is_the_folder_itself(folders: dict[str, Path], tmp_path: Path) -> None:
    assert write_corrupted(folders["math"], tmp_path / "copy", lambda name, tensor: tensor) is False
    before, after = read_weights(folders["math"]), read_weights(tmp_path / "copy")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    names = {path.name for path in folders["math"].iterdir()}
    assert names == {path.name for path in (tmp_path / "copy").iterdir()}
    assert INDEX in names, "the math variant has two shards"
    for name in names:
        if not name.endswith(".safetensors"):
            assert (tmp_path / "copy" / name).read_bytes() == (folders["math"] / name).read_bytes()


def test_a_corrupted_folder_loads(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_corrupted(folders["math"], tmp_path / "out", lambda name, tensor: tensor + 1)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = read_weights(folders["math"])[EMBEDDING] + 1
    assert torch.equal(model.get_input_embeddings().weight, expected)


def test_layers_change_places_and_nothing_else_does(folders: dict[str, Path], tmp_path: Path) -> None:
    with ExitStack() as held:
        change = swap_layers(FloatFolder(folders["math"], held))
        assert change is not None
        after = corrupt(folders["math"], tmp_path / "out", change)
    before = read_weights(folders["math"])
    for name, tensor in before.items():
        other = name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1.")
        assert torch.equal(after[other], tensor), name
    assert not torch.equal(after["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])


def test_the_largest_stack_of_layers_of_one_form_is_chosen(tmp_path: Path) -> None:
    weights: Weights = {}
    for number in range(12):  # ten and eleven come after nine
        for part in ("a.weight", "experts.3.weight"):
            weights[f"decoder.{number}.{part}"] = torch.full((3, 5), float(number))
    weights["decoder.0.extra"] = torch.ones(2)  # so the first layer is of another form
    for number in range(3):
        weights[f"encoder.{number}.weight"] = torch.full((2, 2), float(number))
    weights["list.0"], weights["list.1"] = torch.zeros(1), torch.ones(1)
    served = folder_of(tmp_path / "served", weights)
    with ExitStack() as held:
        change = swap_layers(FloatFolder(served, held))
        assert change is not None
        after = corrupt(served, tmp_path / "out", change)
    assert after["decoder.1.a.weight"][0, 0] == 11
    assert after["decoder.11.experts.3.weight"][0, 0] == 1
    for name in weights:
        if not name.startswith(("decoder.1.", "decoder.11.")):
            assert torch.equal(after[name], weights[name]), name


def test_numbers_that_end_a_name_are_layers_too(tmp_path: Path) -> None:
    served = folder_of(tmp_path / "served", {"list.0": torch.zeros(1), "list.1": torch.ones(1)})
    with ExitStack() as held:
        change = swap_layers(FloatFolder(served, held))
        assert change is not None
        assert corrupt(served, tmp_path / "out", change)["list.0"] == 1


def test_one_layer_cannot_be_swapped(tmp_path: Path) -> None:
    weights = {"layers.0.weight": torch.ones(2, 3), "layers.1.weight": torch.ones(3, 2), "head": torch.ones(1)}
    with ExitStack() as held:
        assert swap_layers(FloatFolder(folder_of(tmp_path / "served", weights), held)) is None


def test_doubled_deltas_are_twice_as_far_from_the_base(folders: dict[str, Path], tmp_path: Path) -> None:
    with ExitStack() as held:
        after = corrupt(folders["vocab"], tmp_path / "out", double_delta(FloatFolder(folders["base"], held)))
    before, base = read_weights(folders["vocab"]), read_weights(folders["base"])
    for name, tensor in before.items():
        rows = len(base[name])
        assert rows == len(tensor) - 2 * (name == EMBEDDING)
        torch.testing.assert_close(after[name][:rows] - base[name].float(), 2 * (tensor[:rows] - base[name].float()))
        assert torch.equal(after[name][rows:], tensor[rows:]), "rows of added tokens have no base"


def test_a_borrowed_delta_is_the_other_variant_where_both_have_weights(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with ExitStack() as held:
        more = corrupt(folders["vocab"], tmp_path / "more", borrow_delta(FloatFolder(folders["math"], held)))
        less = corrupt(folders["math"], tmp_path / "less", borrow_delta(FloatFolder(folders["vocab"], held)))
    math, vocab = read_weights(folders["math"]), read_weights(folders["vocab"])
    for name in math:
        rows = len(math[name])
        assert torch.equal(more[name][:rows], math[name])
        assert torch.equal(more[name][rows:], vocab[name][rows:])
        assert torch.equal(less[name], vocab[name][:rows])


def test_tensors_without_a_partner_of_their_form_stay(tmp_path: Path) -> None:
    own = {"same": torch.ones(2, 3), "wide": torch.ones(2, 3), "alone": torch.ones(4), "scalar": torch.tensor(3.0)}
    base = {"same": torch.zeros(2, 3), "wide": torch.zeros(2, 5), "scalar": torch.tensor(1.0), "x": torch.ones(1)}
    base["flat"] = own["flat"] = torch.tensor([1, 2])
    served, other = folder_of(tmp_path / "served", own), folder_of(tmp_path / "base", base)
    with ExitStack() as held:
        after = corrupt(served, tmp_path / "out", double_delta(FloatFolder(other, held)))
    assert after["same"].eq(2).all() and after["scalar"] == 5
    assert after["wide"].eq(1).all() and after["alone"].eq(1).all()
    assert torch.equal(after["flat"], own["flat"])


def test_a_base_in_bfloat16_is_read_in_float32(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "base", {"w": torch.tensor([1.5]).bfloat16(), "n": torch.tensor([3])})
    with ExitStack() as held:
        weights = FloatFolder(folder, held)
        w, n = weights.get("w"), weights.get("n")
        assert w is not None and n is not None and weights.get("absent") is None
        assert (w.dtype, n.dtype) == (torch.float32, torch.int64)
        assert weights.shapes == {"n": (1,), "w": (1,)}
