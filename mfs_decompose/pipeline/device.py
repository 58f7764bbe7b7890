"""Where the factorisations run."""

from __future__ import annotations

import re

from mfs_decompose.errors import UsageError


def choose_device(wanted: str) -> str:
    """`cpu`, or `cuda` with an index: what `auto`, `cpu`, `cuda` or `cuda:1` come to on this machine.

    Raises:
        UsageError: the device is unknown or not there.
    """
    import torch

    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", wanted):
        raise UsageError(f"expected a device among auto, cpu, cuda and cuda:N, found {wanted!r}")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return wanted
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(wanted.partition(":")[2] or 0)
    if index >= count:
        built = "" if torch.version.cuda else f" (this torch, {torch.__version__}, is built without CUDA)"
        raise UsageError(
            f"expected {wanted} to be one of this machine's CUDA devices, found {count}{built}",
            hint="Use --device cpu." if count == 0 else f"Use --device cuda:{count - 1} or a smaller index.",
        )
    torch.backends.cuda.matmul.allow_tf32 = False  # ambient settings must not decide about bytes
    return f"cuda:{index}"


def crowded_out(device: str) -> str | None:
    """A sentence on matrices that a device had no room for, since it was last asked; None where there were none."""
    from mfs_decompose.linalg.device_batches import lane_of

    left = lane_of(device).take_left_to_cpu()
    if not left:
        return None
    what = "1 matrix was" if left == 1 else f"{left} matrices were"
    return f"{what} factorised on the CPU for want of memory on {device}: on a device with room, bytes will differ"


def platform_facts(device: str) -> dict[str, str]:
    """Kind of device and CPU capability: other ones give other bytes."""
    import torch

    return {"device": device.partition(":")[0], "capability": torch.backends.cpu.get_cpu_capability()}
