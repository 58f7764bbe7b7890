"""Every way in which the Hub can say no: one sentence, what to type, an exit code, and never the access token."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from hub_stub import SIGNATURE, HubStub, Status, model_files
from recording_sink import RecordingSink

from mfs_decompose.errors import MfsError, NetworkFailure, SourceNotFound, UsageError
from mfs_decompose.source import hub_client
from mfs_decompose.source.hub_client import HubClient
from mfs_decompose.source.hub_errors import Asked, explain, is_transient
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.source.resolve import resolve

TOKEN = "hf_plantedTOKENplantedTOKEN1234567"
WEIGHTS = "model.safetensors"


def refused(text: str = "hf://org/name", sink: RecordingSink | None = None) -> MfsError:
    with pytest.raises(MfsError) as caught:
        resolve(SourceRef.parse(text), progress=sink)
    error = caught.value
    said = f"{error.message}\n{error.hint}"
    assert TOKEN not in said
    assert SIGNATURE not in said
    assert "\n" not in error.message
    assert error.hint
    return error


@pytest.fixture(params=[False, True], ids=["anonymous", "token"])
def authorised(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    return bool(request.param)


class TestNoAccess:
    def test_no_such_model(self, hub: HubStub, authorised: bool) -> None:
        error = refused("hf://org/nmae")
        assert (type(error), error.exit_code) == (SourceNotFound, 11)
        if authorised:
            assert error.message == "the Hub has no model org/nmae that this access token may read"
            assert error.hint == "Check the spelling; if it is private, check what the token may read."
        else:
            assert error.message == "the Hub has no model org/nmae that may be read without an access token"
            assert error.hint == "Check the spelling; if it is private, run `hf auth login` or set HF_TOKEN."

    @pytest.mark.parametrize(("status", "code"), [(404, "RepoNotFound"), (404, ""), (401, "")])
    def test_other_ways_to_say_it(self, hub: HubStub, status: int, code: str) -> None:
        hub.fail("listing", Status(status, code))
        assert refused().message.startswith("the Hub has no model org/name that may be read")

    def test_a_bare_name_might_have_been_a_path(
        self, hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        hint = refused("runs/codee").hint or ""
        assert hint.startswith("No folder has that name, so it was taken for a model of the Hub. Check the spelling;")

    def test_a_private_model(self, hub: HubStub, authorised: bool) -> None:
        hub.commit("org/name", model_files(shards=1))
        hub.tokens["org/name"] = TOKEN
        if authorised:
            assert resolve(SourceRef.parse("org/name")).repo == "org/name"
        else:
            assert refused().exit_code == 11

    def test_a_gated_model(self, hub: HubStub, authorised: bool) -> None:
        hub.commit("org/name", model_files(shards=1))
        hub.gated.add("org/name")
        error = refused("hf://org/name@main")
        who = "this access token has not been granted access" if authorised else "no access token was given"
        assert (type(error), error.message) == (SourceNotFound, f"org/name@main is gated, and {who}")
        assert f"Ask for access at {hub.url}/org/name" in (error.hint or "")
        assert ("hf auth login" in (error.hint or "")) != authorised

    def test_a_token_that_is_not_accepted(self, hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.fail("listing", Status(401, "", {"X-Error-Message": "Invalid credentials in Authorization header"}))
        error = refused()
        assert (error.exit_code, error.message) == (11, "the Hub does not accept this access token (HTTP 401)")
        assert "unset HF_TOKEN" in (error.hint or "")

    @pytest.mark.parametrize("what", ["listing", "config.json"])
    def test_forbidden(self, hub: HubStub, what: str) -> None:
        hub.commit("org/name", model_files(shards=1))
        hub.fail(what, Status(403))
        subject = "org/name" if what == "listing" else "config.json of org/name"
        error = refused()
        assert (error.exit_code, error.message) == (11, f"the Hub denies access to {subject} (HTTP 403)")

    def test_a_disabled_model(self, hub: HubStub) -> None:
        hub.fail("listing", Status(403, "", {"X-Error-Message": "Access to this resource is disabled."}))
        assert refused().message == "access to org/name is disabled on the Hub"

    def test_no_such_revision(self, hub: HubStub) -> None:
        hub.commit("org/name", model_files(shards=1))
        error = refused("hf://org/name@v9")
        assert (error.exit_code, error.message) == (11, "org/name has no revision 'v9'")
        assert error.hint == f"Its revisions are listed at {hub.url}/org/name/commits"

    @pytest.mark.parametrize("code", ["EntryNotFound", ""])
    def test_a_file_that_is_listed_and_not_there(self, hub: HubStub, code: str) -> None:
        hub.commit("org/name", model_files(shards=1))
        hub.fail(WEIGHTS, Status(404, code))
        error = refused()
        assert (error.exit_code, error.message) == (
            11,
            "model.safetensors of org/name is listed, but the Hub does not have it",
        )

    def test_an_answer_that_nobody_expects(self, hub: HubStub) -> None:
        hub.fail("listing", Status(451))
        error = refused()
        assert (error.exit_code, error.message) == (30, "the Hub answers HTTP 451 for org/name")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited."""
    waited: list[float] = []
    monkeypatch.setattr(HubClient, "pause", lambda self, seconds: waited.append(seconds))
    monkeypatch.setattr(hub_client, "FIRST_WAIT", 1.0)
    return waited


