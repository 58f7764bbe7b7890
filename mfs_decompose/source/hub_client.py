"""Requests to the Hub through huggingface_hub's session: its endpoint, proxies, certificates and access token hold.

Waiting is ours. The library waits as long as a server asks it to, in silence; here it is bounded and said aloud.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    get_session,
    parse_ratelimit_headers,
)

from mfs_decompose import __version__
from mfs_decompose.errors import UsageError
from mfs_decompose.events import ProgressSink
from mfs_decompose.source.hub_errors import (
    FAILURES,
    Asked,
    ConnectionBroken,
    NoListing,
    explain,
    is_transient,
    is_unreached,
    response_of,
)
from mfs_decompose.source.ref import SourceRef, is_commit
from mfs_decompose.units import format_duration

TRIES = 5
TRIES_UNREACHED = 2  # of the first request, when nobody is there: most often there is no network at all
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0  # seconds; a Hub that asks for more is not waited for
_WORTH_SAYING = 3.0

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FIRST_BYTE = re.compile(r"bytes ([0-9]+)-")


class Stopped(Exception):
    """Another transfer failed, or the user interrupted: this one need not go on."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file at one commit. `digest` is what the cache names it by: the sha256 of its bytes (64 hex digits), or for a
    file that git itself holds the id of its blob (40)."""

    name: str
    size: int
    digest: str

    @classmethod
    def checked(cls, name: str, size: object, digest: object) -> HubFile:
        """A file as somebody else describes it.

        Raises:
            ValueError: that is no description; a digest becomes a file name here.
        """
        if type(size) is not int or size < 0 or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError
        return cls(name, size, digest)


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of a model at one commit, by name."""

    commit: str
    files: tuple[HubFile, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes of a file from byte `start` on: 0 where a server sends the whole of it whatever was asked."""

    start: int
    chunks: Iterator[bytes]


class HubClient:
    """Asks about one model. `stop` ends waits and transfers in all threads."""

    def __init__(self, ref: SourceRef, progress: ProgressSink, token_env: str | None = None) -> None:
        assert ref.repo is not None
        self.ref, self.repo, self.progress = ref, ref.repo, progress
        self.stop = threading.Event()
        self.endpoint = constants.ENDPOINT
        token = _token(token_env)
        name = "mfs_decompose"
        self._headers = build_hf_headers(token=token, library_name=name, library_version=__version__)
        self._api = HfApi(endpoint=self.endpoint, token=token, library_name=name, library_version=__version__)

    @property
    def authorised(self) -> bool:
        """Whether an access token is sent."""
        return "authorization" in self._headers

    def list_files(self) -> Listing:
        """The commit that the reference means now, and its files.

        Raises:
            SourceNotFound: no such model or revision, or no access to it.
            NetworkFailure: no usable answer.
        """
        patience = Patience(self, None)
        while True:
            try:
                return self._list_files()
            except FAILURES as error:
                patience.after(error)

    @contextmanager
    def get(self, commit: str, name: str, start: int = 0, stop: int | None = None) -> Iterator[Answer]:
        """Ask for a file's bytes from `start` to `stop`; what comes may begin elsewhere, and go on.

        Raises one of FAILURES.
        """
        headers = {**self._headers, "Accept-Encoding": "identity"}
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        url = hf_hub_url(self.repo, name, revision=commit, endpoint=self.endpoint)
        wait = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=wait, follow_redirects=True) as response:
            if response.status_code not in (200, 206):
                raise HfHubHTTPError(f"HTTP {response.status_code}", response=response)
            begin = _FIRST_BYTE.match(response.headers.get("Content-Range", ""))
            if response.status_code == 206 and begin is None:
                raise ConnectionBroken
            yield Answer(int(begin[1]) if response.status_code == 206 and begin else 0, response.iter_bytes())

    def read(self, commit: str, name: str, start: int, stop: int) -> bytes:
        """The bytes of a file from `start` to `stop`, no more of it is fetched than that needs.

        Raises:
            SourceNotFound: no such file, or no access to it.
            NetworkFailure: they do not come.
        """
        patience = Patience(self, name)
        while start < stop:
            part = bytearray()
            try:
                with self.get(commit, name, start, stop) as answer:
                    if answer.start > start:
                        raise ConnectionBroken
                    for chunk in answer.chunks:
                        part += chunk
                        if answer.start + len(part) >= stop:
                            return bytes(part[start - answer.start : stop - answer.start])
                raise ConnectionBroken
            except FAILURES as error:
                patience.after(error)
        return b""

    def asked(self, file: str | None, tries: int = 1) -> Asked:
        """What messages need to know of a request."""
        return Asked(self.ref, self.endpoint, self.authorised, file, tries)

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            Stopped: there is nothing to wait for any more.
        """
        if self.stop.wait(seconds):
            raise Stopped

    def _list_files(self) -> Listing:
        try:
            info = self._api.model_info(
                self.repo,
                revision=self.ref.revision,
                files_metadata=True,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            )
            if info.sha is None or not is_commit(info.sha):
                raise NoListing
            files = {
                file.rfilename: HubFile.checked(file.rfilename, file.lfs.size, file.lfs.sha256)
                if file.lfs is not None
                else HubFile.checked(file.rfilename, file.size, file.blob_id)
                for file in info.siblings or ()
            }
        except (AttributeError, TypeError, ValueError, KeyError):  # what huggingface_hub makes of an answer of others
            raise NoListing from None
        return Listing(info.sha, tuple(files[name] for name in sorted(files)))


class Patience:
    """Counts failures in a row, waits between them, and in the end says what is wrong."""

    def __init__(self, client: HubClient, file: str | None) -> None:
        self._client, self._file = client, file
        self._failures = 0

    def reset(self) -> None:
        """Something went forward."""
        self._failures = 0

    def after(self, error: Exception) -> None:
        """Wait before the next try.

        Raises:
            MfsError: another try makes no sense, or there were enough.
            Stopped: the transfer is not wanted any more.
        """
        self._failures += 1
        asked = _asked_wait(error)
        wait = FIRST_WAIT * 2 ** (self._failures - 1) if asked is None else asked
        tries = TRIES_UNREACHED if self._file is None and is_unreached(error) else TRIES
        if not is_transient(error) or self._failures >= tries or wait > LONGEST_WAIT:
            raise explain(error, self._client.asked(self._file, self._failures), asked) from None
        if wait > _WORTH_SAYING:
            self._client.progress.note(f"waiting {format_duration(wait)} for the Hub, then trying again")
        self._client.pause(wait)


def _asked_wait(error: Exception) -> float | None:
    """The seconds that the Hub asked to wait."""
    response = response_of(error)
    if response is None:
        return None
    after = response.headers.get("Retry-After", "").strip()
    if after.isascii() and after.isdigit():
        return float(after)
    limit = parse_ratelimit_headers(response.headers) if response.status_code == 429 else None
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None


def _token(variable: str | None) -> str | None:
    """None lets huggingface_hub find its own: HF_TOKEN, or what `hf auth login` stored."""
    if variable is None:
        return None
    if not (token := os.environ.get(variable)):
        raise UsageError(f"expected an access token in {variable}, found nothing", hint=f"export {variable}=...")
    return token
