"""B51: generation never stops: the variant ends its turns with another token than the base, and the files disagree.

The stop ids of a variant are the union of what its own files name, shown by `mfs inspect` with where each came from; a
file that contradicts the first one is a warning. Restored, the files are the variant's own, and generation stops.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama, read_weights
from report_program import run, succeeded
from safetensors.torch import save_file

BASE_STOP, TURN_END = 256, 7


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base stops at 256; `chat` says [256, 7] in generation_config.json, `torn` says 7 in its tokenizer alone."""
    root = tmp_path_factory.mktemp("b51")
    base = make_llama(root / "base", seed=51, tie=False)
    found = {"base": base}
    for id in ("chat", "torn"):
        folder = found[id] = shutil.copytree(base, root / id)
        rigged = read_weights(folder)
        # The last norm's output has a positive sum for no token in particular: make the head follow its first column.
        head = torch.zeros_like(rigged["lm_head.weight"])
        rigged["model.norm.weight"] = torch.ones_like(rigged["model.norm.weight"])
        head[TURN_END] = 50 * torch.sign(rigged["model.embed_tokens.weight"][BASE_STOP].float()).to(head.dtype)
        rigged["lm_head.weight"] = head
        save_file({name: weight.contiguous() for name, weight in rigged.items()}, folder / "model.safetensors")
    generation: dict[str, Any] = {"eos_token_id": [BASE_STOP, TURN_END], "pad_token_id": 0}
    (found["chat"] / "generation_config.json").write_text(json.dumps(generation))
    (found["torn"] / "generation_config.json").write_text(json.dumps({"eos_token_id": BASE_STOP}))
    settings = json.loads((found["torn"] / "tokenizer_config.json").read_text())
    tokens = json.loads((found["torn"] / "tokenizer.json").read_text())["model"]["vocab"]
    settings["eos_token"] = next(text for text, id in tokens.items() if id == TURN_END)
    (found["torn"] / "tokenizer_config.json").write_text(json.dumps(settings))
    return found


@pytest.fixture(scope="module")
def art(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("b51-art") / "art"
    refs = [f"{id}={folders[id]}" for id in ("chat", "torn")]
    recipe = ["--codec", "lossless"]
    succeeded("decompose", "--base", folders["base"], "--variants", *refs, *recipe, "--out", out)
    return out


def test_inspect_shows_the_union_and_where_each_came_from(art: Path) -> None:
    stops = {one["id"]: one["stop_ids"] for one in succeeded("inspect", art, "--json").document["variants"]}
    assert stops["chat"]["ids"] == [BASE_STOP, TURN_END]
    assert [(one["file"], one["ids"]) for one in stops["chat"]["sources"]] == [
        ("generation_config.json", [BASE_STOP, TURN_END]),
        ("config.json", [BASE_STOP]),
        ("tokenizer_config.json", [BASE_STOP]),
    ]
    assert stops["chat"]["warnings"] == []  # a list that holds what the others name contradicts nobody
    assert stops["torn"]["ids"] == [BASE_STOP, TURN_END]


def test_files_that_contradict_each_other_are_a_warning(art: Path) -> None:
    ran = succeeded("inspect", art)
    assert ran.talk == [
        "Warning: torn: tokenizer_config.json ends at 7 ('(') and generation_config.json at 256 alone: "
        "what reads one of them runs past the other"
    ]
    assert any(line.split()[:3] == ["torn", "256,", "7"] for line in ran.out.splitlines())


def test_diff_names_both(folders: dict[str, Path], art: Path) -> None:
    ran = run("diff", folders["base"], f"{art}::chat", "--exit-code")
    assert ran.code == 23
    assert f"stop ids: {BASE_STOP} in A, {BASE_STOP}, {TURN_END} in B" in ran.out


def test_what_is_restored_stops(folders: dict[str, Path], art: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    succeeded("restore", art, "--variant", "chat", "--out", tmp_path / "chat")
    for name in ("generation_config.json", "config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (tmp_path / "chat" / name).read_bytes() == (folders["chat"] / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "chat", dtype=torch.float32)
    ids = model.generate(
        torch.tensor([[BASE_STOP]]), attention_mask=torch.ones(1, 1), max_new_tokens=9, do_sample=False
    )
    assert ids.tolist() == [[BASE_STOP, TURN_END]]
