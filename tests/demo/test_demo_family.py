"""The embedded family is what `mfs demo` says it is: small, real, licensed, and judged on text it has not seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "mfs_decompose" / "demo" / "data"
CORPORA = ROOT / "eval" / "corpora"
VARIANTS = ("code", "math", "chat")
MEMBERS = ("base", *VARIANTS)
HIDDEN, INNER, NARROW, LAYERS = 96, 256, 48, 3


pytestmark = pytest.mark.usefixtures("one_thread")


def load(member: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(DATA / member, dtype=torch.float32)
    return model.eval()


def tensors(member: str) -> dict[str, torch.Tensor]:
    with safe_open(DATA / member / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def held_out(variant: str) -> list[str]:
    lines = (DATA / "text" / f"{variant}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def rows_of(member: str) -> int:
    return 1026 if member == "chat" else 1024


def test_the_package_data_is_small() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) <= 3_600_000


def test_the_data_holds_the_family_and_nothing_else() -> None:
    assert {path.name for path in DATA.iterdir()} == {*MEMBERS, "text", "LICENSE"}
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for member in MEMBERS:
        expected = files | ({"chat_template.jinja"} if member == "chat" else set())
        assert {path.name for path in (DATA / member).iterdir()} == expected


def test_nothing_tells_where_the_family_was_made() -> None:
    for member in MEMBERS:
        for path in (DATA / member).glob("*.json"):
            text = path.read_text(encoding="utf-8")
            assert "name_or_path" not in text, path
            assert str(ROOT) not in text and "/tmp/" not in text, path
        with safe_open(DATA / member / "model.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("member", MEMBERS)
def test_stored_tensors_are_bf16_of_the_expected_shapes(member: str) -> None:
    stored = tensors(member)
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (rows_of(member), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            expected[f"{stem}{norm}.weight"] = (HIDDEN,)
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", NARROW, HIDDEN),
            ("self_attn.v_proj", NARROW, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            expected[f"{stem}{name}.weight"] = (rows, columns)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in stored.values())


@pytest.mark.parametrize("member", MEMBERS)
def test_each_member_loads_with_its_tokenizer(member: str) -> None:
    model, tokenizer = load(member), AutoTokenizer.from_pretrained(DATA / member)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.vocab_size == len(tokenizer) == rows_of(member)
    ids = tokenizer("Tom has 3 apples.\n    return x", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "Tom has 3 apples.\n    return x"
    with torch.no_grad():
        written = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert written.shape[1] > ids.shape[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_matrix_of_a_variant_moved(variant: str) -> None:
    base, tuned = tensors("base"), tensors(variant)
    for name, before in base.items():
        if before.dim() == 2 and not (variant == "math" and "embed" in name):
            assert not torch.equal(tuned[name][: len(before)], before), name


def test_the_merged_lora_is_rank_8_under_its_rounding() -> None:
    base, tuned = tensors("base"), tensors("math")
    assert torch.equal(base["model.embed_tokens.weight"], tuned["model.embed_tokens.weight"])
    for name, before in base.items():
        if before.dim() == 1:
            assert torch.equal(before, tuned[name]), name
        elif "embed" not in name:
            energies = torch.linalg.svdvals(tuned[name].double() - before.double()) ** 2
            assert float(energies[:8].sum() / energies.sum()) > 0.9, name
            assert int((energies > 0).sum()) > 8, name


def test_chat_adds_two_tokens_a_template_and_a_stop_id() -> None:
    tokenizer, before = AutoTokenizer.from_pretrained(DATA / "chat"), AutoTokenizer.from_pretrained(DATA / "base")
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1024, 1025]
    assert len(before("<|im_start|>")["input_ids"]) > 1
    assert before.chat_template is None
    assert load("chat").generation_config.eos_token_id == [0, 1025]
    assert load("base").generation_config.eos_token_id == 0
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Four."}]
    text = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
    assert tokenizer.apply_chat_template(turns, tokenize=False) == text
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"


def test_held_out_chat_is_what_the_template_renders() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DATA / "chat")
    for text in held_out("chat"):
        bodies = [part.split("\n", 1)[1] for part in text.replace("<|im_end|>\n", "").split("<|im_start|>")[1:]]
        turns = [{"role": role, "content": body} for role, body in zip(("user", "assistant"), bodies, strict=True)]
        assert tokenizer.apply_chat_template(turns, tokenize=False) == text


@torch.no_grad()
def loss_and_kl(variant: str) -> tuple[float, float, float]:
    """Nats a token on the held-out text: the variant's loss, the base's, and KL(variant || base) on common tokens."""
    tuned, base = load(variant), load("base")
    tokenizer = AutoTokenizer.from_pretrained(DATA / variant)
    sums, tokens = torch.zeros(3, dtype=torch.float64), 0
    for text in held_out(variant):
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=512)["input_ids"]
        ids = ids[:, ids[0] < 1024]
        p = tuned(ids).logits[0, :-1, :1024].double().log_softmax(-1)
        q = base(ids).logits[0, :-1].double().log_softmax(-1)
        scored = torch.arange(len(p)), ids[0, 1:]
        sums += torch.stack([-p[scored].sum(), -q[scored].sum(), (p.exp() * (p - q)).sum()])
        tokens += len(p)
    tuned_loss, base_loss, kl = (sums / tokens).tolist()
    return tuned_loss, base_loss, kl


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_learned_something_that_holds_on_unseen_text(variant: str) -> None:
    tuned_loss, base_loss, kl = loss_and_kl(variant)
    assert base_loss < 5.0, "far below ln 1024 = 6.93: the base is a language model"
    assert tuned_loss < base_loss - 0.02
    assert 0.03 < kl < 1.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_held_out_text_is_enough_to_judge_by(variant: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DATA / variant)
    lengths = [min(512, len(tokenizer(text)["input_ids"])) - 1 for text in held_out(variant)]
    assert sum(lengths) <= 8192
    assert sum(length // 64 for length in lengths) >= 50, "resampling takes runs of 64 scored tokens of one document"


def fragments(text: str) -> list[str]:
    """The lines of a document that are long enough to be its own, labels and turn marks stripped."""
    for mark in ("<|im_start|>user", "<|im_start|>assistant", "<|im_end|>", "Question: ", "Answer: "):
        text = text.replace(mark, "")
    return [line.strip() for line in text.splitlines() if len(line.strip()) >= 80]


def test_no_held_out_document_is_in_the_training_corpora() -> None:
    corpora = [
        field
        for path in CORPORA.glob("*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
        for field in json.loads(line).values()
    ]
    assert len(corpora) > 2000
    trained = "\n".join(corpora)
    for variant in VARIANTS:
        for text in held_out(variant):
            assert text not in trained
            for fragment in fragments(text):
                assert fragment not in trained, fragment


def test_the_texts_are_licensed_and_named() -> None:
    licence = (DATA / "LICENSE").read_text(encoding="utf-8")
    readme = (CORPORA / "README.md").read_text(encoding="utf-8")
    for text in (licence, readme):
        assert "Permission is hereby granted, free of charge" in text
        assert "Copyright (c) 2021 OpenAI" in text
    for path in CORPORA.glob("*.jsonl"):
        assert path.stat().st_size <= 250_000, path
        named = "prose-1.jsonl` ... `prose-4.jsonl" if path.name.startswith("prose") else path.name
        assert named in readme, path
