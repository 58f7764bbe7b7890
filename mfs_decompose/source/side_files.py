"""The files beside a model's weights: config, tokenizer, templates. Read on demand, within limits, never trusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from mfs_decompose.source.checkpoint import CONFIG, MAX_CONFIG_BYTES, Checkpoint, read_sidecar
from mfs_decompose.source.folder import MAX_SIDECAR_BYTES

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Parsed:
    """A file read as a JSON object: None where there is no such file, or where `problem` says what is wrong with it."""

    value: dict[str, object] | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class SideFiles:
    """Files by name: `sizes` in bytes, how to read one, and the sha256 of those whose digest is on record."""

    sizes: Mapping[str, int]
    read: Callable[[str], bytes]
    digests: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.sizes

    def digest(self, name: str) -> str:
        """sha256 of a file that is there."""
        return self.digests.get(name) or sha256(self.read(name)).hexdigest()

    def text(self, name: str) -> tuple[str | None, str | None]:
        """A file as text: (text, None), (None, what is wrong with it), or (None, None) where it is absent."""
        if name not in self.sizes:
            return None, None
        if self.sizes[name] > MAX_SIDECAR_BYTES:
            return None, _too_large(self.sizes[name], MAX_SIDECAR_BYTES)
        try:
            return self.read(name).decode("utf-8"), None
        except UnicodeDecodeError:
            return None, "it is not UTF-8"

    def parse(self, name: str) -> Parsed:
        """A file as a JSON object. Infinity and doubled keys are let pass: published configs have both."""
        if name not in self.sizes:
            return Parsed(None)
        limit = MAX_CONFIG_BYTES if name in (CONFIG, GENERATION_CONFIG) else MAX_SIDECAR_BYTES
        if self.sizes[name] > limit:
            return Parsed(None, _too_large(self.sizes[name], limit))
        try:
            value = json.loads(self.read(name))
        except RecursionError:
            return Parsed(None, "it is nested too deeply")
        except UnicodeDecodeError:
            return Parsed(None, "it is not UTF-8")
        except json.JSONDecodeError as error:
            return Parsed(None, f"it is not JSON ({error.msg} at character {error.pos})")
        except ValueError:  # an integer of more digits than Python reads
            return Parsed(None, "it holds a number that is too long")
        if not isinstance(value, dict):
            return Parsed(None, f"expected a JSON object, found {type(value).__name__}")
        return Parsed(value)


NO_FILES = SideFiles({}, lambda name: b"")


def files_of_checkpoint(checkpoint: Checkpoint) -> SideFiles:
    """The side files of a checkpoint; one that changes while it is read raises SourceIncompatible."""
    by_name = {sidecar.name: sidecar for sidecar in checkpoint.sidecars}
    sizes = {name: sidecar.size for name, sidecar in by_name.items()}
    return SideFiles(sizes, lambda name: read_sidecar(checkpoint, by_name[name]))


def _too_large(size: int, limit: int) -> str:
    return f"it has {size} bytes, and at most {limit} are read"
