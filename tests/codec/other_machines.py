"""Decoding in processes that stand for other machines: one thread, other vector instructions, other matrix kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENTS = {
    "one thread": {},
    "plain vector instructions": {"ATEN_CPU_CAPABILITY": "default"},
    "compatible matrix kernels": {"MKL_CBWR": "COMPATIBLE"},
}


def decode_elsewhere(script: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """The JSON that `script folder` prints in each of the environments; the processes run side by side."""
    clean = {key: value for key, value in os.environ.items() if key not in ("ATEN_CPU_CAPABILITY", "MKL_CBWR")}
    running = {
        name: subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**clean, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **changes},
            stdout=subprocess.PIPE,
        )
        for name, changes in ENVIRONMENTS.items()
    }
    found = {}
    for name, process in running.items():
        output, _ = process.communicate()
        assert process.returncode == 0
        found[name] = json.loads(output)
    return found
