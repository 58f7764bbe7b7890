"""B63: memory grows with every checkpoint that is opened until the machine dies, despite lazy loading.

`--max-ram` holds for nine checkpoints of 40 MB, in anonymous memory as measured and under a limit that the kernel
enforces; too little of it is refused before any work, and memory that runs out is no bug.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import random_checkpoint
from report_program import run

LAYERS, VARIANTS = 40, 8
SHAPE = (256, 1024)  # 1 MB in fp32
MAX_RAM = 500_000_000
HARD = 650_000_000  # of address space that may be written to: stacks and room that the allocator keeps come on top


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base, and fine-tunes that differ in every layer."""
    root = tmp_path_factory.mktemp("b63")
    generator = torch.Generator().manual_seed(63)
    base = {f"layers.{at}.weight": torch.randn(SHAPE, generator=generator) for at in range(LAYERS)}
    noise = 0.01 * torch.randn(SHAPE, generator=generator)
    found = [random_checkpoint(root / "base", base)]
    for number in range(VARIANTS):
        own = {name: weight + noise.roll(31 * at + number) for at, (name, weight) in enumerate(base.items())}
        found.append(random_checkpoint(root / f"v{number}", own))
    return found


def command(folders: list[Path], out: Path, *more: str) -> list[str]:
    words = [sys.executable, "-m", "mfs_decompose", "decompose", "--base", str(folders[0]), "--variants"]
    words += [str(folder) for folder in folders[1:]]
    return [*words, "--rank", "2", "--base-store", "reference", "--threads", "2", "--out", str(out), *more]


def limited(nbytes: int) -> Callable[[], None]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))

    return limit


def watched(words: list[str], limit: int) -> tuple[int, int, str]:
    """Run a command under a hard limit: exit code, peak of anonymous memory, what it said."""
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=limited(limit)
    )
    said: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=said.extend, args=(process.stderr,))
    reader.start()
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        lines = [line.split() for line in status.read_text().splitlines()]
        peak = max([peak, *(int(words[1]) * 1024 for words in lines if words[0] == "RssAnon:")])
        time.sleep(0.01)
    reader.join()
    process.stderr.close()
    return process.returncode, peak, "".join(said)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_nine_checkpoints_stay_within_the_limit(folders: list[Path], tmp_path: Path) -> None:
    code, peak, said = watched(command(folders, tmp_path / "art", "--max-ram", str(MAX_RAM) + "B"), HARD)
    assert code == 0, said
    assert 100_000_000 < peak <= MAX_RAM
    assert (tmp_path / "art" / "manifest.json").is_file()


def test_a_limit_that_the_largest_tensors_exceed_is_refused_before_any_work(
    folders: list[Path], tmp_path: Path
) -> None:
    done = run(*command(folders, tmp_path / "art", "--max-ram", "360MB")[3:])
    assert done.code == 13
    assert "of memory for its largest tensors, and 360 MB was allowed" in done.err
    assert "Hint: Use --max-ram " in done.err and "or more" in done.err
    assert list(tmp_path.iterdir()) == []


def test_memory_that_runs_out_is_no_bug(folders: list[Path], tmp_path: Path) -> None:
    """The machine has less than was promised: nothing is published, and the run can go on elsewhere."""
    code, _, said = watched(command(folders[:3], tmp_path / "art", "--max-ram", "2GB"), 330_000_000)
    assert code == 13, said
    assert "Error: not enough memory" in said and "--max-ram" in said
    assert not (tmp_path / "art").exists()
