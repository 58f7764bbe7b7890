"""What this run runs on: versions of the libraries that decide bytes, the device, and the machine's limits."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path

from mfs_decompose import __version__

LIBRARIES = ("torch", "numpy", "safetensors", "zstandard")


def tool_versions() -> dict[str, str]:
    """Name and version of this tool, and of the libraries whose arithmetic reaches the artifact."""
    found = {"name": "mfs_decompose", "version": __version__}
    return found | {name: metadata.version(name) for name in LIBRARIES}


def available_memory() -> int:
    """Bytes of memory that can be had without swapping: MemAvailable, or less inside a control group."""
    limits = [_meminfo("MemAvailable")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(name).strip()
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def anonymous_memory() -> int:
    """Bytes of anonymous memory this process holds now."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def free_disk(folder: Path) -> int:
    """Bytes free where `folder`, or its nearest existing parent, lies."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def processors() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _meminfo(key: str) -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
