"""Nothing is silently dropped: random models, and variants with tensors dropped, renamed, resized, reshaped, retyped.

A run accounts for every tensor, which is proven from the files alone, or names what it refuses and leaves nothing.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_checkpoint
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pipeline_runs import Recording, Tensors, back, manifest, run, same_bits, toy
from random_models import FLOATS, Model, Variant, draw, models, variants

from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import MfsError, UsageError
from mfs_decompose.pipeline.inspect import inspect

RECIPES: dict[str, dict[str, object]] = {
    "default": {},
    "banded": {"deltas.default.factors": "banded"},
    "rank": {"objective.rank": 2},
    "residual": {"objective.rank": 1, "deltas.default.residual": {"codec": "sign"}},
    "sparse": {"deltas.default.codec": "sparse", "objective.density": "20%"},
    "effect": {"deltas.default.codec": "sparse", "deltas.default.select": "effect", "objective.density": "20%"},
    "kbit": {"deltas.default.codec": "kbit", "deltas.default.bits": 2},
    "sign": {"deltas.default.codec": "sign"},
    "ternary": {"deltas.default.codec": "ternary"},
    "deadzone": {"deltas.default.codec": "deadzone", "deltas.default.step": 0.03},
    "rowsparse": {"deltas.default.codec": "rowsparse", "deltas.default.rows": 3},
    "keep-exact": {"objective.rank": 2, "deltas.keep_exact": True},
    "lora-exact": {"deltas.default.codec": "lora-exact"},
    "lossless": {"deltas.default.codec": "lossless"},
}
EXACT = ("keep-exact", "lora-exact", "lossless")
NAMES_OF_SAFETENSORS = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}


@contextmanager
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp())
    try:
        yield made
    finally:
        shutil.rmtree(made)


@dataclass(frozen=True)
class Drawn:
    mode: str
    base: Model
    variants: dict[str, Variant]


@st.composite
def families(draw_one: Any) -> Drawn:
    mode = draw_one(st.sampled_from(["known", "known", "known", "mean"]))
    base = draw_one(models(averaged=mode == "mean"))
    return Drawn(mode, base, {id: draw_one(variants(base, seed)) for seed, id in enumerate(("one", "two"), start=1)})


@settings(max_examples=40)
@given(families(), st.sampled_from(list(RECIPES)))
def test_every_tensor_is_accounted_for_or_refused_by_name(family: Drawn, recipe: str) -> None:
    with folder() as root:
        known = toy(root / "base", family.base) if family.mode == "known" else None
        folders = {id: toy(root / id, variant.tensors) for id, variant in family.variants.items()}
        said = decomposed(root / "art", known, folders, RECIPES[recipe], family)
        if said is None:
            event(f"{family.mode}: refused")
            return
        event(f"{family.mode}: {recipe} accounted for")
        account(root, family.base if known else None, family.variants, said, exact=recipe in EXACT)


def decomposed(
    out: Path,
    base: Path | None,
    folders: Mapping[str, Path],
    recipe: dict[str, object],
    family: Drawn,
) -> list[str] | None:
    """What was said on the way, or None where the run was refused as it should be."""
    sink = Recording()
    try:
        run(out, base, folders, recipe, sink)
    except UsageError as error:  # the default budget seldom holds what must be exact of such models
        assert "objective.budget" not in recipe and "must be stored exactly" in error.message
        assert error.hint is not None and "--budget" in error.hint
        assert not out.exists()
        return decomposed(out, base, folders, {**recipe, "objective.budget": "1MB"}, family)
    except MfsError as error:
        assert type(error) is not MfsError and error.hint
        assert not out.exists() and not out.with_name(f"{out.name}.partial").exists()
        names = [*family.base, *(name for variant in family.variants.values() for name in variant.tensors)]
        names += [str(folder) for folder in folders.values()]
        assert any(name in error.message for name in names) or re.search(r"'(one|two)'|\d", error.message)
        return None
    return [message for message, _ in sink.notes]


def account(root: Path, base: Tensors | None, made: Mapping[str, Variant], said: list[str], *, exact: bool) -> None:
    document = manifest(root / "art")
    stored = document["base"]["tensors"]
    if base is not None:
        assert {name: spec(tensor) for name, tensor in base.items()} == {
            name: (one["dtype"], one["shape"]) for name, one in stored.items()
        }
    total = sum(len(variant.tensors) for variant in made.values()) + len(base or {})
    assert document["coverage"]["tensors"] == total
    assert inspect(root / "art")["coverage"] == 1.0
    assert [variant["id"] for variant in document["variants"]] == sorted(made)
    for record in document["variants"]:
        variant = made[record["id"]]
        check_record(record, variant.tensors, set(stored))
        if base is not None and not variant.renamed and not variant.added:
            assert record["missing"] == sorted(variant.dropped)
        if record["missing"]:
            assert any(note.startswith(f"{record['id']}: ") and "left out" in note for note in said), said
        check_restored(root, record, variant.tensors, exact=exact)
    if base is not None:
        _, weights = back(root / "art", "base", root / "base-out")
        assert weights.keys() == base.keys() and all(same_bits(weights[name], base[name]) for name in base)
    assert verify(root / "art", "values").ok


def spec(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return NAMES_OF_SAFETENSORS[tensor.dtype], list(tensor.shape)


def check_record(record: dict[str, Any], original: Tensors, base: set[str]) -> None:
    """Every tensor has one record; every base tensor is the partner of one tensor, or has its name, or is missing."""
    tensors = record["tensors"]
    assert {name: (one["dtype"], one["shape"]) for name, one in tensors.items()} == {
        name: spec(tensor) for name, tensor in original.items()
    }
    partners = [one["base_name"] for one in tensors.values() if one["kind"] in ("same", "resized")]
    assert len(partners) == len(set(partners)) and set(partners) <= base
    assert record["missing"] == sorted(base - set(partners) - tensors.keys())
    for name, one in tensors.items():
        values = original[name]
        float_ = values.dtype in FLOATS
        assert one["nonfinite"] == (int((~torch.isfinite(values)).sum()) if float_ else 0)
        assert math.isfinite(one["energy"]) and math.isfinite(one["error"])
        if one["tree"]["codec"] == "alias":  # stored as the other, whose base may be another tensor
            assert one["error"] == tensors[one["tree"]["params"]["of"]]["error"]
        else:
            assert one["error"] <= one["energy"] * (1 + 1e-6)
        assert one["exact"] or (float_ and values.dim() >= 2 and one["kind"] in ("same", "resized", "tied"))
        assert (one["original_sha256"] == one["restored_sha256"]) >= one["exact"]


def check_restored(root: Path, record: dict[str, Any], original: Tensors, *, exact: bool) -> None:
    id = record["id"]
    restored, weights = back(root / "art", id, root / f"{id}-out", exact=exact)
    assert weights.keys() == original.keys()
    for name, values in original.items():
        assert (weights[name].dtype, weights[name].shape) == (values.dtype, values.shape), name
        if exact or record["tensors"][name]["exact"]:
            assert same_bits(weights[name], values), name
        else:
            finite = torch.isfinite(values)
            assert torch.isfinite(weights[name][finite]).all(), name
    if exact:
        assert restored.exact
        for name in ("model.safetensors", "config.json"):
            assert (root / f"{id}-out" / name).read_bytes() == (root / id / name).read_bytes()


# The same on models where each thing is known to happen.


def plain(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return {f"model.layers.{at}.{part}.weight": draw(dtype, (24 + at, 17), 10 * at + len(part)) for at in range(3)
            for part in ("up", "down")}  # fmt: skip


def moved(tensors: Tensors, seed: int = 5) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (weight.double() + 0.05 * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
        for name, weight in tensors.items()
    }


@pytest.mark.parametrize("recipe", ["rank", "lossless"])
def test_one_dropped_tensor_is_said_and_recorded(tmp_path: Path, recipe: str) -> None:
    base = plain()
    own = moved(base)
    gone = "model.layers.1.up.weight"
    del own[gone]
    sink = Recording()
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, RECIPES[recipe], sink)
    assert manifest(tmp_path / "art")["variants"][0]["missing"] == [gone]
    assert [note for note, _ in sink.notes] == [f"v: 1 tensor of the base left out: {gone}"]
    _, weights = back(tmp_path / "art", "v", tmp_path / "out")
    assert weights.keys() == own.keys()


def test_a_variant_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    base = plain()
    own = {name: weight.T.contiguous() for name, weight in moved(base).items()}
    with pytest.raises(MfsError, match=r"'v' is of another architecture .*model\.layers\.0\.down\.weight is BF16"):
        run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, RECIPES["rank"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "v"]


def test_an_adapter_is_nothing_without_its_base(tmp_path: Path) -> None:
    adapter = random_checkpoint(tmp_path / "tuned", {f"model.up.lora_{half}.weight": torch.ones(3, 3) for half in "AB"})
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 7, "base_model_name_or_path": "org/name"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(MfsError, match="variant 'tuned' is an adapter, and an adapter is nothing without") as refused:
        run(tmp_path / "art", None, {"tuned": adapter, "v": toy(tmp_path / "v", plain())}, RECIPES["rank"])
    assert refused.value.exit_code == 12 and "org/name" in str(refused.value.hint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tuned", "v"]


@pytest.mark.parametrize("recipe", ["rank", "lossless"])
@pytest.mark.parametrize(
    ("before", "after"), [((6, 0), (10, 0)), ((10, 0), (6, 0)), ((0, 4), (3, 4)), ((3, 4), (0, 4))]
)
def test_an_empty_tensor_of_another_height(
    tmp_path: Path, recipe: str, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Rows without bytes: there is nothing to compare, and none of the base's can stand for them."""
    base, own = (
        {**plain(), "odd": draw(torch.float32, before, 1)},
        {**moved(plain()), "odd": draw(torch.float32, after, 2)},
    )
    run(tmp_path / "art", toy(tmp_path / "base", base), {"v": toy(tmp_path / "v", own)}, RECIPES[recipe])
    _, weights = back(tmp_path / "art", "v", tmp_path / "out")
    assert same_bits(weights["odd"], own["odd"])
    assert manifest(tmp_path / "art")["variants"][0]["tensors"]["odd"]["kind"] == "only_in_variant"


@pytest.mark.parametrize("dtype", list(NAMES_OF_SAFETENSORS), ids=NAMES_OF_SAFETENSORS.get)
def test_every_type_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = ((), (0,), (7,), (9, 11), (0, 3), (2, 9, 8), (3, 2, 2, 2))
    base = {**plain(), **{f"t{at}": draw(dtype, shape, at) for at, shape in enumerate(shapes)}}
    own = {**moved(plain()), **{f"t{at}": draw(dtype, shape, 50 + at) for at, shape in enumerate(shapes)}}
    sources = toy(tmp_path / "base", base), toy(tmp_path / "v", own)
    run(tmp_path / "art", sources[0], {"v": sources[1]}, RECIPES["lossless"])
    _, weights = back(tmp_path / "art", "v", tmp_path / "out", exact=True)
    assert all(same_bits(weights[name], tensor) for name, tensor in own.items())
    tensors = json.loads((tmp_path / "art" / "manifest.json").read_bytes())["variants"][0]["tensors"]
    assert {tensors[f"t{at}"]["dtype"] for at in range(len(shapes))} == {NAMES_OF_SAFETENSORS[dtype]}