class TestLaterPerhaps:
    @pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
    @pytest.mark.parametrize("what", ["listing", "README.md"])
    def test_trouble_that_passes(self, hub: HubStub, waits: list[float], what: str, status: int) -> None:
        hub.commit("org/name", model_files(shards=1))
        hub.fail(what, *[Status(status)] * 4)
        assert resolve(SourceRef.parse("org/name")).repo == "org/name"
        assert waits == [1.0, 2.0, 4.0, 8.0]

    @pytest.mark.parametrize("what", ["listing", "README.md"])
    def test_trouble_that_stays(self, hub: HubStub, waits: list[float], what: str) -> None:
        hub.commit("org/name", model_files(shards=1))
        hub.fail(what, *[Status(503)] * 9)
        error = refused()
        subject = "org/name" if what == "listing" else "README.md of org/name"
        assert (type(error), error.exit_code) == (NetworkFailure, 30)
        assert error.message == f"the Hub answers HTTP 503 for {subject}, after 5 tries"
        assert "what has arrived is kept" in (error.hint or "")
        assert len(waits) == 4

    @pytest.mark.parametrize(
        "headers", [{"Retry-After": "7"}, {"ratelimit": '"api";r=0;t=7', "ratelimit-policy": '"w";"api";q=500;w=300'}]
    )
    @pytest.mark.parametrize("what", ["listing", WEIGHTS])
    def test_a_rate_limit_is_waited_for(
        self, hub: HubStub, waits: list[float], what: str, headers: dict[str, str]
    ) -> None:
        hub.commit("org/name", model_files(shards=1))
        hub.fail(what, Status(429, "", headers), Status(429, "", headers))
        sink = RecordingSink()
        resolve(SourceRef.parse("org/name"), progress=sink)
        assert waits == [7.0, 7.0]
        assert sink.notes[:2] == [("info", "waiting 7.0 s for the Hub, then trying again")] * 2

    def test_without_a_time_the_waits_grow(self, hub: HubStub, waits: list[float]) -> None:
        hub.commit("org/name", model_files(shards=1))
        later = {"Retry-After": "Wed, 21 Oct 2035 07:28:00 GMT"}
        hub.fail("listing", Status(429), Status(429, "", later), Status(429, "", {"Retry-After": "²"}))
        resolve(SourceRef.parse("org/name"))
        assert waits == [1.0, 2.0, 4.0]

    def test_a_rate_limit_that_stays(self, hub: HubStub, waits: list[float], authorised: bool) -> None:
        hub.fail("listing", *[Status(429, "", {"Retry-After": "2"})] * 9)
        error = refused()
        assert (type(error), error.exit_code) == (NetworkFailure, 30)
        expected = "the Hub limits the rate of requests (HTTP 429): it asks to wait 2.0 s, after 5 tries"
        assert error.message == expected
        assert ("With an access token" in (error.hint or "")) != authorised

    def test_a_wait_that_is_too_long_is_not_begun(self, hub: HubStub, waits: list[float]) -> None:
        hub.fail("listing", Status(429, "", {"Retry-After": "3600"}))
        error = refused()
        assert error.message == "the Hub limits the rate of requests (HTTP 429): it asks to wait 1 h 00 min"
        assert waits == []


