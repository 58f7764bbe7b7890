"""A progress sink that keeps what it hears."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from mfs_decompose.events import Level


@dataclass
class Stage:
    name: str
    total: int | None
    done: int = 0
    finished: bool = False


@dataclass
class RecordingSink:
    stages: list[Stage] = field(default_factory=list)
    notes: list[tuple[Level, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, stage: str, total_bytes: int | None) -> None:
        self.stages.append(Stage(stage, total_bytes))

    def advance(self, nbytes: int) -> None:
        with self.lock:
            self.stages[-1].done += nbytes

    def finish(self) -> None:
        self.stages[-1].finished = True

    def note(self, message: str, level: Level = "info") -> None:
        with self.lock:
            self.notes.append((level, message))

    @property
    def warnings(self) -> list[str]:
        return [message for level, message in self.notes if level == "warning"]
