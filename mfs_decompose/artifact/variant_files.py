"""The files beside the weights of what an artifact holds; torch is not needed.

An adapter is given back as the merge that it makes of the base: the base's files, with what the adapter brings and
changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from mfs_decompose.artifact.layout import content_name
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import SourceRecord, VariantRecord
from mfs_decompose.source.checkpoint import CONFIG
from mfs_decompose.source.folder import ADAPTER_INDEX
from mfs_decompose.source.side_files import NO_FILES, SideFiles
from mfs_decompose.source.weights import ADAPTER_CONFIG

_File = TypeVar("_File")
_ADAPTERS_OWN = frozenset({ADAPTER_CONFIG, ADAPTER_INDEX})
_OF_ONE_FOLDER = frozenset({"README.md"})
"""Describes the folder it lies in, and no merge of two."""


def files_of_variant(family: Family, record: VariantRecord) -> SideFiles:
    """A variant's own files; of an adapter those of its merge: the base's, with what the adapter brings and changes."""
    base = family.manifest.base.source
    if record.adapter is None or base is None:
        return stored_files(family, record.source.files)
    found = stored_files(family, files_of_merge(base, record.source))
    changes = record.adapter.config_changes
    return _with_changes(found, changes) if changes and CONFIG in found else found


def files_of_base(family: Family) -> SideFiles:
    """The base's files; of a mean base, what all variants agree on."""
    source = family.manifest.base.source
    if source is not None:
        return stored_files(family, source.files)
    if not family.manifest.variants:
        return NO_FILES
    shared = set.intersection(*(set(variant.source.files.items()) for variant in family.manifest.variants))
    return stored_files(family, dict(sorted(shared)))


def stored_files(family: Family, files: Mapping[str, str]) -> SideFiles:
    """Files of an artifact by name and digest."""
    table = family.manifest.files
    sizes = {name: table[content_name(digest)].size for name, digest in files.items()}
    return SideFiles(sizes, lambda name: family.file_bytes(files[name]), files)


def files_of_merge(base: SourceRecord, adapter: SourceRecord) -> dict[str, str]:
    """Name and digest of each file beside the merge."""
    return choose_files(base.files, adapter.files)


def choose_files(base: Mapping[str, _File], adapter: Mapping[str, _File]) -> dict[str, _File]:
    """By name: a tokenizer, chat template or stop id of the adapter's goes before the base's.

    Not so config.json, which describes the weights: what lies in an adapter's folder is that of its training, and says
    of a QLoRA's that they are 4-bit codes.
    """
    found = {**base, **adapter}
    if CONFIG in base:
        found[CONFIG] = base[CONFIG]
    return {name: found[name] for name in sorted(found) if name not in _ADAPTERS_OWN | _OF_ONE_FOLDER}


def change_config(config: Mapping[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    """The config with some keys changed; objects are merged, all else is replaced."""
    changed = dict(config)
    for key, value in changes.items():
        own = changed.get(key)
        changed[key] = change_config(own, value) if isinstance(own, dict) and isinstance(value, Mapping) else value
    return changed


def as_float32(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the dtype of the weights beside it: transformers would round them to what stands there."""
    return config | {"torch_dtype" if "torch_dtype" in config else "dtype": "float32"}


def dump_config(config: Mapping[str, Any]) -> bytes:
    """The bytes of a config.json."""
    return (json.dumps(config, indent=2) + "\n").encode()


def _with_changes(files: SideFiles, changes: Mapping[str, Any]) -> SideFiles:
    parsed = files.parse(CONFIG)
    if parsed.value is None:
        return files
    data = dump_config(change_config(parsed.value, changes))
    digests = {name: digest for name, digest in files.digests.items() if name != CONFIG}
    sizes = {**files.sizes, CONFIG: len(data)}
    return SideFiles(sizes, lambda name: data if name == CONFIG else files.read(name), digests)
