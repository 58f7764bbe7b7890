"""Every error a user can meet, each with its exit code.

    MfsError                    1   a bug (anything that is not a subclass below)
    ├── UsageError              2   the command line asks for something impossible
    ├── RecipeError            10   a recipe file is wrong
    ├── SourceNotFound         11   a checkpoint, or a part of it, is not there
    ├── SourceIncompatible     12   the checkpoints do not fit together, or are unsafe to read
    ├── ResourceShortage       13   not enough disk or memory
    ├── OutputBusy             14   the output exists, is an input, or is locked
    ├── ResumeRefused          15   an unfinished run was made from something else
    ├── ArtifactInvalid        20   an artifact is damaged or not one we can read
    ├── GateFailed             21   a drift that was asked for is not kept
    ├── DifferencesFound       23   two things that were compared differ
    ├── NetworkFailure         30   the Hub cannot be reached, or does not serve what it lists
    └── Interrupted           130   stopped by the user; the same command resumes

A message says what was expected and what was found; the hint says what to type next.
"""

from __future__ import annotations

from typing import ClassVar


class MfsError(Exception):
    """An error with a one-sentence message for the user and an exit code for scripts."""

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[MfsError], message: str, hint: str | None) -> MfsError:
    return kind(message, hint=hint)


class UsageError(MfsError):
    exit_code = 2
    code = "usage"


class RecipeError(MfsError):
    exit_code = 10
    code = "recipe"


class SourceNotFound(MfsError):
    exit_code = 11
    code = "source-not-found"


class SourceIncompatible(MfsError):
    exit_code = 12
    code = "source-incompatible"


class ResourceShortage(MfsError):
    exit_code = 13
    code = "resource-shortage"


class OutputBusy(MfsError):
    exit_code = 14
    code = "output-busy"


class ResumeRefused(MfsError):
    exit_code = 15
    code = "resume-refused"


class ArtifactInvalid(MfsError):
    exit_code = 20
    code = "artifact-invalid"


class GateFailed(MfsError):
    exit_code = 21
    code = "gate-failed"


class DifferencesFound(MfsError):
    exit_code = 23
    code = "differences-found"


class NetworkFailure(MfsError):
    exit_code = 30
    code = "network"


class Interrupted(MfsError):
    exit_code = 130
    code = "interrupted"
