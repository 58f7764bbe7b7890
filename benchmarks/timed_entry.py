"""Import first, then start the clock: `python timed_entry.py MODULE:FUNCTION MODULES ARG...`.

Runs in the interpreter that is measured, so it imports nothing but the standard library and what it is told to.
MODULES are comma-separated; `package.*` imports every module of a package. Prints one line, `timed_entry {json}`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import resource
import sys
import time


def load(name: str) -> None:
    if not name.endswith(".*"):
        importlib.import_module(name)
        return
    package = importlib.import_module(name[:-2])
    for found in pkgutil.walk_packages(package.__path__, name[:-1]):
        if not found.name.endswith(".__main__"):
            importlib.import_module(found.name)


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    entry, modules, *arguments = sys.argv[1:]
    module, function = entry.split(":")
    before = time.perf_counter()
    for name in [*modules.split(","), module]:
        load(name)
    imported = time.perf_counter() - before
    sys.argv = [function, *arguments]
    exit_code, error = 0, None
    cpu, started, clock = cpu_seconds(), time.time(), time.perf_counter()
    try:
        result = getattr(sys.modules[module], function)()
        exit_code = result if isinstance(result, int) else 0
    except SystemExit as stop:
        exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as failure:
        exit_code, error = 1, type(failure).__name__
    wall, cpu = time.perf_counter() - clock, cpu_seconds() - cpu
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    facts = {
        "wall": wall,
        "cpu": cpu,
        "peak_rss": max(peaks) * 1024,
        "import_seconds": imported,
        "exit_code": exit_code,
        "error": error,
        "started": started,
    }
    sys.stdout.write(f"\ntimed_entry {json.dumps(facts)}\n")


if __name__ == "__main__":
    main()
