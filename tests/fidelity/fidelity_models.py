"""Tiny real checkpoints with real tokenizers, for the tests of this folder."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_family
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.request import DecomposeRequest
from mfs_decompose.recipe.load import load_recipe

TRAINED = 129
VOCABULARY = 131  # with two added tokens, as a fine-tune for chats adds them
DOCUMENTS = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps for a long while in the warm sun.",
    "</s>",  # a single token
    "def add(a, b): return a + b  # not a poem",
    "Rivers run to the sea; the sea is not full. " * 3,
)


def make_tokenizer(*, bos: bool) -> Any:
    """BPE over printable characters with a few merges; with `bos` it puts `<s>` before a text by itself."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=list(string.printable.strip()),
        show_progress=False,
    )
    inner.train_from_iterator(DOCUMENTS, trainer)
    inner.add_tokens(["<|ask|>", "<|reply|>"])
    assert inner.get_vocab_size() == VOCABULARY
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make_model(*, seed: int = 0, vocabulary: int = VOCABULARY, tied: bool = False, positions: int = 64) -> Any:
    """A random Llama whose answers are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def perturb(model: Any, scale: float, seed: int) -> Any:
    """Move every weight in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += scale * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def save(model: Any, folder: Path, tokenizer: Any = None, *, dtype: torch.dtype = torch.float32) -> Path:
    model.to(dtype).save_pretrained(folder)
    model.to(torch.float32)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class StoredFamily:
    """An artifact, and the folders it was made from."""

    artifact: Path
    base: Path
    variants: dict[str, Path]


def store_family(root: Path, budget: str = "10%") -> StoredFamily:
    """Decompose the tests' tied family; `code` is dense noise, so a small budget leaves it far from its original."""
    family = make_family(root / "folders", tie=True)
    decompose(
        DecomposeRequest(
            variants={id: str(folder) for id, folder in family.variants.items()},
            out=root / "art",
            recipe=load_recipe("lowrank-int4", {"objective.budget": budget}),
            base=str(family.base),
            device="cpu",
            threads=1,
        )
    )
    return StoredFamily(root / "art", family.base, family.variants)


class RecordingSink:
    """Keeps what a progress sink is told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None, int]] = []
        self.notes: list[str] = []

    def start(self, stage: str, total_bytes: int | None) -> None:
        self.stages.append((stage, total_bytes, 0))

    def advance(self, nbytes: int) -> None:
        stage, total, done = self.stages[-1]
        self.stages[-1] = (stage, total, done + nbytes)

    def finish(self) -> None:
        return None

    def note(self, message: str, level: str = "info") -> None:
        self.notes.append(message)
