"""docs/format.md is enough to write a reader: one that knows the page alone decodes real artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import write_adapter
from checkpoints import make_llama, random_checkpoint, read_weights
from merged_loras import merged_lora
from page_adapter import merged_by_the_page
from page_reader import Page

from mfs_decompose import decompose, restore

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
RULES: list[dict[str, Any]] = [
    {"match": "large*", "codec": "kbit", "bits": 3},
    {"match": "pile*", "codec": "kbit", "bits": 5},
    {"match": "wide*", "codec": "ternary"},
    {"match": "embed*", "codec": "deadzone", "step": 0.01},
    {"match": "experts*", "codec": "sparse"},
    {"match": "conv*", "codec": "rowsparse", "rows": 5},
    {"match": "row.sign*", "codec": "sign", "scale": "row"},
    {"match": "sign*", "codec": "sign", "scale": "group"},
    {"match": "rest*", "codec": "lowrank", "rank": 3, "residual": {"codec": "sign", "scale": "tensor"}},
    {"match": "half*", "codec": "lowrank", "factors": "banded"},
    {"match": "single*", "codec": "lowrank", "factors": "int8"},
]
MIXED: dict[str, Any] = {"objective.budget": "60%", "deltas.rules": RULES}
PLAIN: dict[str, Any] = {"objective.budget": "60%"}
SHARED: dict[str, Any] = {
    "objective.budget": "30%",
    "base.mode": "shared",
    "deltas.default.factors": "banded",
    "deltas.keep_exact": True,
}


def drawn(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def base_tensors() -> dict[str, torch.Tensor]:
    half, single, brain = torch.float16, torch.float32, torch.bfloat16
    found = {
        "large.weight": drawn(1, brain, 40, 24),
        "wide.weight": drawn(2, brain, 16, 52),
        "embed.weight": drawn(3, brain, 33, 24),
        "experts.weight": drawn(4, brain, 3, 20, 18),
        "conv.weight": drawn(5, brain, 12, 4, 3, 1),
        "pile.weight": drawn(12, brain, 2, 10, 70),
        "half.weight": drawn(6, half, 70, 230),
        "single.weight": drawn(7, single, 33, 21),
        "rest.weight": drawn(8, brain, 41, 70),
        "sign.weight": drawn(9, brain, 19, 130),
        "row.sign.weight": drawn(10, brain, 9, 37),
        "norm.weight": drawn(11, brain, 24),
        "position": torch.tensor(9),
    }
    found["sign.weight"][0, :3] = torch.tensor([0.0, -0.0, 2.0**-130])
    return found


def moved(tensors: Mapping[str, torch.Tensor], seed: int, size: float = 1.0) -> dict[str, torch.Tensor]:
    """A fine-tune: every float moved a little, along two directions above all."""
    found = dict(tensors)
    for at, (name, weight) in enumerate(tensors.items()):
        if weight.is_floating_point():
            flat, own = weight.float().reshape(weight.shape[0], -1), seed * 100 + 3 * at
            change = 0.01 * drawn(own, torch.float32, *flat.shape)
            change += (
                0.05 * drawn(own + 1, torch.float32, len(flat), 2) @ drawn(own + 2, torch.float32, 2, flat.shape[1])
            )
            found[name] = (flat + size * change).reshape(weight.shape).to(weight.dtype)
    return found


def write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    random_checkpoint(folder, dict(tensors), {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "toy"}\n')
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts `lossy`, `kept` (its corrections as well), `plain` (the default recipe), `shared` and `merges`."""
    root, base = tmp_path_factory.mktemp("page"), base_tensors()
    grown = moved(base, 2)
    grown["embed.weight"] = torch.cat([grown["embed.weight"], torch.ones(4, 24, dtype=torch.bfloat16)])
    folders = {"one": write(root / "one", moved(base, 1)), "two": write(root / "two", grown)}
    below = write(root / "base", base)
    for name, recipe in {"lossy": MIXED, "kept": MIXED | {"deltas.keep_exact": True}, "plain": PLAIN}.items():
        decompose(below, folders, root / name, overrides=recipe, threads=1, device="cpu")
    common = moved(base, 7)
    learnt = {id: moved(common, seed, 0.2) for seed, id in ((8, "one"), (9, "two"))}
    learnt["two"]["embed.weight"] = torch.cat([learnt["two"]["embed.weight"], torch.ones(4, 24, dtype=torch.bfloat16)])
    folders = {id: write(root / f"{id}-learnt", own) for id, own in learnt.items()}
    decompose(below, folders, root / "shared", overrides=SHARED, threads=1, device="cpu")
    pairs = {
        "once.weight": merged_lora((130, 270), 3, 2e-4, 5),
        "twice.weight": merged_lora((270, 130), 3, 1e-3, 6, rounded_first=True),
    }
    merged = write(root / "merged", {name: own for name, (_, own, _) in pairs.items()})
    below = write(root / "below", {name: low for name, (low, _, _) in pairs.items()})
    decompose(below, {"one": merged}, root / "merges", codec="lora-exact", threads=1, device="cpu")
    return root


def codecs(tree: Mapping[str, Any]) -> set[str]:
    return {tree["codec"]}.union(*(codecs(child) for child in tree.get("children", [])))


