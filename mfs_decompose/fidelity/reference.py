"""A saved reference: what an original answered, whole, so that drift can be measured when the original is gone.

The file holds the original's logits at every scored token, in the dtype they were computed in. Nothing less gives the
KL of an unknown other model; with them every figure is the same, to the bit, as beside the original itself. It is a
safetensors file with, for each text in order, the noise floor, the logits `[T, V]` and a sha256 over both; what they
are of stands in its metadata, with a digest of its own (docs/decisions/0006-saved-references.md).
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from mfs_decompose.artifact.canonical import digest_of, load_strict
from mfs_decompose.artifact.shard import Entry, ShardPlan, write_shard
from mfs_decompose.artifact.values import row_bytes
from mfs_decompose.errors import ArtifactInvalid, MfsError, ResourceShortage, SourceNotFound
from mfs_decompose.events import NullSink, ProgressSink
from mfs_decompose.fidelity.model import LoadedModel, predict_windows
from mfs_decompose.fidelity.noise import NoiseFloor, measure_noise
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.fidelity.windows import TokenizedCorpus, Window, batches
from mfs_decompose.provenance import free_disk
from mfs_decompose.units import format_bytes

SCHEMA: Final = "mfs.reference/1"
_KEY: Final = "mfs.reference"
_MAX_ABOUT: Final = 16 * 2**20
_DTYPES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_NOISE: Final = struct.Struct("<dd")
_AGAIN: Final = "save the reference again beside the original"


def write_reference(
    path: Path,
    model: LoadedModel,
    texts: Sequence[TokenizedCorpus],
    settings: EvalSettings,
    about: Mapping[str, Any],
    progress: ProgressSink,
) -> int:
    """Run an original over texts and keep its logits.

    Args:
        about: what the reference is of, plain JSON; `StoredReference.about` gives it back.

    Returns:
        Bytes of the file.

    Raises:
        ResourceShortage: the disk has not that much room; said before anything is computed.
    """
    described = {
        "schema": SCHEMA,
        "about": dict(about),
        "vocabulary": model.vocabulary,
        "max_positions": model.max_positions,
        "texts": [{"name": text.name, "windows": windows_digest(text), "tokens": text.tokens} for text in texts],
    }
    described["digest"] = digest_of(described)
    # One answer says how wide logits are: a head may have more rows than there are tokens to ask for.
    (sample_TV,) = predict_windows(model, texts[0].windows[:1])
    entries: list[Entry] = []
    for number, text in enumerate(texts):
        shape = (text.tokens, sample_TV.shape[1])
        entries += [
            Entry.of_bytes(f"{number}.noise", _NOISE.size),
            Entry(f"{number}.logits", _DTYPES[sample_TV.dtype], shape, math.prod(shape) * sample_TV.itemsize),
            Entry.of_bytes(f"{number}.sha256", 32),
        ]
    metadata = {_KEY: json.dumps(described, sort_keys=True)}
    size = ShardPlan(tuple(entries), metadata).size
    if size > free_disk(path.parent):
        raise ResourceShortage(
            f"the reference needs {format_bytes(size)} of disk, and {format_bytes(free_disk(path.parent))} is free",
            hint="measure fewer tokens: it holds a logit for each scored token and each token of the vocabulary",
        )
    progress.note(f"the reference takes {format_bytes(size)}: {path}")
    progress.start("save the reference", sum(entry.nbytes for entry in entries))
    write_shard(path, entries, _saved_bytes(model, texts, settings), metadata, progress=progress)
    progress.finish()
    return size


class StoredReference:
    """An original's answers, read back in place of the original.

    Attributes:
        about: what `write_reference` was told.
        vocabulary, max_positions: as of a `LoadedModel`.
    """

    def __init__(self, path: Path, described: Mapping[str, Any], texts: Mapping[str, _StoredText]) -> None:
        self.path = path
        self.about: Mapping[str, Any] = described["about"]
        self.vocabulary = int(described["vocabulary"])
        positions = described["max_positions"]
        self.max_positions = None if positions is None else int(positions)
        self._texts = texts

    @classmethod
    def open(cls, path: Path) -> StoredReference:
        """Read what a file is a reference of.

        Raises:
            SourceNotFound: there is no such file.
            ArtifactInvalid: it is no reference, or a damaged one.
        """
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            raise SourceNotFound(f"expected a saved reference at {path}, found none", hint="check the path")
        try:
            with safe_open(path, framework="pt") as file:
                described = load_strict((file.metadata() or {})[_KEY].encode(), "a reference", _MAX_ABOUT)
                if described["schema"] != SCHEMA or described["digest"] != digest_of(described):
                    raise ArtifactInvalid("another schema or digest")
                texts = {
                    text["name"]: _StoredText(path, number, text["windows"], text["tokens"])
                    for number, text in enumerate(described["texts"])
                }
                return cls(path, described, texts)
        except (SafetensorError, MfsError, KeyError, TypeError, ValueError) as error:
            raise _damaged(path) from error

    def lacks(self, text: TokenizedCorpus) -> bool:
        """Whether it holds no answers to exactly these windows."""
        stored = self._texts.get(text.name)
        return stored is None or stored.windows != windows_digest(text)

    def noise(self, text: str) -> NoiseFloor:
        """The original's noise floor on a text."""
        return self._texts[text].noise()

    def answers(self, text: str, batched: Iterable[Sequence[Window]], device: str) -> Iterator[list[torch.Tensor]]:
        """The logits of each batch of a text, one `[T, V]` a window.

        Raises:
            ArtifactInvalid: at the end, if they are not what was saved: use nothing before that.
        """
        return self._texts[text].answers(batched, device)


