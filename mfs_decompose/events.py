"""What long work says about itself. Lower floors emit; only the command line renders."""

from __future__ import annotations

from typing import Literal, Protocol

Level = Literal["info", "warning"]


class ProgressSink(Protocol):
    """Receives progress from any thread; implementations lock for themselves."""

    def start(self, stage: str, total_bytes: int | None) -> None:
        """A stage begins; `total_bytes` is None where the amount is not known."""

    def advance(self, nbytes: int) -> None:
        """`nbytes` more of the current stage are done."""

    def finish(self) -> None:
        """The current stage is done."""

    def note(self, message: str, level: Level = "info") -> None:
        """One sentence for the user."""


class NullSink:
    """Says nothing: the default of the Python API."""

    def start(self, stage: str, total_bytes: int | None) -> None:
        return None

    def advance(self, nbytes: int) -> None:
        return None

    def finish(self) -> None:
        return None

    def note(self, message: str, level: Level = "info") -> None:
        return None
