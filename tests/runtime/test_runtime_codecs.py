"""Every codec in every kind of module: Linear, Conv1D, experts, embeddings and heads, as fp32 restores answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from architectures import make_architecture_family
from checkpoints import read_weights
from runtime_families import Stored, alone, check_logits, packed_logits, store, texts

from mfs_decompose.artifact.reader import Family
from mfs_decompose.codec.tree import CodecNode

CODECS: tuple[Mapping[str, object], ...] = (
    {"codec": "lowrank", "factors": "banded"},
    {"codec": "lowrank", "factors": "int4"},
    {"codec": "lowrank", "factors": "int8"},
    {"codec": "lowrank", "factors": "bf16"},
    {"codec": "sparse", "values": "bf16"},
    {"codec": "sparse", "values": "int8"},
    {"codec": "sign", "scale": "group"},
    {"codec": "sign", "scale": "row"},
    {"codec": "sign", "scale": "tensor"},
    {"codec": "ternary"},
    {"codec": "kbit", "bits": 3},
    {"codec": "kbit", "bits": 4},
    {"codec": "deadzone", "step": 1e-2},
    {"codec": "rowsparse", "rows": 5},
    {"codec": "lowrank", "factors": "int4", "rank": 2, "residual": {"codec": "kbit", "bits": 2}},
    {"codec": "lossless"},
    {"codec": "raw"},
    {"codec": "lora-exact"},
)
IDS = ("words", "chat", "base", "chat", "words")
CASES = (("llama", 0, False), ("llama", 7, True), ("gpt2", 3, False), ("gpt2", 11, True), ("mixtral", 5, False))


def recipe(base: Path, first: int, exact: bool) -> dict[str, object]:
    """One codec after another for the base's matrices."""
    names = sorted(name for name, weight in read_weights(base).items() if weight.dim() > 1)
    rules = [{"match": name, **CODECS[(first + at) % len(CODECS)]} for at, name in enumerate(names)]
    return {"objective.budget": "60%", "deltas.rules": rules, "deltas.keep_exact": exact}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    name, first, exact = request.param
    root = tmp_path_factory.mktemp("codecs")
    made = make_architecture_family(root, name)
    return store(root, made.base, made.variants, recipe(made.base, first, exact))


def test_a_mixed_batch_of_every_codec(stored: Stored) -> None:
    family = stored.load()
    models = {id: stored.restored(id) for id in ("base", "chat", "words")}
    asked = texts(len(IDS))
    for id, text, found in zip(IDS, asked, packed_logits(family, IDS, asked), strict=True):
        check_logits(found, alone(models[id], text))


def test_the_cases_hold_every_codec(tmp_path_factory: pytest.TempPathFactory) -> None:
    del tmp_path_factory
    used = {(first + at) % len(CODECS) for name, first, _ in CASES for at in range({"gpt2": 10}.get(name, 16))}
    assert used == set(range(len(CODECS)))


def test_trees_are_of_the_codecs_asked_for(stored: Stored) -> None:
    with Family.open(stored.artifact) as family:
        found = {
            node.codec
            for id in family.variant_ids
            for one in family.variant(id).tensors
            for node in nodes(family.tree(id, one))
        }
    assert len(found) >= 7


def nodes(node: CodecNode) -> Iterator[CodecNode]:
    yield node
    for child in node.children:
        yield from nodes(child)
