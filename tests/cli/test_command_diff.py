from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import EMBEDDING, Family, random_checkpoint, read_weights
from e2e_program import check_document, refused, run, succeeded, tree

EVIL = "red\x1b[31m [bold]\u202eback\n"


@pytest.fixture(scope="module")
def art(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("diff") / "art"
    refs = [f"{id}={folder}" for id, folder in family.variants.items()]
    succeeded("decompose", "--base", family.base, "--variants", *refs, "--budget", "30%", "--out", out)
    return out


def test_two_checkpoints_for_people(family: Family) -> None:
    ran = succeeded("diff", family.base, family.variants["vocab"], "--tensors", "3", "-q")
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"A: {family.base} (checkpoint, 20 tensors, ")
    assert "20 tensors in both: 19 changed, 1 of another shape" in lines
    assert "17 more tensors differ: --tensors 20" in lines
    assert "tokenizer: 2 tokens only in B: '<|extra_0|>' (257), '<|extra_1|>' (258)" in lines
    assert any(line.split() == ["config.json", "vocab_size", "257", "259"] for line in lines)
    assert lines[-1] == "different"
    assert ran.err == ""


def test_the_most_changed_come_first(family: Family) -> None:
    document = succeeded("diff", family.base, family.variants["code"], "--json").document
    check_document(document)
    shown = succeeded("diff", family.base, family.variants["code"], "--tensors", "4").out.splitlines()
    start = next(at for at, line in enumerate(shown) if line.startswith("tensor "))
    names = [line.split()[0] for line in shown[start + 2 : start + 6]]
    assert names == [one["tensor"] for one in document["tensors"]["changes"]][:4]
    assert len(document["tensors"]["changes"]) == 20  # --tensors is for people
    assert succeeded("diff", family.base, family.variants["code"], "--tensors", "0").out.count("self_attn") == 0


def test_equal_is_said(family: Family, tmp_path: Path) -> None:
    copy = shutil.copytree(family.base, tmp_path / "copy")
    before = tree(tmp_path)
    ran = succeeded("diff", family.base, copy, "--exit-code")
    assert "20 tensors in both: 20 equal" in ran.out
    assert "all that is not weights says the same" in ran.out
    assert ran.out.endswith("\nequal\n")
    assert tree(tmp_path) == before


def test_the_exit_code_is_asked_for(family: Family, art: Path) -> None:
    words = ["diff", family.base, family.variants["math"], "--tensors", "1"]
    assert run(*words).code == 0
    ran = run(*words, "--exit-code")
    assert (ran.code, ran.talk[-1]) == (23, f"Error: {family.base} and {family.variants['math']} differ")
    document = run(*words, "--exit-code", "--json")
    assert (document.code, document.document["schema"], document.document["equal"]) == (23, "mfs.diff/1", False)
    assert run("diff", art, art, "--exit-code").code == 0
    assert run("diff", f"{art}::math", f"{art}::math", "--exit-code", "--no-weights").code == 0


def test_a_variant_and_where_it_came_from(family: Family, art: Path) -> None:
    ran = succeeded("diff", family.variants["math"], f"{art}::math")
    assert "A is the checkpoint that B was made from" in ran.out
    assert "all that is not weights says the same" in ran.out
    assert succeeded("diff", f"{art}::base", family.base).out.endswith("\nequal\n")


def test_without_weights_nothing_is_measured(family: Family, art: Path) -> None:
    ran = succeeded("diff", family.base, family.variants["vocab"], "--no-weights")
    assert "20 tensors in both: 1 of another shape, 19 not compared" in ran.out
    assert [line.split()[0] for line in ran.out.splitlines() if "BF16" in line] == [EMBEDDING]
    check_document(succeeded("diff", f"{art}::math", f"{art}::code", "--no-weights", "--json").document)


