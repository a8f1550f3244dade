"""Killed workers, clients that vanish or stall, and huge prompts affect no other request and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import MODEL, Running, serving, tiny_engine, wait
from shoal.serve import middleware
from shoal.serve.answer import Answer
from shoal.serve.settings import Settings

ANSWERS: weakref.WeakSet[Answer] = weakref.WeakSet()
PLAIN: dict[str, Any] = {"model": MODEL, "prompt": "Some words", "temperature": 0, "max_tokens": 120}


@pytest.fixture(autouse=True)
def _watch(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Answer.__init__

    def watched(self: Answer, *args: Any) -> None:
        ANSWERS.add(self)
        make(self, *args)

    monkeypatch.setattr(Answer, "__init__", watched)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine(), scheduling={"max_seqs": 3}) as running:
        yield running


def ask(server: Running, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={**PLAIN, **more}, timeout=60)


def text(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


def calm(server: Running) -> None:
    """Wait until no sequences, KV or objects of any request are left."""
    scheduler = server.scheduler
    wait(lambda: not (scheduler.running or scheduler.waiting or scheduler._open))
    wait(lambda: not ANSWERS or gc.collect() < 0)
    assert scheduler.kv_use == 0 and scheduler._batches.plain.cache.seqs == 0
    assert not any(layer.keys is not None and layer.keys.numel() for layer in scheduler._batches.plain.cache.layers)


def raw(server: Running, body: str, announced: int | None = None) -> socket.socket:
    """A connection that has sent a request, with a tiny receive buffer."""
    host, port = server.url.removeprefix("http://").split(":")
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    one.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {announced or len(body)}\r\n\r\n"
    one.sendall((head + body).encode())
    return one


@pytest.mark.slow
def test_a_killed_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny_engine(), scheduling={"max_seqs": 1}) as server:
        health = f"{server.url}/health"
        assert httpx.get(health, timeout=60).status_code == 200
        server.scheduler.worker._pause = 60.0
        turn, calls = server.scheduler._batches.plain.step, iter(range(10_000))

        def deadly(budget: int, rows: Any = None) -> Any:
            if next(calls) == 20:
                raise SystemExit
            return turn(budget, rows)

        monkeypatch.setattr(server.scheduler._batches.plain, "step", deadly)
        waited: list[str] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**PLAIN, "stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            other = threading.Thread(target=lambda: waited.append(text(ask(server))))
            other.start()
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "interrupted"
        assert httpx.get(health, timeout=60).status_code == 503
        server.scheduler.worker._hurry.set()
        wait(lambda: httpx.get(health, timeout=60).status_code == 200)
        other.join(60)
        assert waited == [server.engine.generate("Some words", max_new_tokens=120).text]
        calm(server)


@pytest.mark.slow
def test_clients_that_vanish_leave_the_others_alone(server: Running) -> None:
    expected, rng = server.engine.generate("Some words", max_new_tokens=120).text, random.Random(1)
    said: list[str] = []

    def patient() -> None:
        said.append(text(ask(server)))

    def fickle(seconds: float) -> None:
        with raw(server, json.dumps({**PLAIN, "stream": True, "n": 2})):
            time.sleep(seconds)

    threads = [threading.Thread(target=patient) for _ in range(4)]
    threads += [threading.Thread(target=fickle, args=(rng.uniform(0, 0.4),)) for _ in range(6)]
    rng.shuffle(threads)
    before = threading.active_count()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said == [expected] * 4
    calm(server)
    pools = ("asyncio", "uvloop", "AnyIO", "tqdm", "roof")
    named = [one.name for one in threading.enumerate() if not one.name.startswith(pools)]
    assert len(named) <= before, named


@pytest.mark.slow
def test_a_megabyte_of_prompt_is_refused_and_delays_nobody(server: Running) -> None:
    expected, said = server.engine.generate("Some words", max_new_tokens=120).text, []
    other = threading.Thread(target=lambda: said.append(text(ask(server))))
    other.start()
    for size, status in ((1_000_000, 400), (1_100_000, 413)):
        answer = ask(server, prompt="some words " * (size // 11))
        assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True)
    messages = [{"role": "user", "content": "a b" * 300_000}]
    chat = httpx.post(f"{server.url}/v1/chat/completions", json={"model": MODEL, "messages": messages}, timeout=60)
    assert (chat.status_code, chat.json()["error"]["code"]) == (400, "context_length_exceeded")
    other.join(60)
    assert said == [expected]
    calm(server)


@pytest.mark.slow
def test_clients_that_stall_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "LAST_WORDS", 0.5)
    with serving(tiny_engine(), timeout=1.5) as server:
        large = json.dumps({**PLAIN, "stream": True, "n": 8, "logprobs": 20})
        with raw(server, large), raw(server, large[:50], announced=len(large)):
            wait(lambda: server.scheduler.running > 0)
            assert ask(server, max_tokens=5).status_code == 200
            wait(lambda: not server.scheduler._open)
            calm(server)
        assert ask(server, max_tokens=5).status_code == 200
        calm(server)


def test_a_request_that_got_no_answer_in_time_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that waited for its model until another limit had passed."""
    monkeypatch.setattr(middleware, "LAST_WORDS", 0.1)

    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def asked() -> httpx.Response:
        gate = middleware.Gate(never, Settings(model_name="model", timeout=0.1))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://localhost") as client:
            return await client.post("/v1/completions", json=PLAIN)

    answer = asyncio.run(asked())
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


def test_a_shutdown_that_cannot_wait_says_so_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    """The log has a line per request and no traceback; clients get an error, at the end of a stream if need be."""
    caplog.set_level("INFO")
    answers: dict[bool, httpx.Response] = {}

    def asked(running: Running, stream: bool) -> None:
        answers[stream] = ask(running, stream=stream, max_tokens=400)

    with serving(tiny_engine(), scheduling={"max_seqs": 3}, grace=0.0) as running:
        clients = [threading.Thread(target=asked, args=(running, stream)) for stream in (False, True)]
        for client in clients:
            client.start()
        wait(lambda: running.scheduler.running == 2)
    for client in clients:
        client.join(60)
    assert answers[False].status_code == 503 and answers[False].json()["error"]["code"] == "shutting_down"
    *_, last = answers[True].text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    lines = [json.loads(record.message) for record in caplog.records if record.name == "shoal.serve"]
    assert [line["status"] for line in lines] == ["cut off by the shutdown"] * 2
    assert not [record for record in caplog.records if record.exc_info]
