"""`shoal serve --replicas` as a process: one address for all replicas, replicas that are killed, and SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

import shoal
from ray_processes import LONG, below, require_ray, save_tiny
from serving import serve_process, wait
from shoal.serve.replicas import HEADER

pytestmark = pytest.mark.ray

ASK = [{"role": "user", "content": "Hello there"}]
PLAIN: dict[str, Any] = {"model": "t", "prompt": "Some words", "temperature": 0}
KEY = "right"


@dataclass
class Command:
    """The running command."""

    process: subprocess.Popen[str]
    url: str
    clients: list[openai.OpenAI] = field(default_factory=list)

    def client(self, key: str = KEY) -> openai.OpenAI:
        """A client that is closed with the command."""
        self.clients.append(openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=LONG))
        return self.clients[-1]

    def complete(self, **more: Any) -> tuple[str, str]:
        """A completion, and the replica that made it."""
        raw = self.client().completions.with_raw_response.create(**{**PLAIN, "max_tokens": 4, **more})
        return raw.parse().choices[0].text, raw.headers[HEADER]

    def stream(self, **more: Any) -> tuple[str, Any]:
        """The replica of an answer that has begun, and its stream."""
        raw = self.client().completions.with_raw_response.create(**{**PLAIN, **more, "stream": True})
        return raw.headers[HEADER], raw.parse()

    def samples(self, name: str) -> list[tuple[str, float]]:
        """Samples of a metric: labels and value."""
        text = httpx.get(self.url.replace("/v1", "/metrics"), timeout=LONG).text
        return [(labels, float(value)) for labels, value in re.findall(rf"^{name}\{{([^}}]*)\}} (\S+)$", text, re.M)]


@contextmanager
def command(folder: Path, *words: str) -> Iterator[Command]:
    """Run two replicas within the context."""
    options = ["--model", str(folder), "--replicas", "2", "--api-key", KEY, *words]
    with serve_process(*options, within=LONG) as (process, url, _), ExitStack() as opened:
        made = Command(process, f"{url}/v1")
        opened.callback(lambda: [client.close() for client in made.clients])
        try:
            yield made
        finally:
            process.terminate()
            process.wait(LONG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_ray()
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Command]:
    with command(folder, "--max-rows", "2", "--max-waiting", "3") as running:
        yield running


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    return shoal.load(str(folder), dtype="float64", backend="hf")


def test_both_replicas_answer_as_the_engine_does(server: Command, engine: Any) -> None:
    expected, who = engine.generate("Some words", max_new_tokens=4).text, set()

    def both() -> bool:
        text, replica = server.complete()
        assert text == expected
        who.add(replica)
        return len(who) == 2

    wait(both, LONG)


def test_a_chat_whole_and_as_a_stream(server: Command, engine: Any) -> None:
    words = engine.tokenizer.apply_chat_template(ASK, add_generation_prompt=True, tokenize=True, return_dict=False)
    expected = engine.generate(words, max_new_tokens=30).text
    options: dict[str, Any] = {"model": "t", "messages": ASK, "max_tokens": 30, "temperature": 0}
    whole = server.client().chat.completions.create(**options)
    chunks = list(server.client().chat.completions.create(**options, stream=True))
    assert whole.choices[0].message.content == expected
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert len(chunks) > 10, "the stream came in one piece"


def test_errors_are_those_of_one_server(server: Command) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    with pytest.raises(openai.NotFoundError) as missing:
        server.client().completions.create(**{**PLAIN, "model": "another"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        server.client().completions.create(**{**PLAIN, "temperature": 3})
    with pytest.raises(openai.RateLimitError) as full:
        server.client().completions.create(**{**PLAIN, "temperature": 1, "n": 4})  # three may wait
    assert full.value.code == "queue_full"
    assert [model.id for model in server.client().models.list()] == ["t"]
    health = httpx.get(server.url.replace("/v1", "/health"), timeout=LONG, headers={"x-request-id": "mine-1"})
    assert (health.status_code, health.json(), health.headers["x-request-id"]) == (200, {"status": "ok"}, "mine-1")


def test_metrics_are_of_all_replicas(server: Command) -> None:
    def made() -> float:
        return sum(value for _, value in server.samples("shoal:generation_tokens_total"))

    before, who = made(), set()
    wait(lambda: who.add(server.complete(max_tokens=1)[1]) or len(who) == 2, LONG)
    rows = server.samples("shoal:num_requests_running")
    assert {labels for labels, _ in rows} == {f'model_name="t",replica="{one}"' for one in who}
    wait(lambda: made() >= before + 2, LONG)


def test_leaving_a_stream_frees_its_row(server: Command) -> None:
    def left() -> float:
        return sum(value for labels, value in server.samples("shoal:request_success_total") if "abort" in labels)

    before = left()
    _, stream = server.stream(max_tokens=8000)
    next(iter(stream))
    stream.close()
    wait(lambda: left() == before + 1, LONG)
    wait(lambda: all(value == 0 for _, value in server.samples("shoal:num_requests_running")), LONG)


def test_a_killed_replica_is_replaced_while_the_other_goes_on(server: Command, engine: Any) -> None:
    expected = engine.generate("Some words", max_new_tokens=1500).text
    streams: dict[str, Any] = {}
    said: dict[str, str] = {}

    def begin() -> bool:
        replica, stream = server.stream(max_tokens=1500)
        if replica in streams:
            stream.close()
        else:
            streams[replica] = stream
        return len(streams) == 2

    def read(replica: str) -> None:
        try:
            said[replica] = "".join(chunk.choices[0].text for chunk in streams[replica])
        except (openai.APIError, httpx.HTTPError):
            said[replica] = ""

    wait(begin, LONG)
    victim = below(server.process.pid, "ray::ServeReplica")[0]
    os.kill(victim.pid, signal.SIGKILL)
    readers = [threading.Thread(target=read, args=(replica,)) for replica in streams]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(LONG)
    (survivor,) = [replica for replica, text in said.items() if text == expected]
    assert len(said) == 2

    def replaced() -> bool:
        try:
            return server.complete()[1] not in streams
        except openai.APIError:  # a request that was sent to the dead one
            return False

    wait(replaced, LONG)
    wait(lambda: server.complete()[1] == survivor, LONG)


def test_sigterm_lets_streams_end_and_leaves_nothing_behind(folder: Path, engine: Any) -> None:
    with command(folder, "--max-rows", "4", "--grace", str(LONG)) as server:  # on a busy machine streams take long
        expected = engine.generate("Some words", max_new_tokens=600).text
        streams = [server.stream(max_tokens=600)[1] for _ in range(4)]
        firsts = [next(iter(stream)).choices[0].text for stream in streams]
        processes = below(server.process.pid)
        assert len([one for one in processes if one.name().startswith("ray::ServeRepl")]) == 2
        server.process.terminate()
        texts = [first + "".join(chunk.choices[0].text for chunk in stream)
                 for first, stream in zip(firsts, streams, strict=True)]
        assert texts == [expected] * 4
        assert server.process.wait(LONG) == 0
        with pytest.raises(openai.APIConnectionError):
            server.complete()
        assert not psutil.wait_procs(processes, timeout=LONG)[1]


def test_a_model_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    require_ray()
    words = ["serve", "--model", str(tmp_path / "nowhere"), "--replicas", "2", "--port", "0"]
    done = subprocess.run([sys.executable, "-m", "shoal", *words], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 2
    assert re.search(r"^shoal serve: error: .*nowhere.*$", done.stderr, re.M)
    assert "Traceback" not in done.stderr
