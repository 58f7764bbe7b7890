"""Artifacts that are none, are damaged, or do not hold what is asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import Family
from e2e_program import check_document, flip, refused, run, succeeded, tree

AGAIN = "Get the artifact again from where it came from."


@pytest.fixture(scope="module")
def whole(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of math and code that tests read and never write."""
    out = tmp_path_factory.mktemp("bad-artifacts") / "art"
    variants = [family.variants[id] for id in ("math", "code")]
    succeeded("decompose", "--base", family.base, "--variants", *variants, "--budget", "30%", "--out", out)
    return out


@pytest.fixture
def art(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(whole, tmp_path / "art")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 3)
    return path


def read_commands(artifact: Path, text: Path) -> dict[str, list[str]]:
    """Every command that reads an artifact."""
    out = str(text.parent / "out")
    return {
        "restore": ["restore", str(artifact), "--variant", "math", "--out", out],
        "restore all": ["restore", str(artifact), "--variant", "all", "--out", out],
        "restore base": ["restore", str(artifact), "--variant", "base", "--out", out],
        "inspect": ["inspect", str(artifact)],
        "verify": ["verify", str(artifact)],
        "eval": ["eval", str(artifact), "--text", str(text), "--window", "32"],
    }


# No artifact.


def test_nothing_at_that_place(tmp_path: Path, text: Path) -> None:
    for words in read_commands(tmp_path / "absent", text).values():
        assert refused(11, *words) == (
            f"expected an artifact's folder at {tmp_path / 'absent'}, found nothing", "check the path",
        )  # fmt: skip
    for words in read_commands(text, text).values():
        assert refused(11, *words)[0] == f"expected an artifact's folder at {text}, found a file"
    assert list(tmp_path.iterdir()) == [text]


def test_a_checkpoint_is_no_artifact(family: Family, tmp_path: Path, text: Path) -> None:
    commands = read_commands(family.base, text)
    found = f"expected an artifact, found a folder without manifest.json: {family.base}"
    ran = run(*commands.pop("verify"), "--json")
    assert ran.code == 20
    assert ran.document["problems"] == [{"file": "manifest.json", "tensor": None, "what": found}]
    for words in commands.values():
        assert refused(20, *words) == (found, "give the folder that `mfs decompose --out` wrote")
    assert list(tmp_path.iterdir()) == [text]


def test_a_newer_artifact_is_refused_by_the_name_of_its_schema(art: Path, tmp_path: Path, text: Path) -> None:
    manifest = json.loads((art / "manifest.json").read_text())
    (art / "manifest.json").write_text(json.dumps({**manifest, "schema": "mfs.family/7"}))
    for name, words in read_commands(art, text).items():
        ran = run(*words)
        assert ran.code == 20, name
        assert "mfs.family/7" in ran.out + ran.err
    assert not (tmp_path / "out").exists()


def test_an_artifact_is_no_source(family: Family, whole: Path, tmp_path: Path) -> None:
    said, _ = refused(12, "decompose", "--base", family.base, "--variants", whole, "--out", tmp_path / "new")
    assert "expected one set of weights" in said
    assert list(tmp_path.iterdir()) == []


# Variants that are not in it.


@pytest.mark.parametrize(
    "words",
    [
        ("restore", "{art}", "--variant", "mth", "--out", "{tmp}/out"),
        ("inspect", "{art}", "--variant", "mth"),
        ("eval", "{art}", "--variant", "mth", "--text", "{tmp}/text.txt"),
        ("eval", "{art}", "--originals", "mth={tmp}", "--text", "{tmp}/text.txt"),
        ("verify", "{art}", "--against", "mth={tmp}"),
    ],
)
def test_a_mistyped_id_says_which_was_meant(whole: Path, tmp_path: Path, text: Path, words: tuple[str, ...]) -> None:
    said, hint = refused(2, *(word.format(art=whole, tmp=tmp_path) for word in words))
    assert said == "expected a variant of this artifact, found 'mth' (did you mean 'math'?)"
    assert hint == "it has code, math"
    assert list(tmp_path.iterdir()) == [text]


def test_verify_of_an_id_that_is_not_there(whole: Path) -> None:
    said, hint = refused(2, "verify", whole, "--variant", "chat")
    assert "'chat'" in said
    assert hint == "it has code, math"


# Damage.