class TestNoWayThere:
    def test_nobody_listens(self, hub: HubStub, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        error = refused()
        assert (type(error), error.exit_code) == (NetworkFailure, 30)
        assert error.message == f"cannot reach the Hub at {address}: connection refused"
        assert "--offline" in (error.hint or "")
        assert waits == [1.0]  # without a network nobody wants to wait

    def test_a_hub_that_goes_away_in_the_middle_is_waited_for(
        self, hub: HubStub, waits: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            gone = f"http://127.0.0.1:{free.getsockname()[1]}"
        hub.commit("org/name", model_files(shards=1))
        hub.fail(WEIGHTS, *[Status(302, "", {"Location": f"{gone}/blob?{SIGNATURE}"})] * 3)
        assert resolve(SourceRef.parse("org/name")).repo == "org/name"
        assert waits == [1.0, 2.0, 4.0]

    def test_nobody_answers(self, hub: HubStub, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
            monkeypatch.setattr(constants, "ENDPOINT", address)
            error = refused()
        assert (type(error), error.exit_code) == (NetworkFailure, 30)
        assert error.message == f"the Hub at {address} does not answer in time, after 5 tries"

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (httpx2.ConnectError("[Errno -2] Name or service not known"), "its name is not known"),
            (httpx2.ConnectError("[Errno -3] Temporary failure in name resolution"), "its name cannot be looked up"),
            (httpx2.ConnectError("[Errno 101] Network is unreachable"), "no network"),
            (httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"), "is not trusted"),
            (httpx2.TooManyRedirects("Exceeded maximum allowed redirects."), "it redirects in circles"),
            (httpx2.ProxyError(f"407 for http://user:{TOKEN}@proxy"), "ProxyError"),
            (httpx2.UnsupportedProtocol("Request URL is missing a protocol"), "UnsupportedProtocol"),
        ],
    )
    def test_reasons(self, error: Exception, reason: str) -> None:
        asked = Asked(SourceRef.parse("hf://org/name"), "https://user:secret@hub.example", False, None, 1)
        found = explain(error, asked)
        assert (found.exit_code, found.message.startswith("cannot reach the Hub at https://hub.example: ")) == (
            30,
            True,
        )
        assert found.message.endswith(reason)
        assert TOKEN not in found.message

    def test_what_is_worth_another_try(self) -> None:
        assert is_transient(httpx2.ReadTimeout("")) and is_transient(httpx2.RemoteProtocolError(""))
        assert not is_transient(httpx2.LocalProtocolError("Illegal header value"))
        assert not is_transient(httpx2.TooManyRedirects(""))


class TestTokens:
    def test_the_cdn_never_sees_it(self, hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.commit("org/name", model_files())
        resolve(SourceRef.parse("org/name"))
        sent = {(seen.server, seen.headers.get("authorization")) for seen in hub.seen}
        assert sent == {("hub", f"Bearer {TOKEN}"), ("cdn", None)}

    def test_it_may_come_from_another_variable(self, hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEAM_TOKEN", TOKEN)
        hub.commit("org/name", model_files(shards=1))
        hub.tokens["org/name"] = TOKEN
        assert resolve(SourceRef.parse("org/name"), token_env="TEAM_TOKEN").repo == "org/name"
        with pytest.raises(UsageError, match="expected an access token in NO_TOKEN, found nothing"):
            resolve(SourceRef.parse("org/name"), token_env="NO_TOKEN")

    def test_a_server_that_repeats_it_is_not_repeated(self, hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.commit("org/name", model_files(shards=1))
        echo = {"X-Error-Message": f"bad token {TOKEN}", "X-HF-Warning": f"topic; you sent {TOKEN}"}
        body = f'{{"error": "Bearer {TOKEN}"}}'.encode()
        for what in ("listing", "config.json"):
            for status in (400, 401, 403, 404, 451):
                hub.fail(what, Status(status, "", echo, body))
                refused()
            hub.fail(what, *[Status(500, "", echo, body)] * 5)
            refused()

    def test_nothing_says_it(self, hub: HubStub, tmp_path: Path) -> None:
        """Planted in the environment of another process; everything it says and leaves behind is searched."""
        hub.commit("org/name", model_files(shards=1))
        echo = {"X-HF-Warning": f"topic; you sent {TOKEN}"}
        hub.fail("listing", Status(503, "", echo))
        hub.fail("config.json", Status(429, "", echo | {"Retry-After": "0"}))
        hub.fail(WEIGHTS, Status(403, "", {"X-Error-Message": TOKEN}, TOKEN.encode()))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN}
        environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONWARNINGS": "error"}
        program = """
import logging, sys, traceback
logging.basicConfig(level=logging.DEBUG)
from mfs_decompose.source import hub_client
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.source.resolve import resolve
hub_client.FIRST_WAIT = 0.01
try:
    resolve(SourceRef.parse("org/name"))
except Exception as error:
    traceback.print_exc()
    print(error, error.hint)
"""
        process = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert "denies access to model.safetensors" in process.stdout
        assert any("authorization" in seen.headers for seen in hub.seen)
        assert TOKEN not in process.stdout + process.stderr
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_the_libraries_say_nothing_of_their_own(
    hub: HubStub, waits: list[float], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "httpx2", "httpcore2")]
    before = [logger.level for logger in loggers]
    hub.commit("org/name", model_files(shards=1))
    hub.fail("listing", Status(503, "", {"X-HF-Warning": "topic; log in"}))
    with caplog.at_level(logging.DEBUG), ThreadPoolExecutor(3) as pool:
        list(pool.map(resolve, [SourceRef.parse("org/name")] * 3))
    assert [logger.level for logger in loggers] == before
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name.startswith(("huggingface_hub", "http"))]
