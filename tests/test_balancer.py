"""HAProxy before two replicas, by `deploy/haproxy.cfg`: its syntax, and what it does when a replica is busy or gone."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from documents import ROOT

CONFIG = ROOT / "deploy" / "haproxy.cfg"
PORTS = ("127.0.0.1:8000", "127.0.0.1:8001", "127.0.0.1:8002")
"""Of the balancer and of the replicas, as the file has them."""

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")


@dataclass
class Replica:
    """Stands for a server. It answers with its name, in two halves with `gate` between them.

    Attributes:
        status: of its answers.
        gate: what the second half waits for.
        asked: how many answers it began.
    """

    name: str
    status: int = 200
    gate: threading.Event = field(default_factory=threading.Event)
    asked: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        replica = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                replica.asked += 1
                self.send_response(replica.status)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                self.wfile.write(f"{replica.name}\n".encode())
                replica.gate.wait(20)
                self.wfile.write(b"end\n")

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Refuse connections from now on."""
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    made = [Replica("one"), Replica("two")]
    yield made
    for replica in made:
        replica.close()


@pytest.fixture
def address(replicas: list[Replica], tmp_path: Path) -> Iterator[str]:
    """Of HAProxy before them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    text, config = CONFIG.read_text("utf-8"), tmp_path / "haproxy.cfg"
    for before, port in zip(PORTS, (own, *(replica.server.server_port for replica in replicas)), strict=True):
        assert text.count(before) == 1
        text = text.replace(before, f"127.0.0.1:{port}")
    config.write_text(text, "utf-8")
    with subprocess.Popen(["haproxy", "-db", "-f", str(config)], stderr=subprocess.DEVNULL) as process:
        try:
            _listens(own)
            yield f"http://127.0.0.1:{own}/v1/completions"
        finally:
            process.terminate()


def _listens(port: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError("haproxy does not listen")


def ask(address: str) -> bytes:
    """Who answers."""
    with urllib.request.urlopen(urllib.request.Request(address, data=b"{}"), timeout=20) as answer:
        return bytes(answer.readline().strip())


def test_haproxy_has_no_complaint() -> None:
    done = subprocess.run(["haproxy", "-c", "-f", str(CONFIG)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr


def test_the_less_busy_replica_is_asked_and_streams_are_not_held_back(replicas: list[Replica], address: str) -> None:
    for replica in replicas:
        replica.gate.clear()
    request = urllib.request.Request(address, data=b"{}")
    with urllib.request.urlopen(request, timeout=20) as first, urllib.request.urlopen(request, timeout=20) as second:
        names = [first.readline(), second.readline()]  # before either answer ends
        assert sorted(names) == [b"one\n", b"two\n"]
        replicas[0].gate.set()
        assert (first, second)[names.index(b"one\n")].read() == b"end\n"
        assert [ask(address) for _ in range(3)] == [b"one"] * 3  # the other still answers
        replicas[1].gate.set()


def test_a_replica_that_shuts_down_costs_no_answer(replicas: list[Replica], address: str) -> None:
    replicas[0].status = 503
    assert [ask(address) for _ in range(4)] == [b"two"] * 4
    assert replicas[0].asked > 0  # it was tried, and the request went on


def test_a_replica_that_is_gone_costs_no_answer(replicas: list[Replica], address: str) -> None:
    replicas[1].close()
    assert [ask(address) for _ in range(4)] == [b"one"] * 4
