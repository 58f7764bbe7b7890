"""Train the family that `mfs demo` takes apart: one base and three fine-tunes of it, from the texts in eval/corpora.

    python benchmarks/make_demo_family.py [--out DIR] [--only base code math chat]

Writes, as transformers writes them (bf16 safetensors, tied embeddings, tokenizer, generation config):

  base   a Llama-style model of 0.4 M weights, trained from nothing on word problems in prose and on Python functions
  code   full fine-tune on Python functions with their tests
  math   LoRA r=8 alpha=16 on all linear layers (PEFT), on worked solutions; merged in fp32, saved in bf16
  chat   full fine-tune on dialogues, with 2 added tokens (two more vocabulary rows) and its own chat template

About ten minutes, on one thread: on a machine with other work two were ten times slower.
Seeds are fixed, so the same machine and versions give the same files; another machine gives another family of the same
quality. Prints the losses and, for each variant, what demo_training.report says of text that nothing was trained on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from demo_training import END, ROOT, TURNS, VOCABULARY, Course, make_tokenizer, report, train
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

DATA = ROOT / "mfs_decompose" / "demo" / "data"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

BASE = Course("base", steps=1000, lr=4e-3, seed=11, decay=0.1)
CODE = Course("code", steps=100, lr=1.2e-4, seed=12)
MATH = Course("math", steps=60, lr=2e-4, seed=13)
CHAT = Course("chat", steps=100, lr=1e-4, seed=14)


def make_base(tokenizer: Any) -> Any:
    end = tokenizer.convert_tokens_to_ids(END)
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.04,
        **ids,
    )
    torch.manual_seed(BASE.seed)
    model = LlamaForCausalLM(config)
    generation: Any = GenerationConfig
    model.generation_config = generation(**ids)
    train(model, tokenizer, BASE)
    return model


def tune_fully(base: Path, tokenizer: Any, course: Course) -> Any:
    model = load(base)
    if len(tokenizer) > model.config.vocab_size:
        grow(model, tokenizer, course.seed)
    train(model, tokenizer, course)
    return model


def grow(model: Any, tokenizer: Any, seed: int) -> None:
    """Add the rows of the added tokens, near the mean row, and let generation stop at the end of a turn."""
    old = model.config.vocab_size
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    torch.manual_seed(seed)
    with torch.no_grad():
        rows_VI = model.get_input_embeddings().weight
        rows_VI[old:] = rows_VI[:old].mean(dim=0) + 0.02 * torch.randn(len(tokenizer) - old, rows_VI.shape[1])
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(TURNS[1])]


def tune_by_lora(base: Path, tokenizer: Any, course: Course) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(course.seed)
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=LINEARS, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(load(base), config)
    train(adapted, tokenizer, course)
    return adapted.merge_and_unload()


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the checkpoint, without anything that tells where it was made."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        fields = json.loads((folder / name).read_text(encoding="utf-8"))
        for key in ("_name_or_path", "name_or_path", "is_local", "local_files_only"):
            fields.pop(key, None)
        (folder / name).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def make_variant(out: Path, course: Course, tune: Callable[[Path, Any, Course], Any]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(out / "base")
    before = load(out / "base")
    if course.name == "chat":
        tokenizer.add_tokens([AddedToken(turn, special=True, normalized=False) for turn in TURNS], special_tokens=True)
        tokenizer.chat_template = CHAT_TEMPLATE
        grow(before, tokenizer, course.seed)
    save(tune(out / "base", tokenizer, course), tokenizer, out / course.name)
    report(before, load(out / course.name), tokenizer, course.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--only", nargs="+", default=["base", "code", "math", "chat"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "base" in args.only:
        tokenizer = make_tokenizer()
        save(make_base(tokenizer), tokenizer, args.out / "base")
        base = load(args.out / "base")
        for name in ("code", "math"):
            report(base, base, tokenizer, name)
    for course, tune in ((CODE, tune_fully), (MATH, tune_by_lora), (CHAT, tune_fully)):
        if course.name in args.only:
            make_variant(args.out, course, tune)


if __name__ == "__main__":
    main()
