"""Which models are in memory together: all, or the original with one other at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mfs_decompose.errors import ResourceShortage
from mfs_decompose.fidelity.settings import EvalSettings
from mfs_decompose.units import format_bytes

_MARGIN = 1.1  # activations and allocator, beside weights and logits


@dataclass(frozen=True)
class ModelSize:
    """Bytes of a model's weights once loaded, and the most rows of any tensor: its vocabulary, or more."""

    weight_bytes: int
    rows: int


def measure_model(folder: Path, itemsize: int) -> ModelSize:
    """Size of a checkpoint folder from its safetensors headers.

    A folder without readable headers has size 0: loading it then says what is wrong.
    """
    from safetensors import SafetensorError, safe_open

    elements = rows = 0
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    count = 1
                    shape = shard.get_slice(name).get_shape()
                    for length in shape:
                        count *= length
                    elements += count
                    rows = max(rows, *shape[:1], 0)
        except (OSError, SafetensorError):
            continue
    return ModelSize(elements * itemsize, rows)


def group_rivals(
    original: ModelSize, rivals: Mapping[str, ModelSize], settings: EvalSettings, available: int
) -> tuple[tuple[str, ...], ...]:
    """Roles that are loaded together beside the original: all in one group if they fit, else one a group.

    Raises:
        ResourceShortage: the original and one other do not fit together.
    """
    if _bytes_needed(original, list(rivals.values()), settings) <= available:
        return (tuple(rivals),)
    for role, size in rivals.items():
        needed = _bytes_needed(original, [size], settings)
        if needed > available:
            raise ResourceShortage(
                f"measuring needs the original and the {role} checkpoint in memory together: "
                f"expected {format_bytes(needed)}, found {format_bytes(available)}",
                hint="close other programs, or measure on a machine with more memory",
            )
    return tuple((role,) for role in rivals)


def available_memory(device: str = "cpu") -> int:
    """Bytes that can be allocated now: on a GPU what it reports, else the least of the system's and the cgroup's."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return min(_system_memory(), *_cgroup_memory(Path("/sys/fs/cgroup")))


def _bytes_needed(original: ModelSize, others: list[ModelSize], settings: EvalSettings) -> int:
    # Logits of the original and of one other model exist at a time.
    rows = max(size.rows for size in (original, *others))
    logits = 2 * settings.batch_size * settings.window * rows * settings.itemsize
    return int(_MARGIN * (sum(size.weight_bytes for size in (original, *others)) + logits))


def _weight_files(folder: Path) -> list[Path]:
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return sorted(folder.glob("*.safetensors"))


def _system_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_memory(root: Path) -> list[int]:
    """What the container may still allocate, or nothing where it is not limited."""
    for limit, used, stat, prefix in (
        ("memory.max", "memory.current", "memory.stat", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
    ):
        try:
            counts = dict(line.split() for line in (root / stat).read_text().splitlines())
            # Cached files count as used but give way: checkpoints just read must not look like a shortage.
            cached = int(counts[f"{prefix}inactive_file"]) + int(counts[f"{prefix}active_file"])
            return [max(0, int((root / limit).read_text()) - int((root / used).read_text()) + cached)]
        except (OSError, ValueError, KeyError):
            continue
    return []
