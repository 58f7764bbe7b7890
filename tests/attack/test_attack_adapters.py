"""Parameters of adapters that lie, and adapters whose tensors are not what the parameters need."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attack_artifacts import Target
from attack_reading import limits, read_tensor
from every_codec import ADAPTERS
from hostile_trees import HOSTILE, near

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.values import open_tensor
from mfs_decompose.codec.adapter import open_adapter_tensor
from mfs_decompose.errors import ArtifactInvalid
from mfs_decompose.source.header import TensorSpec

Attacked = Callable[[str], Target]
Json = Any
Dice = random.Random

_ITEMS = {"F64": 8, "C64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E8M0": 1}
_BOXES: list[Json] = [
    [0, 1], [1, 0], [0, 2**40], [[0, 3], [0, 3]], [[0, 1], [0, 3], [0, 3]], [[0, 2**40]] * 2, "in_out", "out_in",
]  # fmt: skip


def places(node: Json) -> Iterator[tuple[Json, Json]]:
    """Every (container, key) of a JSON document."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, child in items:
        yield node, key
        yield from places(child)


def change_params(target: Target, name: str, dice: Dice) -> None:
    """One value among the parameters is another: a tensor of the adapter, something near, or nonsense."""
    own = list(target.variant["adapter"]["tensors"])
    holder, key = dice.choice(list(places(target.tensors[name]["tree"]["params"])))
    old = holder[key]
    choices: list[Json] = [*near(old), dice.choice(HOSTILE), dice.choice(_BOXES)]
    holder[key] = json.loads(json.dumps(dice.choice(own if isinstance(old, str) and dice.random() < 0.7 else choices)))


def add_params(target: Target, name: str, dice: Dice) -> None:
    """Something more is done to the tensor, with any tensors of the adapter."""
    own = list(target.variant["adapter"]["tensors"])
    scale = dice.choice([1.0, 1e308, -1e308, 5e-324, 0, 2**62])
    factor = {"a": dice.choice(own), "b": dice.choice(own), "scale": scale, "orientation": dice.choice(_BOXES[-2:])}
    if dice.random() < 0.3:
        factor["experts"] = dice.choice([1, 2, 3, 65_536, 10**9])
    rows = dice.choice([[0], [0, 1, 2], [10**9], list(range(60)), [2**31 - 1], [0, 0], [-1]])
    more: dict[str, Json] = {
        "magnitude": dice.choice(own),
        "replace": dice.choice(own),
        "add": [{"tensor": dice.choice(own), "scale": scale}],
        "tokens": {"tensor": dice.choice(own), "rows": rows},
        "factors": [factor],
    }
    key = dice.choice(list(more))
    target.tensors[name]["tree"]["params"][key] = more[key]


def change_tensor(target: Target, name: str, dice: Dice) -> None:
    """A tensor of the adapter has another type and shape, of as many bytes or of none."""
    own = dice.choice(list(target.variant["adapter"]["tensors"]))
    record = target.variant["adapter"]["tensors"][own]
    dtype = dice.choice(list(_ITEMS))
    count = len(target.blobs.get(own, b"")) // _ITEMS[dtype]
    shape = dice.choice(
        [[count], [count, 1], [1, count], [count, 1, 1], [1, count, 1, 1], [count // 2, 2], [2, count // 2],
         [0, 5], [5, 0], [0, 3, 3], [0], [], [1] * 60 + [count]]
    )  # fmt: skip
    nbytes = math.prod(shape) * _ITEMS[dtype]
    record.update(dtype=dtype, shape=shape)
    if nbytes:
        data = target.blobs.get(own, b"")[:nbytes]
        target.blobs[own] = dice.randbytes(nbytes) if dice.random() < 0.2 else data + bytes(nbytes - len(data))
        record["blob"] = record["blob"] or {"shard": 0, "entry": own, "nbytes": nbytes}
    else:
        target.blobs.pop(own, None)
        record["blob"] = None


def attack(target: Target, name: str, dice: Dice) -> str:
    for _ in range(dice.choice((1, 1, 2, 3))):
        dice.choice((change_params, add_params, change_tensor))(target, name, dice)
    try:
        target.seal()
    except ArtifactInvalid:  # a number that JSON cannot hold
        return "unwritable"
    with limits():
        return read_tensor(target.folder, "many", name, target.tensors[name]["restored_sha256"])


def run(target: Target, times: int, dice: Dice) -> set[str]:
    found = set()
    for name, record in target.tensors.items():
        for _ in range(times if record["tree"]["codec"] == "adapter" else 0):
            one = target.fresh()
            found.add(attack(one, name, dice))
    return found


@pytest.mark.parametrize("artifact", ADAPTERS)
def test_adapters_that_lie(artifact: str, attacked: Attacked) -> None:
    times = {"experts": 3, "linear": 5, "dora": 5}.get(artifact, 9)
    assert "refused" in run(attacked(artifact), times, random.Random(4))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("artifact", ADAPTERS)
def test_many_adapters_that_lie(artifact: str, seed: int, attacked: Attacked) -> None:
    run(attacked(artifact), 40, random.Random(100 + seed))


def refused(params: Json, tensors: Json, shape: tuple[int, ...], base: tuple[int, ...] | None = None) -> None:
    spec, below = TensorSpec("w", "F32", shape), TensorSpec("w", "F32", base or shape)
    made = {name: torch.ones(one) for name, one in tensors.items()}
    with limits(), pytest.raises(ArtifactInvalid):
        merged = open_adapter_tensor(params, made.__getitem__, spec, below)
        merged.rows(0, shape[0] if shape else 1, lambda start, stop: torch.ones(stop - start, *below.shape[1:]))


FACTOR = {"a": "a", "b": "b", "scale": 1.0, "orientation": "out_in"}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0, 3, 3), (8, 2)),
        ((2, 3, 3), ()),
        ((2, 3, 3), (8,)),
        ((2, 3, 3), (0, 2)),
        ((2, 0, 3), (8, 2)),
        ((2, 3, 3), (8, 3)),
    ],
)
def test_factors_of_a_convolution_that_are_none(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    refused({"factors": [FACTOR]}, {"a": a, "b": b}, (8, 3, 3))


@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
def test_norms_of_a_stack_are_no_norms(orientation: str) -> None:
    params = {"factors": [{**FACTOR, "orientation": orientation}], "magnitude": "m"}
    shape = (1, 8, 9) if orientation == "out_in" else (1, 9, 8)
    refused(params, {"a": (2, 9), "b": (8, 2), "m": (8,)}, shape)


def test_a_tensor_of_another_variant_is_none(attacked: Attacked) -> None:
    """A checkpoint's tensor says that an adapter makes it, and the variant has none."""
    target = attacked("lossy")
    tree = {"codec": "adapter", "version": 1, "params": {"replace": "sign.weight"}}
    target.tensors["sign.weight"].update(tree=tree, blob=None)
    target.blobs.pop("sign.weight")
    target.seal()
    with limits():
        assert read_tensor(target.folder, "many", "sign.weight", "") == "refused"


def test_the_adapters_of_these_tests_are_sound(attacked: Attacked) -> None:
    target = attacked("dora")
    with Family.open(target.folder) as family:
        stored = open_tensor(family, "many", "model.layers.0.self_attn.q_proj.weight")
        assert stored.served(0, 3).shape[0] == 3
