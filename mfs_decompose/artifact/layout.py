"""Where things lie in an artifact: names, limits, and which names are safe.

Every file name in an artifact is generated here, so a name that came from a user (a variant id, a tensor, a tokenizer
file) is only ever text inside JSON.  User names become paths again in one place, `mfs restore`, and must pass
`check_user_path` when the manifest is loaded, long before that.
"""

from __future__ import annotations

import re
from typing import Final

from mfs_decompose.errors import ArtifactInvalid

SCHEMA: Final = "mfs.family/1"
SCHEMA_FAMILY: Final = "mfs.family/"

MANIFEST: Final = "manifest.json"
CARD: Final = "README.md"
RUN: Final = "run.json"
CONTENT_FOLDER: Final = "files"
TEMPORARY_PREFIX: Final = ".tmp-"

MAX_MANIFEST_BYTES: Final = 64_000_000
MAX_RUN_BYTES: Final = 4_000_000
MAX_JSON_DEPTH: Final = 64
MAX_HEADER_BYTES: Final = 8_000_000
"""Of the shards we write.  Libraries refuse 100 MB; a copied base shard may come near that."""
MAX_PATH_PARTS: Final = 4
MAX_NAME_BYTES: Final = 255

RESERVED_IDS: Final = frozenset({"all", "base"})

_DIGEST = re.compile(r"[0-9a-f]{64}")
_VARIANT_ID = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")
_GENERATED = re.compile(
    r"README\.md"
    r"|files/[0-9a-f]{64}"
    r"|base-[0-9]{5}-of-[0-9]{5}\.safetensors"
    r"|shared-[0-9]{5}\.safetensors"
    r"|v[0-9]{4,9}-[0-9]{5}\.safetensors"
)
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f-\x9f\\:*?"<>|\u200e\u200f\u202a-\u202e\u2066-\u2069]')


def base_shard_name(number: int, count: int) -> str:
    """Name of base shard `number` of `count`, both counted from 1."""
    assert 1 <= number <= count <= 99_999
    return f"base-{number:05d}-of-{count:05d}.safetensors"


def shared_shard_name(shard: int) -> str:
    """Name of a shard of the shared delta, counted from 1."""
    assert 1 <= shard <= 99_999
    return f"shared-{shard:05d}.safetensors"


def variant_shard_name(variant: int, shard: int) -> str:
    """Name of a variant's shard; variants are numbered from 1 in the order of their sorted ids, shards from 1."""
    assert variant >= 1 and 1 <= shard <= 99_999
    return f"v{variant:04d}-{shard:05d}.safetensors"


def content_name(sha256: str) -> str:
    """Path of a content-addressed file inside the artifact."""
    assert is_digest(sha256)
    return f"{CONTENT_FOLDER}/{sha256}"


def is_digest(text: str) -> bool:
    """Whether the text is a sha256 as we write it: 64 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def is_variant_id(text: str) -> bool:
    """Whether the text can name a variant: 1 to 64 of `A-Z a-z 0-9 . _ -`, no dot at either end, not reserved."""
    return _VARIANT_ID.fullmatch(text) is not None and text not in RESERVED_IDS


def is_generated_path(path: str) -> bool:
    """Whether the path can be in a manifest's file table: one that the functions above give, or the model card."""
    return _GENERATED.fullmatch(path) is not None


def check_user_path(path: str, *, parts: int = MAX_PATH_PARTS) -> str:
    """Return a user's file name if restoring it cannot leave the output folder, on any system.

    Relative, with `/` between at most `parts` components; none of them empty, `.`, `..`, longer than 255 bytes, ending
    in a dot or space, or holding a separator, a drive colon, a control or a text-direction character.

    Raises:
        ArtifactInvalid: the name is not safe.
    """
    components = path.split("/")
    if 1 <= len(components) <= parts and all(_is_safe_component(component) for component in components):
        return path
    raise ArtifactInvalid(
        f"expected a plain relative file name, found {path[:120]!r}",
        hint="the artifact was altered or was not made by mfs; do not restore it",
    )


def _is_safe_component(name: str) -> bool:
    try:
        length = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return False
    return 1 <= length <= MAX_NAME_BYTES and name[-1] not in ". " and _FORBIDDEN.search(name) is None
