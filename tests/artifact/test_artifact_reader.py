"""An opened artifact: blobs, base rows, hints; and what it refuses to believe."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from artifact_families import Made, Store, edit_manifest, make_artifact
from safetensors.torch import load_file, save_file

from mfs_decompose.artifact.layout import MANIFEST, RUN
from mfs_decompose.artifact.reader import Family
from mfs_decompose.errors import ArtifactInvalid, SourceIncompatible, SourceNotFound, UsageError


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def test_opening_says_what_is_inside(kept: Made) -> None:
    import hashlib

    with Family.open(kept.path) as family:
        assert family.variant_ids == ("alpha", "zeta")
        assert family.artifact_digest == hashlib.sha256((kept.path / MANIFEST).read_bytes()).hexdigest()
        assert family.variant("zeta").source.files.keys() == {"config.json", "tokenizer.json"}


def test_blobs_are_the_variants_own_bytes(kept: Made) -> None:
    with Family.open(kept.path) as family:
        for id, folder in kept.variants.items():
            for name, tensor in weights(folder).items():
                expected = raw_bytes(tensor) if family.tree(id, name).codec == "raw" else b""
                assert family.blob(id, name) == expected


def test_ranges_of_a_blob(kept: Made) -> None:
    with Family.open(kept.path) as family:
        whole = family.blob("zeta", "embed.weight")
        assert len(whole) == 78
        for offset, count in [(0, 78), (0, 0), (78, 0), (5, 7), (77, 1)]:
            assert family.blob_range("zeta", "embed.weight", offset, count) == whole[offset : offset + count]
        for offset, count in [(0, 79), (78, 1), (-1, 2), (5, -1), (2**70, 1), (0, 2**70)]:
            with pytest.raises(ArtifactInvalid, match="inside the 78 bytes"):
                family.blob_range("zeta", "embed.weight", offset, count)
        assert family.blob_range("zeta", "empty", 0, 0) == b""
        with pytest.raises(ArtifactInvalid, match="inside the 0 bytes"):
            family.blob_range("zeta", "position", 0, 1)


@pytest.mark.parametrize("store", ["copy", "reference", "hardlink", "mean"])
def test_base_rows_come_from_wherever_the_base_is(tmp_path: Path, store: Store) -> None:
    made = make_artifact(tmp_path, store)
    with Family.open(made.path, base=made.base if store == "reference" else None) as family:
        for name, expected in weights(made.base).items():
            rows = expected.shape[0] if expected.dim() else 1
            found = family.base_rows(name, 0, rows)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
            assert bytes(family.base_raw(name, 0, rows).numpy()) == raw_bytes(expected)
        assert torch.equal(family.base_rows("embed.weight", 3, 8), weights(made.base)["embed.weight"][3:8])
        with pytest.raises(ArtifactInvalid, match="'nope', which it has not"):
            family.base_rows("nope", 0, 1)


def test_a_stored_base_needs_no_originals(tmp_path: Path) -> None:
    made = make_artifact(tmp_path)
    shutil.rmtree(made.base)
    with Family.open(made.path) as family:
        assert family.base_rows("norm.weight", 0, 7).shape == (7,)


def test_the_referenced_base_is_found_by_its_hint(tmp_path: Path) -> None:
    made = make_artifact(tmp_path, "reference", hints=True)
    with Family.open(made.path) as family:
        assert family.base_rows("norm.weight", 2, 5).shape == (3,)


@pytest.mark.parametrize("case", ["no hints", "moved"])
def test_without_the_base_the_way_out_is_named(tmp_path: Path, case: str) -> None:
    made = make_artifact(tmp_path, "reference", hints=case == "moved")
    moved = made.base.rename(tmp_path / "moved")
    with Family.open(made.path) as family:
        family.blob("zeta", "embed.weight")
        with pytest.raises(SourceNotFound) as caught:
            family.base_rows("norm.weight", 0, 7)
    assert caught.value.exit_code == 11
    assert "--base REF" in (caught.value.hint or "")
    with Family.open(made.path, base=moved) as family:
        assert family.base_rows("norm.weight", 0, 7).shape == (7,)


def test_another_base_is_refused_by_the_tensor_that_differs(tmp_path: Path) -> None:
    made = make_artifact(tmp_path, "reference")
    foreign = weights(made.base)
    foreign["layer.1.weight"] = foreign["layer.1.weight"].clone()
    foreign["layer.1.weight"][2, 6] += 1
    (tmp_path / "foreign").mkdir()
    save_file(foreign, tmp_path / "foreign" / "model.safetensors")
    with Family.open(made.path, base=tmp_path / "foreign") as family:
        assert family.base_rows("norm.weight", 0, 7).shape == (7,)  # digests decide, not how the base is sharded
        with pytest.raises(SourceIncompatible, match=r"other values in its tensor 'layer\.1\.weight'"):
            family.base_rows("layer.1.weight", 0, 1)


@pytest.mark.parametrize("change", ["shape", "dtype", "absent"])
def test_a_base_of_other_shapes_is_refused_at_once(tmp_path: Path, change: str) -> None:
    made = make_artifact(tmp_path, "reference")
    foreign = weights(made.base)
    wrong = {"shape": torch.zeros(4, 7), "dtype": torch.zeros(3, 7, dtype=torch.float64)}
    foreign.pop("layer.1.weight")
    if change != "absent":
        foreign["layer.1.weight"] = wrong[change]
    (tmp_path / "foreign").mkdir()
    save_file(foreign, tmp_path / "foreign" / "model.safetensors")
    with (
        Family.open(made.path, base=tmp_path / "foreign") as family,
        pytest.raises(SourceIncompatible, match=r"tensor 'layer\.1\.weight'"),
    ):
        family.base_rows("norm.weight", 0, 1)


def test_a_hard_linked_base_that_was_edited_is_found(tmp_path: Path) -> None:
    made = make_artifact(tmp_path, "hardlink")
    shard = made.base / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    with shard.open("r+b") as stream:
        stream.write(data)
    with Family.open(made.path) as family:
        touched = [name for name in load_file(shard) if name in family.manifest.base.tensors]
        with pytest.raises(ArtifactInvalid, match="found other values"):
            for name in touched:
                family.base_raw(name, 0, 0)


def test_unknown_names_are_met_with_the_nearest(kept: Made) -> None:
    with Family.open(kept.path) as family:
        with pytest.raises(UsageError, match="did you mean 'alpha'") as caught:
            family.variant("alhpa")
        assert caught.value.hint == "it has alpha, zeta"
        with pytest.raises(UsageError, match=r"did you mean 'norm\.weight'"):
            family.blob("zeta", "norm.weigth")


def test_side_files_come_back_byte_for_byte(kept: Made) -> None:
    with Family.open(kept.path) as family:
        for id, folder in kept.variants.items():
            source = family.variant(id).source
            for name, digest in source.files.items():
                assert family.file_bytes(digest) == (folder / name).read_bytes()
            for shard in source.shards:
                header = family.file_bytes(shard.header_sha256)
                assert (folder / shard.file).read_bytes().startswith(header)
        with pytest.raises(ArtifactInvalid, match="no such file"):
            family.file_bytes("0" * 64)


def test_a_damaged_side_file_is_not_handed_out(made: Made) -> None:
    digest = json.loads((made.path / MANIFEST).read_bytes())["variants"][0]["source"]["files"]["config.json"]
    path = made.path / "files" / digest
    path.write_bytes(path.read_bytes().replace(b"toy", b"tox"))
    with Family.open(made.path) as family, pytest.raises(ArtifactInvalid, match="match its name"):
        family.file_bytes(digest)


def test_originals_are_hints(kept: Made, tmp_path: Path) -> None:
    with Family.open(kept.path) as family:
        assert family.original_ref("base") == str(kept.base)
        assert family.original_ref("zeta") == str(kept.variants["zeta"])
        assert family.original_ref("other") is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"hints":[]}', '{"hints":{"base":1,"variants":2}}',
             '{"hints":{"base":"a\\u0000b"}}', '{"hints":{},"hints":{}}', "[" * 90 + "]" * 90]
)  # fmt: skip
def test_a_broken_run_record_is_only_a_missing_one(made: Made, text: str) -> None:
    (made.path / RUN).write_text(text)
    with Family.open(made.path) as family:
        assert family.original_ref("base") is None
        assert family.original_ref("zeta") is None


def set_codec(id: str, codec: str, version: int = 1) -> object:
    def edit(document: dict[str, object]) -> None:
        variant = next(v for v in document["variants"] if v["id"] == id)  # type: ignore[attr-defined]
        variant["tensors"]["embed.weight"]["tree"].update(codec=codec, version=version)

    return edit


@pytest.mark.parametrize(("codec", "version"), [("wavelet", 1), ("raw", 99)])
def test_an_unknown_codec_is_refused_for_its_variant_alone(made: Made, codec: str, version: int) -> None:
    edit_manifest(made.path, set_codec("zeta", codec, version))  # type: ignore[arg-type]
    with Family.open(made.path) as family:
        assert len(family.blob("alpha", "layer.1.weight")) == 84
        for ask in (
            lambda: family.variant("zeta"),
            lambda: family.tree("zeta", "norm.weight"),
            lambda: family.blob("zeta", "embed.weight"),
            lambda: family.blob_range("zeta", "embed.weight", 0, 1),
        ):
            with pytest.raises(ArtifactInvalid, match=rf"tensor 'embed\.weight' of variant 'zeta'.*{codec}"):
                ask()


@pytest.mark.parametrize(
    "part",
    [{"offset": 1}, {"nbytes": 77}, {"nbytes": 79}, {"offset": 2**60}, {"nbytes": 2**60}],
    ids=["hole", "bytes left over", "bytes too many", "far away", "huge"],
)
def test_arrays_tile_their_entry(made: Made, part: dict[str, int]) -> None:
    def edit(document: dict[str, object]) -> None:
        tree = document["variants"][1]["tensors"]["embed.weight"]["tree"]  # type: ignore[index]
        tree["parts"][0].update(part)

    edit_manifest(made.path, edit)
    with Family.open(made.path) as family, pytest.raises(ArtifactInvalid, match="expected array"):
        family.variant("zeta")


def test_overlapping_arrays_are_refused(made: Made) -> None:
    def edit(document: dict[str, object]) -> None:
        tree = document["variants"][1]["tensors"]["embed.weight"]["tree"]  # type: ignore[index]
        (part,) = tree["parts"]
        tree["parts"] = [{**part, "nbytes": 40}, {**part, "name": "more", "offset": 39, "nbytes": 39}]

    edit_manifest(made.path, edit)
    with Family.open(made.path) as family, pytest.raises(ArtifactInvalid, match="expected array 'more' at byte 40"):
        family.variant("zeta")


def test_no_folder_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="found nothing"):
        Family.open(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(SourceNotFound, match="found a file"):
        Family.open(tmp_path / "file")
    with pytest.raises(ArtifactInvalid, match=r"without manifest\.json"):
        Family.open(tmp_path)
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(ArtifactInvalid, match="not a regular file"):
        Family.open(tmp_path)


def test_missing_and_cut_files_are_named_when_opening(made: Made) -> None:
    shard = made.path / "v0001-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ArtifactInvalid, match=r"v0001-00001\.safetensors, found"):
        Family.open(made.path)
    shard.unlink()
    with pytest.raises(ArtifactInvalid, match=r"cannot read .*v0001-00001\.safetensors"):
        Family.open(made.path)


def test_shards_swapped_between_variants_are_not_read(made: Made) -> None:
    """Also when the attacker fixes the table: the shard says whose it is."""
    one, other = made.path / "v0001-00001.safetensors", made.path / "v0002-00001.safetensors"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)

    def edit(document: dict[str, object]) -> None:
        files = document["files"]
        files[one.name], files[other.name] = files[other.name], files[one.name]  # type: ignore[index]
        for number, name in enumerate((one.name, other.name)):
            variant = document["variants"][number]  # type: ignore[index]
            variant["bytes"] = sum(files[shard]["size"] for shard in variant["shards"])  # type: ignore[index]
            assert name in variant["shards"]

    edit_manifest(made.path, edit)
    with Family.open(made.path) as family, pytest.raises(ArtifactInvalid, match=r"expected mfs\.owner 'alpha'"):
        family.blob(
            "alpha", next(n for n, t in family.variant("alpha").tensors.items() if t.blob and t.blob.shard == 0)
        )


def test_a_link_out_of_the_artifact_is_not_followed(made: Made, tmp_path: Path) -> None:
    shard = made.path / "v0001-00001.safetensors"
    outside = shard.rename(tmp_path / "outside.safetensors")
    shard.symlink_to(outside)
    with Family.open(made.path) as family, pytest.raises(ArtifactInvalid, match="outside of the"):
        for name in family.variant("alpha").tensors:
            family.blob("alpha", name)


def test_a_shard_that_is_cut_while_open_is_an_error_and_no_zeros(made: Made) -> None:
    with Family.open(made.path) as family:
        family.blob("zeta", "embed.weight")
        record = family.variant("zeta").tensors["embed.weight"]
        assert record.blob is not None
        os.truncate(made.path / family.variant("zeta").shards[record.blob.shard], 200)
        with pytest.raises(ArtifactInvalid, match="more bytes"):
            family.blob("zeta", "embed.weight")


def test_many_threads_read_the_same(tmp_path: Path) -> None:
    made = make_artifact(tmp_path, "reference", hints=True)
    expected = {id: weights(folder) for id, folder in made.variants.items()}
    base = weights(made.base)

    with Family.open(made.path) as family:

        def check(turn: int) -> bool:
            id = ("alpha", "zeta")[turn % 2]
            name = sorted(expected[id])[turn % len(expected[id])]
            blob = family.blob(id, name)
            rows = base["embed.weight"][turn % 11 :]
            sound = blob in (b"", raw_bytes(expected[id][name]))
            return sound and torch.equal(family.base_rows("embed.weight", turn % 11, 11), rows)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(check, range(200)))
