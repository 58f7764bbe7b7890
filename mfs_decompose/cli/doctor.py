"""`mfs doctor`: what this machine offers, and what would go wrong on it."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from mfs_decompose.cli.options import output_of

_PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "zstandard", "pydantic", "typer", "rich")


def command(
    ctx: typer.Context,
    folder: Annotated[
        Path, typer.Option("--at", metavar="DIR", help="Where artifacts will be written: its free disk is shown.")
    ] = Path(),
) -> None:
    """Show versions, devices, memory and disk, and known problems of this machine.

    Examples:
      mfs doctor
      mfs doctor --at /data --json
    """
    from mfs_decompose.units import format_bytes

    output = output_of(ctx)
    facts = _facts(folder)
    problems = _problems(facts)
    output.document({"schema": "mfs.doctor/1", **facts, "problems": problems})
    rows = [
        ("mfs", facts["versions"]["mfs_decompose"]),
        ("python", facts["python"]),
        *((name, facts["versions"].get(name) or "missing") for name in _PACKAGES),
        ("device", facts["device"]),
        ("cpu capability", facts["capability"]),
        ("processors", str(facts["processors"])),
        ("memory available", format_bytes(facts["memory_available"])),
        (f"disk free at {folder.absolute()}", format_bytes(facts["disk_free"])),
        ("temporary files in", facts["temporary"]),
    ]
    output.table(("what", "found"), rows)
    for problem in problems:
        output.warn(problem)
    if not problems:
        output.say("nothing known to be wrong here")


def _facts(folder: Path) -> dict[str, Any]:
    from mfs_decompose.pipeline.device import choose_device, platform_facts
    from mfs_decompose.provenance import available_memory, free_disk, processors

    versions: dict[str, str | None] = {"mfs_decompose": metadata.version("mfs_decompose")}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    device = choose_device("auto")
    return {
        "python": platform.python_version(),
        "versions": versions,
        "device": device,
        "capability": platform_facts(device)["capability"],
        "processors": processors(),
        "memory_available": available_memory(),
        "disk_free": free_disk(folder),
        "temporary": tempfile.gettempdir(),
    }


def _problems(facts: dict[str, Any]) -> list[str]:
    """Each with what to do about it."""
    from mfs_decompose.units import format_bytes

    found = []
    missing = [name for name, version in facts["versions"].items() if version is None]
    if missing:
        found.append(f"missing packages: {', '.join(missing)}; install mfs_decompose again")
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        found.append(f"python {facts['python']} is not among 3.11 to 3.13, which are tested")
    if facts["memory_available"] < 2_000_000_000:
        found.append(f"only {format_bytes(facts['memory_available'])} of memory are free: use --max-ram to stay below")
    if sys.byteorder != "little":
        found.append("this machine is big-endian: artifacts are little-endian, and nothing here converts them")
    if not os.access(facts["temporary"], os.W_OK):
        found.append(f"{facts['temporary']} cannot be written to: set TMPDIR")
    return found
