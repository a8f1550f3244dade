"""Requests of the load tool, its reading of answers, and its figures against hand-computed ones."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_api import HEAD, chunked, event, fake_api, whole
from shoal.methods import make
from shoal_lab.bench.load import figures
from shoal_lab.bench.load.figures import Objective
from shoal_lab.bench.load.folder import tokenizer
from shoal_lab.bench.load.http import Address, Failed, get
from shoal_lab.bench.load.loops import Load, LoadPhase
from shoal_lab.bench.load.multi import _BatchLoop, _Sequence
from shoal_lab.bench.load.prompts import Prompts, recorded
from shoal_lab.bench.load.run import LoadConfig, measure, results, verdict
from shoal_lab.bench.load.server import Server, free_port
from shoal_lab.bench.load.servers import Servers, ServersConfig
from shoal_lab.bench.load.targets import Form, Http, look, own_fields
from shoal_lab.bench.load.trace import Trace, ask, read
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.process import MemorySampler
from shoal_lab.bench.system import NotMeasured, Setting


def trace(due: float = 0.0, first: float = 1.0, gaps: float = 0.1, tokens: int = 5, **more: Any) -> Trace:
    chunks = tuple(first + gaps * place for place in range(tokens))
    return Trace(due, chunks, chunks[-1], 3, tokens, **more)


def stream(*lines: bytes) -> list[tuple[float, bytes]]:
    return [(float(place), line.removeprefix(b"data: ").strip()) for place, line in enumerate(lines)]


# streams


def test_times_and_counts_are_read_from_a_stream() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 9}
    came = stream(event(), event("ab"), event("c"), event("", "length"),
                  event("", usage=usage, metrics={"queue_time_ms": 250}), b"data: [DONE]")
    found = read(came, 0.5, 6.0, None)
    assert found == Trace(0.5, (1.0, 2.0), 6.0, 7, 9, 0.25, None)
    assert (found.ttft, found.gaps, found.tpot) == (0.5, [1.0], 1.0 / 8)


def test_chunks_stand_for_tokens_where_nothing_is_counted_and_chats_are_read() -> None:
    chat = [json.dumps({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}).encode()] * 3
    end = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None}).encode()
    found = read(stream(*chat, end), 0.0, 4.0, None)
    assert (found.tokens, found.chunks, found.error) == (3, (0.0, 1.0, 2.0), None)


@pytest.mark.parametrize(
    ("came", "said"),
    [
        ([event("a")], "without a finish_reason"),
        ([event("a"), b'data: {"error": {"message": "too long"}}'], "too long"),
        ([event("a"), b'data: {"error": "worn out"}'], "worn out"),
        ([b"data: {oops"], "not JSON"),
    ],
)
def test_a_stream_that_fails_is_an_error(came: list[bytes], said: str) -> None:
    assert said in str(read(stream(*came), 0.0, 1.0, None).error)


# the client


def asked(url: str, limit: float = 20.0, **more: Any) -> Trace:
    body = Form("fake", **more).body("Why?", 3)

    async def once() -> Trace:
        async with httpx.AsyncClient(**Address(url).options()) as client:
            return await ask(client, "/v1/completions", body, 0.0, time.perf_counter(), limit)

    return asyncio.run(once())


def test_a_stream_is_followed_however_it_is_cut() -> None:
    with fake_api() as url:
        found = asked(url)
    assert (found.tokens, found.prompt_tokens, len(found.chunks), found.error) == (3, 3, 3, None)
    raw = event("a") + event("b", "stop")
    for pieces in (chunked(raw), chunked(*(bytes([one]) for one in raw)), [HEAD + b"\r\n" + raw]):
        with fake_api(lambda *_, pieces=pieces: pieces) as url:
            assert asked(url).tokens == 2


def test_a_line_end_of_unicode_does_not_cut_an_event() -> None:
    raw = event("?", "stop").replace(b"?", "\u2028\x85".encode())
    with fake_api(lambda *_: chunked(raw)) as url:
        assert (asked(url).tokens, asked(url).error) == (1, None)


def test_proxies_and_sessions_are_not_used_and_certificates_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with fake_api() as url:
        assert asked(url).error is None
    options = Address("HTTPS://example.org", "key").options()
    assert options["headers"] == {"accept-encoding": "identity", "connection": "close", "authorization": "Bearer key"}
    assert options["verify"].check_hostname


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (whole({"error": {"message": "the queue is full"}}, "429 Too Many"), "429 .*the queue is full"),
        ([], "without sending a response"),
        (chunked(event("a"))[:2], "RemoteProtocolError: peer closed connection"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n"], "RemoteProtocolError"),
    ],
)
def test_what_goes_wrong_is_said(pieces: list[bytes], said: str) -> None:
    import re

    with fake_api(lambda *_: pieces) as url:
        assert re.search(said, str(asked(url).error))


def test_silence_and_a_closed_port_are_errors() -> None:
    with fake_api(lambda *_: [HEAD + b"transfer-encoding: chunked\r\n\r\n"] * 1 + [b""]) as url:
        assert asked(url, 5.0).error is not None
    closed = f"http://127.0.0.1:{free_port()}"
    assert "Connect" in str(asked(closed).error)
    with pytest.raises(ValueError, match="does not list a model"):
        look(Address(closed))
    with pytest.raises(ValueError, match="must look like"):
        Address("localhost:8000")


def test_nothing_is_waited_for_longer_than_the_limit() -> None:
    def stall(path: str, body: Any) -> list[bytes]:
        time.sleep(1.0)
        return []

    with fake_api(stall) as url:
        assert asked(url, 0.05).error == "no end after 0.05 s"


def test_keys_paths_and_bodies_arrive() -> None:
    seen = []

    def note(path: str, body: Any) -> list[bytes]:
        seen.append((path, body))
        return whole({"data": [{"id": "m", "owned_by": "shoal"}]})

    with fake_api(note) as url:
        face = look(Address(url + "/prefix/", "key"))
        asked(url, chat=True)
    assert (face.model, face.shoal) == ("m", True)
    assert seen[0][0] == "/prefix/v1/models"
    assert seen[1][1] == {"model": "fake", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 3,
                          "temperature": 0, "stream": True}
    spec = make({"method": "early_exit", "method_args": {"exit_layer": 2}}).to_dict()
    fields = own_fields(spec, True)
    assert (fields["method"], fields["method_args"]["exit_layer"], fields["ignore_eos"]) == ("early_exit", 2, True)
    assert "ignore_eos" not in own_fields(spec, False)


def test_a_page_is_read_whole() -> None:
    with fake_api(lambda *_: whole({"x": [1, 2]})) as url:
        assert json.loads(get(Address(url), "/metrics")) == {"x": [1, 2]}
    with fake_api(lambda *_: whole("no", "404 Not Found")) as url, pytest.raises(Failed, match="404"):
        get(Address(url), "/metrics")


# timing of requests


@given(st.floats(0.1, 50), st.integers(0, 99))
def test_arrivals_are_seeded_and_end(rate: float, seed: int) -> None:
    turn = LoadPhase(Load(rate=rate), requests=20, seed=seed)
    moments = list(turn.arrivals())
    assert moments == list(turn.arrivals()) == sorted(moments) and len(moments) == 20 and moments[0] == 0
    assert moments != list(LoadPhase(Load(rate=rate), requests=20, seed=seed + 1).arrivals())
    assert all(moment < 3 / rate for moment in LoadPhase(Load(rate=rate), seconds=3 / rate, seed=seed).arrivals())


def test_arrivals_come_at_their_rate() -> None:
    moments = list(LoadPhase(Load(rate=4.0), requests=4000, seed=1).arrivals())
    gaps = np.diff(moments)
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert np.std(gaps) == pytest.approx(0.25, rel=0.08), "exponential gaps spread as wide as they are long"


class Clients:
    """Records requests in progress; answers after some turns of the event loop."""

    def __init__(self) -> None:
        self.now, self.most, self.numbers = 0, 0, list[int]()

    async def __call__(self, number: int, due: float, start: float) -> Trace:
        self.numbers.append(number)
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(1 + number % 5):
            await asyncio.sleep(0)
        self.now -= 1
        return Trace(due, (due + 1.0,), due + 1.0, 1, number)


@given(st.integers(1, 9), st.integers(1, 40))
def test_a_closed_loop_keeps_so_many_under_way(clients: int, requests: int) -> None:
    send = Clients()
    traces = asyncio.run(LoadPhase(Load(concurrency=clients), requests=requests).run(send))
    assert send.most == min(clients, requests)
    assert sorted(send.numbers) == list(range(requests)) and [one.tokens for one in traces] == list(range(requests))


def test_an_open_loop_waits_for_nobody() -> None:
    sent = []

    async def send(number: int, due: float, start: float) -> Trace:
        sent.append(number)
        while len(sent) < 6:
            await asyncio.sleep(0)
        return Trace(due, (), due, error="late")

    traces = asyncio.run(LoadPhase(Load(rate=1000.0), requests=6).run(send))
    assert len(traces) == 6 and {one.error for one in traces} == {"late"}


@pytest.mark.parametrize(
    ("make_it", "said"),
    [
        (lambda: Load(), "either"),
        (lambda: Load(concurrency=0), "at least 1"),
        (lambda: Load(rate=-1.0), "above 0"),
        (lambda: LoadPhase(Load(rate=1.0)), "needs an end"),
        (lambda: LoadConfig([], Prompts()), "no load"),
        (lambda: LoadConfig([Load(rate=1.0)], Prompts()), "need an end"),
        (lambda: LoadConfig([Load(concurrency=1)], Prompts(), seconds=0), "above 0"),
        (lambda: Prompts(lengths=()), "at least 1"),
        (lambda: Objective.parse("ttft"), "ttft"),
        (lambda: Objective.parse("speed=3"), "speed=3"),
        (lambda: recorded(["chat"], None), "--data"),
    ],
)
def test_impossible_wishes_are_refused(make_it: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_it()


# prompts


def test_prompts_are_the_same_for_everybody() -> None:
    prompts = Prompts(lengths=(4, 9), new_tokens=(2, 5), seed=3)
    first = [prompts[number] for number in range(40)]
    assert first == [prompts[number] for number in range(40)]
    assert {len(one.text.split()) for one in first} == {4, 9} and {one.new_tokens for one in first} == {2, 5}
    assert first[0] != Prompts(lengths=(4, 9), new_tokens=(2, 5), seed=4)[0]
    assert Prompts(texts=["a"])[7].text == "a"
    assert all(text.endswith("\n") for text in recorded(["problems"], None))


def test_every_id_of_a_made_up_tokenizer_has_a_text() -> None:
    made = tokenizer(1500, ["Some text to learn from. Some more text."])
    assert len(made) == 1500
    assert all(made.decode([index]) for index in range(1500))
    text = Prompts(lengths=(50,))[0].text
    ids = made(text)["input_ids"]
    assert made.decode(ids) == text and len(ids) < 130
    assert "Why" in made.apply_chat_template([{"role": "user", "content": "Why"}], tokenize=False)


# figures


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    found = figures.percentiles([*values, None])
    assert found is not None
    for share in (50, 90, 99):
        assert found[f"p{share}"] == pytest.approx(np.quantile(values, share / 100), rel=1e-9, abs=1e-6)
    assert found["mean"] == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)


def test_figures_of_two_rounds() -> None:
    slow = trace(due=1.0, first=4.0, gaps=0.5, tokens=3)  # over at 5
    rounds = [[trace(), slow], [trace(), Trace(0.0, (), 2.0, error="gone")]]
    found = figures.figures(rounds, Objective.parse("ttft=2,tpot=0.2"))
    assert (found["requests"], found["errors"], found["messages"]) == (4, 1, {"gone": 1})
    assert found["tokens"] == 13 and found["seconds"] == pytest.approx(5.0 + 2.0)
    assert found["tokens_per_second"]["max"] == pytest.approx(5 / 2.0)
    assert found["tokens_per_second"]["min"] == pytest.approx(8 / 5.0)
    assert found["ttft_seconds"]["p50"] == pytest.approx(1.0)
    assert found["goodput"]["share"] == 0.5 and found["goodput"]["requests_per_second"] == pytest.approx(2 / 7)
    assert found["queue_seconds"] is None
    assert figures.ratio(rounds, rounds)["median"] == 1.0


def test_an_objective_holds_all_that_it_names() -> None:
    good = trace(first=1.0, gaps=0.1, tokens=5)
    assert Objective().kept(good) and Objective(1.0, 0.11, 1.5).kept(good)
    assert not Objective(ttft=0.9).kept(good) and not Objective(tpot=0.09).kept(good)
    assert not Objective(latency=1.3).kept(good)
    assert not Objective().kept(trace(error="gone"))


def curve(*held: float) -> list[dict[str, float]]:
    return [{"seconds": float(place), "bytes": value} for place, value in enumerate(held)]


def flatness(*held: float) -> Any:
    return figures.flat(curve(*held), 0.02)


def test_memory_is_flat_when_it_stays() -> None:
    steady = [100.0 + (place % 2) for place in range(100)]
    assert flatness(*([50.0] * 9), *steady)["flat"], "the first tenth is warm-up"
    grown = flatness(*(100.0 + 0.05 * place for place in range(100)))
    assert not grown["flat"] and 0.03 < grown["largest_change"] < 0.05
    shrunk = flatness(*(100.0 - 0.05 * place for place in range(100)))
    assert not shrunk["flat"]
    spiked = list(steady)
    spiked[50] = 500.0
    assert flatness(*spiked)["flat"], "one reading is not a leak"
    assert figures.flat(curve(1.0, 1.0, 1.0), 0.02) is None and figures.flat([], 0.02) is None


def test_a_soak_passes_only_without_errors_and_with_readable_flat_memory() -> None:
    flat = {"flat": True, "largest_change": 0.0, "allowed": 0.02}
    assert verdict({"errors": 0, "requests": 9}, flat) == {"passed": True, "why": []}
    assert verdict({"errors": 1, "requests": 9}, flat)["why"] == ["1 of 9 requests failed"]
    assert not verdict({"errors": 0, "requests": 0}, flat)["passed"]
    assert not verdict({"errors": 0, "requests": 9}, None)["passed"]
    moved = verdict({"errors": 0, "requests": 9}, {**flat, "flat": False, "largest_change": 0.03})
    assert moved["why"] == ["memory moved by 3.0%, and 2% are allowed"]


# rounds


class Made:
    """A target that answers at once, twice as fast as another of half its speed."""

    def __init__(self, name: str, speed: float, log: list[str]) -> None:
        self.name, self.label, self._speed, self._log = name, "", speed, log

    def run(self, turn: LoadPhase, prompts: Prompts) -> list[Trace]:
        self._log.append(f"{self.name} {turn.load.label} {turn.seed}")
        return [trace(first=1 / self._speed, gaps=1 / self._speed) for _ in range(turn.requests or 0)]

    def hold(self) -> None:
        self._log.append(f"{self.name} held")

    def resident(self) -> int | None:
        return 1000

    def cpu_seconds(self) -> float | None:
        return None

    def stop(self) -> None:
        pass


def test_targets_take_turns_and_every_other_round_runs_backwards() -> None:
    log: list[str] = []
    targets = [Made("a", 2.0, log), Made("b", 1.0, log)]
    wish = LoadConfig([Load(concurrency=1), Load(concurrency=3)], Prompts(), rounds=2)
    cells, rounds = measure(targets, wish)
    assert rounds.to_dict() == {"asked": 2, "done": 2, "stopped_early": False}
    assert [line for line in log if "held" not in line] == [
        "a 1 at once 0", "b 1 at once 0", "a 3 at once 0", "b 3 at once 0",
        "b 3 at once 1", "a 3 at once 1", "b 1 at once 1", "a 1 at once 1",
    ]
    assert log[1] == "a held", "nobody runs while another is measured"
    found = results(cells, Objective())
    assert found[0]["times_the_speed_of"]["b"]["median"] == pytest.approx(2.0)
    assert found[3]["times_the_speed_of"]["a"]["median"] == pytest.approx(0.5)
    assert found[0]["requests"] == 4 and found[2]["requests"] == 12
    assert found[0]["memory"]["largest"] == 1000


def test_the_time_box_cuts_rounds_off() -> None:
    log: list[str] = []
    _, rounds = measure([Made("a", 1.0, log)], LoadConfig([Load(concurrency=1)], Prompts(), rounds=5, minutes=1e-9))
    assert rounds.to_dict() == {"asked": 5, "done": 1, "stopped_early": True}
    assert len([line for line in log if "held" not in line]) == 1


def test_an_http_target_takes_a_load() -> None:
    with fake_api() as url:
        target = Http("fake", "", Address(url), Form("fake"))
        traces = target.run(LoadPhase(Load(concurrency=3), requests=7), Prompts(new_tokens=(4,)))
    assert [one.tokens for one in traces] == [4] * 7 and not any(one.error for one in traces)
    assert target.resident() is None and target.cpu_seconds() is None


def test_memory_is_read_from_the_metrics_of_a_server_elsewhere() -> None:
    page = b"# HELP x\nprocess_resident_memory_bytes 1.5e+06\n"
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(page)}\r\n\r\n".encode()
    with fake_api(lambda *_: [head + page]) as url:
        assert Http("fake", "", Address(url), Form("fake")).resident() == 1_500_000


def test_a_watch_reads_at_once_and_until_the_end() -> None:
    values = iter(range(10**9))
    with MemorySampler(lambda: next(values), 0.001) as watch:
        while len(watch.curve) < 3:
            time.sleep(0.001)
    count = len(watch.curve)
    time.sleep(0.01)
    assert len(watch.curve) == count and [point["bytes"] for point in watch.curve] == list(range(count))


# our own servers

SERVE = "import http.server,sys; http.server.HTTPServer(('127.0.0.1',int(sys.argv[1])), None).serve_forever()"


def test_a_server_is_held_released_and_ended() -> None:
    port = free_port()
    server = Server([sys.executable, "-c", SERVE, str(port)], port)
    assert server.alive and server.url.endswith(str(port))
    stat = f"/proc/{server.pid}/stat"
    if os.path.exists(stat):
        server.hold()
        _until(lambda: _state(stat) == "T")
        server.resume()
        _until(lambda: _state(stat) != "T")
        server.hold()
    server.stop()
    assert not server.alive
    server.stop()


def _until(condition: Any) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def _state(stat: str) -> str:
    with open(stat) as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_server_that_ends_is_not_measured_and_its_last_words_are_told() -> None:
    with pytest.raises(NotMeasured, match="code 3: no such model"):
        Server([sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"], free_port())
    with pytest.raises(NotMeasured, match="not ready in time"):
        Server([sys.executable, "-c", "import time; time.sleep(60)"], free_port(), minutes=0.003)


LLAMA = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

argv, looks = sys.argv[1:], []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        looks.append(self.path)
        self.send_response(200 if len(looks) > 2 else 503)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        right = body["ignore_eos"] and len(looks) == 3 and {{"-np", "4", "-t", "2", "--no-cache-prompt"}} <= set(argv)
        usage = {{"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}}
        self.send_response(200)
        self.end_headers()
        for choices in ([{{"text": "a", "finish_reason": "length" if right else None}}], []):
            self.wfile.write(b"data: " + json.dumps({{"choices": choices, "usage": usage}}).encode() + b"\\n\\n")


HTTPServer(("127.0.0.1", int(argv[argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_llama_cpps_own_server_is_started_on_the_file_and_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(LLAMA.format(python=sys.executable), "utf-8")
    program.chmod(0o755)
    config = ServersConfig(baselines=["llama-server"], max_seqs=4, llama_server=str(program))
    with Servers(config) as servers:
        servers._llama_server(MeasuredModel(model="some.gguf"), Setting("bfloat16", threads=2))
        (target,) = servers.targets
        (found,) = target.run(LoadPhase(Load(concurrency=1), requests=1), Prompts(new_tokens=(7,)))
    assert (found.error, found.tokens, found.prompt_tokens) == (None, 7, 3)
    with Servers(config) as servers, pytest.raises(NotMeasured, match="GGUF files alone"):
        servers._llama_server(MeasuredModel(model="folder"), Setting("bfloat16", threads=2))
    with Servers(ServersConfig(llama_server="nobody")) as servers, pytest.raises(NotMeasured, match="'nobody'"):
        servers._llama_server(MeasuredModel(model="some.gguf"), Setting("bfloat16", threads=2))


# llama.cpp's batches


class FakeContext:
    """Logits of a sequence depend on all of its tokens and on nothing else."""

    capacity = 6

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}
        self.largest = 0

    def clear(self) -> None:
        self.held.clear()

    def drop(self, row: int) -> None:
        del self.held[row]

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        assert 0 < len(tokens) <= self.capacity
        chosen = []
        for token, place, row, wanted in tokens:
            mine = self.held.setdefault(row, [])
            assert place == len(mine), "positions follow each other"
            mine.append(token)
            if wanted:
                chosen.append(after(mine))
        self.largest = max(self.largest, len(self.held))
        return chosen


def after(tokens: list[int]) -> int:
    return (7 * sum(tokens) + len(tokens)) % 101


def alone(ids: list[int], new: int) -> list[int]:
    tokens = list(ids)
    for _ in range(new):
        tokens.append(after(tokens))
    return tokens[len(ids):]


@given(st.lists(st.tuples(st.integers(1, 15), st.integers(1, 6)), min_size=1, max_size=9), st.integers(1, 4),
       st.booleans())
def test_rows_of_a_shared_batch_are_what_they_are_alone(
    jobs: list[tuple[int, int]], rows: int, timed: bool
) -> None:
    context = FakeContext()
    waiting = [_Sequence(number, 0.0, [(3 * number + place) % 50 for place in range(length)], new)
               for number, (length, new) in enumerate(jobs)]
    seen = {one.number: one for one in waiting}
    chosen: dict[int, list[int]] = {one.number: [] for one in waiting}
    run = _BatchLoop(context, rows, timed)
    step = run._step

    def noted() -> None:
        before = {number: len(one.times) for number, one in seen.items()}
        step()
        for number, one in seen.items():
            if len(one.times) > before[number]:
                chosen[number].append(one.last)

    run._step = noted  # type: ignore[method-assign]
    traces = run.through(list(waiting))
    assert context.held == {} and context.largest <= rows
    for one, found in zip(waiting, traces, strict=True):
        assert chosen[one.number] == alone(one.ids, one.new_tokens)
        assert (found.prompt_tokens, found.tokens) == (len(one.ids), one.new_tokens)
        assert list(found.chunks) == sorted(found.chunks)


