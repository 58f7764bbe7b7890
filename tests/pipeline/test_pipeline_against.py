"""An artifact held against its originals, and what is in it."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EMBEDDING, Family, fine_tune, random_checkpoint
from pipeline_runs import Recording, codec_of, copied, manifest, record, run

from mfs_decompose.artifact.canonical import canonical_bytes, digest_of
from mfs_decompose.errors import SourceIncompatible, UsageError
from mfs_decompose.pipeline.against import compare_with_originals
from mfs_decompose.pipeline.inspect import inspect, inspect_tensors

UP = "model.layers.0.mlp.up_proj.weight"


def _tree_of(tree: dict[str, Any]) -> str:
    inner = "+".join(_tree_of(child) for child in tree.get("children", []))
    return f"{tree['codec']}({inner})" if inner else str(tree["codec"])


def refs(family: Family, *ids: str) -> dict[str, str]:
    return {id: str(family.variants[id]) for id in ids or family.variants}


def test_errors_are_found_again_from_the_originals(art: Path, family: Family) -> None:
    sink = Recording()
    found = compare_with_originals(art, refs(family), base=None, progress=sink)
    assert [one.id for one in found] == ["code", "math", "vocab"]
    for one in found:
        assert one.ok
        assert one.rel_error == pytest.approx(one.recorded, rel=1e-6)
        assert (one.tensors, one.exact) == (20, 5)
    assert sink.advanced == sum(variant["checkpoint_bytes"] for variant in manifest(art)["variants"])
    assert json.loads(json.dumps(found[0].to_json())).keys() == set(replace(found[0]).__dict__)


def test_exact_variants_are_compared_by_their_bits(lossless_art: Path, untied_family: Family) -> None:
    for one in compare_with_originals(lossless_art, refs(untied_family), base=None, progress=Recording()):
        assert (one.ok, one.rel_error, one.exact) == (True, 0.0, one.tensors)


def test_another_checkpoint_is_no_original(art: Path, family: Family, tmp_path: Path) -> None:
    other = fine_tune(family.base, tmp_path / "other", seed=55)
    for ref in (other, family.variants["code"], family.variants["vocab"]):
        with pytest.raises(SourceIncompatible, match=r"is not the checkpoint that variant 'math' was made from"):
            compare_with_originals(art, {"math": str(ref)}, base=None, progress=Recording())
    with pytest.raises(UsageError, match="found 'maths'"):
        compare_with_originals(art, {"maths": str(other)}, base=None, progress=Recording())


def test_a_record_that_flatters_is_found_out(art: Path, family: Family, tmp_path: Path) -> None:
    copy = copied(art, tmp_path / "art")
    document = manifest(copy)
    document["variants"][1]["tensors"][UP]["error"] *= 0.5
    document["digest"] = digest_of(document)
    (copy / "manifest.json").write_bytes(canonical_bytes(document))
    code, math = compare_with_originals(copy, refs(family, "code", "math"), base=None, progress=Recording())
    assert code.ok
    assert not math.ok
    assert math.rel_error > math.recorded


def test_weights_that_are_wrong_are_found_out(art: Path, family: Family, tmp_path: Path) -> None:
    copy = copied(art, tmp_path / "art")
    shard = copy / "v0002-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 0x55
    shard.write_bytes(data)
    (found,) = compare_with_originals(copy, refs(family, "math"), base=None, progress=Recording())
    assert not found.ok


def test_a_base_by_reference_may_be_named(family: Family, tmp_path: Path) -> None:
    base = copied(family.base, tmp_path / "base")
    run(tmp_path / "art", base, {"math": family.variants["math"]}, {"base.store": "reference"})
    moved = base.rename(tmp_path / "moved")
    (found,) = compare_with_originals(tmp_path / "art", refs(family, "math"), base=str(moved), progress=Recording())
    assert found.ok


def test_inspect_says_what_the_manifest_holds(art: Path) -> None:
    document = json.loads(json.dumps(inspect(art)))
    assert (document["schema"], document["coverage"]) == ("mfs.inspect/1", 1.0)
    base = (art / "base-00001-of-00001.safetensors").stat().st_size
    assert document["base"] == {"mode": "known", "store": "copy", "bytes": base}
    assert document["total_bytes"] == base + sum(path.stat().st_size for path in art.glob("v*.safetensors"))
    sides = [art / "manifest.json", art / "README.md", *(art / "files").iterdir()]
    assert document["files_bytes"] == sum(path.stat().st_size for path in sides)
    vocab = document["variants"][2]
    assert vocab["id"] == "vocab"
    found = Counter(_tree_of(tensor["tree"]) for tensor in record(art, "vocab")["tensors"].values())
    assert vocab["codecs"] == found
    assert found["raw"] == 5 and sum(found.values()) == 20
    assert (vocab["tensors"], vocab["exact_tensors"], vocab["missing"]) == (20, 5, 0)
    assert vocab["footprint"] == vocab["bytes"] / vocab["checkpoint_bytes"] <= 0.05


def test_inspect_tensor_by_tensor(art: Path) -> None:
    found = {one["tensor"]: one for one in inspect_tensors(art, "vocab")}
    tensors = record(art, "vocab")["tensors"]
    assert found.keys() == tensors.keys()
    tree = next(tensor["tree"] for tensor in tensors.values() if tensor["tree"]["codec"] in ("banded", "sum"))
    name = next(name for name, tensor in tensors.items() if tensor["tree"] is tree)
    bands = tree.get("children", [tree])[0]["params"]["bands"]
    said = " ".join(f"{count}x{bits}" for count, bits in zip(bands, (8, 6, 4, 3, 2), strict=True) if count)
    assert f"banded[{said}]" in found[name]["codec"]
    assert found[EMBEDDING]["codec"].startswith("rows(") and found[EMBEDDING]["codec"].endswith("+raw)")
    assert codec_of(art, "vocab", EMBEDDING).endswith("+raw)")
    assert found[UP]["rel_error"] == pytest.approx((tensors[UP]["error"] / tensors[UP]["energy"]) ** 0.5)
    assert found["model.norm.weight"]["exact"]
    with pytest.raises(UsageError):
        inspect_tensors(art, "nobody")


def test_a_slice_that_is_no_numbers_is_no_distance_from_itself(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    stack = torch.randn(5, 32, 24, generator=generator)
    tuned = stack + 0.01 * torch.randn(5, 32, 24, generator=generator)
    tuned[2, 3, 4], tuned[2, 5, 6] = torch.nan, torch.inf
    base = random_checkpoint(tmp_path / "base", {"experts": stack})
    variant = random_checkpoint(tmp_path / "own", {"experts": tuned})
    run(tmp_path / "art", base, {"own": variant}, {"objective.rank": 2})
    (found,) = compare_with_originals(tmp_path / "art", {"own": str(variant)}, base=None, progress=Recording())
    assert found.ok
    assert 0 < found.rel_error < 1
    infinite = replace(found, rel_error=math.inf)
    assert json.loads(json.dumps(infinite.to_json(), allow_nan=False))["rel_error"] is None
