"""The files beside the weights of what an artifact holds, as `mfs restore` writes them; torch is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mfs_decompose.artifact.layout import content_name
from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.records import VariantRecord
from mfs_decompose.pipeline.adapter_files import change_config, dump_config, files_of_merge
from mfs_decompose.source.checkpoint import CONFIG
from mfs_decompose.source.side_files import NO_FILES, SideFiles


def files_of_variant(family: Family, record: VariantRecord) -> SideFiles:
    """A variant's own files; of an adapter those of its merge: the base's, with what the adapter brings and changes."""
    if record.adapter is None:
        return _stored(family, record.source.files)
    base = family.manifest.base.source
    if base is None:
        return _stored(family, record.source.files)
    found = _stored(family, files_of_merge(base, record.source))
    changes = record.adapter.config_changes
    return _with_changes(found, changes) if changes and CONFIG in found else found


def files_of_base(family: Family) -> SideFiles:
    """The base's files; of a mean base, what all variants agree on."""
    source = family.manifest.base.source
    if source is not None:
        return _stored(family, source.files)
    if not family.manifest.variants:
        return NO_FILES
    shared = set.intersection(*(set(variant.source.files.items()) for variant in family.manifest.variants))
    return _stored(family, dict(sorted(shared)))


def _stored(family: Family, files: Mapping[str, str]) -> SideFiles:
    table = family.manifest.files
    sizes = {name: table[content_name(digest)].size for name, digest in files.items()}
    return SideFiles(sizes, lambda name: family.file_bytes(files[name]), files)


def _with_changes(files: SideFiles, changes: Mapping[str, Any]) -> SideFiles:
    parsed = files.parse(CONFIG)
    if parsed.value is None:
        return files
    data = dump_config(change_config(parsed.value, changes))
    digests = {name: digest for name, digest in files.digests.items() if name != CONFIG}
    sizes = {**files.sizes, CONFIG: len(data)}
    return SideFiles(sizes, lambda name: data if name == CONFIG else files.read(name), digests)
