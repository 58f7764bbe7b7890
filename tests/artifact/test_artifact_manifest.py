"""The manifest: sealed, loaded without trust, and refused by name for everything an attacker may change."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_families import edit_manifest, make_artifact
from pydantic import ValidationError

from mfs_decompose.artifact.canonical import canonical_bytes, digest_of
from mfs_decompose.artifact.layout import MANIFEST, MAX_MANIFEST_BYTES
from mfs_decompose.artifact.manifest import (
    Manifest,
    artifact_digest,
    load_manifest,
    manifest_bytes,
    seal,
)
from mfs_decompose.artifact.records import SourceRecord, TensorRecord, relative_error
from mfs_decompose.errors import ArtifactInvalid

Edit = Callable[[dict[str, Any]], None]
SHA = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return (make_artifact(tmp_path_factory.mktemp("manifest")).path / MANIFEST).read_bytes()


def edited(data: bytes, edit: Edit) -> bytes:
    document = json.loads(data)
    edit(document)
    document["digest"] = digest_of(document)
    return canonical_bytes(document)


def test_the_manifest_round_trips(data: bytes) -> None:
    manifest = load_manifest(data)
    assert manifest_bytes(manifest) == data
    assert seal(manifest) == manifest
    assert manifest.to_json()["schema"] == "mfs.family/1"
    assert [variant.id for variant in manifest.variants] == ["alpha", "zeta"]
    assert manifest.coverage.tensors == 21
    assert manifest.total_bytes == manifest.base.bytes + sum(variant.bytes for variant in manifest.variants)


def test_the_artifact_digest_is_that_of_the_bytes(data: bytes) -> None:
    import hashlib

    assert artifact_digest(data) == hashlib.sha256(data).hexdigest()


def test_records_say_what_the_sources_are(data: bytes) -> None:
    alpha, zeta = load_manifest(data).variants
    assert alpha.missing == ("norm.weight",)
    assert alpha.tensors["head.weight"].kind == "only_in_variant"
    assert zeta.tensors["embed.weight"].kind == "resized"
    assert zeta.tensors["embed.weight"].common_rows == 11
    assert alpha.source.left_out == ("notes.bin",)
    assert alpha.checkpoint_bytes == 66 + 30 + 84 + 8 + 12
    assert alpha.footprint == alpha.bytes / alpha.checkpoint_bytes


def test_a_sealed_manifest_does_not_change(data: bytes) -> None:
    manifest = load_manifest(data)
    with pytest.raises(ValidationError):
        manifest.digest = SHA
    with pytest.raises(AssertionError):
        manifest_bytes(manifest.model_copy(update={"digest": ""}))


def test_every_flipped_bit_of_a_stretch_is_found(data: bytes) -> None:
    for bit in range(0, 8 * len(data), 211):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ArtifactInvalid):
            load_manifest(bytes(wrong))


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_cut_manifest_is_refused(data: bytes, cut: int) -> None:
    with pytest.raises(ArtifactInvalid):
        load_manifest(data[:cut])


def test_an_edited_manifest_fails_its_digest(data: bytes) -> None:
    with pytest.raises(ArtifactInvalid, match="its own digest"):
        load_manifest(data.replace(b'"budget":0.05', b'"budget":0.06'))


def test_another_spelling_is_refused_though_it_says_the_same(data: bytes) -> None:
    with pytest.raises(ArtifactInvalid, match="another spelling"):
        load_manifest(json.dumps(json.loads(data)).encode())


@pytest.mark.parametrize("schema", ["mfs.family/2", "mfs.family/10"])
def test_a_newer_artifact_is_called_newer(data: bytes, schema: str) -> None:
    wrong = edited(data, lambda document: document.update(schema=schema, more={"unknown": [1]}))
    with pytest.raises(ArtifactInvalid, match=f"written by a newer mfs: {schema}") as caught:
        load_manifest(wrong)
    assert caught.value.hint == "update mfs_decompose"
    assert caught.value.exit_code == 20


@pytest.mark.parametrize("schema", [None, 1, "mfs.gate/1", "mfs.family/1 ", "mfs.family/01", "mfs.family/x"])
def test_something_else_is_called_something_else(data: bytes, schema: Any) -> None:
    with pytest.raises(ArtifactInvalid, match="of something else"):
        load_manifest(edited(data, lambda document: document.update(schema=schema)))


@pytest.mark.parametrize("text", [b"[]", b"1\n", b"null\n", b'"mfs.family/1"\n'])
def test_other_json_is_something_else(text: bytes) -> None:
    with pytest.raises(ArtifactInvalid, match="of something else"):
        load_manifest(text)


def test_hostile_json_is_refused_before_anything_else(data: bytes) -> None:
    for wrong, reason in [
        (data.replace(b'{"base":', b'{"base":1,"base":', 1), "twice"),
        (data.replace(b"0.05", b"NaN", 1), "NaN"),
        (data.replace(b"0.05", b"[" * 80 + b"]" * 80, 1), "nested"),
        (b" " * (MAX_MANIFEST_BYTES + 1), "at most 64000000 bytes"),
    ]:
        with pytest.raises(ArtifactInvalid, match=reason):
            load_manifest(wrong)


def alpha(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["variants"][0]
    assert found["id"] == "alpha"
    return found


def tensor(document: dict[str, Any], name: str = "layer.1.weight") -> dict[str, Any]:
    found: dict[str, Any] = alpha(document)["tensors"][name]
    return found


def rename_key(mapping: dict[str, Any], old: str, new: str) -> None:
    mapping[new] = mapping.pop(old)


RECORD_ATTACKS: dict[str, Edit] = {
    "unknown field": lambda d: d.update(extra=1),
    "unknown field below": lambda d: tensor(d).update(extra=1),
    "missing field": lambda d: d.pop("coverage"),
    "text for a number": lambda d: tensor(d).update(nonfinite="0"),
    "true for a number": lambda d: tensor(d).update(nonfinite=True),
    "fraction for a count": lambda d: alpha(d).update(bytes=1.5),
    "negative bytes": lambda d: alpha(d).update(bytes=-1),
    "negative energy": lambda d: tensor(d).update(energy=-1.0),
    "short digest": lambda d: tensor(d).update(original_sha256="ab"),
    "upper-case digest": lambda d: tensor(d).update(original_sha256=SHA.upper()),
    "unknown dtype": lambda d: tensor(d).update(dtype="Q4"),
    "negative dimension": lambda d: tensor(d).update(shape=[-3, 7]),
    "huge rank": lambda d: tensor(d).update(shape=[1] * 65),
    "unknown kind": lambda d: tensor(d).update(kind="other"),
    "empty tensor name": lambda d: rename_key(alpha(d)["tensors"], "position", ""),
    "blob of nothing": lambda d: tensor(d)["blob"].update(nbytes=0),
    "negative shard": lambda d: tensor(d)["blob"].update(shard=-1),
    "exact but restored otherwise": lambda d: tensor(d).update(restored_sha256=SHA),
    "more common rows than rows": lambda d: tensor(d).update(common_rows=4),
    "common rows without a base": lambda d: tensor(d, "head.weight").update(common_rows=1),
    "a base tensor for one that has none": lambda d: tensor(d, "head.weight").update(base_name="empty"),
    "none for one that has": lambda d: tensor(d).update(base_name=None),
    "tree that is no object": lambda d: tensor(d).update(tree=[]),
    "id as a path": lambda d: alpha(d).update(id="../evil"),
    "reserved id": lambda d: alpha(d).update(id="all"),
    "traversal in the file table": lambda d: rename_key(d["files"], "README.md", "../README.md"),
    "absolute path in the file table": lambda d: rename_key(d["files"], "README.md", "/etc/passwd"),
    "traversal in a shard": lambda d: alpha(d).update(shards=["../v0001-00001.safetensors"]),
    "traversal in a source's shard": lambda d: alpha(d)["source"]["shards"][0].update(file="../model.safetensors"),
    "folder in a source's shard": lambda d: alpha(d)["source"]["shards"][0].update(file="a/model.safetensors"),
    "traversal in a side file": lambda d: rename_key(alpha(d)["source"]["files"], "config.json", "a/../../x"),
    "absolute side file": lambda d: rename_key(alpha(d)["source"]["files"], "config.json", "/etc/cron.d/x"),
    "drive in a side file": lambda d: rename_key(alpha(d)["source"]["files"], "config.json", "C:\\x"),
    "traversal in an index": lambda d: alpha(d)["source"]["index"].update(name=".."),
    "side file over a shard": lambda d: rename_key(
        alpha(d)["source"]["files"], "config.json", "model-00001-of-00002.safetensors"
    ),
    "source without shards": lambda d: alpha(d)["source"].update(shards=[]),
    "Hub source without a revision": lambda d: alpha(d)["source"].update(kind="hub", repo="a/b"),
    "Hub source at a branch": lambda d: alpha(d)["source"].update(kind="hub", repo="a/b", revision="main"),
    "local source with a repo": lambda d: alpha(d)["source"].update(repo="a/b"),
    "mean with a source": lambda d: d["base"].update(mode="mean"),
    "known without a source": lambda d: d["base"].update(source=None),
    "reference with shards": lambda d: d["base"].update(store="reference"),
    "one base shard too few": lambda d: d["base"]["shards"].pop(),
    "unknown device": lambda d: d["platform"].update(device="tpu"),
}


@pytest.mark.parametrize("edit", RECORD_ATTACKS.values(), ids=RECORD_ATTACKS.keys())
def test_a_spoofed_record_is_refused(data: bytes, edit: Edit) -> None:
    with pytest.raises(ArtifactInvalid, match=r"expected a valid manifest\.json, found"):
        load_manifest(edited(data, edit))


CROSS_ATTACKS: dict[str, tuple[Edit, str]] = {
    "variants out of order": (lambda d: d["variants"].reverse(), "sorted by id"),
    "a variant twice": (lambda d: d["variants"].insert(0, d["variants"][0]), "sorted by id"),
    "a variant dropped": (lambda d: d["variants"].pop(), "only files with a use"),
    "shards of another variant": (
        lambda d: alpha(d).update(shards=d["variants"][1]["shards"]),
        "shards of variant 'alpha' numbered in order",
    ),
    "shards in another order": (lambda d: alpha(d)["shards"].reverse(), "numbered in order"),
    "base shards in another order": (lambda d: d["base"]["shards"].reverse(), "base's shards numbered"),
    "other bytes": (lambda d: alpha(d).update(bytes=alpha(d)["bytes"] + 1), "bytes of variant 'alpha'"),
    "other base bytes": (lambda d: d["base"].update(bytes=7), "base's bytes"),
    "file missing from the table": (
        lambda d: d["files"].pop("v0001-00001.safetensors"),
        "every shard in the file table",
    ),
    "card missing from the table": (lambda d: d["files"].pop("README.md"), "every file in the table"),
    "content missing from the table": (
        lambda d: d["files"].pop("files/" + alpha(d)["source"]["files"]["config.json"]),
        "every file in the table",
    ),
    "file without a use": (
        lambda d: d["files"].update({f"files/{SHA}": {"size": 1, "sha256": SHA}}),
        "only files with a use",
    ),
    "shard without a use": (
        lambda d: d["files"].update({"v0003-00001.safetensors": {"size": 1, "sha256": SHA}}),
        "only files with a use",
    ),
    "content under another name": (
        lambda d: d["files"]["files/" + alpha(d)["source"]["files"]["config.json"]].update(sha256=SHA),
        "named by its content",
    ),
    "base shard of another size": (
        lambda d: d["base"]["source"]["shards"][0].update(size=3),
        "sizes of their source's files",
    ),
    "blob in no shard": (lambda d: tensor(d)["blob"].update(shard=9), "a shard of variant 'alpha'"),
    "two tensors in one entry": (
        lambda d: tensor(d)["blob"].update(tensor(d, "head.weight")["blob"]),
        "an entry of its own",
    ),
    "blob larger than its shard": (lambda d: tensor(d)["blob"].update(nbytes=10**9), "said to be in it"),
    "a shard nobody uses": (lambda d: tensor(d).update(blob=None), "said to be in it"),
    "no such base tensor": (lambda d: tensor(d).update(base_name="nope"), "a base tensor for tensor"),
    "same with another shape": (lambda d: tensor(d).update(shape=[3, 8]), "in the shape of its base tensor"),
    "more common rows than the base": (
        lambda d: tensor(d).update(base_name="empty", kind="resized"),
        "share at most the base's 0 rows",
    ),
    "a missing tensor denied": (lambda d: alpha(d).update(missing=[]), "base tensors that variant 'alpha' lacks"),
    "a tensor said to be missing": (
        lambda d: alpha(d).update(missing=["empty", "norm.weight"]),
        "base tensors that variant 'alpha' lacks",
    ),
    "a tensor dropped": (lambda d: alpha(d)["tensors"].pop("position"), "base tensors that variant 'alpha' lacks"),
    "coverage of less": (lambda d: d["coverage"].update(tensors=20), "coverage of all 21 tensors"),
}


@pytest.mark.parametrize(("edit", "reason"), CROSS_ATTACKS.values(), ids=CROSS_ATTACKS.keys())
def test_records_that_contradict_each_other_are_refused(data: bytes, edit: Edit, reason: str) -> None:
    with pytest.raises(ArtifactInvalid, match=reason):
        load_manifest(edited(data, edit))


def test_a_writer_is_held_to_the_same_story(data: bytes) -> None:
    manifest = load_manifest(data)
    with pytest.raises(ArtifactInvalid, match="sorted by id"):
        seal(manifest.model_copy(update={"variants": manifest.variants[::-1]}))


def test_numbers_that_json_lacks_never_enter_a_record(data: bytes) -> None:
    record = load_manifest(data).variants[0].tensors["layer.1.weight"]
    for value in (math.nan, math.inf, -0.5):
        with pytest.raises(ValidationError):
            TensorRecord(**{**dict(record), "energy": value})


def test_errors_are_unsquared_ratios(data: bytes) -> None:
    assert relative_error(4.0, 1.0) == 0.5
    assert relative_error(0.0, 0.0) == 0.0
    assert relative_error(0.0, 1e-30) == math.inf
    variant = load_manifest(data).variants[0]
    tensors = {
        "a": variant.tensors["layer.1.weight"].model_copy(update={"energy": 3.0, "error": 0.5}),
        "b": variant.tensors["layer.1.weight"].model_copy(update={"energy": 1.0, "error": 0.5}),
    }
    assert tensors["a"].rel_error == math.sqrt(0.5 / 3.0)
    assert variant.model_copy(update={"tensors": tensors}).rel_error == 0.5


def test_names_that_are_not_utf8_are_shown_as_escapes(data: bytes) -> None:
    source = load_manifest(data).variants[0].source
    odd = SourceRecord(**{**dict(source), "left_out": (b"caf\xe9.txt".decode("utf-8", "surrogateescape"), "ü")})
    assert odd.left_out == ("caf\\xe9.txt", "ü")


def test_loading_needs_no_torch() -> None:
    import subprocess
    import sys

    script = """
import sys
import mfs_decompose.artifact.manifest, mfs_decompose.artifact.layout, mfs_decompose.artifact.reader
import mfs_decompose.artifact.verify, mfs_decompose.artifact.writer
assert not {"torch", "transformers", "scipy", "safetensors", "zstandard"} & set(sys.modules), "heavy imports"
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_helper_writes_what_loads(tmp_path: Path) -> None:
    """The attacks above fail for their own reason: an edit that changes nothing loads."""
    made = make_artifact(tmp_path)
    before = (made.path / MANIFEST).read_bytes()
    edit_manifest(made.path, lambda document: None)
    assert (made.path / MANIFEST).read_bytes() == before
    assert isinstance(load_manifest(before), Manifest)
