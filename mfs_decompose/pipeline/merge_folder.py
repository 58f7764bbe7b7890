"""The original of an adapter: its fp32 merge with the base, as a folder that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mfs_decompose.artifact.atomic import write_file
from mfs_decompose.artifact.shard import Entry, library_order, write_shard
from mfs_decompose.artifact.values import row_bytes
from mfs_decompose.artifact.variant_files import as_float32, change_config, choose_files, dump_config
from mfs_decompose.codec.base import DECODE_ELEMENTS, block_rows
from mfs_decompose.codec.opened_adapter import OpenedAdapterTensor
from mfs_decompose.codec.tree import CodecNode
from mfs_decompose.events import ProgressSink
from mfs_decompose.source.adapter import MergedTensor, resolve_adapter
from mfs_decompose.source.checkpoint import CONFIG, Checkpoint, TensorReader, read_sidecar
from mfs_decompose.source.dtypes import is_float
from mfs_decompose.source.header import TensorSpec

if TYPE_CHECKING:
    import torch

_WEIGHTS = "model.safetensors"


def write_merge(adapter: Checkpoint, base: Checkpoint, folder: Path, progress: ProgressSink) -> None:
    """Merge an adapter into its base in fp32, and write a checkpoint into the new `folder`.

    From the two sources alone, so that what an artifact keeps of them is held against it.

    Raises:
        SourceIncompatible: the adapter does not fit the base, or one of the two changed.
    """
    merge = resolve_adapter(adapter, base)
    specs = {name: _in_fp32(tensor.spec) for name, tensor in merge.tensors.items()}
    entries = library_order([Entry(s.name, s.dtype, s.shape, s.nbytes) for s in specs.values()])
    folder.mkdir(parents=True)
    with TensorReader(adapter) as own, TensorReader(base) as below:

        def chunks() -> Iterator[memoryview]:
            for entry in entries:
                for _, _, rows in merged_rows(merge.tensors[entry.name], own, below.rows):
                    yield row_bytes(rows)

        progress.start(f"merge {adapter.id} into its base", sum(spec.nbytes for spec in specs.values()))
        write_shard(folder / _WEIGHTS, entries, chunks(), {}, progress=progress)
        progress.finish()
    bases, brought = ({sidecar.name: (one, sidecar) for sidecar in one.sidecars} for one in (base, adapter))
    for name, place in choose_files(bases, brought).items():
        data = read_sidecar(*place)
        if name == CONFIG:
            data = dump_config(as_float32(change_config(json.loads(data), merge.config_changes)))
        write_file(folder / name, data)


def merged_rows(
    tensor: MergedTensor, own: TensorReader, below: Callable[[str, int, int], torch.Tensor]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The fp32 merge in blocks: (start, stop, rows). `own` reads the adapter, `below` rows of the base by name."""
    import torch

    opened = None
    if tensor.params is not None:
        node = CodecNode("adapter", params=dict(tensor.params))
        opened = OpenedAdapterTensor(node, own.rows, tensor.spec, tensor.base)
    base = None if tensor.base is None else partial(below, tensor.base.name)
    step = block_rows(tensor.spec, DECODE_ELEMENTS)
    for start in range(0, tensor.spec.rows, step):
        stop = min(start + step, tensor.spec.rows)
        if opened is not None:
            yield start, stop, opened.served(start, stop, base)
        else:
            assert base is not None
            rows = base(start, stop)
            yield start, stop, rows.to(torch.float32) if is_float(tensor.spec.dtype) else rows


def _in_fp32(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, "F32", spec.shape) if is_float(spec.dtype) else spec
