"""B08: a base with tied embeddings stores no head, its variant does (or the reverse): missing keys, or 10 % too much.

Right: a head is compared with the embeddings it stands for, a copy of them costs nothing, a real one is kept, and each
variant gets back exactly the tensors that it had.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import EMBEDDING, HEAD, fine_tune, make_llama, random_checkpoint, read_weights
from other_names import called, wrapped
from report_runs import back, run, same_bits, tensors_of

from mfs_decompose import Family

RECIPES = [{"deltas.default.codec": "lossless"}, {"objective.budget": "15%"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tied base; fine-tunes without a head, with their embeddings as the head, and with a head of their own."""
    root = tmp_path_factory.mktemp("b08")
    base = make_llama(root / "base", seed=8, vocab=137)
    found = {"base": base, "tied": fine_tune(base, root / "tied", seed=1)}
    for id, seed in (("equal", 2), ("other", 3)):
        found[id] = fine_tune(base, root / id, seed=seed, tie=False)
    weights = read_weights(found["equal"])
    random_checkpoint(found["equal"], {**weights, HEAD: weights[EMBEDDING].clone()}, {"format": "pt"})
    return found


def check(artifact: Path, id: str, original: Path, out: Path) -> dict[str, torch.Tensor]:
    """The variant's own key set comes back, exact tensors bit for bit."""
    restored, truth = back(artifact, id, out), read_weights(original)
    assert restored.keys() == truth.keys()
    for name, record in tensors_of(artifact, id).items():
        assert same_bits(restored[name], truth[name]) or not record["exact"]
    return restored


def stored_once(artifact: Path, id: str) -> bool:
    """Whether one of head and embeddings is the other, and needs no bytes."""
    records = tensors_of(artifact, id)
    aliases = {
        name: record["tree"]["params"]["of"] for name, record in records.items() if record["tree"]["codec"] == "alias"
    }
    assert all(records[name]["blob"] is None for name in aliases)
    return aliases in ({HEAD: EMBEDDING}, {EMBEDDING: HEAD})


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tied_base(folders: dict[str, Path], tmp_path: Path, recipe: dict[str, object]) -> None:
    variants = {id: folders[id] for id in ("tied", "equal", "other")}
    report = run(tmp_path / "art", folders["base"], variants, recipe)
    for id in variants:
        restored = check(tmp_path / "art", id, folders[id], tmp_path / id)
        assert (HEAD in restored) == (id != "tied")
        if id == "equal":
            assert same_bits(restored[HEAD], restored[EMBEDDING])
    heads = {id: tensors_of(tmp_path / "art", id)[HEAD] for id in ("equal", "other")}
    assert {(head["kind"], head["base_name"]) for head in heads.values()} == {("tied", EMBEDDING)}
    assert stored_once(tmp_path / "art", "equal")
    assert not stored_once(tmp_path / "art", "other")
    sizes = {variant.id: variant for variant in report.variants}
    stored = {id: sum(weight.nbytes for weight in read_weights(folders[id]).values()) for id in variants}
    assert {id: variant.checkpoint_bytes for id, variant in sizes.items()} == stored
    with Family.open(tmp_path / "art") as family:
        assert [family.variant(id).missing for id in variants] == [(), (), ()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_untied_base(folders: dict[str, Path], tmp_path: Path, recipe: dict[str, object]) -> None:
    base = make_llama(tmp_path / "base", seed=8, vocab=137, tie=False)
    tied = fine_tune(base, tmp_path / "tied", seed=4, tie=True)
    run(tmp_path / "art", base, {"tied": tied, "untied": fine_tune(base, tmp_path / "untied", seed=5)}, recipe)
    assert HEAD not in check(tmp_path / "art", "tied", tied, tmp_path / "out")
    with Family.open(tmp_path / "art") as family:
        assert (family.variant("tied").missing, family.variant("untied").missing) == ((HEAD,), ())


@pytest.mark.parametrize("recipe", RECIPES)
def test_under_other_names(folders: dict[str, Path], tmp_path: Path, recipe: dict[str, object]) -> None:
    """The base in a wrapper, with what ties it in `text_config`."""
    tying = {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": False}
    base = called(folders["base"], tmp_path / "base", wrapped, tying)
    run(tmp_path / "art", base, {id: folders[id] for id in ("tied", "equal", "other")}, recipe)
    for id in ("tied", "equal", "other"):
        check(tmp_path / "art", id, folders[id], tmp_path / id)
        records = tensors_of(tmp_path / "art", id)
        assert {record["base_name"] for name, record in records.items() if name != HEAD} == set(read_weights(base))
        if id != "tied":
            assert (records[HEAD]["kind"], records[HEAD]["base_name"]) == ("tied", wrapped(EMBEDDING))
    assert stored_once(tmp_path / "art", "equal")


def test_an_untied_base_under_other_names(folders: dict[str, Path], tmp_path: Path) -> None:
    untied = make_llama(tmp_path / "untied", seed=8, vocab=137, tie=False)
    base = called(untied, tmp_path / "base", wrapped)
    own, tied = fine_tune(untied, tmp_path / "own", seed=5), fine_tune(untied, tmp_path / "tied", seed=6, tie=True)
    run(tmp_path / "art", base, {"own": own, "tied": tied}, RECIPES[0])
    assert tensors_of(tmp_path / "art", "own")[HEAD]["base_name"] == wrapped(HEAD)
    assert HEAD not in check(tmp_path / "art", "tied", tied, tmp_path / "out")
    with Family.open(tmp_path / "art") as family:
        assert (family.variant("tied").missing, family.variant("own").missing) == ((wrapped(HEAD),), ())


def test_a_base_that_stores_its_embeddings_as_the_head(folders: dict[str, Path], tmp_path: Path) -> None:
    base = called(folders["base"], tmp_path / "base", lambda name: HEAD if name == EMBEDDING else name)
    run(tmp_path / "art", base, {"tied": folders["tied"], "other": folders["other"]}, RECIPES[0])
    records = tensors_of(tmp_path / "art", "tied")
    assert (records[EMBEDDING]["kind"], records[EMBEDDING]["base_name"]) == ("tied", HEAD)
    for id in ("tied", "other"):
        check(tmp_path / "art", id, folders[id], tmp_path / id)
    with Family.open(tmp_path / "art") as family:
        assert (family.variant("tied").missing, family.variant("other").missing) == ((HEAD,), ())
