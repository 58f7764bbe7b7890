"""Random small families under random recipes: the cap is kept, every tensor comes back, and the artifact is sound."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_runs import Tensors, back, measured_error, moved, record, run, same_bits, toy

from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import UsageError
from mfs_decompose.pipeline import reading, survey
from mfs_decompose.plan import units
from mfs_decompose.recipe.values import read_budget

CODECS: list[dict[str, object]] = [
    {"deltas.default.factors": "int4"},
    {"deltas.default.factors": "int8"},
    {"deltas.default.factors": "bf16"},
    {"deltas.default.codec": "sparse", "deltas.default.values": "bf16"},
    {"deltas.default.codec": "sparse", "deltas.default.values": "int8"},
]
sizes = st.integers(8, 41)
shapes = st.lists(
    st.one_of(
        st.tuples(sizes, sizes),
        st.tuples(st.integers(4, 6), sizes, sizes),
        st.tuples(sizes, st.integers(1, 3), sizes),
        st.tuples(sizes),
    ),
    min_size=2,
    max_size=6,
)


@contextmanager
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp())
    try:
        yield made
    finally:
        shutil.rmtree(made)


def drawn(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(len(shapes))
    return {f"t{at}.weight": torch.randn(shape, generator=generator).to(dtype) for at, shape in enumerate(shapes)}


def longer(tensors: Tensors, name: str, rows: int) -> Tensors:
    own = tensors[name]
    new = torch.full((rows, *own.shape[1:]), 0.5, dtype=own.dtype)
    return {**tensors, name: torch.cat([own, new])} if own.dim() > 1 and rows else tensors


def partly(tensors: Tensors, base: Tensors) -> Tensors:
    """Every second slice of a stack as in the base, and every fifth with an infinity."""
    found = {name: weight.clone() for name, weight in tensors.items()}
    for name, weight in found.items():
        if weight.dim() == 3:
            weight[::2] = base[name][::2]
            weight[::5, 0, 0] = math.inf
    return found


def check(root: Path, id: str, original: Tensors, base: Tensors, rel_error: float) -> None:
    _, served = back(root / "art", id, root / f"{id}-32", dtype="float32")
    assert served.keys() == original.keys()
    if all(bool(torch.isfinite(weight).all()) for weight in original.values()):
        found = measured_error(original, base, served)
        assert found == pytest.approx(rel_error, rel=2e-6, abs=1e-7)
    restored, weights = back(root / "art", id, root / f"{id}-out")
    assert restored.checked
    for name, tensor in record(root / "art", id)["tensors"].items():
        assert (weights[name].dtype, weights[name].shape) == (original[name].dtype, original[name].shape)
        assert same_bits(weights[name], original[name]) or not tensor["exact"]
        rows = tensor["common_rows"]
        assert same_bits(weights[name][rows:].contiguous(), original[name][rows:].contiguous())


@settings(max_examples=25)
@given(
    shapes,
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.sampled_from(CODECS),
    st.integers(2, 100),
    st.sampled_from([150, 900, 10**9]),
    st.integers(0, 3),
    st.sampled_from([300, 10**6]),
    st.booleans(),
)
def test_any_family_under_any_budget(
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    codec: dict[str, object],
    percent: int,
    shard_size: int,
    rows: int,
    block: int,
    sparsely: bool,
) -> None:
    base = drawn(shapes, dtype)
    first = min(base)
    one = partly(moved(base, 1), base) if sparsely else moved(base, 1)
    sources = {"one": one, "two": longer(moved(base, 2), first, rows)}
    recipe = {**codec, "objective.budget": f"{percent}%", "output.shard_size": shard_size}
    with folder() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "BLOCK_ELEMENTS", block)
        for module in (reading, survey):
            patch.setattr(module, "ROW_BLOCK_ELEMENTS", block)
        variants = {id: toy(root / id, tensors) for id, tensors in sources.items()}
        out, known = root / "art", toy(root / "base", base)
        try:
            report = run(out, known, variants, recipe)
        except UsageError as error:
            assert error.hint is not None
            recipe["objective.budget"] = error.hint.rpartition(" ")[2]
            if read_budget(f"{percent}%").share == 1.0 or float(str(recipe["objective.budget"])[:-1]) > 100:
                return  # so little of it is matrices that not even all of its bytes hold it with headers
            report = run(out, known, variants, recipe)
        budget = read_budget(recipe["objective.budget"])
        for variant in report.variants:
            assert variant.bytes <= budget.cap(variant.checkpoint_bytes)
            assert math.isfinite(variant.rel_error)
            check(root, variant.id, sources[variant.id], base, variant.rel_error)
        assert verify(root / "art", "values").ok


@settings(max_examples=12)
@given(shapes, st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]), st.integers(0, 3))
def test_any_family_without_loss(shapes: list[tuple[int, ...]], dtype: torch.dtype, rows: int) -> None:
    base = drawn(shapes, dtype)
    sources = {"one": moved(base, 1), "two": longer(moved(base, 2), min(base), rows)}
    with folder() as root:
        variants = {id: toy(root / id, tensors) for id, tensors in sources.items()}
        run(root / "art", toy(root / "base", base), variants, {"deltas.default.codec": "lossless"})
        for id, folder_of in variants.items():
            back(root / "art", id, root / f"{id}-out", exact=True)
            name = "model.safetensors"
            assert (root / f"{id}-out" / name).read_bytes() == (folder_of / name).read_bytes()
