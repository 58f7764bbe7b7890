"""A checkpoint in a local folder: opened from headers alone, then read in blocks of rows."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mfs_decompose.errors import SourceIncompatible, SourceNotFound
from mfs_decompose.source import dtypes
from mfs_decompose.source.folder import Folder, Sidecar, list_folder, resolve_inside
from mfs_decompose.source.header import MAX_TENSORS, ShardHeader, TensorInfo, read_shard_header
from mfs_decompose.source.weights import (
    ADAPTER_CONFIG,
    Take,
    check_weight_map,
    choose_contents,
    choose_shards,
    read_weight_map,
)

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "Sidecar", "TensorReader", "open_checkpoint", "read_sidecar"]

CONFIG = "config.json"
MAX_CONFIG_BYTES = 4 * 2**20
_REFETCH = "Fetch the file again."


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that is known of a checkpoint before a weight is read.

    `shards` and `sidecars` are sorted by name, `tensors` holds every tensor of every shard by name, sorted; `index` is
    the weight index of a sharded checkpoint; `left_out` names what lies in the folder and is not taken (folders end in
    a slash); `config` is the parsed config.json, empty where there is none; `repo` and `revision` (a commit) belong to
    a model of the Hub.

    `adapter` is the parsed adapter_config.json where the checkpoint is an adapter: its tensors are then the adapter's
    own. `taken` is which of weights and adapter was asked for, where somebody had to say.
    """

    id: str
    root: Path
    shards: tuple[ShardHeader, ...]
    index: Sidecar | None
    tensors: Mapping[str, TensorInfo]
    sidecars: tuple[Sidecar, ...]
    left_out: tuple[str, ...]
    config: Mapping[str, object]
    repo: str | None = None
    revision: str | None = None
    adapter: Mapping[str, object] | None = None
    taken: Take | None = None

    @property
    def pinned(self) -> str:
        """A reference that means the same tomorrow: the commit of a model of the Hub, or the absolute path."""
        place = f"hf://{self.repo}@{self.revision}" if self.repo else str(self.root.absolute())
        return f"{place}::{self.taken}" if self.taken else place

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_checkpoint(root: Path | str, id: str, *, take: Take | None = None) -> Checkpoint:
    """Read the headers of a checkpoint's shards, or of an adapter's, and check that they fit together.

    `take` says which of the two is meant in a folder that holds both.

    Raises:
        SourceNotFound: no folder, no weights in it, or a shard or tensor that is missing or cut off.
        SourceIncompatible: files that are no safetensors, lie outside of the folder, contradict each other, or hold
            both weights and an adapter.
    """
    folder, is_adapter = choose_contents(list_folder(Path(root)), take)
    weight_map = read_weight_map(folder)
    shards = tuple(_read_header(folder.root, name) for name in choose_shards(folder, weight_map))
    adapter = _read_config(folder, ADAPTER_CONFIG) if is_adapter else None
    return join_checkpoint(id, folder, weight_map, shards, _read_config(folder, CONFIG), adapter, take)


def join_checkpoint(
    id: str,
    folder: Folder,
    weight_map: Mapping[str, str] | None,
    shards: tuple[ShardHeader, ...],
    config: Mapping[str, object],
    adapter: Mapping[str, object] | None = None,
    taken: Take | None = None,
) -> Checkpoint:
    """A checkpoint out of what was read of it, wherever that was; raises as open_checkpoint does."""
    tensors = _join(folder.root, shards)
    if weight_map is not None:
        check_weight_map(folder, weight_map, shards)
    left_out = sorted({*folder.others, *folder.weights} - {shard.file for shard in shards})
    return Checkpoint(
        id,
        folder.root,
        shards,
        folder.index,
        tensors,
        folder.sidecars,
        tuple(left_out),
        config,
        adapter=adapter,
        taken=taken,
    )


def read_sidecar(checkpoint: Checkpoint, sidecar: Sidecar) -> bytes:
    """The bytes of a side file, or of the weight index.

    Raises:
        SourceIncompatible: it is not what it was when the checkpoint was opened.
    """
    try:
        content = resolve_inside(checkpoint.root, sidecar.name).read_bytes()
    except (OSError, SourceNotFound):
        content = b""
    if len(content) != sidecar.size:
        raise _changed(checkpoint.root / sidecar.name)
    return content


