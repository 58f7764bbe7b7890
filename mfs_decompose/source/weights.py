"""Which files of a folder are its weights, and whether the weight index tells the truth about them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mfs_decompose.errors import SourceIncompatible, SourceNotFound
from mfs_decompose.source.folder import (
    ADAPTER_INDEX,
    MAX_SIDECAR_BYTES,
    WEIGHT_INDEX,
    Folder,
    require_plain_name,
    resolve_inside,
)
from mfs_decompose.source.header import ShardHeader
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.strict_json import parse_strict_object

_SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(.+)-([0-9]{5})-of-(?!00000)([0-9]{5})\.safetensors")
_OTHER_FORMATS = (".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
ADAPTER_CONFIG = "adapter_config.json"
Take = Literal["weights", "adapter"]
"""Which of the two is meant where a folder holds both."""

_ADAPTER_WEIGHTS = re.compile(r"adapter_model(?:-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_ADAPTER_PICKLE = "adapter_model.bin"
_FETCH = "Download or copy the checkpoint again."


def choose_contents(folder: Folder, take: Take | None) -> tuple[Folder, bool]:
    """The folder as if it held only what is meant, and whether that is an adapter; the rest becomes `others`.

    Raises:
        SourceNotFound: what `take` asks for is not there, or only one half of an adapter is.
        SourceIncompatible: weights and an adapter are there and nothing says which is meant, or an adapter is there
            only as a pickle.
    """
    configs = tuple(sidecar for sidecar in folder.sidecars if sidecar.name == ADAPTER_CONFIG)
    parts = [name for name in folder.weights if _ADAPTER_WEIGHTS.fullmatch(name)]
    whole = [name for name in folder.weights if name not in parts]
    has_adapter = bool(configs) and bool(parts or _ADAPTER_PICKLE in folder.others)
    has_weights = bool(whole) or folder.index is not None
    if has_adapter and has_weights and take is None:
        raise SourceIncompatible(
            f"expected one model in {folder.root}, found whole weights ({(whole or [WEIGHT_INDEX])[0]}) and an adapter "
            f"({(parts or [_ADAPTER_PICKLE])[0]})",
            hint="Say which is meant: append ::weights or ::adapter to the reference.",
        )
    if (parts or configs) and not has_weights and not has_adapter:
        there, lacking = (ADAPTER_CONFIG, "adapter_model.safetensors") if configs else (parts[0], ADAPTER_CONFIG)
        raise SourceNotFound(f"an adapter without {lacking}: {folder.root} has only {there}", hint=_FETCH)
    if take is not None and not (has_adapter if take == "adapter" else has_weights):
        wanted, found = ("an adapter", "none") if take == "adapter" else ("whole weights", "an adapter")
        raise SourceNotFound(
            f"expected {wanted} in {folder.root}, found {found if has_adapter or has_weights else 'nothing'}",
            hint=f"Leave ::{take} out, or give another folder.",
        )
    if has_adapter and take != "weights":
        if not parts:
            raise SourceIncompatible(
                f"expected the adapter of {folder.root} as safetensors, found {_ADAPTER_PICKLE}, a pickle",
                hint="Load it in PEFT (PeftModel.from_pretrained) and save it again (save_pretrained).",
            )
        index = () if folder.index is None else (folder.index.name,)
        others = tuple(sorted({*folder.others, *whole, *index}))
        return replace(folder, weights=tuple(parts), index=None, others=others), True
    adapters = {ADAPTER_CONFIG, ADAPTER_INDEX} & {sidecar.name for sidecar in folder.sidecars}
    sidecars = tuple(sidecar for sidecar in folder.sidecars if sidecar.name not in adapters)
    others = tuple(sorted({*folder.others, *parts, *adapters}))
    return replace(folder, weights=tuple(whole), sidecars=sidecars, others=others), False


def read_weight_map(folder: Folder) -> dict[str, str] | None:
    """The index's map from tensor to shard, or None where the folder has no index.

    Raises:
        SourceIncompatible: the index is too large, is not JSON, or names a file that could lie elsewhere.
    """
    if folder.index is None:
        return None
    path = folder.root / folder.index.name
    if folder.index.size > MAX_SIDECAR_BYTES:
        found = f"expected at most {MAX_SIDECAR_BYTES} bytes, found {folder.index.size}: {path}"
        raise SourceIncompatible(found, hint=_FETCH)
    return parse_weight_map(path, resolve_inside(folder.root, folder.index.name).read_bytes())


def parse_weight_map(path: Path, raw: bytes) -> dict[str, str]:
    """The map from tensor to shard out of the bytes of an index; `path` is for messages.

    Raises:
        SourceIncompatible: it is not JSON, or names files that are no safetensors.
    """
    try:
        weight_map = parse_strict_object(raw).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("its weight_map is not a map from tensors to files")
        for shard in sorted(set(weight_map.values())):
            if not shard.endswith(".safetensors"):
                raise ValueError(f"its weight_map names {shard[:200]!r}, which is no safetensors file")
    except ValueError as error:
        raise SourceIncompatible(f"{path} is not a weight index: {error}", hint=_FETCH) from None
    return weight_map


def choose_shards(folder: Folder, weight_map: Mapping[str, str] | None) -> tuple[str, ...]:
    """The names of the weight files, sorted: those of the index, else the one or the numbered set there is.

    Raises:
        SourceNotFound: there are no weights, or a shard is missing.
        SourceIncompatible: nothing says which of several files are meant.
    """
    if weight_map is not None:
        return _indexed_shards(folder, weight_map)
    names = list(folder.weights)
    names = [name for name in names if not name.startswith("consolidated")] or names
    if not names:
        raise _no_weights(folder)
    if _SINGLE in names:
        return (_SINGLE,)
    series = {(match[1], match[3]) if (match := _NUMBERED.fullmatch(name)) else (name, "") for name in names}
    if len(series) > 1:
        raise SourceIncompatible(
            f"expected one set of weights in {folder.root}, found {first_few(names)}",
            hint=f"Move the files away that do not belong to it, or restore its {WEIGHT_INDEX}.",
        )
    ((prefix, count),) = series
    if not count:
        return (prefix,)
    expected = [f"{prefix}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    _require(folder, expected)
    return tuple(expected)


def check_weight_map(folder: Folder, weight_map: Mapping[str, str], shards: Sequence[ShardHeader]) -> None:
    """Check that the index and the headers name the same tensors in the same shards.

    Raises:
        SourceNotFound: they do not.
    """
    holder = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    for name, shard in sorted(weight_map.items()):
        if holder.get(name) != shard:
            where = f"it is in {holder[name]}" if name in holder else "no shard has it"
            raise SourceNotFound(
                f"the weight index of {folder.root} places tensor {name[:200]!r} in {shard}, but {where}", hint=_FETCH
            )
    unlisted = sorted(holder.keys() - weight_map.keys())
    if unlisted:
        raise SourceNotFound(
            f"the weight index of {folder.root} does not list {first_few(unlisted)}, found in {holder[unlisted[0]]}",
            hint=_FETCH,
        )


def _indexed_shards(folder: Folder, weight_map: Mapping[str, str]) -> tuple[str, ...]:
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        require_plain_name(folder.root, shard)
    _require(folder, shards)
    if _SINGLE in folder.weights and _SINGLE not in shards:
        raise SourceIncompatible(
            f"{folder.root} holds both {_SINGLE} and a weight index that names other files",
            hint="Loaders differ in which of them they take: move the stale one away.",
        )
    if not shards:
        raise SourceNotFound(f"the weight index of {folder.root} names no tensors", hint=_FETCH)
    return tuple(shards)


def _require(folder: Folder, shards: Sequence[str]) -> None:
    missing = [shard for shard in shards if shard not in folder.weights]
    if missing:
        raise SourceNotFound(
            f"expected {len(shards)} shards in {folder.root}, found {len(shards) - len(missing)}: "
            f"{first_few(missing)} missing",
            hint=_FETCH,
        )


def _no_weights(folder: Folder) -> SourceNotFound:
    if not (folder.index or folder.sidecars or folder.others):
        return SourceNotFound(f"the folder is empty: {folder.root}", hint="Give the folder of a checkpoint.")
    foreign = [name for name in folder.others if name.endswith(_OTHER_FORMATS)]
    inner = [name for name in folder.others if name.endswith("/") and any((folder.root / name).glob("*.safetensors"))]
    hint = "Give the folder of a checkpoint."
    if foreign:
        hint = "Load it in transformers and write it with save_pretrained, which writes safetensors."
    elif inner:
        hint = f"Its folder {inner[0]} has some: give {folder.root / inner[0]}"
    found = f"only {first_few(foreign)}, which this version does not read" if foreign else "none"
    return SourceNotFound(f"expected weights in *.safetensors in {folder.root}, found {found}", hint=hint)
