"""Commands for a model card: what made an artifact and what uses it, without a path of the machine it was made on."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from mfs_decompose.artifact.records import BaseRecord, SourceRecord, VariantRecord
from mfs_decompose.artifact.target_record import TargetRecord
from mfs_decompose.errors import UsageError
from mfs_decompose.recipe.schema import Recipe
from mfs_decompose.recipe.strict_yaml import read_scalar
from mfs_decompose.source.ref import SourceRef

LOCAL: Final = "PATH"
"""Stands for a checkpoint that was a local folder."""

_WORD = re.compile(r"[a-z][a-z0-9_]*")
_NO_ASCII = re.compile(r"[^\x20-\x7e]")


def shell_line(words: Sequence[str]) -> str:
    """Words as one line for a shell; what is not printable becomes `?`, so nothing ends the block of code around it."""
    return shlex.join("".join(one if one.isprintable() else "?" for one in word) for word in words)


def decompose_command(
    base: BaseRecord,
    variants: Sequence[VariantRecord],
    recipe: Mapping[str, Any],
    device: str,
    target: TargetRecord | None = None,
) -> str:
    """`mfs decompose` with the recipe's keys that are not the defaults, over several lines of a shell.

    Args:
        recipe: the effective recipe, as the manifest keeps it.
        device: `cpu` or `cuda`.
        target: names the text that was measured on; `NAME` stands for a file of that name.
    """
    lines = ["mfs decompose"]
    if base.source is not None:
        lines.append(shell_line(["--base", reference(base.source)]))
    lines += [shell_line(["--variants", f"{variant.id}={reference(variant.source)}"]) for variant in variants]
    lines += [shell_line(["--set", pair]) for pair in changed_keys(recipe)]
    lines += [shell_line(words) for words in _texts(target)]
    lines.append(shell_line(["--device", device, "--out", "DIR"]))
    return " \\\n  ".join(lines)


def _texts(target: TargetRecord | None) -> Iterator[list[str]]:
    texts = {} if target is None else target.measured_on.get("texts", {})
    limits: list[object] = []
    for name, text in texts.items() if isinstance(texts, Mapping) else ():
        yield ["--text", str(name)]
        limits.append(text.get("limit") if isinstance(text, Mapping) else None)
    if limits and isinstance(limits[0], int) and len(set(limits)) == 1:
        yield ["--max-tokens", str(limits[0])]


def reference(source: SourceRecord) -> str:
    """`hf://org/name@commit` of a model of the Hub, else `PATH`."""
    return LOCAL if source.repo is None else portable_ref(f"hf://{source.repo}@{source.revision}")


def portable_ref(text: str) -> str:
    """What was given for a checkpoint: as it is if it is a model of the Hub, else `PATH`."""
    try:
        return text if SourceRef.parse(text).repo is not None else LOCAL
    except UsageError:
        return LOCAL


def changed_keys(recipe: Mapping[str, Any]) -> list[str]:
    """`KEY=VALUE` for each value of an effective recipe that a recipe without a line would not give, sorted."""
    default = dict(_leaves(Recipe().canonical()))
    changed = {key: value for key, value in _leaves(recipe) if key not in default or default[key] != value}
    return [f"{key}={_value(key, value)}" for key, value in sorted(changed.items())]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value(key: str, value: object) -> str:
    """A value as `--set` reads it back: a bare word, or JSON, which is YAML, in ASCII."""
    if key == "objective.budget" and isinstance(value, int):
        return f"{value}B"  # a small bare number would be refused as a forgotten percent sign
    if isinstance(value, str) and _WORD.fullmatch(value) and read_scalar(value) == value:
        return value
    spelled = json.dumps(value, ensure_ascii=False, sort_keys=True)
    # YAML has no surrogate pairs, so JSON's own ASCII form would not read back.
    return _NO_ASCII.sub(lambda found: f"\\U{ord(found[0]):08x}", spelled)
