"""The manifest: sealed with its own digest, loaded as if an attacker had written it.

`load_manifest` takes bytes in this order: size, depth, duplicate keys, numbers; then the schema's name, so that a newer
artifact is called newer and not damaged; then spelling and digest; then every record; then the records against each
other.  No file of the artifact is opened before all of that holds.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from mfs_decompose.artifact.canonical import canonical_bytes, digest_of, is_canonical, load_strict
from mfs_decompose.artifact.crosscheck import crosscheck
from mfs_decompose.artifact.layout import MANIFEST, MAX_MANIFEST_BYTES, SCHEMA
from mfs_decompose.artifact.records import (
    BaseRecord,
    CoverageRecord,
    FileEntry,
    GeneratedPath,
    PlatformRecord,
    Record,
    ToolRecord,
    VariantRecord,
)
from mfs_decompose.artifact.shared_delta import SharedRecord
from mfs_decompose.artifact.target_record import TargetRecord
from mfs_decompose.errors import ArtifactInvalid

_DAMAGED = "the artifact is damaged or was edited; get it again from where it came from"
_SCHEMA_NAME = re.compile(r"mfs\.family/[1-9][0-9]{0,5}")


class Manifest(Record):
    """Everything an artifact is, except its bytes.  `digest` is empty until `seal`."""

    schema_id: Literal["mfs.family/1"] = Field(default=SCHEMA, alias="schema")
    digest: str = ""
    tool: ToolRecord
    platform: PlatformRecord
    recipe: dict[str, Any]
    base: BaseRecord
    variants: tuple[VariantRecord, ...]
    files: dict[GeneratedPath, FileEntry]
    coverage: CoverageRecord
    shared: SharedRecord | None = None
    """What the variants have in common beside the base; most families have none."""
    target: TargetRecord | None = None
    """The drift that variants were cut to hold; none where they were cut to a size."""

    @model_validator(mode="after")
    def _target_is_of_variants(self) -> Manifest:
        strangers = set() if self.target is None else self.target.variants.keys() - {one.id for one in self.variants}
        if strangers:
            raise ValueError(f"a target was held by {min(strangers)!r}, which is no variant")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_absent(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialise(self)
        return {key: value for key, value in document.items() if key not in ("shared", "target") or value is not None}

    @property
    def total_bytes(self) -> int:
        """Bytes of all weight files: the base's, the shared delta's and every variant's."""
        shared = self.shared.bytes if self.shared is not None else 0
        return self.base.bytes + shared + sum(variant.bytes for variant in self.variants)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, as it is written."""
        return self.model_dump(mode="json", by_alias=True)


def seal(manifest: Manifest) -> Manifest:
    """The same manifest with its digest filled in, after the checks a reader will make.

    Raises:
        ArtifactInvalid: the records contradict each other, or hold what JSON cannot.
    """
    crosscheck(manifest.base, manifest.variants, manifest.files, manifest.coverage, manifest.shared)
    return manifest.model_copy(update={"digest": digest_of(manifest.to_json())})


def manifest_bytes(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json` for a sealed manifest.

    Raises:
        ArtifactInvalid: it is larger than any reader accepts.
    """
    assert manifest.digest, "a manifest is sealed before it is written"
    data = canonical_bytes(manifest.to_json())
    if len(data) > MAX_MANIFEST_BYTES:
        raise ArtifactInvalid(
            f"expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, found {len(data)}",
            hint="put fewer variants into one artifact",
        )
    return data


def artifact_digest(data: bytes) -> str:
    """The digest that names an artifact: sha256 of the bytes of its manifest."""
    return hashlib.sha256(data).hexdigest()


def load_manifest(data: bytes) -> Manifest:
    """Read the bytes of a `manifest.json`, believing nothing.

    Raises:
        ArtifactInvalid: naming the first thing that is wrong.
    """
    document = load_strict(data, MANIFEST, MAX_MANIFEST_BYTES)
    _check_schema(document)
    if not is_canonical(document, data):
        raise ArtifactInvalid(f"expected canonical JSON in {MANIFEST}, found another spelling", hint=_DAMAGED)
    if document.get("digest") != digest_of(document):
        raise ArtifactInvalid(f"expected {MANIFEST} to match its own digest, found a difference", hint=_DAMAGED)
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise ArtifactInvalid(f"expected a valid {MANIFEST}, found {_first(error)}", hint=_DAMAGED) from None
    crosscheck(manifest.base, manifest.variants, manifest.files, manifest.coverage, manifest.shared)
    return manifest


def _check_schema(document: Any) -> None:
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema == SCHEMA:
        return
    if isinstance(schema, str) and _SCHEMA_NAME.fullmatch(schema):
        raise ArtifactInvalid(
            f"expected an artifact of the format {SCHEMA}, found one written by a newer mfs: {schema}",
            hint="update mfs_decompose",
        )
    raise ArtifactInvalid(f"expected an mfs artifact, found a {MANIFEST} of something else", hint=_DAMAGED)


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part)[:80] for part in problem["loc"])
    return f"{place or 'the whole'}: {problem['msg']}"
