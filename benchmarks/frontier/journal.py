"""Finished cells, one JSON line each, appended as they finish: a killed run loses the cell it was at."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mfs_decompose
from benchmarks.frontier.cells import Cell
from benchmarks.frontier.treatment import AUTO, ROWS

HERE = Path(__file__).resolve().parent
PACKAGE = Path(mfs_decompose.__file__).resolve().parent
PEERS = ("groups", "lowrank", "deltacome", "impart", "sparse", "signs", "distill", "direct", "mergekit")
SHARED = ("plan", "treatment", "work", "judge", "variant")
OWN = ("codec", "linalg")
BESIDE = ("cli", "fidelity", "demo", "report", "server")
"""What changes nothing that an artifact holds."""


class Journal:
    """Cells by what they are; one counts only while all that it was made from is the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[Cell, tuple[str, dict[str, Any]]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a line that a kill cut short
            self._found[Cell(**record["cell"])] = record["fingerprint"], record["result"]

    def get(self, cell: Cell, fingerprint: str) -> dict[str, Any] | None:
        """The result of a cell, if it was made from the same."""
        print_, result = self._found.get(cell, ("", None))
        return result if print_ == fingerprint else None

    def latest(self, cell: Cell) -> dict[str, Any] | None:
        """The last result of a cell, whatever it was made from."""
        return self._found.get(cell, ("", None))[1]

    def add(self, cell: Cell, fingerprint: str, result: Mapping[str, Any]) -> None:
        self._found[cell] = fingerprint, dict(result)
        line = json.dumps({"cell": cell.record(), "fingerprint": fingerprint, "result": result})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        cut = self._path.exists() and self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut else "") + line + "\n")
            file.flush()
            os.fsync(file.fileno())


def fingerprint(cell: Cell, inputs: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """Of all that a cell is made from: checkpoints and text (`inputs`), options, and the code that does it.

    `extra` holds what only some codecs see, under their names.
    """
    parts: list[Path] = [HERE / f"{name}.py" for name in (*PEERS, *SHARED)]
    if cell.codec == AUTO:
        parts = [
            HERE / "auto.py",
            HERE / "judge.py",
            *(path for path in sorted(PACKAGE.iterdir()) if path.name not in BESIDE),
        ]
    elif cell.codec in ROWS and ROWS[cell.codec].own:
        parts += [PACKAGE / name for name in OWN]
    document = {"cell": cell.record(), "inputs": inputs, "extra": extra.get(cell.codec), "code": digest_of(parts)}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def digest_of(parts: Iterable[Path]) -> str:
    """sha256 over source files, and those of folders."""
    found = hashlib.sha256()
    for part in parts:
        for path in sorted(part.rglob("*.py")) if part.is_dir() else [part][: part.suffix == ".py"]:
            data = path.read_bytes()
            found.update(f"{path.name} {len(data)}\n".encode() + data)
    return found.hexdigest()


def digest_of_weights(folder: Path) -> str:
    """sha256 over the weight files of a checkpoint."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
