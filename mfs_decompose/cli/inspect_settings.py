"""What `mfs inspect` shows of a variant besides its weights: stop ids, and where its config differs from the base's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mfs_decompose.cli.out import Output
from mfs_decompose.cli.short import cut, short_json

_ROWS = 12
_IDS = 8


def show_settings(output: Output, variants: Sequence[Mapping[str, Any]], rows: int | None) -> None:
    """Two tables, and a warning for each contradiction; at most `rows` keys of a variant, by default a dozen."""
    output.line()
    output.table(("variant", "stop ids", "named by"), [_stops(one["id"], one["stop_ids"]) for one in variants])
    changed = [line for one in variants for line in _changes(one, rows or _ROWS)]
    if changed:
        output.line()
        output.table(("variant", "file", "key", "base", "variant has"), changed)
    for one in variants:
        for warning in one["stop_ids"]["warnings"]:
            output.warn(f"{one['id']}: {warning}")


def _stops(id: str, stops: Mapping[str, Any]) -> tuple[str, str, str]:
    named = [
        f"{source['file']} {source['key']} {_few(source['ids'])}"
        + (f" ({cut(source['token'])})" if source["token"] is not None else "")
        for source in stops["sources"]
    ]
    return id, _few(stops["ids"]) or "none", "; ".join(named) or "-"


def _changes(variant: Mapping[str, Any], rows: int) -> list[tuple[str, str, str, str, str]]:
    changes = variant["config_changes"]
    found = [
        (variant["id"], one["file"], cut(one["key"] or "(the whole file)"), _value(one, "base"), _value(one, "variant"))
        for one in changes[:rows]
    ]
    if len(changes) > rows:
        found.append((variant["id"], "", f"... and {len(changes) - rows} more: --json", "", ""))
    return found


def _value(change: Mapping[str, Any], side: str) -> str:
    if change["key"] is None:
        return "there" if change["kind"] == f"only_{side}" else "-"
    absent = change["kind"] == ("only_variant" if side == "base" else "only_base")
    return "-" if absent else short_json(change[side])


def _few(ids: Sequence[int]) -> str:
    return ", ".join(str(id) for id in ids[:_IDS]) + (f" and {len(ids) - _IDS} more" if len(ids) > _IDS else "")
