"""The main path, as a user types it: decompose, dry run, verify, inspect, restore."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import Family, read_weights
from e2e_made import BUDGET, IDS, Made, make
from e2e_program import COMPARED, TENSOR, check_document, refused, run, succeeded, tree


@pytest.fixture(scope="module")
def made(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(family, tmp_path_factory.mktemp("main-path"), "--budget", BUDGET)


def bits(weights: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: weight.contiguous().view(torch.uint8).numpy().tobytes() for name, weight in weights.items()}


# decompose.


def test_decompose_reports_what_it_wrote(made: Made) -> None:
    document = made.document
    check_document(document)
    assert document["artifact"] == str(made.art)
    assert document["written"] is True
    assert document["resumed_units"] == 0
    variants = document["variants"]
    assert isinstance(variants, list)
    assert [v["id"] for v in variants] == IDS
    for v in variants:
        shards = list(made.art.glob(f"v{IDS.index(v['id']) + 1:04d}-*.safetensors"))
        assert v["bytes"] == sum(shard.stat().st_size for shard in shards)
        assert v["checkpoint_bytes"] == sum(w.nbytes for w in read_weights(made.variants[v["id"]]).values())
        assert v["footprint"] == v["bytes"] / v["checkpoint_bytes"] <= 0.30
        assert 0 < v["rel_error"] < 0.5
        assert sum(v["codecs"].values()) == 20
    base_bytes = sum(file.stat().st_size for file in made.art.glob("base-*.safetensors"))
    assert document["base_bytes"] == base_bytes == (made.base / "model.safetensors").stat().st_size
    assert document["total_bytes"] == base_bytes + sum(v["bytes"] for v in variants)
    stages = document["stages"]
    assert isinstance(stages, dict)
    assert list(stages) == ["base", "pass 1", "allocate", "pass 2", "write"]
    assert sorted(path.name for path in made.root.iterdir()) == ["art", "base", "tuned"]


def test_the_same_command_again_writes_nothing(made: Made) -> None:
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in made.root.rglob("*")}
    again = succeeded(*made.command, "--json").document
    check_document(again)
    assert again["written"] is False
    assert again["variants"] == made.document["variants"]
    assert (again["artifact_digest"], again["stages"]) == (made.document["artifact_digest"], {})
    plain = succeeded(*made.command)
    assert plain.talk[-1] == f"{made.art} is finished already: nothing was written"
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in made.root.rglob("*")} == before


def test_the_order_of_variants_does_not_matter(made: Made, tmp_path: Path) -> None:
    refs = [f"{id}={folder}" for id, folder in reversed(made.variants.items())]
    words = ("--base", made.base, "--budget", BUDGET, "--out", tmp_path / "art", "--threads", "1")
    other = succeeded("decompose", *words, "-V", refs[0], "-V", refs[1], "--variants", refs[2], "--json").document
    assert other["artifact_digest"] == made.document["artifact_digest"]


def test_a_mean_base_needs_none_given(made: Made, tmp_path: Path) -> None:
    art = tmp_path / "art"
    variants = [made.variants[id] for id in ("math", "code")]
    document = succeeded("decompose", "--variants", *variants, "--budget", "40%", "--out", art, "--json").document
    check_document(document)
    assert succeeded("inspect", art, "--json").document["base"]["mode"] == "mean"
    succeeded("verify", art, "--level", "values", "--against", *(f"{v.name}={v}" for v in variants))
    succeeded("restore", art, "--variant", "base", "--out", tmp_path / "mean")
    mean = read_weights(tmp_path / "mean")
    math, code = (read_weights(variant) for variant in variants)
    assert mean.keys() == math.keys()
    for name, weight in mean.items():
        expected = ((math[name].double() + code[name].double()) / 2).to(torch.bfloat16)
        assert torch.equal(weight, expected), name


# The dry run.


def test_a_dry_run_prints_the_plan_and_writes_nothing(made: Made, tmp_path: Path) -> None:
    words = [*made.command[: made.command.index("--out")], "--out", str(tmp_path / "new" / "art"), "--budget", BUDGET]
    document = succeeded(*words, "--dry-run", "--json").document
    check_document(document)
    assert document["base"] == {"mode": "known", "store": "copy", "bytes": made.document["base_bytes"]}
    assert document["coverage"] == {"tensors": 80, "planned": 80, "groups": 20}
    assert document["lineage"] is None
    for plan, real in zip(document["variants"], made.document["variants"], strict=True):  # type: ignore[call-overload]
        assert plan["max_bytes"] >= real["bytes"]
        assert plan["max_footprint"] == plan["max_bytes"] / plan["checkpoint_bytes"] <= 0.30
    assert document["disk_bytes"] > sum(path.stat().st_size for path in made.art.rglob("*") if path.is_file())
    kinship = 4 * 8 * 2**18 * 2  # what the look at kinship samples at most, in no estimate: 8 matrices of each source
    assert document["read_bytes"] + kinship >= made.document["bytes_read"]
    plain = succeeded(*words, "-n")
    for word in (
        "time: about ",
        "disk: ",
        "memory: ",
        "read: ",
        "coverage 80 of 80 tensors",
        "lineage: not checked",
        "<= 45.1 kB",
    ):
        assert word in plain.out
    assert "vocab: 1 tensor with 259 rows where the base has 257" in plain.out
    assert plain.err == "dry run: nothing was read but headers, and nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_imports_nothing_heavy(made: Made, tmp_path: Path) -> None:
    program = (
        "import json, sys\n"
        "from mfs_decompose.cli.app import main\n"
        "code = main(sys.argv[1:])\n"
        "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)\n"
    )
    words = [*made.command[: made.command.index("--out")], "--out", str(tmp_path / "art"), "--dry-run", "--json", "-q"]
    process = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert json.loads(process.stdout)["schema"] == "mfs.plan/1"
    code, modules = json.loads(process.stderr)
    assert code == 0
    assert not {"torch", "transformers", "scipy", "safetensors", "zstandard", "numpy"} & set(modules)
    assert list(tmp_path.iterdir()) == []


# verify and inspect.


@pytest.mark.parametrize("level", ["quick", "checksums", "values"])
def test_verify_at_each_level(made: Made, level: str) -> None:
    document = succeeded("verify", made.art, "--level", level, "--json").document
    check_document(document)
    assert (document["ok"], document["level"], document["problems"]) == (True, level, [])
    sizes = {path: path.stat().st_size for path in made.art.rglob("*") if path.is_file() and path.name != "run.json"}
    checked = sizes[made.art / "manifest.json"] if level == "quick" else sum(sizes.values())
    assert document["checked_bytes"] == checked
    plain = succeeded("verify", made.art, "--level", level)
    assert plain.out == ""
    assert f"{made.art} is whole ({level}): " in plain.talk[-1]
    assert succeeded("verify", made.art, "--json").document["level"] == "checksums"


def test_verify_against_the_originals(made: Made) -> None:
    refs = [f"{id}={folder}" for id, folder in made.variants.items()]
    document = succeeded("verify", made.art, "--against", *refs, "--json").document
    check_document(document, against=[COMPARED])
    recorded = {v["id"]: v["rel_error"] for v in made.document["variants"]}  # type: ignore[attr-defined]
    for compared in document["against"]:
        assert compared["ok"] is True
        assert compared["tensors"] == 20
        assert compared["recorded"] == recorded[compared["id"]]
        assert compared["rel_error"] == pytest.approx(compared["recorded"], rel=1e-5)
    plain = succeeded("verify", made.art, "--against", str(made.variants["math"]))
    assert [line.split()[0] for line in plain.out.splitlines()[2:]] == ["math"]
    said, _ = refused(12, "verify", made.art, "--against", f"math={made.variants['code']}")
    assert "is not the checkpoint that variant 'math' was made from" in said


def test_inspect_shows_what_is_there(made: Made) -> None:
    document = succeeded("inspect", made.art, "--json").document
    check_document(document)
    assert document["coverage"] == 1.0
    assert document["artifact_digest"] == made.document["artifact_digest"]
    assert document["base"] == {"mode": "known", "store": "copy", "bytes": made.document["base_bytes"]}
    assert document["total_bytes"] == made.document["total_bytes"]
    for inspected, reported in zip(document["variants"], made.document["variants"], strict=True):  # type: ignore[call-overload]
        assert {key: inspected[key] for key in reported} == reported
        assert (inspected["shared_bytes"], inspected["missing"], inspected["left_out"]) == (0, 0, [])
        # Norms, and matrices whose merged LoRA is cheapest stored as such.
        assert inspected["tensors"] == 20 and inspected["exact_tensors"] >= 5
    others = [path for path in made.art.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert document["files_bytes"] == sum(path.stat().st_size for path in others if path.name != "run.json")
    plain = succeeded("inspect", made.art)
    assert [line.split()[0] for line in plain.out.splitlines()[2:5]] == IDS
    assert "raw x 5" in plain.out and "banded" in plain.out
    assert plain.out.endswith("coverage 1\n")


def test_inspect_tensor_by_tensor(made: Made) -> None:
    document = succeeded("inspect", made.art, "--variant", "vocab", "--json").document
    check_document(document, tensors=[TENSOR])
    assert [v["id"] for v in document["variants"]] == ["vocab"]
    tensors = {tensor["tensor"]: tensor for tensor in document["tensors"]}
    assert tensors.keys() == read_weights(made.variants["vocab"]).keys()
    grown = tensors["model.embed_tokens.weight"]
    assert (grown["kind"], grown["shape"], grown["codec"][:5]) == ("resized", [259, 64], "rows(")
    assert tensors["model.norm.weight"]["exact"] is True
    plain = succeeded("inspect", made.art, "--variant", "vocab", "--top", "3").out
    assert "17 more tensors: --top 20" in plain
    assert "more tensors" not in succeeded("inspect", made.art, "--variant", "vocab", "--top", "20").out


# restore.


def test_restore_gives_every_checkpoint_back(made: Made, tmp_path: Path) -> None:
    document = succeeded("restore", made.art, "--variant", "all", "--out", tmp_path / "all", "--json").document
    check_document(document)
    assert [one["id"] for one in document["restored"]] == IDS
    for one in document["restored"]:
        folder, original = Path(one["folder"]), made.variants[one["id"]]
        assert folder == tmp_path / "all" / one["id"]
        assert (one["exact"], one["checked"], one["tensors"]) == (False, True, 20)
        assert one["bytes"] == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        found, expected = tree(folder), tree(original)
        assert found.keys() == expected.keys()
        assert {n for n in found if found[n] != expected[n]} == {n for n in found if n.endswith(".safetensors")}
        restored, own = read_weights(folder), read_weights(original)
        assert {n: (w.dtype, w.shape) for n, w in restored.items()} == {n: (w.dtype, w.shape) for n, w in own.items()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all"]
    vocab, back = (
        read_weights(f)["model.embed_tokens.weight"] for f in (made.variants["vocab"], tmp_path / "all/vocab")
    )
    assert torch.equal(vocab[257:], back[257:])
    again = succeeded("restore", made.art, "--variant", "math", "--out", tmp_path / "math")
    assert tree(tmp_path / "math") == tree(tmp_path / "all" / "math")
    assert [line.split()[0] for line in again.out.splitlines()[2:]] == ["math"]


def test_restore_the_base(made: Made, tmp_path: Path) -> None:
    one = succeeded("restore", made.art, "--variant", "base", "--out", tmp_path / "b", "--json").document["restored"][0]
    assert (one["exact"], one["checked"]) == (True, True)
    assert tree(tmp_path / "b") == tree(made.base)


def test_restore_in_float32_is_what_is_served(made: Made, tmp_path: Path) -> None:
    words = ("restore", made.art, "--variant", "math", "--dtype", "float32", "--out", tmp_path / "wide")
    ran = succeeded(*words)
    assert "config.json says float32" in ran.err
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    wide, own = read_weights(tmp_path / "wide"), read_weights(made.variants["math"])
    base = read_weights(made.base)
    assert {weight.dtype for weight in wide.values()} == {torch.float32}
    error = sum(float((wide[n].double() - own[n].double()).square().sum()) for n in own)
    energy = sum(float((own[n].double() - base[n].double()).square().sum()) for n in own)
    recorded = {v["id"]: v["rel_error"] for v in made.document["variants"]}["math"]  # type: ignore[attr-defined]
    assert (error / energy) ** 0.5 == pytest.approx(recorded, rel=1e-5)


def test_restore_rounds_to_nearest_when_told_and_into_one_file(made: Made, tmp_path: Path) -> None:
    words = ("restore", made.art, "--variant", "math", "--out")
    succeeded(*words, tmp_path / "wide", "--dtype", "float32")
    near = succeeded(*words, tmp_path / "near", "--rounding", "nearest", "--json").document["restored"][0]
    assert near["checked"] is False  # what is recorded is the digest of the default
    wide, nearest = read_weights(tmp_path / "wide"), read_weights(tmp_path / "near")
    own = read_weights(made.variants["math"])
    inexact = {n for n in own if not torch.equal(nearest[n].view(torch.int16), own[n].view(torch.int16))}
    assert bits({n: nearest[n] for n in inexact}) == bits({n: wide[n].to(torch.bfloat16) for n in inexact})
    assert len(inexact) == 15  # the others have all their bits, however they are served
    single = succeeded(*words, tmp_path / "single", "--layout", "single", "--json").document["restored"][0]
    assert single["checked"] is True
    assert [file.name for file in (tmp_path / "single").glob("*.safetensors*")] == ["model.safetensors"]
    assert not list((tmp_path / "single").glob("*.index.json"))
    succeeded(*words, tmp_path / "default")
    assert bits(read_weights(tmp_path / "single")) == bits(read_weights(tmp_path / "default"))


def test_lossless_restores_the_files_themselves(made: Made, tmp_path: Path) -> None:
    refs = [f"{id}={folder}" for id, folder in made.variants.items()]
    words = ("--base", made.base, "--variants", *refs, "--codec", "lossless", "--out", tmp_path / "art")
    document = succeeded("decompose", *words, "--json").document
    assert all(v["rel_error"] == 0 and v["footprint"] < 1 for v in document["variants"])
    restored = succeeded(
        "restore", tmp_path / "art", "--variant", "all", "--exact", "--out", tmp_path / "back", "--json"
    )
    assert all(one["exact"] and one["checked"] for one in restored.document["restored"])
    for id, folder in made.variants.items():
        assert tree(tmp_path / "back" / id) == tree(folder)
    (compared,) = run("verify", tmp_path / "art", "--against", refs[0], "--json").document["against"]
    assert (compared["exact"], compared["rel_error"]) == (20, 0.0)


def test_a_hard_linked_base_shares_its_bytes(family: Family, tmp_path: Path) -> None:
    made = make(family, tmp_path, "--budget", BUDGET, "--base-store", "hardlink")
    (stored,) = made.art.glob("base-*.safetensors")
    assert stored.samefile(made.base / "model.safetensors")
    succeeded("verify", made.art, "--level", "values")
