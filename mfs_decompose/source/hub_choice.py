"""Which files of a model on the Hub make up its checkpoint: those that would be taken from a folder, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mfs_decompose.errors import SourceNotFound
from mfs_decompose.source.folder import (
    MAX_SIDECAR_BYTES,
    WEIGHT_INDEX,
    Folder,
    Sidecar,
    is_sidecar,
    require_plain_name,
)
from mfs_decompose.source.hub_client import HubFile
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.weights import choose_shards

_SAVE = "Load it in transformers and write it with save_pretrained, which writes safetensors."


def as_folder(files: Iterable[HubFile], root: Path) -> Folder:
    """A listing as the folder that it would be; `root` is where it lies, or how messages call it."""
    weights, sidecars, others = [], [], set()
    index = None
    for file in files:
        top, slash, _ = file.name.partition("/")
        if top.startswith("."):
            continue
        if slash:
            others.add(top + "/")
        elif top.endswith(".safetensors"):
            weights.append(top)
        elif top == WEIGHT_INDEX:
            index = Sidecar(top, file.size)
        elif is_sidecar(top) and file.size <= MAX_SIDECAR_BYTES:
            sidecars.append(Sidecar(top, file.size))
        else:
            others.add(top)
    return Folder(root, tuple(sorted(weights)), index, tuple(sorted(sidecars, key=_name)), tuple(sorted(others)))


def require_safetensors(folder: Folder, files: Iterable[HubFile]) -> None:
    """Refuse a model without safetensors at its top, saying what it has instead.

    Raises:
        SourceNotFound: it has none.
    """
    if folder.weights:
        return
    below = sorted(file.name for file in files if file.name.endswith(".safetensors"))
    if below:
        raise SourceNotFound(
            f"expected weights in *.safetensors at the top of {folder.root}, found {first_few(below)}",
            hint="Models of several parts are not read: download the part that is meant and give its folder.",
        )
    found = [name for name in folder.others if not name.endswith("/")] or [s.name for s in folder.sidecars]
    raise SourceNotFound(
        f"expected weights in *.safetensors in {folder.root}, found {first_few(found) if found else 'no files'}",
        hint=_SAVE,
    )


def choose_names(folder: Folder, weight_map: Mapping[str, str] | None) -> tuple[list[str], list[str]]:
    """The names of the side files with the weight index, and those of the shards.

    Raises:
        MfsError: as for a folder, see choose_shards.
    """
    shards = list(choose_shards(folder, weight_map))
    beside = [sidecar.name for sidecar in folder.sidecars] + ([folder.index.name] if folder.index else [])
    for name in (*shards, *beside):
        require_plain_name(folder.root, name)
    return sorted(beside), shards


def _name(sidecar: Sidecar) -> str:
    return sidecar.name
