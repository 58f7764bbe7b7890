"""What went wrong with the Hub, in one sentence of ours.

Nothing the server said is repeated: its texts and addresses may hold signatures or an echo of the access token.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

import httpx2

from mfs_decompose.errors import MfsError, NetworkFailure, SourceNotFound
from mfs_decompose.source.ref import SourceRef
from mfs_decompose.units import format_duration

_LOG_IN = "run `hf auth login` or set HF_TOKEN"
_AGAIN = "Run the same command again: what has arrived is kept."
_TRANSIENT = frozenset({408, 416, 429, 500, 502, 503, 504})


class ConnectionBroken(Exception):
    """The answer ended before the file did, and the client library had nothing to say against it."""


class NoListing(Exception):
    """The answer is no description of a model's files."""


_BROKEN = (ConnectionBroken, httpx2.ReadError, httpx2.WriteError, httpx2.CloseError, httpx2.RemoteProtocolError)

FAILURES = (httpx2.HTTPError, httpx2.InvalidURL, ConnectionBroken, NoListing)
"""What a request can end in; errors of huggingface_hub are HTTPErrors too. Anything else is a bug or the disk's."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked, and how: `file` is None for the listing, `tries` counts the failures in a row."""

    ref: SourceRef
    endpoint: str
    authorised: bool
    file: str | None
    tries: int

    @property
    def subject(self) -> str:
        return self.ref.label if self.file is None else f"{self.file} of {self.ref.label}"

    @property
    def page(self) -> str:
        return f"{_without_user(self.endpoint)}/{self.ref.repo}"


def is_transient(error: Exception) -> bool:
    """Whether the same request may go well a little later."""
    if (response := response_of(error)) is not None:
        return response.status_code in _TRANSIENT
    return isinstance(error, ConnectionBroken | httpx2.TransportError) and not isinstance(
        error, httpx2.UnsupportedProtocol | httpx2.LocalProtocolError
    )


def is_unreached(error: Exception) -> bool:
    """Whether not even a connection could be made."""
    return isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)


def response_of(error: Exception) -> httpx2.Response | None:
    """The answer that an error of huggingface_hub or httpx2 is about."""
    response = getattr(error, "response", None)
    return response if isinstance(response, httpx2.Response) else None


def explain(error: Exception, asked: Asked, wait: float | None = None) -> MfsError:
    """The error to show. `wait` is how many seconds the Hub asked to wait."""
    response = response_of(error)
    if response is None:
        found = _no_answer(error, asked)
    elif response.status_code == 429:
        found = _rate_limited(asked, wait)
    elif response.status_code in _TRANSIENT or response.status_code >= 500:
        found = NetworkFailure(
            f"the Hub answers HTTP {response.status_code} for {asked.subject}{_tried(asked)}",
            hint=f"The trouble is on its side. {_AGAIN}",
        )
    else:
        found = _refused(response, asked)
    if asked.ref.is_bare and asked.file is None:
        found.hint = f"No folder has that name, so it was taken for a model of the Hub. {found.hint}"
    return found


def _refused(response: httpx2.Response, asked: Asked) -> MfsError:
    """Answers that will be the same next time."""
    status, code = response.status_code, response.headers.get("X-Error-Code")
    if code == "GatedRepo":
        who = "this access token has not been granted access" if asked.authorised else "no access token was given"
        then = "." if asked.authorised else f", then {_LOG_IN}."
        return SourceNotFound(f"{asked.ref.label} is gated, and {who}", hint=f"Ask for access at {asked.page}{then}")
    if code == "RevisionNotFound":
        return SourceNotFound(
            f"{asked.ref.repo} has no revision {asked.ref.revision or 'main'!r}",
            hint=f"Its revisions are listed at {asked.page}/commits",
        )
    if code == "EntryNotFound" or (status == 404 and asked.file is not None):
        return SourceNotFound(f"{asked.subject} is listed, but the Hub does not have it", hint=f"Look at {asked.page}")
    if status == 401 and asked.authorised and code != "RepoNotFound":
        return SourceNotFound(
            "the Hub does not accept this access token (HTTP 401)",
            hint=f"For another one {_LOG_IN}; public models need none: `hf auth logout`, and unset HF_TOKEN.",
        )
    if code == "RepoNotFound" or status in (401, 404):
        whom = "this access token may read" if asked.authorised else "may be read without an access token"
        then = "check what the token may read" if asked.authorised else _LOG_IN
        return SourceNotFound(
            f"the Hub has no model {asked.ref.repo} that {whom}",
            hint=f"Check the spelling; if it is private, {then}.",
        )
    if response.headers.get("X-Error-Message") == "Access to this resource is disabled.":
        return SourceNotFound(f"access to {asked.ref.label} is disabled on the Hub", hint=f"Look at {asked.page}")
    if status == 403:
        return SourceNotFound(f"the Hub denies access to {asked.subject} (HTTP 403)", hint=f"Look at {asked.page}")
    return NetworkFailure(f"the Hub answers HTTP {status} for {asked.subject}", hint=f"Look at {asked.page}")


def _rate_limited(asked: Asked, wait: float | None) -> MfsError:
    until = "" if wait is None else f": it asks to wait {format_duration(wait)}"
    hint = "Run the same command again later: what has arrived is kept."
    if not asked.authorised:
        hint += f" With an access token the limit is higher: {_LOG_IN}."
    return NetworkFailure(f"the Hub limits the rate of requests (HTTP 429){until}{_tried(asked)}", hint=hint)


def _no_answer(error: Exception, asked: Asked) -> MfsError:
    """Failures without an answer: the way there, or the answer itself, is broken."""
    where = f"the Hub at {_without_user(asked.endpoint)}"
    if isinstance(error, httpx2.TimeoutException):
        return NetworkFailure(f"{where} does not answer in time{_tried(asked)}", hint=_AGAIN)
    if isinstance(error, _BROKEN):
        return NetworkFailure(f"the connection to {where} broke off{_tried(asked)}: {asked.subject}", hint=_AGAIN)
    if isinstance(error, NoListing):
        return NetworkFailure(
            f"{where} answers with something that is no listing of {asked.ref.label}",
            hint="Check HF_ENDPOINT, and whether a proxy or a login page stands in between.",
        )
    hint = "Check the network, a proxy, and HF_ENDPOINT; --offline takes what is in the cache."
    return NetworkFailure(f"cannot reach {where}: {_reason(error)}", hint=hint)


def _reason(error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _REASONS:
            return _REASONS[cause.errno]
        cause = cause.__cause__ or cause.__context__
    text = str(error).lower()
    for sign, reason in _SIGNS.items():
        if sign in text:
            return reason
    return type(error).__name__


_REASONS = {
    errno.ECONNREFUSED: "connection refused",
    errno.ENETUNREACH: "no network",
    errno.EHOSTUNREACH: "no route to it",
}
_SIGNS = {
    "refused": "connection refused",
    "certificate": "its certificate is not trusted",
    "name or service not known": "its name is not known",
    "name resolution": "its name cannot be looked up",
    "nodename nor servname": "its name is not known",
    "unreachable": "no network",
    "redirect": "it redirects in circles",
}


def _without_user(endpoint: str) -> str:
    """The address without a user name and password that might stand in it."""
    scheme, _, rest = endpoint.rpartition("://")
    host = rest.rpartition("@")[2]
    return f"{scheme}://{host}" if scheme else host


def _tried(asked: Asked) -> str:
    return f", after {asked.tries} tries" if asked.tries > 1 else ""
