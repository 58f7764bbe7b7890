"""Side files out of memory, for tests of what is read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mfs_decompose.source.side_files import SideFiles


def made(files: dict[str, Any]) -> SideFiles:
    """Files by name: bytes as they are, text as UTF-8, everything else as JSON."""
    data = {name: _bytes(value) for name, value in files.items()}
    return SideFiles({name: len(one) for name, one in data.items()}, data.__getitem__)


def of_folder(folder: Path) -> SideFiles:
    """The files of a folder, weights apart."""
    return made({path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"})


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()
