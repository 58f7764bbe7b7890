"""What `verify` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["quick", "checksums", "values"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: in which file of the artifact, for which tensor if that is known, and what."""

    file: str
    tensor: str | None
    what: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """`checked_bytes` counts the bytes that were read and hashed; `problems` are sorted by file and tensor."""

    ok: bool
    level: Level
    checked_bytes: int
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        """As `mfs verify --json` prints it."""
        return {
            "ok": self.ok,
            "level": self.level,
            "checked_bytes": self.checked_bytes,
            "problems": [
                {"file": problem.file, "tensor": problem.tensor, "what": problem.what} for problem in self.problems
            ],
        }
