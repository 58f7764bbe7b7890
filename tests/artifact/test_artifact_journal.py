"""The journal: what was appended comes back, what was torn does not."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfs_decompose.artifact.journal import JOURNAL_NAME, Journal, JournalLine
from mfs_decompose.errors import ArtifactInvalid, ResourceShortage

LINES: list[tuple[str, dict[str, Any]]] = [
    ("start", {"fingerprint": "ab"}),
    ("group", {"name": "w\n", "error": 0.25}),
    ("shard", {"bytes": 2**40}),
]


def fill(folder: Path, lines: list[tuple[str, dict[str, Any]]] = LINES) -> bytes:
    with Journal.open(folder) as journal:
        for kind, payload in lines:
            journal.append(kind, payload)
    return (folder / JOURNAL_NAME).read_bytes()


def replay(folder: Path) -> list[tuple[str, Any]]:
    with Journal.open(folder) as journal:
        return [(line.kind, line.payload) for line in journal.lines()]


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    fill(tmp_path)
    assert replay(tmp_path) == LINES


def test_golden_line(tmp_path: Path) -> None:
    assert fill(tmp_path, [("group", {"b": 1, "a": [0.5]})]) == (
        b'{"check":"3f3efdc8baab2076","kind":"group","number":0,"payload":{"a":[0.5],"b":1}}\n'
    )


def test_an_open_journal_knows_its_own_lines(tmp_path: Path) -> None:
    fill(tmp_path, LINES[:1])
    with Journal.open(tmp_path) as journal:
        journal.append(*LINES[1])
        assert journal.lines() == (JournalLine(*LINES[0]), JournalLine(*LINES[1]))
        assert journal.dropped_bytes == 0


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwrite, []

    def spy(fd: int, data: bytes, offset: int) -> int:
        calls.append(data)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", spy)
    fill(tmp_path)
    assert len(calls) == len(LINES)
    assert all(data.endswith(b"\n") and data.count(b"\n") == 1 for data in calls)


def test_every_torn_tail_gives_a_prefix_and_can_be_continued(tmp_path: Path) -> None:
    whole = fill(tmp_path)
    ends = [index + 1 for index, byte in enumerate(whole) if byte == 10]
    for cut in sorted({*range(0, len(whole), 5), *ends[:-1], *(end - 1 for end in ends)}):
        (tmp_path / JOURNAL_NAME).write_bytes(whole[:cut])
        good = sum(end <= cut for end in ends)
        with Journal.open(tmp_path) as journal:
            assert len(journal.lines()) == good
            assert journal.dropped_bytes == cut - ([0, *ends][good])
            journal.append("again", {})
        assert replay(tmp_path) == [*LINES[:good], ("again", {})]


@given(st.data())
def test_a_flipped_bit_drops_its_line_and_all_after(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("journal")
    whole = bytearray(fill(folder))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    (folder / JOURNAL_NAME).write_bytes(whole)
    line = bytes(whole[: bit // 8]).count(b"\n")
    assert replay(folder) == LINES[:line]


@pytest.mark.parametrize("tail", [b"\0" * 100, b"garbage", b"\n", b"{}\n", b"[1]\n", b'{"check":1}\n', b"\xff\n"])
def test_garbage_behind_the_last_line_is_dropped(tmp_path: Path, tail: bytes) -> None:
    (tmp_path / JOURNAL_NAME).write_bytes(fill(tmp_path) + tail)
    assert replay(tmp_path) == LINES


def test_a_line_out_of_turn_is_dropped(tmp_path: Path) -> None:
    first, second, third = fill(tmp_path).splitlines(keepends=True)
    (tmp_path / JOURNAL_NAME).write_bytes(first + third + second)
    assert replay(tmp_path) == LINES[:1]


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    first = [True]

    def short(fd: int, data: bytes, offset: int) -> int:
        if first.pop() if first else False:
            return real(fd, data[:5], offset)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", short)
    fill(tmp_path)
    monkeypatch.undo()
    assert replay(tmp_path) == LINES


@pytest.mark.parametrize("written", [0, 7])
def test_a_full_disk_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    before = fill(tmp_path)
    real = os.pwrite
    state = {"left": written}

    def full(fd: int, data: bytes, offset: int) -> int:
        if not state["left"]:
            raise OSError(28, "No space left on device")
        state["left"] = 0
        return real(fd, data[:written], offset)

    with Journal.open(tmp_path) as journal:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(ResourceShortage, match=JOURNAL_NAME):
            journal.append("more", {})
        monkeypatch.undo()
        assert (tmp_path / JOURNAL_NAME).read_bytes() == before
        journal.append("later", {})
    assert replay(tmp_path) == [*LINES, ("later", {})]


def test_what_is_not_json_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        with pytest.raises(ArtifactInvalid):
            journal.append("group", {"x": float("nan")})
        journal.append("group", {"x": 1.0})
    assert replay(tmp_path) == [("group", {"x": 1.0})]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:

        def work(number: int) -> None:
            for turn in range(50):
                journal.append("unit", {"thread": number, "turn": turn, "text": "x" * 50})

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = replay(tmp_path)
    assert len(lines) == 200
    for number in range(4):
        assert [p["turn"] for _, p in lines if p["thread"] == number] == list(range(50))
    numbers = [json.loads(line)["number"] for line in (tmp_path / JOURNAL_NAME).read_text().splitlines()]
    assert numbers == list(range(200))


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.close()
    journal.close()
