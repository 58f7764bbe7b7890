"""Write a sharded family of any size, a few megabytes at a time: bf16 Llama-shaped checkpoints with untied heads.

Base weights are normal with deviation 0.02. A variant adds a rank-8 delta to every matrix, with the deviation given by
`DELTA`, about one step of bf16 at a typical weight, so that rounding leaves the noise it leaves in a real fine-tune.
All checkpoints are written side by side, so each base value is drawn once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

SPREAD = 0.02
DELTA = 1e-4
DELTA_RANK = 8
BLOCK_VALUES = 4 * 2**20

Floats = npt.NDArray[np.float32]
Entry = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Size:
    """The numbers that fix every shape of a checkpoint."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
        }

    def tensors(self) -> Iterator[Entry]:
        hidden, inner, narrow = self.hidden, self.intermediate, self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocabulary, hidden)
        for layer in range(self.layers):
            stem = f"model.layers.{layer}."
            yield stem + "input_layernorm.weight", (hidden,)
            yield stem + "self_attn.q_proj.weight", (hidden, hidden)
            yield stem + "self_attn.k_proj.weight", (narrow, hidden)
            yield stem + "self_attn.v_proj.weight", (narrow, hidden)
            yield stem + "self_attn.o_proj.weight", (hidden, hidden)
            yield stem + "post_attention_layernorm.weight", (hidden,)
            yield stem + "mlp.gate_proj.weight", (inner, hidden)
            yield stem + "mlp.up_proj.weight", (inner, hidden)
            yield stem + "mlp.down_proj.weight", (hidden, inner)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocabulary, hidden)


def nbytes(entry: Entry) -> int:
    return 2 * int(np.prod(entry[1]))


def shards(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """Cut the tensors, in order, into files of at most `limit` bytes, or of one tensor."""
    cut: list[list[Entry]] = []
    room = 0
    for entry in entries:
        size = nbytes(entry)
        if size > room:
            cut.append([])
            room = limit
        cut[-1].append(entry)
        room -= size
    return cut


def write_family(out: Path, size: Size, variants: int, shard_bytes: int, seed: int = 0) -> int:
    """Write `out/base` and `out/v1` ... `out/v<variants>`; returns the tensor bytes of one checkpoint."""
    entries = list(size.tensors())
    cut = shards(entries, shard_bytes)
    folders = [out / "base", *(out / f"v{number}" for number in range(1, variants + 1))]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(size.config(), indent=2) + "\n")
        _write_index(folder, cut)
    number = {name: index for index, (name, _) in enumerate(entries)}
    for part, inside in enumerate(cut):
        with ExitStack() as stack:
            files = [stack.enter_context(open(folder / _shard_name(part, len(cut)), "wb")) for folder in folders]
            for file in files:
                file.write(_header(inside))
            for name, shape in inside:
                _write_tensor(files, shape, (seed, number[name]))
    return sum(map(nbytes, entries))


def _write_tensor(files: Sequence[IO[bytes]], shape: tuple[int, ...], key: tuple[int, int]) -> None:
    """Append one tensor to each file: the base first, then the variants."""
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    count = len(files) - 1
    draw = np.random.default_rng([*key, 0])
    gain = np.float32(DELTA / np.sqrt(DELTA_RANK))
    left: list[Floats] = [draw.standard_normal((rows, DELTA_RANK), dtype=np.float32) * gain for _ in range(count)]
    right: list[Floats] = [draw.standard_normal((DELTA_RANK, columns), dtype=np.float32) for _ in range(count)]
    step = max(1, BLOCK_VALUES // columns)
    for block, start in enumerate(range(0, rows, step)):
        stop = min(start + step, rows)
        drawn = np.random.Generator(np.random.SFC64([*key, block + 1]))
        base = drawn.standard_normal((stop - start, columns), dtype=np.float32) * np.float32(SPREAD)
        if len(shape) == 1:
            base += np.float32(1)
        bits = to_bf16(base)
        files[0].write(bits.tobytes())
        stored = (bits.astype(np.uint32) << 16).view(np.float32)
        for file, left_OR, right_RI in zip(files[1:], left, right, strict=True):
            file.write(to_bf16(stored + left_OR[start:stop] @ right_RI).tobytes())


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """Round finite fp32 values to the nearest bf16, ties to even, as bit patterns."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _header(entries: Sequence[Entry]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + nbytes(entry)
        fields[entry[0]] = {"dtype": "BF16", "shape": list(entry[1]), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shard_name(part: int, parts: int) -> str:
    return f"model-{part + 1:05d}-of-{parts:05d}.safetensors"


def _write_index(folder: Path, cut: Sequence[Sequence[Entry]]) -> None:
    names = {name: _shard_name(part, len(cut)) for part, inside in enumerate(cut) for name, _ in inside}
    total = sum(nbytes(entry) for inside in cut for entry in inside)
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