class TensorReader:
    """Reads the tensors of a checkpoint into memory of their own, from any thread.

    Nothing is mapped: the peak of anonymous memory is promised, and a mapped file that is cut off kills the process.
    A file is open only while it is read, so hundreds of shards cost no descriptors and each read sees whether the file
    is still the one whose header was checked.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._shards = {shard.file: shard for shard in checkpoint.shards}
        self._places: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._bytes_read = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True

    @property
    def bytes_read(self) -> int:
        """Bytes of weights read so far."""
        return self._bytes_read

    def raw(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The bytes of rows `start` to `stop` as they stand in the file: uint8, [(stop - start) * row_bytes].

        Raises:
            SourceIncompatible: the file changed since its header was read.
        """
        info = self.checkpoint.tensors[name]
        stop = info.rows if stop is None else stop
        assert 0 <= start <= stop <= info.rows, f"rows {start}:{stop} of {info.rows} in {name}"
        return self._read(info, start * info.row_bytes, (stop - start) * info.row_bytes)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows `start` to `stop` in the tensor's own type: [stop - start, *shape[1:]], and a 0-d tensor as 0-d.

        Raises:
            SourceIncompatible: the file changed since its header was read.
        """
        info = self.checkpoint.tensors[name]
        stop = info.rows if stop is None else stop
        values = self.raw(name, start, stop).view(dtypes.torch_dtype(info.dtype))
        return values.reshape((stop - start, *info.shape[1:]) if info.shape else ())

    def head(self, name: str, elements: int) -> torch.Tensor:
        """The first `elements` elements in the tensor's own type, flat; fewer where the tensor is smaller.

        Raises:
            SourceIncompatible: the file changed since its header was read.
        """
        info = self.checkpoint.tensors[name]
        wanted = min(elements, info.numel) * dtypes.item_size(info.dtype)
        return self._read(info, 0, wanted).view(dtypes.torch_dtype(info.dtype))

    def _read(self, info: TensorInfo, offset: int, length: int) -> torch.Tensor:
        import torch

        assert not self._closed, "the reader is closed"
        content = torch.empty(length, dtype=torch.uint8)
        path = self.checkpoint.root / info.file
        header = self._shards[info.file]
        try:
            with open(self._place(info.file), "rb", buffering=0, opener=_open_itself) as stream:
                status = os.fstat(stream.fileno())
                if (status.st_size, status.st_mtime_ns) != (header.size, header.mtime_ns):
                    raise _changed(path)
                _fill(stream.fileno(), content.numpy().data, info.start + offset, path)
        except (OSError, SourceNotFound) as error:
            raise _changed(path) from error
        with self._lock:
            self._bytes_read += length
        return content

    def _place(self, file: str) -> Path:
        """Where a shard really lies, looked up once: whether it still is the same file, every read makes sure of."""
        place = self._places.get(file)
        if place is None:
            place = self._places[file] = resolve_inside(self.checkpoint.root, file)
        return place


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)  # the place is resolved: a link there is new


def _fill(fd: int, buffer: memoryview, position: int, path: Path) -> None:
    done = 0
    while done < len(buffer):  # the kernel hands out at most 2 GiB at a time
        got = os.preadv(fd, [buffer[done:]], position + done)
        if got == 0:
            raise _changed(path)
        done += got


def _changed(path: Path) -> SourceIncompatible:
    return SourceIncompatible(
        f"{path} changed while it was being read", hint="Run the same command again once nobody writes to it."
    )


def _read_header(root: Path, name: str) -> ShardHeader:
    resolve_inside(root, name)
    return read_shard_header(root / name)


def _join(root: Path, shards: tuple[ShardHeader, ...]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in tensors:
                raise SourceIncompatible(
                    f"tensor {tensor.name!r} stands in two shards of {root}: "
                    f"{tensors[tensor.name].file} and {shard.file}",
                    hint="Move the shard away that does not belong to this checkpoint.",
                )
            tensors[tensor.name] = tensor
    if not tensors:
        raise SourceNotFound(f"the weights of {root} hold no tensors", hint="Give the folder of a whole checkpoint.")
    if len(tensors) > MAX_TENSORS:
        found = f"expected at most {MAX_TENSORS} tensors in {root}, found {len(tensors)}"
        raise SourceIncompatible(found, hint="Give the folder of one checkpoint.")
    return dict(sorted(tensors.items()))


def _read_config(folder: Folder, name: str) -> dict[str, object]:
    sidecar = next((sidecar for sidecar in folder.sidecars if sidecar.name == name), None)
    if sidecar is None:
        return {}
    path = folder.root / name
    if sidecar.size > MAX_CONFIG_BYTES:
        found = f"expected at most {MAX_CONFIG_BYTES} bytes, found {sidecar.size}: {path}"
        raise SourceIncompatible(found, hint=_REFETCH)
    return parse_config(path, resolve_inside(folder.root, name).read_bytes())


def parse_config(path: Path, raw: bytes) -> dict[str, object]:
    """A config.json out of its bytes; `path` is for messages.

    Raises:
        SourceIncompatible: it is no JSON object.
    """
    try:
        # Not the strict reader: configs of published models hold Infinity.
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise SourceIncompatible(f"{path} is not JSON: {error}", hint=_REFETCH) from None
    if not isinstance(config, dict):
        raise SourceIncompatible(f"expected an object in {path}, found {type(config).__name__}", hint=_REFETCH)
    return config
