"""Random models of every type and shape, and what people do to them between a base and a variant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from checkpoints import EMBEDDING, HEAD
from hypothesis import strategies as st
from pipeline_runs import Tensors

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OTHERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool, torch.complex64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

dims = st.integers(1, 13)
SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 13)),
    st.tuples(st.integers(0, 25), st.integers(0, 25)),
    st.tuples(st.integers(8, 25), st.integers(8, 25)),
    st.tuples(st.integers(0, 4), dims, dims),
    st.tuples(st.integers(2, 4), st.integers(8, 13), st.integers(8, 13)),
    st.tuples(dims, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
)
DTYPES = st.one_of(st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.sampled_from(OTHERS), st.sampled_from(FP8))
PARTS = ("attn.q_proj", "attn.k_proj", "mlp.up", "mlp.down", "norm", "experts.gate_up_proj", "conv")
NAMES = st.one_of(
    st.builds(lambda layer, part: f"model.layers.{layer}.{part}.weight", st.integers(0, 3), st.sampled_from(PARTS)),
    st.builds(lambda layer, part: f"model.layers.{layer}.{part}.bias", st.integers(0, 3), st.sampled_from(PARTS)),
    st.sampled_from(
        ["step", "../up", "a b", "żółw.weight", "weight", ".", "CON", "x" * 300, 'quoted".weight', "a*[b]?"]
    ),
)
OPERATIONS = (
    "keep",
    "move",
    "move",
    "move",
    "drop",
    "grow",
    "shrink",
    "flatten",
    "transpose",
    "retype",
    "plant",
    "new",
)
RENAMES = st.one_of(
    st.none(),
    st.none(),
    st.sampled_from(
        [("language_model.", ""), ("model.language_model.", ""), ("", "_new"), ("", ".default"), ("m.", "_")]
    ),
)


class Model(Tensors):
    """Tensors by name; shown without their values when a test fails."""

    def __repr__(self) -> str:
        return str({name: f"{str(tensor.dtype)[6:]}{list(tensor.shape)}" for name, tensor in self.items()})


@dataclass(frozen=True)
class Variant:
    """The tensors of a variant, what of the base's it lacks, what it has besides, and whether names were changed."""

    tensors: Model
    dropped: frozenset[str]
    renamed: bool
    added: frozenset[str] = field(default=frozenset())


def draw(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Values of any type, none of them NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if dtype is torch.bool:
        return values > 0
    if dtype.is_floating_point or dtype.is_complex:
        return values.to(dtype)
    return (40 * values.abs()).to(dtype)


@st.composite
def models(draw_one: Any, *, averaged: bool) -> Model:
    """One to eight tensors, and mostly a few matrices that make most of the bytes.

    What is to be `averaged` has those always, and no FP8: codes have no mean, and any model with some is refused.
    """
    specs: Mapping[str, Any] = draw_one(st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), min_size=1, max_size=8))
    found = Model({name: draw(dtype, shape, at) for at, (name, (dtype, shape)) in enumerate(sorted(specs.items()))})
    if averaged:
        found = Model({name: tensor for name, tensor in found.items() if tensor.dtype not in FP8})
    if averaged or draw_one(st.integers(0, 4)):
        dtype = draw_one(st.sampled_from(FLOATS))
        for at in range(3):
            found[f"model.layers.{at}.anchor.weight"] = draw(dtype, (30 + at, 27), 100 + at)
    heads = draw_one(st.sampled_from(["none", "none", "tied", "both"]))
    if heads != "none":
        found[EMBEDDING] = draw(torch.bfloat16, (21, 11), 200)
    if heads == "both":
        found[HEAD] = draw(torch.bfloat16, (21, 11), 201)
    return found


@st.composite
def variants(draw_one: Any, base: Model, seed: int) -> Variant:
    """What a trainer, a converter or a mistake makes of a base."""
    tensors = Model()
    dropped: set[str] = set()
    added: set[str] = set()
    for at, (name, weight) in enumerate(sorted(base.items())):
        anchor = ".anchor." in name
        operation = draw_one(st.sampled_from(("keep", "move", "move") if anchor else OPERATIONS))
        if operation == "drop":
            dropped.add(name)
            continue
        if operation == "new":
            added.add(f"new.{at}.weight")
            tensors[f"new.{at}.weight"] = draw(draw_one(DTYPES), draw_one(SHAPES), 1000 * seed + at)
        tensors[name] = _changed(draw_one, weight, operation, 100 * seed + at)
    head = draw_one(st.sampled_from(["as it is", "as it is", "equal", "own"]))
    if EMBEDDING in tensors and head != "as it is":
        own = tensors[EMBEDDING]
        if HEAD not in base:
            added.add(HEAD)
        dropped.discard(HEAD)
        tensors[HEAD] = own.clone() if head == "equal" else _changed(draw_one, own, "move", 7 * seed)
    rename = draw_one(RENAMES)
    if rename is not None:
        before, after = rename
        names = sorted(tensors)
        some = draw_one(st.sampled_from([names, names, names[: len(names) // 2]]))
        tensors = Model({before + name + after if name in some else name: tensors[name] for name in names})
    return Variant(tensors, frozenset(dropped), rename is not None, frozenset(added))


def _changed(draw_one: Any, weight: torch.Tensor, operation: str, seed: int) -> torch.Tensor:
    if operation == "move" and weight.dtype in FLOATS:
        change = 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        return (weight.double() + change).to(weight.dtype)
    if operation == "move":
        return draw(weight.dtype, tuple(weight.shape), seed)
    if operation == "grow" and weight.dim():
        more = draw(weight.dtype, (draw_one(st.integers(1, 4)), *weight.shape[1:]), seed)
        return torch.cat([weight, more])
    if operation == "shrink" and weight.dim() and weight.shape[0]:
        return weight[: draw_one(st.integers(0, weight.shape[0] - 1))].clone()
    if operation == "flatten":
        return weight.reshape(draw_one(st.sampled_from([(-1,), (1, *weight.shape), (*weight.shape, 1)]))).clone()
    if operation == "transpose" and weight.dim() > 1:
        return weight.transpose(0, 1).contiguous()
    if operation == "retype":
        return draw(draw_one(DTYPES), tuple(weight.shape), seed)
    if operation == "plant" and weight.numel() and weight.dtype in FLOATS:
        planted = weight.clone()
        place = draw_one(st.integers(0, weight.numel() - 1))
        planted.view(-1)[place] = draw_one(st.sampled_from([math.nan, math.inf, -math.inf]))
        return planted
    return weight.clone()
