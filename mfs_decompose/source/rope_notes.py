"""Rotary embeddings of variants that are averaged: a mean of weights made for different ones fits none of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.rope_spelling import PARAMETERS, join_rope

_DEFAULT_THETA = 10000.0  # what configs mean that were written before it could be chosen


def describe_rope_differences(variants: Sequence[Checkpoint]) -> Iterator[str]:
    """One sentence for each setting that the configs of the variants differ in; those without a config say nothing.

    Configs of either spelling are compared, those of wrappers by what they say of their language model.
    """
    settings = {one.id: _settings(one.config) for one in sorted(variants, key=lambda one: one.id) if one.config}
    for key in sorted({key for own in settings.values() for key in own}):
        values: defaultdict[str, list[str]] = defaultdict(list)
        for id, own in settings.items():
            values[_text(own.get(key))].append(id)
        if len(values) > 1:
            shown = [f"{value} ({first_few(ids)})" for value, ids in values.items()]
            yield (
                f"the variants that are averaged differ in {first_few([key])}: {first_few(shown)}; a mean of weights "
                "for different rotary embeddings fits none of them: give the base they were made from with --base"
            )


def _settings(config: Mapping[str, object]) -> dict[str, object]:
    inner = config.get("text_config")
    joined = join_rope(inner if isinstance(inner, Mapping) else config).get(PARAMETERS)
    found = dict(_flat(joined if isinstance(joined, Mapping) else {}, ""))
    if not any("." in key for key in found):
        found = {"rope_theta": _DEFAULT_THETA, "rope_type": "default", **found}
    return found


def _flat(values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _text(value: object) -> str:
    """A value as it stands in a config; 10000 and 10000.0 are one."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = float(value)
    return "none" if value is None else json.dumps(value)