def test_every_flipped_bit_is_found_and_its_file_named(art: Path) -> None:
    files = sorted(path for path in art.rglob("*") if path.is_file() and path.name != "run.json")
    assert {"manifest.json", "README.md", "v0001-00001.safetensors", "v0002-00001.safetensors"} <= {
        f.name for f in files
    }
    assert sum(file.parent.name == "files" for file in files) > 5
    for file in files:
        name = file.relative_to(art).as_posix()
        for at in (0, file.stat().st_size // 2, file.stat().st_size - 1):
            flip(file, at)
            ran = run("verify", art, "--json")
            assert ran.code == 20, (name, at)
            assert ran.document["ok"] is False
            assert name in {problem["file"] for problem in ran.document["problems"]}, (name, at)
            assert ran.talk[-2].startswith(f"Error: {art} is damaged: ")
            assert name in ran.talk[-2]
            assert ran.talk[-1] == f"Hint: {AGAIN}"
            flip(file, at)
    flip(art / "run.json")  # times and places: no part of what is promised
    succeeded("verify", art, "--level", "values")


def test_a_damaged_value_is_named_with_its_tensor(art: Path) -> None:
    shard = art / "v0002-00001.safetensors"
    flip(shard, shard.stat().st_size - 9)
    ran = run("verify", art, "--level", "values", "--json")
    assert ran.code == 20
    check_document(ran.document)
    assert {problem["file"] for problem in ran.document["problems"]} == {shard.name}
    (tensor,) = [problem["tensor"] for problem in ran.document["problems"] if problem["tensor"]]
    plain = run("verify", art, "--level", "values")
    assert plain.code == 20
    assert f"{shard.name}: {tensor}: variant 'math': expected restored sha256 " in plain.out
    only = run("verify", art, "--level", "values", "--variant", "code", "--json").document["problems"]
    assert [problem["tensor"] for problem in only] == [None]  # the checksum still tells


@pytest.mark.parametrize("name", ["v0002-00001.safetensors", "base-00001-of-00001.safetensors"])
def test_damage_does_not_get_through_restore(art: Path, tmp_path: Path, name: str) -> None:
    shard = art / name
    flip(shard, 8 + int.from_bytes(shard.read_bytes()[:8], "little") + 1)  # in its first tensor, that of the embeddings
    before = tree(tmp_path)
    for out in (tmp_path / "out", tmp_path / "deep" / "out"):
        said, hint = refused(20, "restore", art, "--variant", "math", "--out", out)
        assert "of 'math' does not restore to what was recorded: the artifact is damaged" in said
        assert hint.startswith("mfs verify says which file")
        assert not out.exists()
    assert tree(tmp_path).items() - before.items() <= {("deep", "folder")}


def test_damaged_headers_and_side_files_do_not_get_through_restore(art: Path, tmp_path: Path) -> None:
    words = ("restore", art, "--variant", "math", "--out", tmp_path / "out")
    side = next(path for path in (art / "files").iterdir() if b"hidden_size" in path.read_bytes())
    for file, at in ((side, None), (art / "v0002-00001.safetensors", 12), (art / "manifest.json", None)):
        flip(file, at)
        refused(20, *words)
        assert not (tmp_path / "out").exists()
        flip(file, at)
    succeeded(*words)


@pytest.mark.parametrize("name", ["v0001-00001.safetensors", "base-00001-of-00001.safetensors", "README.md"])
def test_a_file_that_is_gone_or_cut_off(art: Path, tmp_path: Path, name: str, text: Path) -> None:
    data = (art / name).read_bytes()
    (art / name).write_bytes(data[:-1])
    before = tree(tmp_path)
    for words in read_commands(art, text).values():
        ran = run(*words)
        assert (ran.code, name in ran.err) == (20, True)
    assert tree(tmp_path) == before
    (art / name).unlink()
    for words in read_commands(art, text).values():
        ran = run(*words)
        assert (ran.code, name in ran.err) == (20, True)
    problems = run("verify", art, "--json").document["problems"]
    assert problems[0] == {"file": name, "tensor": None, "what": f"expected a file of {len(data)} bytes, found none"}


def test_a_file_that_no_record_names(art: Path) -> None:
    (art / "extra.bin").write_bytes(b"x")
    ran = run("verify", art, "--level", "quick", "--json")
    assert ran.code == 20
    assert [problem["file"] for problem in ran.document["problems"]] == ["extra.bin"]


# Places to restore to, and what restore is asked for.


def test_restore_writes_only_where_nothing_is(family: Family, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("do not lose me")
    places = [tmp_path / "mine", tmp_path / "mine" / "notes.txt", family.variants["math"], whole / "out", whole]
    before = [tree(folder) for folder in (tmp_path, whole, family.variants["math"])]
    for place in places:
        for which in ("math", "base"):
            said, hint = refused(14, "restore", whole, "--variant", which, "--out", place)
            assert "to be absent or empty, found something there" in said or "lies inside the artifact" in said
            assert hint == "Choose another --out."
    assert [tree(folder) for folder in (tmp_path, whole, family.variants["math"])] == before
    (tmp_path / "mine" / "math").mkdir()
    (tmp_path / "mine" / "math" / "x").write_text("")
    refused(14, "restore", whole, "--variant", "all", "--out", tmp_path / "mine")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["math", "notes.txt"]


def test_restore_refuses_what_it_cannot_do(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("restore", whole, "--variant", "math", "--out", tmp_path / "out")
    said, hint = refused(2, *words, "--exact")
    assert said == "expected all 20 tensors of variant 'math' to be exact, found 15 that are not"
    assert hint == "Leave --exact out, or decompose with --codec lossless."
    said, _ = refused(2, *words, "--dtype", "float16")
    assert said == "invalid value for '--dtype': expected one of 'original', 'float32', found 'float16'"
    monkeypatch.setattr("mfs_decompose.pipeline.restore.free_disk", lambda folder: 1000)
    said, hint = refused(13, *words)
    assert said == "restoring needs 159 kB of disk, and 1 kB is free"
    assert "one variant at a time" in hint
    assert list(tmp_path.iterdir()) == []
