"""`mfs eval --card FILE`: where the card may lie, the command it shows, and writing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mfs_decompose.errors import UsageError

if TYPE_CHECKING:
    from mfs_decompose.fidelity.document import EvalDocument


def check_card_place(card: Path, artifact: Path, others: Mapping[str, Path | None]) -> None:
    """Refuse a card that would make the artifact invalid, or take the place of another output.

    Raises:
        UsageError: it would lie inside the artifact, or in the file of another option.
    """
    place = _place(card)
    if place.is_relative_to(artifact.resolve()):
        raise UsageError(
            f"expected --card outside of the artifact, whose digest it names, found {card} inside",
            hint="choose a file elsewhere; the artifact's own card is its README.md",
        )
    for option, other in others.items():
        if other is not None and _place(other) == place:
            raise UsageError(f"--card and {option} name the same file {card}", hint="choose another --card")


def repeat_command(
    *,
    text: Sequence[str] | None,
    suite: str | None,
    options: Mapping[str, object],
    refs: Mapping[str, Sequence[str]],
    self_check: bool,
) -> list[str]:
    """The words that measure again from the artifact's folder: of a path only the last part, of a local folder `PATH`.

    Args:
        options: by their names; those that are None were not given.
        refs: checkpoints as they were given, `ID=REF` or `REF`, by option.
    """
    from mfs_decompose.artifact.commands import portable_ref

    words = ["mfs", "eval", "."]
    if suite:
        words += ["--suite", Path(suite).name]
    for one in text or ():
        words += ["--text", _without_folder(one)]
    for option, value in options.items():
        if value is not None:
            words += [option, str(value)]
    for option, values in refs.items():
        for value in values:
            id, equals, ref = value.rpartition("=")
            words += [option, f"{id}{equals}{portable_ref(ref)}"]
    return [*words, *(["--self-check"] if self_check else [])]


def write_card(card: Path, artifact: Path, document: EvalDocument, command: Sequence[str]) -> None:
    """Write the card of an artifact with what was measured, whole or not at all.

    Raises:
        ArtifactInvalid: the artifact is not the one that was measured any more.
        ResourceShortage: the disk is full.
    """
    from mfs_decompose.artifact.atomic import write_file
    from mfs_decompose.artifact.reader import Family
    from mfs_decompose.fidelity.card import render_drift_card

    with Family.open(artifact) as family:
        text = render_drift_card(family, document, command)
    write_file(card, text.encode("utf-8"))


def _place(path: Path) -> Path:
    """Where a file will lie: links to its folder are followed, a link in its own place is replaced."""
    return path.absolute().parent.resolve() / path.name


def _without_folder(text: str) -> str:
    """`FILE[:FIELD+FIELD]` with the last part of the file's path; a field may have a slash in it, too."""
    file, colon, fields = text.rpartition(":")
    if colon and file.lower().endswith((".txt", ".jsonl")):
        return f"{Path(file).name}:{fields}"
    return Path(text).name
