"""A local server that speaks as much of the Hub's HTTP as downloads need, and misbehaves on request.

Small files are served by the Hub itself; large ones (LFS) by redirect from a second address, as from its CDN. The
bodies of large files are where downloads break, so faults of a file's body happen there.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pt", ".gguf", ".onnx", ".msgpack", "tokenizer.json")
SIGNATURE = "X-Amz-Signature=5ec2e7"


@dataclass(frozen=True)
class Status:
    """An answer without the file. `code` is the X-Error-Code of the Hub."""

    status: int
    code: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"{}"


@dataclass(frozen=True)
class Drop:
    """The connection closes after `after` bytes of the body; `promised` False leaves the length unsaid."""

    after: int
    promised: bool = True


@dataclass(frozen=True)
class Body:
    """A whole answer that is not what was asked: other bytes, no range, a range from elsewhere, a late start."""

    flip: int | None = None
    ignore_range: bool = False
    shift: int = 0
    extra: bytes = b""
    delay: float = 0.0
    then_drop: int | None = None


Fault = Status | Drop | Body


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    server: str
    headers: Mapping[str, str]

    @property
    def file(self) -> str | None:
        match = re.search(r"/resolve/[^/]+/(.+)", self.path) if self.server == "hub" else None
        return unquote(match[1]) if match else None


class HubStub:
    """Models by name, each with its commits; `main` moves with every commit."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.tokens: dict[str, str] = {}
        self.gated: set[str] = set()
        self.listing: object = None
        self._faults: dict[str, deque[Fault]] = {}
        self._servers = [_serve(self, name) for name in ("hub", "cdn")]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def commit(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Put files under a new commit, let the branch mean it, and give its id."""
        seed = repr((repo, len(self.commits.get(repo, {})), sorted(files.items())))
        id = hashlib.sha1(seed.encode()).hexdigest()
        self.commits.setdefault(repo, {})[id] = dict(files)
        self.refs.setdefault(repo, {})[branch] = id
        return id

    def fail(self, what: str, *faults: Fault) -> None:
        """Let the next requests for a file, or for `listing`, meet these faults, one each."""
        self._faults.setdefault(what, deque()).extend(faults)

    def clear_faults(self) -> None:
        self._faults.clear()

    def next_fault(self, what: str, kinds: type[Any] | tuple[type[Any], ...]) -> Fault | None:
        waiting = self._faults.get(what)
        return waiting.popleft() if waiting and isinstance(waiting[0], kinds) else None

    def bodies(self) -> list[str]:
        """Names of the files that were asked for with GET, sorted."""
        return sorted(seen.file for seen in self.seen if seen.method == "GET" and seen.file is not None)

    def ranges(self, file: str) -> list[str | None]:
        """The Range of every GET of a file, in order."""
        return [seen.headers.get("range") for seen in self.seen if seen.method == "GET" and seen.file == file]

    def files_of(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = self.refs.get(repo, {}).get(revision, revision)
        files = self.commits.get(repo, {}).get(commit)
        return None if files is None else (commit, files)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_of(name: str, content: bytes) -> str:
    """The name of the file's blob in a cache."""
    return sha256(content) if name.endswith(LARGE) else git_blob(content)


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def shard(tensors: Mapping[str, tuple[int, ...]], seed: int) -> bytes:
    """A safetensors file of F32 tensors with random bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + random.Random(seed).randbytes(end)


def model_files(seed: int = 0, shards: int = 2, rows: int = 97) -> dict[str, bytes]:
    """What a repository of today holds: a checkpoint of `shards` shards of about 25 kB, and much that is not needed."""
    files = {
        "config.json": json.dumps({"model_type": "llama", "seed": seed}).encode(),
        "generation_config.json": b'{"eos_token_id": 2}',
        "tokenizer.json": json.dumps({"model": {"vocab": {f"t{seed}": 0}}}).encode(),
        "chat_template.jinja": b"{{ messages }}",
        "README.md": b"---\nlicense: apache-2.0\n---\n",
        "pytorch_model.bin": b"pickle" * 1000,
        "pytorch_model.bin.index.json": b'{"weight_map": {}}',
        "model.gguf": b"GGUF" * 1000,
        "onnx/model.onnx": b"onnx" * 1000,
        "onnx/config.json": b"{}",
        "optimizer.pt": b"adam" * 1000,
        "flax_model.msgpack": b"flax" * 100,
        ".gitattributes": b"*.bin filter=lfs",
        "figure.png": b"\x89PNG",
    }
    if shards == 1:
        return files | {"model.safetensors": shard({"a.weight": (rows, 65), "b.weight": (7,)}, seed)}
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        files[name] = shard({f"layers.{number}.weight": (rows, 65), f"layers.{number}.bias": (7,)}, seed + number)
        weight_map |= {f"layers.{number}.weight": name, f"layers.{number}.bias": name}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    return files | {"model.safetensors.index.json": json.dumps(index).encode()}


def _serve(stub: HubStub, name: str) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": stub, "server_name": name}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    stub: HubStub
    server_name: str
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits 40 ms

    def log_message(self, format: str, *args: object) -> None:
        return None

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.stub.seen.append(Seen(self.command, self.path, self.server_name, headers))
        path = unquote(urlsplit(self.path).path)
        if self.server_name == "cdn":
            repo, commit, name = parse_qs(urlsplit(self.path).query)["of"][0].split("|")
            self._send_body(name, self.stub.commits[repo][commit][name])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            self._listing(match[1], match[2] or "revision", match[3] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(*match.groups())
        else:
            self._status(Status(404))

    def _refused(self, repo: str, revision: str) -> bool:
        token = self.stub.tokens.get(repo)
        if repo not in self.stub.commits or (token and self.headers.get("Authorization") != f"Bearer {token}"):
            self._status(Status(401, "RepoNotFound"))
        elif self.stub.files_of(repo, revision) is None:
            self._status(Status(404, "RevisionNotFound"))
        else:
            return False
        return True

    def _listing(self, repo: str, kind: str, revision: str) -> None:
        fault = self.stub.next_fault("listing", Status)
        if isinstance(fault, Status):
            return self._status(fault)
        if self.stub.listing is not None:
            return self._json(self.stub.listing)
        if self._refused(repo, revision):
            return None
        commit, files = self.stub.files_of(repo, revision) or ("", {})
        entries = [_entry(name, content) for name, content in files.items()]
        if kind == "tree":
            return self._json([_tree_entry(entry) for entry in entries])
        return self._json({"id": repo, "modelId": repo, "sha": commit, "private": False, "siblings": entries})

    def _file(self, repo: str, revision: str, name: str) -> None:
        fault = self.stub.next_fault(name, Status)
        if isinstance(fault, Status):
            return self._status(fault)
        if self._refused(repo, revision):
            return None
        if repo in self.stub.gated:
            return self._status(Status(403, "GatedRepo"))
        commit, files = self.stub.files_of(repo, revision) or ("", {})
        if name not in files:
            return self._status(Status(404, "EntryNotFound", {"X-Repo-Commit": commit}))
        content = files[name]
        if not name.endswith(LARGE):
            return self._send_body(name, content, {"X-Repo-Commit": commit, "ETag": f'"{git_blob(content)}"'})
        place = f"{self.stub.cdn}/blob?of={repo}|{commit}|{name}&{SIGNATURE}"
        linked = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
        return self._status(Status(302, "", {"Location": place, "X-Repo-Commit": commit, **linked}, b""))

    def _send_body(self, name: str, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        fault = self.stub.next_fault(name, (Drop, Body)) if self.command == "GET" else None
        body = fault if isinstance(fault, Body) else Body()
        time.sleep(body.delay)
        asked = re.fullmatch(r"bytes=([0-9]+)-([0-9]*)", self.headers.get("Range", ""))
        start, stop, status = 0, len(content), 200
        if asked and not body.ignore_range:
            start, status = int(asked[1]) + body.shift, 206
            stop = min(stop, int(asked[2]) + 1) if asked[2] else stop
            if start >= len(content):
                return self._status(Status(416))
        if body.flip is not None:
            content = content[: body.flip] + bytes([content[body.flip] ^ 1]) + content[body.flip + 1 :]
        part = content[start:stop] + body.extra
        end = fault.after if isinstance(fault, Drop) else body.then_drop
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        if isinstance(fault, Drop) and not fault.promised:
            self.send_header("Content-Length", str(min(fault.after, len(part))))
        else:
            self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part if end is None else part[:end])
        if end is not None:
            self.close_connection = True
        return None

    def _json(self, document: object) -> None:
        self._status(Status(200, "", {"Content-Type": "application/json"}, json.dumps(document).encode()))

    def _status(self, answer: Status) -> None:
        self.send_response(answer.status)
        if answer.code:
            self.send_header("X-Error-Code", answer.code)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer.body)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_blob(content)}
    if name.endswith(LARGE):
        entry["blobId"] = git_blob(b"a pointer to " + content)
        entry["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 134}
    return entry


def _tree_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    found = {"type": "file", "path": entry["rfilename"], "size": entry["size"], "oid": entry["blobId"]}
    if "lfs" in entry:
        found["lfs"] = {"oid": entry["lfs"]["sha256"], "size": entry["size"], "pointerSize": 134}
    return found
