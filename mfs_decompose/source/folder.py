"""What lies in a checkpoint's folder, and which of it may be opened."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mfs_decompose.errors import SourceIncompatible, SourceNotFound

WEIGHT_INDEX = "model.safetensors.index.json"
MAX_SIDECAR_BYTES = 64 * 2**20

_SAFE_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,127}")
_SIDECAR = re.compile(r".*\.(json|jinja|txt|model|tiktoken|py)|LICENSE.*|NOTICE.*|README\.md")
_OTHER_INDEX = re.compile(r".*\.index(\.[^.]+)?\.json")  # of weights that are not read, such as pytorch_model.bin's
ADAPTER_INDEX = "adapter_model.safetensors.index.json"
_SHARED_BLOB = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A file beside the weights that belongs to the variant; `size` in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Folder:
    """The top level of a folder, each list sorted by name.

    `weights` are names of safetensors files, `index` the weight index if there is one, `sidecars` what belongs to the
    variant besides, `others` everything else (folders end in a slash). Hidden files are not listed.
    """

    root: Path
    weights: tuple[str, ...]
    index: Sidecar | None
    sidecars: tuple[Sidecar, ...]
    others: tuple[str, ...]


def list_folder(root: Path) -> Folder:
    """Sort what lies at the top of `root` into weights, side files and the rest; nothing is opened.

    Raises:
        SourceNotFound: no such folder, or it or a link in it cannot be followed.
        SourceIncompatible: a side file is a link out of the folder, or no regular file.
    """
    weights, sidecars, others = [], [], []
    index = None
    for name, is_folder in _entries(root):
        if is_folder:
            others.append(name + "/")
        elif name.endswith(".safetensors"):
            weights.append(name)
        elif name == WEIGHT_INDEX:
            index = Sidecar(name, resolve_inside(root, name).stat().st_size)
        elif is_sidecar(name) and (size := resolve_inside(root, name).stat().st_size) <= MAX_SIDECAR_BYTES:
            sidecars.append(Sidecar(name, size))
        else:
            others.append(name)
    return Folder(root, tuple(weights), index, tuple(sidecars), tuple(others))


def is_sidecar(name: str) -> bool:
    """Whether a file of that name belongs to the variant."""
    if _OTHER_INDEX.fullmatch(name) and name != ADAPTER_INDEX:
        return False
    return bool(_SAFE_NAME.fullmatch(name) and _SIDECAR.fullmatch(name))


def require_plain_name(root: Path, name: str) -> None:
    """Refuse a file name that could mean another folder, a device, or trouble in somebody's shell.

    Raises:
        SourceIncompatible: the name is not plain.
    """
    if not _SAFE_NAME.fullmatch(name):
        raise SourceIncompatible(
            f"expected the plain name of a file inside {root}, found {name[:200]!r}",
            hint="Allowed are up to 128 of A-Z a-z 0-9 . _ + - without a leading dot.",
        )


def resolve_inside(root: Path, name: str) -> Path:
    """The real path of a file at the top of `root`, links followed.

    A link may end inside the folder, or among the blobs of the Hub cache that the folder is a snapshot of.

    Raises:
        SourceNotFound: there is no such file.
        SourceIncompatible: the name could leave the folder, or the file does.
    """
    require_plain_name(root, name)
    try:
        home, real = (Path(os.path.realpath(path, strict=True)) for path in (root, root / name))
    except OSError as error:
        broken = " (a link that leads nowhere)" if (root / name).is_symlink() else ""
        raise SourceNotFound(f"cannot read {root / name}{broken}: {error.strerror}") from None
    if not real.is_relative_to(home) and not _is_blob(home, real):
        raise SourceIncompatible(
            f"{root / name} is a link to {real}, outside of the checkpoint's folder",
            hint="Copy the file into the folder.",
        )
    if not real.is_file():
        raise SourceIncompatible(f"expected a regular file, found something else: {root / name}")
    return real


def _entries(root: Path) -> list[tuple[str, bool]]:
    """(name, is a folder) of all that is not hidden, by name."""
    try:
        with os.scandir(root) as entries:
            return sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    except FileNotFoundError:
        raise SourceNotFound(f"no such folder: {root}", hint="Check the path.") from None
    except NotADirectoryError:
        hint = "Give the folder of a checkpoint."
        if root.suffix == ".safetensors":
            hint = f"Give the folder that holds it: {root.parent}"
        raise SourceNotFound(f"expected a checkpoint's folder, found a file: {root}", hint=hint) from None
    except OSError as error:
        raise SourceNotFound(f"cannot read {root}: {error.strerror}") from None


def _is_blob(home: Path, real: Path) -> bool:
    """Whether a file is one that the Hub cache holds for `home`, which is models--org--name/snapshots/<commit>.

    It lies in models--org--name/blobs, or where files lie that several models share: blobs/<2 digits>/<hash> beside it.
    """
    repo = next((parent.parent for parent in home.parents if parent.name == "snapshots"), None)
    if repo is None:
        return False
    is_shared = real.parent.parent == repo.parent / "blobs" and bool(_SHARED_BLOB.fullmatch(real.name))
    return real.parent == repo / "blobs" or (is_shared and real.parent.name == real.name[:2])
