"""Tiny checkpoints for the tests: real Llama folders, fine-tunes of them, and folders of any tensors at all.

Sizes avoid coincidences: no square projection, odd vocabularies, fewer key-value heads than heads.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

Kind = Literal["low_rank", "dense", "norms", "vocab"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"
CHAT_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"


@dataclass(frozen=True)
class Family:
    """Folders that tests read and never write."""

    base: Path
    variants: dict[str, Path]


def make_family(root: Path, *, tie: bool) -> Family:
    """A base, a low-rank variant in two shards, a dense one, and one with two more tokens."""
    base = make_llama(root / "base", seed=1, tie=tie)
    return Family(
        base,
        {
            "math": fine_tune(base, root / "math", seed=2, shards=2),
            "code": fine_tune(base, root / "code", seed=3, kind="dense", scale=0.02),
            "vocab": fine_tune(base, root / "vocab", seed=4, kind="vocab"),
        },
    )


def make_llama(
    folder: Path,
    *,
    seed: int,
    hidden: int = 64,
    inter: int = 96,
    layers: int = 2,
    vocab: int = 257,
    tie: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
) -> Path:
    """A randomly drawn LlamaForCausalLM with a byte-level tokenizer, as save_pretrained writes them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4 - 2,
        max_position_embeddings=128,
        tie_word_embeddings=tie,
        bos_token_id=256,
        eos_token_id=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # norms of ones would hide a lost norm
                weight.add_(0.1 * _noise(name, weight.shape, seed).to(dtype))
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    if shards > 1:
        _save_weights(folder, load_file(folder / "model.safetensors"), shards)
    return folder


def fine_tune(
    base: Path,
    folder: Path,
    *,
    seed: int,
    kind: Kind = "low_rank",
    scale: float = 0.05,
    extra_rows: int = 2,
    tie: bool | None = None,
    shards: int = 1,
) -> Path:
    """A variant of `base`, changed in fp32 and saved in bf16, with files of its own beside the weights.

    `low_rank` moves every matrix by rank 3 plus a little noise, `dense` by noise alone, `norms` only the norms, and
    `vocab` is `low_rank` with `extra_rows` new tokens. `scale` is the size of the change relative to the weights.
    `tie` None keeps the base's way; False gives a head of its own to a tied base, True takes the head away.
    """
    weights = {name: weight.float() for name, weight in read_weights(base).items()}
    if tie is False and HEAD not in weights:
        weights[HEAD] = weights[EMBEDDING].clone()
    if tie is True:
        weights.pop(HEAD, None)
    weights = {name: weight + scale * _change(name, weight, seed, kind) for name, weight in weights.items()}
    folder.mkdir(parents=True)
    for file in base.iterdir():
        if file.suffix != ".safetensors" and file.name != INDEX:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    if tie is not None:
        config["tie_word_embeddings"] = tie
    if kind == "vocab":
        config["vocab_size"] += extra_rows
        for name in {EMBEDDING, HEAD} & weights.keys():
            rows = 0.02 * _noise(name + " rows", (extra_rows, weights[name].shape[1]), seed)
            weights[name] = torch.cat([weights[name], rows])
        _add_tokens(folder, extra_rows)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": [256], "max_new_tokens": 3 + seed % 40}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
    _save_weights(folder, {name: weight.to(torch.bfloat16) for name, weight in weights.items()}, shards)
    return folder


def random_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """A folder that holds just these tensors in model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors", dict(metadata) if metadata is not None else None)
    return folder


def shard_bytes(header: Mapping[str, object] | str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header at all, right or wrong; `length` overrides the first eight bytes."""
    if isinstance(header, Mapping):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogatepass")
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, by the safetensors library: the oracle for our reader."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def _noise(name: str, shape: tuple[int, ...] | torch.Size, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator)


def _change(name: str, weight: torch.Tensor, seed: int, kind: Kind) -> torch.Tensor:
    size = weight.std() if weight.dim() >= 2 else weight.new_tensor(0.1)
    noise = _noise(name, weight.shape, seed)
    if kind == "norms":
        return noise * size if weight.dim() == 1 else torch.zeros_like(weight)
    if kind == "dense" or weight.dim() != 2:
        return noise * size
    left = _noise(name + " left", (weight.shape[0], 3), seed)
    right = _noise(name + " right", (3, weight.shape[1]), seed)
    return size * (left @ right / 3**0.5 + 0.02 * noise)


def _save_weights(folder: Path, weights: Mapping[str, torch.Tensor], shards: int) -> None:
    """One model.safetensors, or `shards` numbered files of about as many tensors each, with their index."""
    for old in (*folder.glob("*.safetensors"), *folder.glob(INDEX)):
        old.unlink()
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(weights.items())[number::shards])
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>")  # type: ignore[no-untyped-call]
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _add_tokens(folder: Path, count: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<|extra_{number}|>" for number in range(count)])
    tokenizer.save_pretrained(folder)
