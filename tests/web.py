"""A web server on a free port that answers with a picture, or as no good one does; over TLS too."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import seers

CERTIFICATE = Path(__file__).parent / "fixtures" / "tls" / "localhost.pem"
"""A key and a certificate that it signed itself, for localhost and 127.0.0.1, until 2126."""
IMAGE = seers.picture(5, 60, 40)
FILE = seers.file_of(IMAGE)


@dataclass
class Web:
    """A server under way: its port, the paths it was asked for with their headers, the bytes that it sent, its film."""

    port: int = 0
    film: bytes = b""
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0

    def url(self, path: str, host: str = "127.0.0.1", scheme: str = "http") -> str:
        """The address of something on it."""
        return f"{scheme}://{host}:{self.port}{path}"


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, web: Web, *given: object) -> None:
        self.web = web
        super().__init__(*given)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.web.asked.append(self.path)
        self.web.headers.append(dict(self.headers))
        kind, _, rest = self.path.partition("?")
        with suppress(OSError):
            getattr(self, f"on_{kind.strip('/').replace('.', '_')}", self.on_nothing)(unquote(rest))

    def _head(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def _send(self, data: bytes) -> None:
        self.wfile.write(data)
        self.web.sent += len(data)

    def on_nothing(self, _: str) -> None:
        self._head(404)

    def on_cat_png(self, _: str) -> None:
        self._head(200, Content_Length=len(FILE))
        self._send(FILE)

    def on_film_mp4(self, _: str) -> None:
        self._head(200, Content_Length=len(self.web.film))
        self._send(self.web.film)

    def on_page(self, _: str) -> None:
        self._head(200, Content_Type="image/png")
        self._send(b"<html>")

    def on_to(self, where: str) -> None:
        self._head(302, Location=where)

    def on_lies(self, _: str) -> None:
        self._head(200, Content_Length=10)
        self._send(FILE)

    def on_endless(self, length: str) -> None:
        self._head(200, **({"Content_Length": length} if length else {}))
        while True:
            self._send(b"\0" * 65536)

    def on_slow(self, _: str) -> None:
        self._head(200, Content_Length=1 << 20)
        self._drip()

    def on_slow_head(self, _: str) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        self._drip()

    def _drip(self) -> None:
        while True:
            self._send(b"x")
            time.sleep(0.02)


@contextmanager
def web(*, tls: bool = False) -> Iterator[Web]:
    """Serve within the context."""
    found = Web()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, found))
    server.daemon_threads = True
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    found.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
