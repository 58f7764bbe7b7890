from __future__ import annotations

from pathlib import Path

import pytest
from fidelity_models import make_tokenizer
from tokenizers import processors

from mfs_decompose.errors import SourceIncompatible, SourceNotFound, UsageError
from mfs_decompose.fidelity.tokenizer import load_encoder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    made = {"plain": make_tokenizer(bos=False), "bos": make_tokenizer(bos=True)}
    made["both"] = make_tokenizer(bos=False)
    made["both"].backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made["eos"] = make_tokenizer(bos=False)
    made["eos"].backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    made["nameless"] = make_tokenizer(bos=False)
    made["nameless"].bos_token = None
    for name, tokenizer in made.items():
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in made}


@pytest.mark.parametrize(("name", "prefix"), [("plain", ()), ("bos", (1,)), ("both", (1,)), ("eos", ())])
def test_auto_is_what_the_tokenizer_adds_by_itself(
    folders: dict[str, Path], name: str, prefix: tuple[int, ...]
) -> None:
    encoder = load_encoder(folders[name], "auto")
    assert encoder.prefix == prefix
    assert encoder.bos == ("<s>" if prefix else "none")


@pytest.mark.parametrize("name", ["plain", "bos", "both", "eos"])
def test_on_and_off_overrule_the_tokenizer(folders: dict[str, Path], name: str) -> None:
    assert load_encoder(folders[name], "on").prefix == (1,)
    assert load_encoder(folders[name], "off").prefix == ()


@pytest.mark.parametrize("name", ["plain", "bos", "both", "eos"])
def test_text_is_encoded_without_special_tokens(folders: dict[str, Path], name: str) -> None:
    ids = load_encoder(folders[name], "auto").encode("The fox")
    assert len(ids) >= 2
    assert not {1, 2} & set(ids)
    assert ids == load_encoder(folders["plain"], "auto").encode("The fox")


def test_a_bos_that_the_text_spells_out_is_not_doubled(folders: dict[str, Path]) -> None:
    with_bos, without = load_encoder(folders["bos"], "auto"), load_encoder(folders["plain"], "auto")
    assert with_bos.encode("<s>The fox")[0] != 1
    assert without.encode("<s>The fox")[0] == 1


def test_on_needs_a_bos_token(folders: dict[str, Path]) -> None:
    assert load_encoder(folders["nameless"], "auto").prefix == ()
    with pytest.raises(UsageError, match="expected a BOS token"):
        load_encoder(folders["nameless"], "on")


def test_long_text_brings_no_noise(folders: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    encoder = load_encoder(folders["bos"], "auto")
    encoder.tokenizer.model_max_length = 8
    encoder.encode("The quick brown fox " * 50)
    assert capfd.readouterr() == ("", "")


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="expected a checkpoint folder"):
        load_encoder(tmp_path / "nowhere", "auto")
    with pytest.raises(SourceIncompatible, match="expected a tokenizer"):
        load_encoder(tmp_path, "auto")


def test_a_broken_tokenizer_file(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["plain"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("<html>")
    with pytest.raises(SourceIncompatible, match="expected a tokenizer"):
        load_encoder(tmp_path, "auto")