@dataclass(frozen=True)
class _StoredText:
    path: Path
    number: int
    windows: str
    tokens: int

    def noise(self) -> NoiseFloor:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            return _unpack_noise(self._bytes(file, "noise"))

    def answers(self, batched: Iterable[Sequence[Window]], device: str) -> Iterator[list[torch.Tensor]]:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            digest = hashlib.sha256(self._bytes(file, "noise"))
            logits = file.get_slice(f"{self.number}.logits")
            done = 0
            for batch in batched:
                found = []
                for window in batch:
                    rows_TV: torch.Tensor = logits[done : done + len(window.targets)]
                    digest.update(row_bytes(rows_TV))
                    found.append(rows_TV.to(device))
                    done += len(window.targets)
                yield found
            if done != self.tokens or digest.digest() != self._bytes(file, "sha256"):
                raise _damaged(self.path)

    def _bytes(self, file: Any, what: str) -> bytes:
        return bytes(file.get_tensor(f"{self.number}.{what}").numpy())


def windows_digest(text: TokenizedCorpus) -> str:
    """sha256 over the token ids of every window, shown and scored."""
    digest = hashlib.sha256()
    for window in text.windows:
        for ids in (window.inputs, window.targets):
            digest.update(struct.pack(f"<q{len(ids)}q", len(ids), *ids))
    return digest.hexdigest()


def _saved_bytes(model: LoadedModel, texts: Sequence[TokenizedCorpus], settings: EvalSettings) -> Iterator[memoryview]:
    for text in texts:
        noise = _pack_noise(measure_noise(model, text, settings, NullSink()))
        digest = hashlib.sha256(noise)
        yield memoryview(noise)
        for batch in batches(text.windows, settings.batch_size):
            for logits_TV in predict_windows(model, batch):
                data = row_bytes(logits_TV.cpu())
                digest.update(data)
                yield data
        yield memoryview(digest.digest())


def _pack_noise(noise: NoiseFloor) -> bytes:
    return _NOISE.pack(*(math.nan if figure is None else figure for figure in (noise.kl, noise.ln_ppl)))


def _unpack_noise(data: bytes) -> NoiseFloor:
    return NoiseFloor(*(None if math.isnan(figure) else figure for figure in _NOISE.unpack(data)))


def _damaged(path: Path) -> ArtifactInvalid:
    return ArtifactInvalid(f"{path} is no saved reference, or a damaged one", hint=_AGAIN)