def words(values: torch.Tensor) -> np.ndarray[Any, Any]:
    flat = values.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(f"<u{flat.element_size()}") if flat.numel() else np.zeros(0, "<u2")


@pytest.mark.parametrize("name", ["lossy", "kept", "plain", "shared", "merges"])
def test_the_page_is_enough_to_decode_every_tensor(name: str, made: Path, tmp_path: Path) -> None:
    page = Page(made / name)
    for variant in page.manifest["variants"]:
        id = variant["id"]
        restored = read_weights(restore(made / name, id, tmp_path / f"{id}-restored").folder)
        served = read_weights(restore(made / name, id, tmp_path / f"{id}-served", dtype="float32").folder)
        for tensor in page.tensors(id).values():
            if "lossless" in codecs(tensor.record["tree"]) or not restored[tensor.name].is_floating_point():
                continue  # tests/codec/lossless_oracle.py is a reader of that codec
            assert np.array_equal(tensor.restored(), words(restored[tensor.name])), tensor.name
            assert np.array_equal(tensor.served().view("<u4"), words(served[tensor.name])), tensor.name


def test_the_page_is_enough_to_decode_bands_of_a_vocabulary(tmp_path: Path) -> None:
    base = {"embed.weight": drawn(13, torch.float16, 30_010, 12)}
    folders = [write(tmp_path / name, own) for name, own in (("base", base), ("one", moved(base, 3)))]
    recipe = {"objective.budget": "9%", "deltas.default.factors": "banded"}
    decompose(folders[0], {"one": folders[1]}, tmp_path / "art", overrides=recipe, threads=1, device="cpu")
    (tensor,) = Page(tmp_path / "art").tensors("one").values()
    assert [part["name"] for part in tensor.record["tree"]["parts"]] == ["gain", "us", "uc", "v"]
    served = read_weights(restore(tmp_path / "art", "one", tmp_path / "served", dtype="float32").folder)
    assert np.array_equal(tensor.served().view("<u4"), words(served["embed.weight"]))


def test_all_codecs_of_a_delta_were_read(made: Path) -> None:
    seen: set[str] = set()
    for name in ("lossy", "kept", "plain", "shared", "merges"):
        for variant in Page(made / name).manifest["variants"]:
            seen |= set().union(*(codecs(tensor["tree"]) for tensor in variant["tensors"].values()))
    lossy = {"lowrank", "banded", "fixed", "sparse", "rowsparse", "sign", "ternary", "kbit", "deadzone", "shared"}
    assert lossy | {"sum", "corrected", "rows", "raw"} <= seen


def test_what_is_corrected_is_exact_and_served_with_an_error(made: Path) -> None:
    for tensor in Page(made / "kept").tensors("one").values():
        if tensor.record["tree"]["codec"] == "corrected":
            assert tensor.record["exact"] and tensor.record["error"] > 0


def test_the_page_names_every_codec() -> None:
    from mfs_decompose.codec import registry

    text = PAGE.read_text(encoding="utf-8")
    for codec in (*registry.LOSSY, *registry.EXACT, *registry.COMPOSED):
        assert f"| `{codec}` |" in text, codec


def write_lora(base: Path, folder: Path, seed: int, dora: bool) -> None:
    """Factors of rank 3 on two projections of every layer, with magnitudes for DoRA."""
    tensors, weights = {}, read_weights(base)
    for at, (name, weight) in enumerate(sorted(weights.items())):
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = 0.1 * drawn(seed + 3 * at, torch.float32, 3, weight.shape[1])
            tensors[f"{stem}.lora_B.weight"] = 0.1 * drawn(seed + 3 * at + 1, torch.float32, weight.shape[0], 3)
            if dora:
                tensors[f"{stem}.lora_magnitude_vector"] = drawn(
                    seed + 3 * at + 2, torch.float32, weight.shape[0]
                ).abs()
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], "use_dora": dora}
    write_adapter(folder, tensors, config)


def test_the_page_is_enough_to_merge_an_adapter(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", seed=4)
    for seed, id in enumerate(("lora", "dora")):
        write_lora(base, tmp_path / id, 1000 * seed, dora=id == "dora")
    given = {id: tmp_path / id for id in ("lora", "dora")}
    decompose(base, given, tmp_path / "art", threads=1, device="cpu")
    page = Page(tmp_path / "art")
    for id in given:
        restored = read_weights(restore(tmp_path / "art", id, tmp_path / f"{id}-restored").folder)
        served = read_weights(restore(tmp_path / "art", id, tmp_path / f"{id}-served", dtype="float32").folder)
        changed = [tensor for tensor in page.tensors(id).values() if tensor.record["tree"]["codec"] == "adapter"]
        assert len(changed) == sum(name.endswith(("q_proj.weight", "down_proj.weight")) for name in restored)
        for tensor in changed:
            merged = merged_by_the_page(tensor, page.adapter(id))
            assert np.array_equal(tensor.rounded(merged.reshape(-1)), words(restored[tensor.name])), tensor.name
            assert np.array_equal(merged.astype("<f4").view("<u4").reshape(-1), words(served[tensor.name])), tensor.name
