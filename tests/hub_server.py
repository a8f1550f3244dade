"""A server on this machine that speaks the Hub's API, as far as a download needs it, and fails as it is told.

Large files are answered by a redirect to a second server, as the Hub does; it knows ranges and no tokens. What the real
Hub answers was taken from `huggingface_hub`'s code: headers, codes of errors, and the fields of a model's description.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class Hub:
    """What the server has, and how it fails.

    Attributes:
        repositories: files by repository and path.
        large: endings of files in the large storage.
        gated, private: repositories that are; a token opens private ones.
        busy: how many further requests are answered by 429, by the beginning of their path.
        wrong: files whose bytes are changed on the way.
        cut: bytes after which an answer of the second server breaks off; 0 for none.
        cuts: how many answers break off.
        pause: seconds between pieces of a large file.
        ranges: whether the second server knows them.
        heard: requests, as method, path, range and whether a token came with them.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: tuple[str, ...] = (".gguf", ".safetensors")
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    busy: Counter[str] = field(default_factory=Counter)
    wrong: set[str] = field(default_factory=set)
    cut: int = 0
    cuts: int = 0
    pause: float = 0.0
    piece: int = 1 << 16
    ranges: bool = True
    address: str = ""
    storage: str = ""
    heard: list[tuple[str, str, str, bool]] = field(default_factory=list)

    def gets(self, file: str = "") -> list[str]:
        """The ranges of requests for the bytes of large files, or of one."""
        return [asked for method, path, asked, _ in self.heard
                if method == "GET" and path.startswith("/storage/") and path.endswith(file)]


@contextmanager
def hub(**options: Any) -> Iterator[Hub]:
    """The server, while the block runs."""
    state = Hub(**options)
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(state)) for _ in range(2)]
    state.address, state.storage = (f"http://{name}:{server.server_port}" for name, server in
                                    zip(("127.0.0.1", "localhost"), servers, strict=True))
    for server in servers:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # a client that was killed is no error
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield state
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _handler(state: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):
                split = urlsplit(self.path)
                path, query = unquote(split.path), parse_qs(split.query)
                token = self.headers.get("authorization") is not None
                state.heard.append((self.command, path, self.headers.get("range", ""), token))
                beginning = next((one for one in state.busy if path.startswith(one) and state.busy[one] > 0), None)
                if beginning is not None:
                    state.busy[beginning] -= 1
                    self._fail(429, "", {"Retry-After": "0"})
                elif path.startswith("/storage/"):
                    self._storage(*path.removeprefix("/storage/").split(":", 1))
                elif path == "/api/models":
                    wanted = query["search"][0].lower()
                    self._json([{"id": name} for name in state.repositories if wanted in name.lower()])
                elif path.startswith("/api/models/"):
                    self._info("/".join(path.split("/")[3:5]), path.partition("/revision/")[2], token)
                else:
                    name, _, rest = path[1:].partition("/resolve/")
                    self._file(name, rest.partition("/")[2], token)

        def _seen(self, name: str, token: bool) -> bool:
            """Whether the repository may be seen; else the answer is given."""
            if name in state.repositories and (token or name not in state.private):
                return True
            self._fail(404 if token else 401, "RepoNotFound" if token else "")
            return False

        def _info(self, name: str, revision: str, token: bool) -> None:
            if not self._seen(name, token):
                return
            if revision not in ("", "main", COMMIT):
                return self._fail(404, "RevisionNotFound")
            files = [self._sibling(path, data) for path, data in state.repositories[name].items()]
            self._json({"id": name, "sha": COMMIT, "siblings": files})

        def _sibling(self, path: str, data: bytes) -> dict[str, Any]:
            known = {"rfilename": path, "size": len(data), "blobId": git_id(data)}
            large = {"sha256": sha256(data), "size": len(data), "pointerSize": 134}
            return {**known, "lfs": large} if path.endswith(state.large) else known

        def _file(self, name: str, path: str, token: bool) -> None:
            if not self._seen(name, token):
                return
            if name in state.gated:
                return self._fail(403 if token else 401, "GatedRepo")
            data = state.repositories[name].get(path)
            if data is None:
                return self._fail(404, "EntryNotFound", {"X-Repo-Commit": COMMIT})
            if not path.endswith(state.large):
                return self._send(200, data, {"ETag": f'"{git_id(data)}"', "X-Repo-Commit": COMMIT})
            self._send(302, b"", {"Location": f"{state.storage}/storage/{name}:{path}", "X-Repo-Commit": COMMIT,
                                  "X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))})

        def _storage(self, name: str, path: str) -> None:
            data = state.repositories[name][path]
            if path in state.wrong:
                data = data[:-1] + bytes([data[-1] ^ 1])
            asked, headers, status = self.headers.get("range"), {"ETag": f'"{sha256(data)}"'}, 200
            begin = int(asked.split("=")[1].split("-")[0]) if asked and state.ranges else 0
            if begin:
                status, headers["Content-Range"] = 206, f"bytes {begin}-{len(data) - 1}/{len(data)}"
            self._send(status, data[begin:], headers, most=state.cut if state.cuts > 0 else 0)

        def _fail(self, status: int, code: str, more: dict[str, str] | None = None) -> None:
            self._send(status, b"", {"X-Error-Code": code, **(more or {})} if code else more or {})

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: dict[str, str], most: int = 0) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if 0 < most < len(body):
                state.cuts -= 1
                self.wfile.write(body[:most])
                self.wfile.flush()
                self.close_connection = True
                return
            for begin in range(0, len(body), state.piece):
                self.wfile.write(body[begin : begin + state.piece])
                time.sleep(state.pause)

    return Handler


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
