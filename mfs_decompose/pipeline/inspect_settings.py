"""What a variant has besides its weights: where its config differs from the base's, and where it stops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.variant_files import files_of_base, files_of_variant
from mfs_decompose.source.checkpoint import CONFIG
from mfs_decompose.source.config_diff import Change, compare_configs
from mfs_decompose.source.side_files import GENERATION_CONFIG, SideFiles
from mfs_decompose.source.stop_ids import find_stop_ids
from mfs_decompose.source.tokenizer_facts import UNDERSTOOD, VOCAB, TokenizerFacts, read_tokenizer

_CONFIGS = (CONFIG, GENERATION_CONFIG)
_KINDS = {"changed": "changed", "only_a": "only_base", "only_b": "only_variant"}


def read_settings(family: Family) -> dict[str, dict[str, Any]]:
    """`config_changes` and `stop_ids` of every variant by its id, as plain JSON: see docs/json.md.

    A mean base has no config of its own: what all variants say alike stands for it. Files that cannot be read change
    nothing, and are named among the warnings.
    """
    variants = {record.id: files_of_variant(family, record) for record in family.manifest.variants}
    base = {name: _base_config(family, name, variants) for name in _CONFIGS}
    tokenizers: dict[tuple[tuple[str, str], ...], TokenizerFacts] = {}
    return {
        id: {
            "config_changes": [one for name in _CONFIGS for one in _changes(name, base[name], files)],
            "stop_ids": asdict(find_stop_ids(files, _tokenizer(files, tokenizers))),
        }
        for id, files in variants.items()
    }


def _base_config(family: Family, name: str, variants: Mapping[str, SideFiles]) -> dict[str, object] | None:
    if family.manifest.base.source is not None:
        return files_of_base(family).parse(name).value
    return _agreed([value for files in variants.values() if (value := files.parse(name).value) is not None])


def _agreed(configs: Sequence[Mapping[str, object]]) -> dict[str, object] | None:
    if not configs:
        return None
    first, *others = configs
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}


def _changes(name: str, base: Mapping[str, object] | None, files: SideFiles) -> Iterator[dict[str, Any]]:
    own = files.parse(name)
    if own.problem is not None:
        return
    if own.value is not None and base is not None:
        for change in compare_configs(base, own.value).changes:
            yield _entry(name, change.key, change)
    elif own.value is not None or base is not None:
        yield _entry(name, None, Change("", "only_a" if own.value is None else "only_b", None, None))


def _entry(file: str, key: str | None, change: Change) -> dict[str, Any]:
    return {"file": file, "key": key, "kind": _KINDS[change.kind], "base": change.a, "variant": change.b}


def _tokenizer(files: SideFiles, known: dict[tuple[tuple[str, str], ...], TokenizerFacts]) -> TokenizerFacts:
    """Variants mostly share their tokenizer, which takes a while to read."""
    key = tuple((name, files.digest(name)) for name in sorted((UNDERSTOOD | {VOCAB}) & files.sizes.keys()))
    if key not in known:
        known[key] = read_tokenizer(files)
    return known[key]
