"""B52: a fine-tune ships its own tokenizer with three more tokens, and the base's is used for it.

Tokenizer, special tokens and chat template belong to the variant: stored with it, restored with it byte for byte, and
`mfs diff` names every token, role and line of the template that is not the base's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import fine_tune, make_llama
from report_program import succeeded

NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, and `tools` with three more tokens, another pad token and another chat template; `plain` has neither."""
    root = tmp_path_factory.mktemp("b52")
    base = make_llama(root / "base", seed=52)
    tools = fine_tune(base, root / "tools", seed=53, kind="vocab", extra_rows=3)
    settings = json.loads((tools / "tokenizer_config.json").read_text())
    (tools / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<|extra_2|>"}))
    template = (tools / "chat_template.jinja").read_text()
    (tools / "chat_template.jinja").write_text(template.replace("<|end|>", "<|extra_0|>"))
    return {"base": base, "tools": tools, "plain": fine_tune(base, root / "plain", seed=54)}


@pytest.fixture(scope="module")
def art(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("b52-art") / "art"
    refs = [f"{id}={folders[id]}" for id in ("tools", "plain")]
    succeeded("decompose", "--base", folders["base"], "--variants", *refs, "--budget", "30%", "--out", out)
    return out


def test_diff_names_every_token_and_role(folders: dict[str, Path], art: Path) -> None:
    for other in (folders["tools"], f"{art}::tools"):
        words = succeeded("diff", folders["base"], other, "--json").document["tokenizer"]
        assert words["vocabulary"]["only_b_first"] == [["<|extra_0|>", 257], ["<|extra_1|>", 258], ["<|extra_2|>", 259]]
        assert (words["vocabulary"]["only_a"], words["vocabulary"]["moved"], words["equal"]) == (0, 0, False)
        assert [(one["key"], one["a"], one["b"]) for one in words["special"]] == [("pad_token", None, "<|extra_2|>")]
        (template,) = words["templates"]
        assert [line[0] for line in template["diff"]] == list("-+@-+")
        assert "<|extra_0|>" in template["diff"][-1]
    same = succeeded("diff", f"{art}::base", f"{art}::plain", "--json").document["tokenizer"]
    assert same["equal"] is True


def test_each_variant_is_restored_with_its_own(folders: dict[str, Path], art: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for id in ("tools", "plain"):
        succeeded("restore", art, "--variant", id, "--out", tmp_path / id)
        for name in NAMES:
            assert (tmp_path / id / name).read_bytes() == (folders[id] / name).read_bytes()
    words = {id: AutoTokenizer.from_pretrained(tmp_path / id) for id in ("tools", "plain")}
    assert (len(words["tools"]), len(words["plain"])) == (260, 257)
    assert words["tools"].encode("<|extra_1|>") == [258]
    assert len(words["plain"].encode("<|extra_1|>")) > 1


def test_the_restored_variant_differs_in_weights_alone(folders: dict[str, Path], art: Path, tmp_path: Path) -> None:
    succeeded("restore", art, "--variant", "tools", "--out", tmp_path / "tools")
    document = succeeded("diff", folders["tools"], tmp_path / "tools", "--json").document
    assert (document["tokenizer"]["equal"], document["files"], document["config"]["changes"]) == (True, [], [])
