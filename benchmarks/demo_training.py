"""How the demo family learns: its texts, its tokenizer, and one plain training loop (see make_demo_family.py)."""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
CORPORA = ROOT / "eval" / "corpora"
HELD_OUT = ROOT / "mfs_decompose" / "demo" / "data" / "text"

VOCABULARY = 1024
END = "<|endoftext|>"
TURNS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Course:
    """How one model is trained: `batch` sequences of `length` tokens a step, `lr` at its peak."""

    name: str
    steps: int
    lr: float
    seed: int
    decay: float = 0.0
    length: int = 512
    batch: int = 8


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


def rows(pattern: str) -> list[dict[str, str]]:
    files = sorted(CORPORA.glob(f"{pattern}.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def training_texts(name: str) -> list[str]:
    """The documents that one model of the family is trained on."""
    if name == "math":
        return [row["text"] for row in rows("math")]
    if name == "chat":
        start, end = TURNS
        return [f"{start}user\n{row['user']}{end}\n{start}assistant\n{row['assistant']}{end}\n" for row in rows("chat")]
    if name == "code":
        return [row["prompt"] + row["solution"] + row["test"] for row in rows("python")]
    functions = [row["prompt"] + row["solution"] for row in rows("python")]
    return [row["text"] for row in rows("prose-*")] + functions[::2]


def held_out_texts(name: str) -> list[str]:
    """The documents that a variant is judged on; nothing was trained on them."""
    lines = (HELD_OUT / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def make_tokenizer() -> Any:
    """A byte-level BPE of `VOCABULARY` entries, `END` among them."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([text for name in ("base", "code", "math") for text in training_texts(name)], trainer)
    assert raw.get_vocab_size() == VOCABULARY
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=raw, bos_token=END, eos_token=END, pad_token=END, model_max_length=512)


def pack(documents: list[list[int]], length: int, shuffle: random.Random) -> list[list[int]]:
    """One pass over the shuffled documents as sequences of `length` tokens; the rest is dropped."""
    order = shuffle.sample(documents, len(documents))
    ids = [token for document in order for token in document]
    return [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]


def train(model: Any, tokenizer: Any, course: Course) -> None:
    """Next-token training in fp32 on packed documents: AdamW, a short warm-up, then a cosine to a twentieth."""
    torch.manual_seed(course.seed)
    shuffle = random.Random(course.seed)
    documents = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in training_texts(course.name)]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=course.lr, betas=(0.9, 0.95), weight_decay=course.decay)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 20) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / course.steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    chunks: list[list[int]] = []
    total = 0.0
    model.train()
    for step in range(course.steps):
        if len(chunks) < course.batch:
            chunks = pack(documents, course.length, shuffle)
        batch = torch.tensor([chunks.pop() for _ in range(course.batch)])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.item()
        if (step + 1) % 50 == 0:
            say(f"{course.name} step {step + 1} of {course.steps}: loss {total / 50:.3f} (mean of 50)")
            total = 0.0
    model.eval()


@torch.no_grad()
def report(base: Any, variant: Any, tokenizer: Any, name: str) -> None:
    """Print the loss of both on the variant's held-out text, a document at a time, and KL(variant || base)."""
    nll_variant = nll_base = kl = 0.0
    tokens = 0
    for text in held_out_texts(name):
        ids = torch.tensor([tokenizer(text)["input_ids"][:512]])
        p = variant(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        q = base(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        scored = torch.arange(len(p)), ids[0, 1:]
        nll_variant -= p[scored].sum().item()
        nll_base -= q[scored].sum().item()
        kl += (p.exp() * (p - q)).sum().item()
        tokens += len(p)
    say(
        f"{name}: held-out loss {nll_variant / tokens:.3f}, the base's {nll_base / tokens:.3f}, "
        f"KL {kl / tokens:.4f} nats a token, {tokens} tokens"
    )
