"""Long texts and values of strangers, cut to what a table can carry."""

from __future__ import annotations

import json

_WIDE = 60


def cut(text: str, width: int = _WIDE) -> str:
    """The text, or its beginning and three dots."""
    return text if len(text) <= width else f"{text[:width]}..."


def short_json(value: object) -> str:
    """A value as JSON on one line, cut."""
    return cut(json.dumps(value, ensure_ascii=False))
