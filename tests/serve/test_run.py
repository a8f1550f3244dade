"""The server as a process, with a method that hangs: /health reports it, and the process always ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ray_processes import save_tiny
from serving import serve_process, wait

pytestmark = pytest.mark.slow

METHOD = '''
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer
from shoal.methods.common.drafting import DraftingMethod


@dataclass(frozen=True)
class Hangs(DraftingMethod):
    """Drafts nothing, slowly."""

    name: ClassVar[str] = "hangs"
    seconds: float = 0.0
    fails: bool = False

    def recipe(self, info: Any) -> Any:
        return self.verified(Made(self), info)


@dataclass(frozen=True)
class Made(Proposer):
    how: Hangs

    def begin(self, stack: Any, cache: Any) -> Any:
        return Sleeper(self.how)


class Sleeper(Drafter):
    def __init__(self, how: Hangs) -> None:
        self.how = how

    def propose(self, rows: Any, limits: Any) -> Any:
        time.sleep(self.how.seconds)
        if self.how.fails:
            raise RuntimeError("that is this request's own fault")
        return [TokenTree.chain(row.tokens[-1:]) for row in rows]
'''
BODY: dict[str, Any] = {"model": "t", "prompt": "Some words", "temperature": 0, "max_tokens": 40}


@dataclass
class Command:
    """The running command."""

    process: subprocess.Popen[str]
    url: str
    said: list[str]

    def ask(self, *, timeout: float = 60, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={**BODY, **more}, timeout=timeout)

    def hang(self, seconds: float) -> None:
        """Start a request with a step of that length, in the background."""
        asked = {"method": "hangs", "method_args": {"seconds": seconds}}
        threading.Thread(target=lambda: _leaving(lambda: self.ask(**asked)), daemon=True).start()

    def wait_for_a_row(self) -> None:
        """Wait until something is being decoded."""
        running = re.compile(r"^shoal:num_requests_running\{.*\} [1-9]", re.MULTILINE)
        wait(lambda: running.search(httpx.get(f"{self.url}/metrics", timeout=60).text))

    def health(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=60).status_code

    def ends_within(self, seconds: float) -> float:
        """Wait for the process to end; returns the seconds."""
        began = time.monotonic()
        self.process.wait(seconds)
        return time.monotonic() - began


def _leaving(ask: Any) -> None:
    with suppress(httpx.HTTPError):
        ask()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hangs")
    (place / "hangs_method.py").write_text(METHOD, encoding="utf-8")
    facts = place / "hangs-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: hangs\nVersion: 1.0\n", encoding="utf-8")
    (facts / "entry_points.txt").write_text("[shoal.methods]\nhangs = hangs_method:Hangs\n", encoding="utf-8")
    save_tiny(place / "model")
    return place


@contextmanager
def command(folder: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{':'.join(sys.path)}")
    options = ["--model", str(folder / "model"), "--methods", "hangs,full,prompt_lookup", *words]
    with serve_process(*options, within=300) as (process, url, said):
        yield Command(process, url, said)


def test_health_tells_of_a_step_that_does_not_end_and_a_signal_ends_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with command(folder, "--stall", "1", "--grace", "2", monkeypatch=monkeypatch) as server:
        assert server.health() == 200 and server.ask(max_tokens=2).status_code == 200
        server.hang(2.5)  # one that does end
        wait(lambda: server.health() == 503)
        said = httpx.get(f"{server.url}/health").json()["status"]
        assert "a step of decoding has taken" in said
        wait(lambda: server.health() == 200)
        server.hang(1000)
        wait(lambda: server.health() == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.ends_within(2 + 5) < 2 + 5
        wait(lambda: any("in propose" in line for line in server.said))  # where the step hung


def test_a_second_signal_does_not_wait_for_the_grace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with command(folder, "--grace", "300", monkeypatch=monkeypatch) as server:
        server.hang(1000)
        server.wait_for_a_row()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert server.process.poll() is None, "the first one waits for what runs"
        server.process.send_signal(signal.SIGTERM)
        assert server.ends_within(10) < 5


def test_a_signal_with_answers_under_way_ends_with_the_grace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with command(folder, "--grace", "1", monkeypatch=monkeypatch) as server:
        answers: list[httpx.Response] = []
        asked = {"method": "hangs", "method_args": {"seconds": 0.2}, "max_tokens": 400, "ignore_eos": True}
        client = threading.Thread(target=lambda: answers.append(server.ask(**asked)))
        client.start()
        server.wait_for_a_row()
        server.process.send_signal(signal.SIGTERM)
        assert server.ends_within(1 + 5) < 1 + 5
        client.join(10)
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"


def test_a_request_that_fails_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with command(folder, monkeypatch=monkeypatch) as server:
        expected = server.ask(method="full").json()["choices"][0]["text"]
        good: list[str] = []

        def ask() -> None:
            good.append(server.ask(method="full").json()["choices"][0]["text"])

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        bad = server.ask(method="hangs", method_args={"fails": True, "seconds": 0.01})
        for client in clients:
            client.join(60)
        assert bad.status_code == 500 and good == [expected] * 3 and server.health() == 200