def test_two_artifacts(family: Family, art: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    refs = [f"{id}={family.variants[id]}" for id in ("math", "code")]
    succeeded("decompose", "--base", family.base, "--variants", *refs, "--budget", "40%", "--out", other)
    ran = succeeded("diff", art, other)
    assert "variants only in A: vocab" in ran.out
    rows = {line.split()[0]: line for line in ran.out.splitlines() if line.split()}
    assert "equal" in rows["math"]
    assert "differ" in rows["math"]
    assert rows["recipe.objective.budget"].split()[1:] == ["0.3", "0.4"]
    document = succeeded("diff", art, other, "--json").document
    check_document(document)
    assert (document["only_a"], document["equal"]) == (["vocab"], False)


def test_mistakes_are_one_sentence(family: Family, art: Path, tmp_path: Path) -> None:
    message, hint = refused(2, "diff", art, family.base)
    assert (
        message == f"expected two models or two artifacts, found a whole artifact, {art}, and one model, {family.base}"
    )
    assert hint == f"say which one of it: {art}::base, {art}::code, {art}::math, {art}::vocab"
    message, hint = refused(2, "diff", f"{art}::mat", family.base)
    assert message == "expected a variant of this artifact, found 'mat' (did you mean 'math'?)"
    message, hint = refused(2, "diff", f"{family.base}::math", family.base)
    assert hint == f"write {family.base} for the checkpoint itself"
    assert refused(11, "diff", family.base, tmp_path / "absent")[0] == f"no such folder: {tmp_path / 'absent'}"
    (tmp_path / "config.json").write_text("{")
    random_checkpoint(tmp_path, {"a": torch.ones(2)})
    assert refused(12, "diff", family.base, tmp_path)[0].startswith(f"{tmp_path / 'config.json'} is not JSON")


def test_names_of_strangers_are_shown_and_obey_nobody(tmp_path: Path) -> None:
    for id, value in (("a", 1.0), ("b", 2.0)):
        folder = random_checkpoint(tmp_path / id, {"[bold]": torch.full((3, 5), value), f"[{id}]": torch.ones(2)})
        (folder / "config.json").write_text(json.dumps({EVIL: EVIL + id}))
        (folder / "chat_template.jinja").write_text(f"{EVIL}{id}")
        added = [{"id": 1, "content": f"{EVIL}{id}"}]
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"x": 0}}}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"{EVIL}{id}"}))
    ran = succeeded("diff", tmp_path / "a", tmp_path / "b")
    assert all(char == "\n" or char.isprintable() for char in ran.out + ran.err)
    assert "[bold]" in ran.out
    check_document(succeeded("diff", tmp_path / "a", tmp_path / "b", "--json").document)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    for id in ("a", "b"):
        folder = random_checkpoint(tmp_path / id, {f"{id}.{n}": torch.ones(2) for n in range(30)})
        (folder / "config.json").write_text(json.dumps({f"key.{n}": [id] * 500 for n in range(50)}))
    ran = succeeded("diff", tmp_path / "a", tmp_path / "b")
    assert "only in A: a.0, a.1, a.10, a.11, a.12 and 25 more" in ran.out
    assert "config.json: 50 keys differ" in ran.out
    assert "... and 30 more" in ran.out
    assert max(len(line) for line in ran.out.splitlines()) < 250


def test_a_template_is_shown(family: Family, tmp_path: Path) -> None:
    copy = shutil.copytree(family.base, tmp_path / "copy")
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").write_text(template.replace("<|end|>", "<|stop|>"))
    ran = succeeded("diff", family.base, copy)
    assert "chat template: differs" in ran.out
    assert "  --- A" in ran.out
    assert ran.out.endswith("\ndifferent\n")


def test_a_file_that_cannot_be_read_is_named(family: Family, tmp_path: Path) -> None:
    copy = shutil.copytree(family.base, tmp_path / "copy")
    (copy / "tokenizer.json").write_text("<html>")
    (copy / "generation_config.json").write_text("[")
    ran = run("diff", family.base, copy, "--exit-code")
    assert ran.code == 23
    assert "tokenizer.json of B cannot be read: it is not JSON (Expecting value at character 0)" in ran.out
    assert "generation_config.json of B cannot be read: it is not JSON" in ran.out
    assert "tokenizer: only A has a vocabulary that can be read" in ran.out


def test_progress_ends_at_its_total(family: Family) -> None:
    ran = succeeded("diff", family.base, family.variants["vocab"], "--progress", "json")
    finished = [event for event in map(json.loads, ran.talk) if event["event"] == "finish"]
    sizes = [sum(w.nbytes for w in read_weights(f).values()) for f in (family.base, family.variants["vocab"])]
    assert [(event["stage"], event["done_bytes"], event["total_bytes"]) for event in finished] == [
        ("comparing tensors", sum(sizes), sum(sizes))
    ]


def test_inspect_shows_configs_and_stop_ids(art: Path) -> None:
    ran = succeeded("inspect", art)
    assert ran.err == ""
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["vocab", "config.json", "vocab_size", "257", "259"] in rows
    stops = [row for row in rows if row[:2] == ["math", "256"]]
    assert len(stops) == 1
    assert "(<|end|>)" in " ".join(stops[0])
    alone = succeeded("inspect", art, "--variant", "math").out
    assert "vocab_size" not in alone


def test_inspect_shows_strangers_words_as_they_are(family: Family, tmp_path: Path) -> None:
    folder = shutil.copytree(family.variants["math"], tmp_path / "math")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, EVIL: EVIL * 9, "limit": float("inf")}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": EVIL}))
    (folder / "generation_config.json").write_text("{")
    words = ["--base", family.base, "--variants", folder, "--budget", "30%", "--out", tmp_path / "art"]
    succeeded("decompose", *words)
    ran = succeeded("inspect", tmp_path / "art")
    assert all(char == "\n" or char.isprintable() for char in ran.out + ran.err)
    assert "red\\x1b[31m [bold]\\u202eback" in ran.out
    warnings = [line for line in ran.talk if line.startswith("Warning: math: ")]
    assert len(warnings) == len(ran.talk) == 2
    assert warnings[0].startswith("Warning: math: generation_config.json cannot be read: it is not JSON")
    assert warnings[1].endswith("is no token of the vocabulary")
    check_document(succeeded("inspect", tmp_path / "art", "--json").document)


def test_inspect_needs_no_torch(art: Path) -> None:
    program = (
        "import sys; from mfs_decompose.cli.app import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    words = ["inspect", str(art), "--variant", "math"]
    assert subprocess.run([sys.executable, "-c", program, *words], capture_output=True, check=False).returncode == 0
