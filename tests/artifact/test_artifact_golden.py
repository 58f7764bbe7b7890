"""The format does not move: one small artifact, byte for byte, and the page that describes it.

A change here is a new format: old artifacts must stay readable, so it gets a new schema name and new golden files
beside these.  To write them: `python tests/artifact/test_artifact_golden.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

from artifact_families import PLATFORM, RECIPE, snapshot

from mfs_decompose.artifact.files import FileRecord, copy_file
from mfs_decompose.artifact.layout import MANIFEST, base_shard_name, variant_shard_name
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import (
    BaseRecord,
    BaseTensor,
    Blob,
    CoverageRecord,
    SourceRecord,
    SourceShard,
    TensorRecord,
    ToolRecord,
    VariantRecord,
)
from mfs_decompose.artifact.shard import Entry, write_shard
from mfs_decompose.artifact.shard_reader import shard_metadata
from mfs_decompose.artifact.verify import verify
from mfs_decompose.artifact.writer import finish_artifact, store_content
from mfs_decompose.codec.tree import CodecNode, Part

GOLDEN = Path(__file__).parent / "golden"
PAGE = Path(__file__).parents[2] / "docs" / "format.md"
TOOL = ToolRecord(name="mfs_decompose", version="0", torch="0", numpy="0", safetensors="0", zstandard="0")

ENTRIES = [Entry("norm", "F32", (1,), 4), Entry("up", "BF16", (3, 2), 12)]
BASE = {"norm": b"\0\0\x80\x3f", "up": bytes.fromhex("803f 0040 80bf 0000 0041 c0c0")}
FRENCH = {**BASE, "up": bytes.fromhex("803f 0140 80bf 0000 0041 c1c0")}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def build(root: Path) -> Path:
    """A base of two tensors and the variant `french`, one of whose tensors is the base's own."""
    out = root / "family"
    out.mkdir(parents=True)
    files: list[FileRecord] = []
    sources: dict[str, SourceRecord] = {}
    for id, tensors in (("base", BASE), ("french", FRENCH)):
        (root / id).mkdir()
        shard = write_shard(root / id / "model.safetensors", ENTRIES, [tensors[e.name] for e in ENTRIES], {})
        raw = (root / id / "model.safetensors").read_bytes()
        header = store_content(out, raw[: 8 + int.from_bytes(raw[:8], "little")])
        config = store_content(out, b'{"model_type":"toy"}\n')
        files += [header, config]
        sources[id] = SourceRecord(
            kind="local",
            shards=(SourceShard(file=shard.path, size=shard.size, header_sha256=header.sha256),),
            files={"config.json": config.sha256},
            left_out=("training.log",) if id == "french" else (),
        )
    base_shard = copy_file(root / "base" / "model.safetensors", out / base_shard_name(1, 1))
    name = variant_shard_name(1, 1)
    shard = write_shard(out / name, [Entry.of_bytes("t1", 12)], [FRENCH["up"]], shard_metadata("french", 1))
    raw_tree = CodecNode("raw", parts=(Part("data", "BF16", (3, 2), 0, 12),))
    finish_artifact(
        out,
        tool=TOOL,
        platform=PLATFORM,
        recipe=RECIPE,
        base=BaseRecord(
            mode="known",
            store="copy",
            source=sources["base"],
            shards=(base_shard.path,),
            tensors={e.name: BaseTensor(dtype=e.dtype, shape=e.shape, sha256=sha(BASE[e.name])) for e in ENTRIES},
            bytes=base_shard.size,
        ),
        variants=[
            VariantRecord(
                id="french",
                source=sources["french"],
                shards=(name,),
                tensors={
                    entry.name: TensorRecord(
                        dtype=entry.dtype,
                        shape=entry.shape,
                        kind="same",
                        base_name=entry.name,
                        common_rows=entry.shape[0],
                        tree=(raw_tree if entry.name == "up" else CodecNode("identical")).to_json(),
                        blob=Blob(shard=0, entry="t1", nbytes=12) if entry.name == "up" else None,
                        energy=0.001220703125 if entry.name == "up" else 0.0,
                        error=0.0,
                        original_sha256=sha(FRENCH[entry.name]),
                        restored_sha256=sha(FRENCH[entry.name]),
                        exact=True,
                        nonfinite=0,
                    )
                    for entry in ENTRIES
                },
                missing=(),
                checkpoint_bytes=16,
                bytes=shard.size,
            )
        ],
        coverage=CoverageRecord(tensors=4, groups=2),
        files=[*files, base_shard, shard],
    )
    return out


def test_an_artifact_is_written_byte_for_byte_as_ever(tmp_path: Path) -> None:
    written, golden = snapshot(build(tmp_path)), snapshot(GOLDEN)
    assert written.keys() == golden.keys()
    for name, data in golden.items():
        assert written[name] == data, name


def test_an_artifact_of_old_is_read_and_decoded() -> None:
    assert verify(GOLDEN, "values").problems == ()
    with Family.open(GOLDEN) as family:
        assert family.artifact_digest == "6e27fd8b15df9e5f1788294451ee4df4255bea011e1a8524fffe55aaa71971ed"
        assert family.blob("french", "up") == FRENCH["up"]
        assert bytes(family.base_raw("up", 1, 3).numpy()) == BASE["up"][4:]


def test_the_page_shows_this_very_manifest() -> None:
    blocks = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    manifests = [document for block in blocks if "schema" in (document := json.loads(block))]
    assert manifests == [json.loads((GOLDEN / MANIFEST).read_bytes())]


def test_the_page_shows_this_very_shard() -> None:
    dump = re.search(r"```hexdump\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert dump is not None
    data = bytes.fromhex("".join(line[10:58] for line in dump[1].splitlines()))
    assert data == (GOLDEN / variant_shard_name(1, 1)).read_bytes()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        shutil.rmtree(GOLDEN, ignore_errors=True)
        shutil.copytree(build(Path(folder)), GOLDEN)
    sys.exit(not verify(GOLDEN).ok)
