"""What every benchmark needs: facts about the machine, a clock around a process, samples of its memory, a result file.

Linux only (/proc). A result names no host, user or path, so it can be committed as it is.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ENTRY = HERE / "timed_entry.py"


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


def mfs(*words: object) -> str:
    """Standard output of a command of mfs."""
    line = [sys.executable, "-m", "mfs_decompose", *map(str, words)]
    return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout


def machine() -> dict[str, Any]:
    """Processor model, cores this process may use, and memory in bytes."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "")
    flags = next((line.split(":", 1)[1].split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    return {
        "cpu": model or platform.machine(),
        "vector": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": round(os.getloadavg()[0], 2),
        "system": platform.system(),
    }


def versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """The versions of `packages` that the interpreter `python` would import, and its own."""
    script = (
        "import sys, json, platform\nfrom importlib.metadata import version, PackageNotFoundError\n"
        "found = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = version(name)\n"
        "    except PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([python, "-c", script, *packages], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_result(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Timing:
    """One run of an entry point, imports left out. Seconds; bytes; `error` is the exception it ended with.

    `others` is how many cores everything else on the machine kept busy meanwhile: above 0.1 the times mean little.
    """

    wall: float
    cpu: float
    peak_rss: int
    import_seconds: float
    exit_code: int
    error: str | None
    others: float
    log: str = field(repr=False, default="")

    def numbers(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "log"}


def time_entry(
    python: Path,
    entry: str,
    preload: Sequence[str],
    argv: Sequence[str],
    *,
    until: Path | None = None,
    threads: int | None = None,
) -> Timing:
    """Run `module:function` with `argv` in a process of its own; the clock starts when `preload` is imported.

    With `until`, the clock stops when that file was written last (never later than the end), so that work which
    fails after the result is there does not count. `threads` limits the threads of torch; None leaves its default.
    Dirty pages of earlier runs are synced first.
    """
    os.sync()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [str(python), str(ENTRY), entry, ",".join(preload), *argv]
    before = _busy_seconds() - _own_seconds()
    clock = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    others = (_busy_seconds() - _own_seconds() - before) / (time.perf_counter() - clock)
    marked = [line for line in done.stdout.splitlines() if line.startswith("timed_entry ")]
    log = done.stdout + done.stderr
    if not marked:
        raise RuntimeError(f"{entry} ended with {done.returncode} before it could report:\n{log[-2000:]}")
    facts = json.loads(marked[-1].removeprefix("timed_entry "))
    started = facts.pop("started")
    if until is not None and until.exists():
        facts["wall"] = min(facts["wall"], until.stat().st_mtime - started)
    return Timing(others=round(max(0.0, others), 3), log=log, **facts)


def _busy_seconds() -> float:
    """Processor seconds that the whole machine has spent on work since it started."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Processor seconds of this process and of the children it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@dataclass
class Memory:
    """Peaks over a process and its descendants, in bytes. `anonymous` is what --max-ram promises to hold."""

    anonymous: int = 0
    anonymous_exact: int = 0
    shared: int = 0
    resident: int = 0
    samples: int = 0

    def note(self, pids: Sequence[int], *, exact: bool) -> None:
        """Take one sample; `exact` also walks the page tables (smaps_rollup), which is slow on large processes."""
        fields = [_read_fields(Path(f"/proc/{pid}/status")) for pid in pids]
        self.anonymous = max(self.anonymous, sum(f.get("RssAnon", 0) for f in fields))
        self.shared = max(self.shared, sum(f.get("RssShmem", 0) for f in fields))
        self.resident = max(self.resident, sum(f.get("VmRSS", 0) for f in fields))
        self.samples += 1
        if exact:
            walked = [_read_fields(Path(f"/proc/{pid}/smaps_rollup")) for pid in pids]
            self.anonymous_exact = max(self.anonymous_exact, sum(f.get("Anonymous", 0) for f in walked))


@dataclass(frozen=True)
class Watched:
    """A whole process, imports included."""

    wall: float
    exit_code: int
    memory: Memory
    log: str = field(repr=False)


def watch(command: Sequence[str], *, every: float = 0.05, exact_every: float = 1.0) -> Watched:
    """Run `command` and sample the memory of its process tree every `every` seconds."""
    memory = Memory()
    started = time.perf_counter()
    exact_due = 0.0
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    reader = _Drain(process)
    while process.poll() is None:
        now = time.perf_counter()
        exact = now >= exact_due
        memory.note(descendants(process.pid), exact=exact)
        if exact:
            exact_due = now + exact_every
        time.sleep(max(0.0, every - (time.perf_counter() - now)))
    wall = time.perf_counter() - started
    return Watched(wall, process.returncode, memory, reader.text())


def descendants(pid: int) -> list[int]:
    """`pid` and every process below it; one that ends meanwhile is left out."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        for children in Path(f"/proc/{current}/task").glob("*/children"):
            try:
                queue += [int(child) for child in children.read_text().split()]
            except OSError:
                continue
    return found


def _read_fields(path: Path) -> dict[str, int]:
    """The `name: N kB` lines of a /proc file, in bytes; nothing when the process is gone."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines if line.endswith(" kB")]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in parts}


class _Drain:
    """Reads the pipe of a process in a thread, so that it never blocks on a full one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        import threading

        assert process.stdout is not None
        self._stream = process.stdout
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        self._lines.extend(self._stream)

    def text(self) -> str:
        self._thread.join()
        return "".join(self._lines)
