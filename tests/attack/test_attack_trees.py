"""Codec trees that lie: refused, or decoded to something whose digest is another. Others stay readable."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attack_artifacts import Target, nodes_of
from attack_reading import limits, read_tensor, read_whole
from every_codec import ADAPTERS
from hostile_trees import Edit, sampled

from mfs_decompose.artifact.canonical import canonical_bytes, digest_of
from mfs_decompose.artifact.manifest import load_manifest
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.values import open_tensor
from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import ArtifactInvalid

Attacked = Callable[[str], Target]


def attack(target: Target, name: str, mutations: list[tuple[str, Edit]]) -> dict[str, int]:
    found = {"refused": 0, "mismatch": 0, "same": 0}
    for what, edit in mutations:
        one = target.fresh()
        edit(one.tensors[name]["tree"])
        one.seal()
        try:
            with limits():
                found[read_tensor(one.folder, "many", name, one.tensors[name]["restored_sha256"])] += 1
        except BaseException as error:
            error.add_note(f"{name}: {what}")
            raise
    return found


@pytest.mark.parametrize("artifact", ["lossy", "exact"])
def test_mutated_trees(artifact: str, attacked: Attacked) -> None:
    target = attacked(artifact)
    total = {"refused": 0, "mismatch": 0, "same": 0}
    for seed, (name, record) in enumerate(target.tensors.items()):
        for outcome, count in attack(target, name, sampled(record["tree"], 9, seed)).items():
            total[outcome] += count
    assert total["refused"] > total["mismatch"] + total["same"]


@pytest.mark.slow
@pytest.mark.parametrize("artifact", ["lossy", "exact"])
def test_many_mutated_trees(artifact: str, attacked: Attacked) -> None:
    target = attacked(artifact)
    for name, record in target.tensors.items():
        attack(target, name, sampled(record["tree"], 60, 77))


@pytest.mark.parametrize("artifact", ADAPTERS)
def test_mutated_adapter_trees(artifact: str, attacked: Attacked) -> None:
    target = attacked(artifact)
    for seed, (name, record) in enumerate(target.tensors.items()):
        if record["tree"]["codec"] == "adapter":
            attack(target, name, sampled(record["tree"], 4, seed))


def test_a_tree_of_another_tensor(attacked: Attacked) -> None:
    """Tree and bytes exchanged together, so that they fit each other and not the tensor."""
    target = attacked("exact")
    names = [name for name in target.blobs if name != "lora.weight"]
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        one = target.fresh()
        one.tensors[name]["tree"] = copy.deepcopy(target.tensors[other]["tree"])
        one.blobs[name] = target.blobs[other]
        one.seal()
        with limits():
            assert read_tensor(one.folder, "many", name, "") in ("refused", "mismatch")


def test_other_variants_stay_readable(attacked: Attacked) -> None:
    target = attacked("lossy")
    before = read_whole(target.folder, "plain")
    for tree in ({"codec": "wavelet", "version": 1}, [], {"codec": "rows", "version": 1, "children": [{}]}):
        one = target.fresh()
        one.tensors["sign.weight"]["tree"] = tree if isinstance(tree, dict) else {"codec": tree}
        one.seal()
        with limits():
            assert read_whole(one.folder, "plain") == before
            assert verify(one.folder, "values", variants=["plain"]).problems
            with pytest.raises(ArtifactInvalid), Family.open(one.folder) as family:
                family.variant("many")


def seal_text(target: Target, change: Callable[[str], str]) -> bytes:
    """A manifest changed as text, digest included: what canonical JSON cannot say."""
    text = change(canonical_bytes(target.document).decode())
    (target.folder / "manifest.json").write_text(text)
    return text.encode()


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 1000 + "]" * 1000])
def test_values_that_json_has_no_word_for(word: str, attacked: Attacked) -> None:
    target = attacked("lossy")
    (node,) = (n for n in nodes_of(target.tensors["deadzone.weight"]["tree"]) if n["codec"] == "deadzone")
    node["params"]["step"] = "HERE"
    with limits(), pytest.raises(ArtifactInvalid):
        load_manifest(seal_text(target, lambda text: text.replace('"HERE"', word)))
    assert not verify(target.folder, "quick").ok


def deep(levels: int) -> Any:
    tree: Any = {"codec": "identical", "version": 1}
    for _ in range(levels):
        tree = {"codec": "sum", "version": 1, "children": [tree]}
    return tree


@pytest.mark.parametrize("levels", [1, 7, 8, 25])
def test_nested_compositions(levels: int, attacked: Attacked) -> None:
    target = attacked("lossy")
    for inner in ("sum", "rows", "corrected"):
        one = target.fresh()
        one.tensors["sign.weight"]["tree"] = json.loads(json.dumps(deep(levels)).replace("sum", inner))
        one.tensors["sign.weight"]["blob"] = None
        one.blobs.pop("sign.weight")
        one.seal()
        with limits():
            assert read_tensor(one.folder, "many", "sign.weight", "") == "refused"


def test_aliases_in_circles(attacked: Attacked) -> None:
    target = attacked("lossy")
    for pair in (("lm_head.weight", "model.embed_tokens.weight"), ("lm_head.weight", "lm_head.weight")):
        one = target.fresh()
        for name, other in (pair, pair[::-1]):
            one.tensors[name].update(tree={"codec": "alias", "version": 1, "params": {"of": other}}, blob=None)
            one.blobs.pop(name, None)
        one.seal()
        with limits():
            assert read_tensor(one.folder, "many", "lm_head.weight", "") == "refused"


@pytest.mark.parametrize("of", [None, 7, [], {}, ["lm_head.weight"], "", "absent", "norm.weight", "position"])
def test_aliases_of_what_is_not_there_or_unlike(of: object, attacked: Attacked) -> None:
    target = attacked("lossy")
    target.tensors["model.embed_tokens.weight"]["tree"]["params"]["of"] = of
    target.seal()
    with limits():
        assert read_tensor(target.folder, "many", "model.embed_tokens.weight", "") == "refused"


def test_messages_stay_short(attacked: Attacked) -> None:
    """What is said of a hostile tree is a sentence, however large the tree."""
    target = attacked("lossy")
    large: list[Any] = ["x" * 50_000, [[1, 2]] * 9_000, {str(n): n for n in range(5_000)}]
    for name in ("lm_head.weight", "sum.weight", "few.experts.weight", "lossless.weight", "deadzone.weight"):
        target.seal()
        for at, node in enumerate(nodes_of(target.tensors[name]["tree"])):
            for key in node.get("params", {}):
                for value in large:
                    one = target.fresh()
                    list(nodes_of(one.tensors[name]["tree"]))[at]["params"][key] = value
                    one.seal()
                    with pytest.raises(ArtifactInvalid) as caught, Family.open(one.folder) as family:
                        open_tensor(family, "many", name).restored(0, 1)
                    assert len(caught.value.message) < 500, (name, key)


def test_the_seal_of_an_attacker_holds(attacked: Attacked) -> None:
    """What these tests stand on: sealed without a change, an artifact is sound to the last byte."""
    for artifact in ("lossy", "exact", "experts"):
        target = attacked(artifact)
        before = (target.folder / "manifest.json").read_bytes()
        target.seal()
        assert (target.folder / "manifest.json").read_bytes() == before
        assert target.document["digest"] == digest_of(target.document)
        assert verify(target.folder, "values").ok
    assert Path(target.folder / "v0001-00001.safetensors").stat().st_size < 200_000
