"""What may stand where a checkpoint is expected: a folder, or a model of the Hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mfs_decompose.errors import UsageError

_SCHEME = "hf://"
_TAKES: tuple[Literal["weights", "adapter"], ...] = ("weights", "adapter")
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"(?!.*(?:--|\.\.))(?!.*\.git$){_PART}/{_PART}")
_REVISION = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9_](?:[A-Za-z0-9._/+-]{0,253}[A-Za-z0-9._+-])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEB = re.compile(r"https?://[^/]+/([^/]+/[^/]+?)(?:/(?:tree|commit)/([^/]+))?/?")
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{4,}")


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A folder, or a model of the Hub: one of `folder` and `repo` is set.

    `text` is what was written, `repo` is `org/name`, `revision` a branch, a tag or a commit; None is the default
    branch. `take` is what `::weights` or `::adapter` behind it says, and no part of `text`.
    """

    text: str
    folder: Path | None = None
    repo: str | None = None
    revision: str | None = None
    take: Literal["weights", "adapter"] | None = None

    @classmethod
    def parse(cls, text: str) -> SourceRef:
        """Read a path, `org/name[@revision]` or `hf://org/name[@revision]`, with `::weights` or `::adapter` behind it.

        What exists as a path is one; `hf://` always means the Hub. Nothing is looked up there.

        Raises:
            UsageError: it can be neither.
        """
        for take in _TAKES:
            if text.endswith(f"::{take}") and not os.path.lexists(text):
                return replace(cls._parse(text.removesuffix(f"::{take}")), take=take)
        return cls._parse(text)

    @classmethod
    def _parse(cls, text: str) -> SourceRef:
        if text.startswith(_SCHEME):
            return _hub_ref(text, text.removeprefix(_SCHEME))
        if not text or "\0" in text:
            raise UsageError(f"expected a folder or org/name, found {text!r}", hint="Give the folder of a checkpoint.")
        if os.path.lexists(text):
            return cls(text, folder=Path(text))
        if "://" in text or text.startswith("hf:"):
            raise _no_ref(text)
        # Where a folder of the owner's name is at hand, a missing one inside it is a typo and no model of the Hub.
        if _REPO.fullmatch(text.partition("@")[0]) and not os.path.isdir(text.partition("/")[0]):  # noqa: PTH112
            return _hub_ref(text, text)
        return cls(text, folder=Path(text))

    @property
    def name(self) -> str:
        """The last part, which can serve as an id: the folder's name, or the repository's without its owner."""
        if self.repo is not None:
            return self.repo.partition("/")[2]
        return Path(os.path.abspath(self.text)).name  # noqa: PTH100 (resolve would follow links)

    @property
    def is_bare(self) -> bool:
        """Whether this is a model of the Hub only because no folder has that name."""
        return self.repo is not None and not self.text.startswith(_SCHEME)

    @property
    def label(self) -> str:
        """The model as messages name it: `org/name`, with the revision where one was given."""
        return self.text.removeprefix(_SCHEME)


def is_commit(revision: str) -> bool:
    """Whether a revision is a whole commit id, which can never mean anything else."""
    return bool(_COMMIT.fullmatch(revision))


def redact(text: str) -> str:
    """The text without access tokens: they end up on command lines, and must not end up in logs."""
    return _TOKEN.sub("hf_***", text)


def _hub_ref(text: str, body: str) -> SourceRef:
    repo, at, revision = body.partition("@")
    if not _REPO.fullmatch(repo):
        raise _no_ref(text)
    if at and not _REVISION.fullmatch(revision):
        raise UsageError(
            f"expected a branch, tag or commit behind the @, found {redact(revision)[:200]!r}",
            hint=f"Write {repo}@main, or leave the @ out for the default branch.",
        )
    return SourceRef(text, repo=repo, revision=revision or None)


def _no_ref(text: str) -> UsageError:
    hint = "A model of the Hub is written hf://org/name or hf://org/name@revision."
    if (page := _WEB.fullmatch(text)) and _REPO.fullmatch(page[1]):
        hint = f"Write {_SCHEME}{page[1]}{'@' + page[2] if page[2] else ''}"
    return UsageError(f"expected a folder, org/name or hf://org/name, found {redact(text)[:200]!r}", hint=hint)
