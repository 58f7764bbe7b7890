"""One run at a time, also where the file system cannot lock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mfs_decompose.artifact.lock import exclusive_lock
from mfs_decompose.errors import OutputBusy

HOLDER = """
import sys, time
from pathlib import Path
from mfs_decompose.artifact.lock import exclusive_lock
with exclusive_lock(Path(sys.argv[1]), Path("out")):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / ".out.lock"


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "no flock here")

    monkeypatch.setattr(fcntl, "flock", refuse)


def start_holder(lock: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_the_lock_is_gone_afterwards(lock: Path) -> None:
    with exclusive_lock(lock, Path("out")):
        assert json.loads(lock.read_text()) == {"host": socket.gethostname(), "pid": os.getpid()}
    assert not lock.exists()


def test_it_is_released_when_the_block_fails(lock: Path) -> None:
    with pytest.raises(KeyboardInterrupt), exclusive_lock(lock, Path("out")):
        raise KeyboardInterrupt
    with exclusive_lock(lock, Path("out")):
        pass


def test_a_second_run_is_refused_and_told_who_holds_it(lock: Path) -> None:
    process = start_holder(lock)
    try:
        pattern = rf"expected here/out to be free, found process {process.pid} on {re.escape(socket.gethostname())}"
        with pytest.raises(OutputBusy, match=pattern) as caught, exclusive_lock(lock, Path("here/out")):
            pass
        assert caught.value.exit_code == 14
        assert process.poll() is None
    finally:
        end(process)


def test_a_killed_holder_leaves_no_stale_lock(lock: Path) -> None:
    end(start_holder(lock))
    assert lock.exists()
    with exclusive_lock(lock, Path("out")):
        assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_also_within_one_process(lock: Path) -> None:
    with exclusive_lock(lock, Path("out")), pytest.raises(OutputBusy), exclusive_lock(lock, Path("out")):
        pass


@pytest.mark.parametrize("text", [b"", b"garbage", b'{"pid":"x"}', b"[]"])
def test_a_holder_that_did_not_sign_is_still_a_holder(lock: Path, text: bytes) -> None:
    with exclusive_lock(lock, Path("out")):
        lock.write_bytes(text)
        with pytest.raises(OutputBusy, match="found another run"), exclusive_lock(lock, Path("out")):
            pass


def test_one_at_a_time_among_many_threads(lock: Path) -> None:
    inside, most, entered, refused = [0], [0], [0], [0]
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(60):
            try:
                with exclusive_lock(lock, Path("out")):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    entered[0] += 1
                    inside[0] -= 1
            except OutputBusy:
                refused[0] += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    assert entered[0] >= 1
    assert not lock.exists()


def test_a_file_unlinked_between_open_and_lock_is_not_taken_for_the_lock(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, first = fcntl.flock, [True]

    def race(fd: int, operation: int) -> None:
        if first:  # the former holder ends exactly now
            first.pop()
            lock.unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", race)
    with exclusive_lock(lock, Path("out")):
        assert lock.exists()
        with pytest.raises(OutputBusy), exclusive_lock(lock, Path("out")):
            pass


@pytest.mark.usefixtures("no_flock")
def test_without_flock_a_living_holder_is_respected(lock: Path) -> None:
    with exclusive_lock(lock, Path("out")):
        with pytest.raises(OutputBusy, match=f"process {os.getpid()}"), exclusive_lock(lock, Path("out")):
            pass
        assert lock.exists()
    assert not lock.exists()


@pytest.mark.usefixtures("no_flock")
def test_without_flock_a_dead_holder_is_taken_over(lock: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    lock.write_text(json.dumps({"host": socket.gethostname(), "pid": process.pid}))
    with exclusive_lock(lock, Path("out")):
        assert json.loads(lock.read_text())["pid"] == os.getpid()


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize("text", ['{"host": "elsewhere", "pid": 1}', "garbage"])
def test_without_flock_an_unknown_holder_is_respected_and_the_way_out_named(lock: Path, text: str) -> None:
    lock.write_text(text)
    with pytest.raises(OutputBusy) as caught, exclusive_lock(lock, Path("out")):
        pass
    assert str(lock) in (caught.value.hint or "")
    assert lock.read_text() == text


def test_other_errors_are_not_mistaken_for_a_missing_flock(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="broken"), exclusive_lock(lock, Path("out")):
        pass
