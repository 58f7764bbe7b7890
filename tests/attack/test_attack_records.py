"""Records that lie about a tensor: shape, type, what it differs from. The trees and bytes are sound."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attack_artifacts import Target
from attack_reading import limits, read_tensor

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import ArtifactInvalid, MfsError
from mfs_decompose.pipeline.inspect import inspect, inspect_tensors
from mfs_decompose.pipeline.restore import restore

Attacked = Callable[[str], Target]

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "U16", "U8", "BOOL", "C64", "F8_E4M3", "F8_E8M0")


def shapes(shape: list[int]) -> Iterator[list[int]]:
    """Others of about as many elements, and of far more, or none."""
    yield from ([*shape, 1], [1, *shape], [math.prod(shape)], shape[::-1], [])
    if shape:
        first, *rest = shape
        yield from ([first + 1, *rest], [first - 1, *rest], [first * 2, *rest], [0, *rest], [2**31, *rest])
        yield from ([first, *rest[:-1], shape[-1] + 1], [first, *rest[:-1], 8 * shape[-1]])
    yield from ([8, 10**9], [10**9, 8], [2**36, 8], [10**6, 10**6], [2**40, 0], [0, 2**40], [1, 2**39])
    yield from ([2**62, 0], [0, 2**62, 2**62], [1] * 64, [1] * 65)


def relate(target: Target, name: str, kind: str, base_name: str | None) -> None:
    """Say what a tensor is a difference from, and keep the list of what the variant lacks right."""
    record = target.tensors[name]
    record.update(kind=kind, base_name=base_name, common_rows=0)
    related = {one["base_name"] for one in target.tensors.values() if one["kind"] in ("same", "resized")}
    target.variant["missing"] = sorted(target.document["base"]["tensors"].keys() - target.tensors.keys() - related)


def check(target: Target, name: str) -> None:
    target.seal()
    with limits():
        assert read_tensor(target.folder, "many", name, "") in ("refused", "mismatch")


@pytest.mark.parametrize("artifact", ["lossy", "exact"])
def test_shapes_that_are_not_those_of_the_tree(artifact: str, attacked: Attacked) -> None:
    target = attacked(artifact)
    names = [name for name in target.tensors if artifact == "lossy" or name[:4] in ("sign", "lora", "int4", "few.")]
    for turn, name in enumerate(names):
        for at, shape in enumerate(shapes(target.tensors[name]["shape"])):
            kinds = ("same", "resized", "tied", "only_in_variant")
            one, kind = target.fresh(), kinds[(turn + at) % 4]
            relate(one, name, kind, None if kind == "only_in_variant" else one.tensors[name]["base_name"])
            one.claim_shape(name, shape, also_base=(turn + at) % 8 < 4 and kind == "same" and name != "lm_head.weight")
            check(one, name)


def test_types_that_are_not_those_of_the_tree(attacked: Attacked) -> None:
    target = attacked("lossy")
    for turn, name in enumerate(target.tensors):
        for dtype in DTYPES[turn % 3 :: 3]:
            one = target.fresh()
            one.tensors[name]["dtype"] = dtype
            if dtype != target.tensors[name]["dtype"]:
                check(one, name)


@pytest.mark.parametrize("artifact", ["lossy", "exact", "dora", "dora_conv1d"])
def test_another_base_tensor(artifact: str, attacked: Attacked) -> None:
    target = attacked(artifact)
    others = list(target.document["base"]["tensors"])
    for turn, name in enumerate(list(target.tensors)[:: 1 if artifact == "lossy" else 3]):
        for other in others[turn % 5 :: 5]:
            one = target.fresh()
            kind = ("resized", "tied")[turn % 2]
            relate(one, name, kind, other)
            one.seal()
            with limits():
                read_tensor(one.folder, "many", name, "")


def test_restore_and_verify_say_what_is_wrong(attacked: Attacked) -> None:
    """Exit 20, and never what a user would take for a bug."""
    target = attacked("lossy")
    for name, other in (("sign.weight", "norm.weight"), ("lossless.weight", "raw.weight"), ("sum.weight", "position")):
        one = target.fresh()
        relate(one, name, "resized", other)
        one.seal()
        with limits(memory=10**9):
            with pytest.raises(MfsError) as caught:
                restore(one.folder, ["many"], one.folder.parent / "out")
            assert caught.value.exit_code == 20
            problems = verify(one.folder, "values", variants=["many"]).problems
        assert problems and not any("Error" in problem.what for problem in problems)


@pytest.mark.parametrize(("energy", "error"), [(1.7e308, 1.7e308), (5e-324, 1e308), (0.0, 1.0), (1e300, 0.0)])
def test_errors_that_no_sum_can_hold(energy: float, error: float, attacked: Attacked) -> None:
    target = attacked("lossy")
    for record in target.tensors.values():
        record.update(energy=energy, error=error)
    target.seal()
    try:
        found = inspect(target.folder)["variants"]
        tensors = inspect_tensors(target.folder, "many")
    except ArtifactInvalid:
        assert energy < error
        return
    assert all(math.isfinite(one["rel_error"]) for one in (*found, *tensors))
    assert found[0]["rel_error"] == pytest.approx(math.sqrt(error / energy))


@pytest.mark.parametrize("config", [b"[" * 100_000, b"\xff{}", b"{", b"", b'{"a": NaN}', b"[]"])
def test_a_config_of_the_base_that_is_none(config: bytes, attacked: Attacked) -> None:
    target = attacked("linear")
    old = target.document["base"]["source"]["files"]["config.json"]
    digest = hashlib.sha256(config).hexdigest()
    (target.folder / "files" / digest).write_bytes(config)
    target.document["base"]["source"]["files"]["config.json"] = digest
    target.document["files"][f"files/{digest}"] = {"size": len(config), "sha256": digest}
    sources: list[Any] = [one["source"] for one in (*target.document["variants"], target.document["base"])]
    if all(old not in source["files"].values() for source in sources):
        target.document["files"].pop(f"files/{old}")
    target.seal()
    with Family.open(target.folder) as family:
        try:
            assert family.base_checkpoint().config in ({}, {"a": pytest.approx(math.nan, nan_ok=True)})
        except ArtifactInvalid as refused:
            assert "config" in refused.message
