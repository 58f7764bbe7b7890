"""Names in messages: as many as a sentence can carry."""

from __future__ import annotations

from collections.abc import Sequence


def first_few(names: Sequence[str]) -> str:
    """The first three names, each of at most 200 characters, and how many more there are.

    Names come from files of strangers: what does not print, an escape sequence or a line break, is written out.
    """
    shown = ", ".join(name[:200] if name.isprintable() else repr(name[:200]) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
