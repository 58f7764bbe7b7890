"""Downloads that break off, lie or are killed: nothing wrong is accepted, and nothing that arrived is fetched again."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_stub import Body, Drop, HubStub, Status, digest_of, git_blob, model_files, sha256
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording_sink import RecordingSink

from mfs_decompose.errors import NetworkFailure, SourceNotFound
from mfs_decompose.events import NullSink
from mfs_decompose.source import hub_cache
from mfs_decompose.source.hub_cache import Hasher, HubCache
from mfs_decompose.source.hub_client import HubClient, HubFile
from mfs_decompose.source.hub_fetch import fetch
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.source.resolve import Resolved, resolve

WEIGHTS = "model.safetensors"
FILES = model_files(shards=1)
SIZE = len(FILES[WEIGHTS])


def get(sink: RecordingSink | None = None) -> Resolved:
    return resolve(SourceRef.parse("org/name"), progress=sink)


def blob(tmp_path: Path, name: str = WEIGHTS) -> Path:
    return tmp_path / "hub" / "models--org--name" / "blobs" / sha256(FILES[name])


def partial(tmp_path: Path) -> Path:
    return blob(tmp_path).with_name(f"{sha256(FILES[WEIGHTS])}.incomplete")


def assert_whole(found: Resolved, tmp_path: Path) -> None:
    assert (found.folder / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".incomplete")]


class TestBrokenConnections:
    @pytest.mark.parametrize("promised", [True, False])
    def test_the_next_try_goes_on_where_the_last_one_ended(self, hub: HubStub, tmp_path: Path, promised: bool) -> None:
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, Drop(7_001, promised), Drop(9_000, promised))
        sink = RecordingSink()
        assert_whole(get(sink), tmp_path)
        assert hub.ranges(WEIGHTS) == [None, "bytes=7001-", "bytes=16001-"]
        assert sink.stages[-1].done == sink.stages[-1].total

    def test_a_file_of_git_itself(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", FILES)
        hub.fail("README.md", Drop(11))
        assert (get().folder / "README.md").read_bytes() == FILES["README.md"]
        assert hub.ranges("README.md") == [None, "bytes=11-"]

    def test_a_connection_that_breaks_before_the_first_byte(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, Drop(0))
        assert_whole(get(), tmp_path)

    def test_one_that_breaks_again_and_again_without_a_byte_more(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, Drop(7_001), *[Drop(0)] * 9)
        with pytest.raises(NetworkFailure, match=r"broke off, after 5 tries: model.safetensors of org/name") as caught:
            get()
        assert caught.value.exit_code == 30
        assert "what has arrived is kept" in (caught.value.hint or "")
        assert partial(tmp_path).read_bytes() == FILES[WEIGHTS][:7_001]
        assert not blob(tmp_path).exists()

    def test_it_may_break_often_as_long_as_bytes_come(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, *[Drop(1_000)] * 12)
        assert_whole(get(), tmp_path)
        assert len(hub.ranges(WEIGHTS)) == 13

    def test_a_server_that_stalls(self, hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, Body(delay=0.3))
        assert_whole(get(), tmp_path)

    def test_the_branch_is_not_remembered_before_all_is_there(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, *[Drop(0)] * 9)
        with pytest.raises(NetworkFailure):
            get()
        assert not (tmp_path / "hub" / "models--org--name" / "refs").exists()
        with pytest.raises(SourceNotFound, match="is not in the cache"):
            resolve(SourceRef.parse("org/name"), offline=True)


class TestWrongAnswers:
    def test_the_whole_where_a_range_was_asked(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, Drop(7_001), Body(ignore_range=True))
        sink = RecordingSink()
        assert_whole(get(sink), tmp_path)
        assert hub.ranges(WEIGHTS) == [None, "bytes=7001-"]
        assert sink.stages[-1].done == sink.stages[-1].total

    def test_the_whole_that_breaks_off_at_the_same_place_each_time_ends(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, *[Body(ignore_range=True, then_drop=7_001)] * 20)
        with pytest.raises(NetworkFailure, match="after 5 tries"):
            get()
        assert len(hub.ranges(WEIGHTS)) == 5

    @pytest.mark.parametrize("shift", [-500, 500])
    def test_a_range_from_elsewhere(self, hub: HubStub, tmp_path: Path, shift: int) -> None:
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, Drop(7_001), Body(shift=shift))
        assert_whole(get(), tmp_path)
        assert hub.ranges(WEIGHTS) == [None, "bytes=7001-", None]

    def test_more_bytes_than_the_file_has(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, Body(extra=b"x" * 100))
        assert_whole(get(), tmp_path)

    def test_a_range_that_cannot_be_served(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, Drop(7_001), Status(416))
        assert_whole(get(), tmp_path)
        assert hub.ranges(WEIGHTS) == [None, "bytes=7001-", None]


class TestWrongBytes:
    """B64 (https://github.com/huggingface/huggingface_hub/issues/3643): right size, wrong bytes, reported as fine."""

    @pytest.mark.parametrize("at", [0, 4_000, SIZE - 1])
    def test_b64_wrong_bytes_that_arrive_once_are_fetched_again(self, hub: HubStub, tmp_path: Path, at: int) -> None:
        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, Body(flip=at))
        sink = RecordingSink()
        assert_whole(get(sink), tmp_path)
        assert sink.warnings == ["model.safetensors arrived with other bytes than the Hub lists: once more"]

    @pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
    def test_b64_wrong_bytes_that_arrive_twice_are_refused(self, hub: HubStub, tmp_path: Path, name: str) -> None:
        hub.commit("org/name", FILES)
        hub.fail(name, Body(flip=3), Body(flip=3))
        with pytest.raises(NetworkFailure, match=rf"{name} of org/name arrived twice with other bytes") as caught:
            get()
        assert caught.value.exit_code == 30
        assert "Nothing of it was kept" in (caught.value.hint or "")
        kept = {path.name for path in (tmp_path / "hub" / "models--org--name").rglob("*")}
        assert not {digest_of(name, FILES[name]), f"{digest_of(name, FILES[name])}.incomplete", name} & kept

    def test_b64_huggingface_hub_itself_takes_them(self, hub: HubStub, tmp_path: Path) -> None:
        """Why we hash: without it this very answer is accepted."""
        from huggingface_hub import hf_hub_download

        hub.commit("org/name", FILES)
        hub.fail(WEIGHTS, Body(flip=4_000))
        assert Path(hf_hub_download("org/name", WEIGHTS)).read_bytes() != FILES[WEIGHTS]
        # ... and we find out, and repair it.
        sink = RecordingSink()
        assert_whole(get(sink), tmp_path)
        assert sink.warnings == ["the cached copy of model.safetensors of org/name is damaged: fetching it again"]

    def test_b64_a_blob_under_the_name_of_another(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", FILES)
        found = get()
        other = bytearray(FILES[WEIGHTS])
        other[-5] ^= 4
        blob(tmp_path).write_bytes(other)
        assert_whole(get(), tmp_path)
        assert found.folder.exists()

    def test_b64_an_interrupted_file_under_its_final_name(self, hub: HubStub, tmp_path: Path) -> None:
        """https://github.com/huggingface/huggingface_hub/issues/1396"""
        hub.commit("org/name", FILES)
        get()
        blob(tmp_path).write_bytes(FILES[WEIGHTS][:9_000])
        hub.seen.clear()
        assert_whole(get(), tmp_path)
        assert hub.bodies() == [WEIGHTS]

    def test_rubbish_left_behind_by_another_download(self, hub: HubStub, tmp_path: Path) -> None:
        hub.commit("org/name", FILES)
        partial(tmp_path).parent.mkdir(parents=True)
        partial(tmp_path).write_bytes(b"\0" * 9_000)
        assert_whole(get(), tmp_path)
        assert hub.ranges(WEIGHTS) == ["bytes=9000-", None]

    @pytest.mark.parametrize("length", [SIZE, SIZE + 7])
    def test_an_unfinished_file_that_is_as_long_or_longer(self, hub: HubStub, tmp_path: Path, length: int) -> None:
        hub.commit("org/name", FILES)
        partial(tmp_path).parent.mkdir(parents=True)
        partial(tmp_path).write_bytes((FILES[WEIGHTS] + b"x" * 7)[:length])
        assert_whole(get(), tmp_path)
        assert hub.ranges(WEIGHTS) == ([] if length == SIZE else [None])


PROGRAM = """
import sys
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.source.resolve import resolve
print(resolve(SourceRef.parse(sys.argv[1])).folder)
"""


def start(hub: HubStub, tmp_path: Path, **more: str) -> subprocess.Popen[str]:
    """Another process that finds the Hub by HF_ENDPOINT and the cache by HF_HOME, as users' do."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"} | more
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "org/name"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_download_goes_on(hub: HubStub, tmp_path: Path, kill: signal.Signals) -> None:
    hub.commit("org/name", FILES)
    hub.fail(WEIGHTS, Drop(17_000), Body(delay=1.0))
    process = start(hub, tmp_path)
    end = time.monotonic() + 20
    while len(hub.ranges(WEIGHTS)) < 2 and time.monotonic() < end:  # the second try hangs: now there are 17 000 bytes
        time.sleep(0.01)
    process.send_signal(kill)
    process.communicate(timeout=20)
    assert process.returncode != 0
    assert not blob(tmp_path).exists()
    assert partial(tmp_path).read_bytes() == FILES[WEIGHTS][:17_000]
    hub.seen.clear()
    process = start(hub, tmp_path)
    folder, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, "")
    assert (Path(folder.strip()) / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert hub.bodies() == [WEIGHTS]
    assert hub.ranges(WEIGHTS) == ["bytes=17000-"]


class TestAnyFile:
    """Whatever happens on the way, the blob is the file or it is not there."""

    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        content=st.binary(max_size=3_000),
        left=st.integers(0, 3_200),
        faults=st.lists(
            st.one_of(
                st.builds(Drop, st.integers(0, 3_000), st.booleans()),
                st.builds(
                    Body,
                    ignore_range=st.booleans(),
                    shift=st.integers(-40, 40),
                    extra=st.binary(max_size=9),
                    then_drop=st.none() | st.integers(0, 3_000),
                ),
                st.builds(Status, st.sampled_from([416, 429, 500, 503])),
            ),
            max_size=6,
        ),
    )
    def test_no_order_of_faults_gets_wrong_bytes_in(
        self,
        hub: HubStub,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        content: bytes,
        left: int,
        faults: list[Drop | Body | Status],
    ) -> None:
        monkeypatch.setattr("mfs_decompose.source.hub_client.FIRST_WAIT", 0.0)
        hub_cache._known.clear()
        hub.clear_faults()
        commit = hub.commit("org/any", {"x.bin": content})
        file = HubFile("x.bin", len(content), sha256(content))
        cache = HubCache("org/any", tmp_path / sha256(repr((content, left, faults)).encode())[:16])
        cache.partial(file).parent.mkdir(parents=True, exist_ok=True)
        cache.partial(file).write_bytes(content[:left])
        hub.fail("x.bin", *faults)
        counted: list[int] = []
        client = HubClient(SourceRef.parse("hf://org/any"), NullSink())
        try:
            fetch(client, cache, commit, file, counted.append)
        except NetworkFailure:
            assert not cache.blob(file).exists()
            return
        assert cache.blob(file).read_bytes() == content
        assert sum(counted) == len(content)
        assert not cache.partial(file).exists()


@given(content=st.binary(max_size=500), cut=st.integers(0, 500))
def test_digests_are_those_of_git_and_of_sha256(content: bytes, cut: int) -> None:
    expected = {40: git_blob(content), 64: hashlib.sha256(content).hexdigest()}
    for digits, digest in expected.items():
        hasher = Hasher(HubFile("x", len(content), "0" * digits))
        hasher.update(content[:cut])
        hasher.update(content[cut:])
        assert hasher.hexdigest() == digest
