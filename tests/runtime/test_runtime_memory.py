"""Bytes by part, in a loaded family and as `mfs inspect --resident` foretells them; layers placed by accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import fine_tune, make_llama
from runtime_families import Stored, alone, check_logits, packed_logits, store, texts

from mfs_decompose.runtime import load_base
from mfs_decompose.runtime.memory import WHOLE, Memory, count_memory
from mfs_decompose.runtime.resident_forms import Factor, LowRank, Placed
from mfs_decompose.runtime.resident_report import NOTHING, report_resident


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    root = tmp_path_factory.mktemp("memory")
    base = make_llama(root / "base", seed=1)
    variants = {
        "math": fine_tune(base, root / "math", seed=2),
        "norms": fine_tune(base, root / "norms", seed=3, kind="norms"),
        "vocab": fine_tune(base, root / "vocab", seed=4, kind="vocab"),
    }
    return store(root, base, variants)


def test_the_report_is_what_is_loaded(stored: Stored) -> None:
    memory, report = stored.load().memory(), report_resident(stored.artifact)
    foretold = {}
    for one in report["variants"]:
        forms: dict[str, int] = {}
        for entry in one["forms"]:
            if entry["form"] != NOTHING:
                forms[entry["form"]] = forms.get(entry["form"], 0) + entry["bytes"]
        foretold[one["id"]] = forms
    assert {id: dict(forms) for id, forms in memory.variants.items()} == foretold
    # The tied head is the embedding: one tensor in memory as in the file. The rest are rotary frequencies.
    assert 0 < memory.base - report["base_bytes"] < 200
    assert memory.total - memory.base == report["total_bytes"] - report["base_bytes"]
    assert "low rank int8" in foretold["math"] and not memory.shared


def test_memory_that_is_shared_counts_once() -> None:
    left, right, other = torch.zeros(2, 9), torch.zeros(2, 7, dtype=torch.int8), torch.zeros(2, 5)
    one = Placed(LowRank(Factor(left), Factor(right)), 0, 9)
    two = Placed(LowRank(Factor(left), Factor(other)), 0, 9)
    base = torch.zeros(11)
    found = count_memory([base, base[2:]], {"a": ([one, one], [torch.zeros(3)]), "b": ([two], [])})
    assert found == Memory(
        44,
        {"low rank float32/int8": 72},
        {"a": {"low rank float32/int8": 14, WHOLE: 12}, "b": {"low rank float32": 40}},
    )
    assert found.total == 44 + 72 + 26 + 40


def test_parts_of_one_memory_are_each_variants_own() -> None:
    left, right = torch.zeros(5, 9), torch.zeros(5, 7)
    parts = {
        id: ([Placed(LowRank(Factor(left[start:stop]), Factor(right[start:stop])), 0, 9)], [])
        for id, start, stop in (("a", 0, 2), ("b", 2, 4))
    }
    form = "low rank float32"
    found = count_memory([], parts)
    assert found == Memory(0, {form: 64}, {"a": {form: 128}, "b": {form: 128}})
    assert count_memory([], {"a": parts["a"]}).total == found.total == left.nbytes + right.nbytes


def test_a_subset_holds_only_its_own(stored: Stored) -> None:
    family = stored.load(variants=["norms"])
    assert set(family.memory().variants) == {"norms"}
    assert family.model.get_submodule("model.layers.0.mlp.up_proj").__class__ is torch.nn.Linear


def test_layers_placed_by_accelerate(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(load_base, "plan_devices", lambda model: {"": "cpu"})
    family = stored.load(device="auto")
    ids = ["vocab", "base", "math"]
    asked = texts(3, below=250)
    for id, text, found in zip(ids, asked, packed_logits(family, ids, asked), strict=True):
        check_logits(found, alone(stored.restored(id), text))
    assert any(hasattr(module, "_hf_hook") for module in family.model.modules())


def test_files_of_a_base_by_reference(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", seed=1)
    made = store(tmp_path, base, {"math": fine_tune(base, tmp_path / "math", seed=2)}, {"base.store": "reference"})
    moved = base.rename(tmp_path / "moved")
    family = made.load(base=moved)
    restored = store(tmp_path, moved, {"math": tmp_path / "math"}, {}, name="copy").restored("base")
    with family.use("base"):
        check_logits(alone(family.model, [5, 6, 7]), alone(restored, [5, 6, 7]))
