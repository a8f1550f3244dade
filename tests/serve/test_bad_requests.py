"""Bad requests get errors in OpenAI's form, never a 500, and do not disturb other streams."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import MODEL, Running, serving, tiny_engine, wait
from shoal import methods
from shoal.engine.memory import memory_limit
from shoal.engine.memory.memory_limit import SPARE, MemoryLimit
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.serve.protocol.bodies import ChatBody, CompletionBody, Extras
from shoal.serve.protocol.fields import CHAT as CHAT_UNREAD
from shoal.serve.protocol.fields import COMPLETION, MESSAGES, OF_PEERS, OLLAMA, RESPONSES
from shoal.serve.protocol.messages import MessageBody
from shoal.serve.protocol.ollama import OllamaBody
from shoal.serve.protocol.responses import ResponseBody

PLAIN = {"model": MODEL, "prompt": "Some words", "max_tokens": 2}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine(), max_body=20_000, max_tokens=500, max_n=4, strict=True) as running:
        yield running


def post(server: Running, content: bytes | str, path: str = "completions", **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers, timeout=60)


def check(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert answer.headers["x-request-id"]
    return dict(error)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"model": "\xc3\x28"}', "not UTF-8"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "surrogate"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "no JSON number"),
        (b'{"model": "tiny", "temperature": 1e999}', ""),
        (b'{"model": "tiny", "prompt": "a", "messages": [], "logit_bias": {"5": 1e999}}', ""),
        (b'{"model": "tiny", "prompt": "a", "messages": [], "logit_bias": {"5": NaN}}', "no JSON number"),
        (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"a": ' * 2000 + b"1" + b"}" * 2000, ""),
        (b"[" * 9000, ""),
    ],
)
def test_bodies_that_are_none(server: Running, content: bytes, said: str) -> None:
    for path in ("completions", "chat/completions"):
        assert said in check(post(server, content, path), 400)["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": None}, {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [1, "a"]}, {"prompt": {"a": 1}},
        {"prompt": [97]}, {"prompt": [-1]}, {"prompt": [10**30]}, {"prompt": [True]}, {"prompt": ["a"] * 5},
        {"model": 3}, {"max_tokens": -3},
        {"max_tokens": 1.5}, {"max_tokens": "5"}, {"max_tokens": True}, {"n": 0}, {"n": 5},
        {"n": 10**9}, {"temperature": -1}, {"temperature": "hot"}, {"top_p": -0.1}, {"top_p": 1.1},
        {"stop": ["a"] * 257}, {"stop": 3}, {"logit_bias": {"x": 1}}, {"logit_bias": {"97": 1}},
        {"logit_bias": {"5": 101}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"²": 1}}, {"logit_bias": [1]},
        {"logprobs": 21}, {"logprobs": True},
        {"seed": 0.5}, {"seed": 2**64}, {"stream": "yes"}, {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"other": True}}, {"stream": True, "metrics": True}, {"suffix": "x"},
        {"best_of": 5}, {"best_of": 2, "stream": True},
        {"n": 3, "best_of": 2}, {"guided_regex": "(a"},
        {"guided_json": 3}, {"guided_choice": []}, {"guided_regex": "a", "guided_grammar": "b"},
        {"guided_members": "java"}, {"guided_members": True}, {"guided_members": "python", "guided_regex": "b"},
        {"echo": True, "logprobs": 1, "prompt": ""}, {"unheard_of": None}, {"top_k": -2}, {"min_p": 2},
        {"repetition_penalty": 0}, {"stop_token_ids": ["a"]}, {"method": 3}, {"method": "d3", "method_args": [1]},
        {"user": 5}, {"ignore_eos": 1},
    ],
    ids=str,
)  # fmt: skip
def test_fields_out_of_range(server: Running, change: dict[str, Any]) -> None:
    check(post(server, json.dumps({**PLAIN, **change})), 400)


def test_members_without_the_lab_say_what_to_install(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_entries", lambda *_: {})
    error = check(post(server, json.dumps({**PLAIN, "guided_members": "python"})), 400)
    assert error["param"] == "guided_members" and "pip install shoal-lab" in error["message"]


@pytest.mark.parametrize(
    "messages",
    [
        None, [], ["a"], [{}], [{"role": "user"}], [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": "x", "name": 4}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
    ],
    ids=str,
)  # fmt: skip
def test_messages_that_are_none(server: Running, messages: Any) -> None:
    check(post(server, json.dumps({**CHAT, "messages": messages}), "chat/completions"), 400)


def test_text_parts_are_text(server: Running) -> None:
    parts = [{"role": "developer", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    whole = [{"role": "system", "content": "Hi"}]
    texts = [
        post(server, json.dumps({**CHAT, "messages": one, "temperature": 0}), "chat/completions").json()["choices"]
        for one in (parts, whole)
    ]
    assert texts[0] == texts[1]


def test_bodies_that_are_too_large(server: Running) -> None:
    large = json.dumps({**PLAIN, "prompt": "a" * 1_000_000})
    check(post(server, large), 413)

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000].encode()

    with contextlib.suppress(httpx.WriteError):  # the server has answered and closed before everything was sent
        check(httpx.post(f"{server.url}/v1/completions", content=pieces(), timeout=60), 413)
    assert post(server, json.dumps(PLAIN)).status_code == 200


def test_a_byte_order_mark_before_a_body_is_no_text(server: Running) -> None:
    assert post(server, b"\xef\xbb\xbf" + json.dumps(PLAIN).encode()).status_code == 200


def test_routes_that_are_none(server: Running) -> None:
    check(httpx.get(f"{server.url}/v1/nothing"), 404)
    check(httpx.get(f"{server.url}/v1/completions"), 405)


@pytest.mark.parametrize("bodies", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_bodies_leave_a_stream_alone(server: Running, bodies: int) -> None:
    rng = random.Random(0)
    text, done = json.dumps({**PLAIN, "temperature": 0}).encode(), threading.Event()
    kept: list[httpx.Response] = []
    expected = server.engine.generate("Some words", max_new_tokens=400).text
    long = json.dumps({**PLAIN, "temperature": 0, "max_tokens": 400})

    def resume() -> None:
        while not done.is_set() and len(kept) < 4:
            kept.append(post(server, long))

    other = threading.Thread(target=resume)
    other.start()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60))
        stack.callback(other.join, 60)
        stack.callback(done.set)
        for number in range(bodies):
            body = bytearray(text) if number % 4 else bytearray(rng.randbytes(rng.randrange(200)))
            for _ in range(rng.randint(1, 4) if number % 4 else 0):
                body[rng.randrange(len(body))] = rng.randrange(256)
            answer = client.post(f"{server.url}/v1/completions", content=bytes(body))
            assert answer.status_code in (200, 400, 404), (bytes(body), answer.text)
    assert {answer.json()["choices"][0]["text"] for answer in kept} == {expected}
    wait(lambda: server.scheduler.running == 0)
    assert server.scheduler._batches.plain.cache.seqs == 0


def test_a_client_that_vanishes_frees_its_row(server: Running) -> None:
    body = json.dumps({**PLAIN, "max_tokens": 490, "stream": True})
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        raw.recv(100)
        wait(lambda: server.scheduler.running == 1)
    wait(lambda: server.scheduler.running == 0)


@pytest.mark.slow
def test_a_slow_reader_holds_nobody_up(server: Running) -> None:
    body = json.dumps({**PLAIN, "max_tokens": 490, "stream": True, "logprobs": 20, "temperature": 0})
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        raw.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        wait(lambda: server.scheduler.running == 1)
        wait(lambda: server.scheduler.running == 0)  # decoded to its end, though nobody reads
        assert post(server, json.dumps(PLAIN)).status_code == 200


def test_branches_of_a_search_count_as_answers(server: Running) -> None:
    """Sampled ones only: a greedy request is decoded once."""
    body = {**PLAIN, "method": "best_of", "method_args": {"n": 5}, "temperature": 1.0}
    for path, prompt in (("completions", {}), ("chat/completions", {"messages": CHAT["messages"]})):
        own = {key: value for key, value in {**body, **prompt}.items() if not (prompt and key == "prompt")}
        error = check(post(server, json.dumps(own), path), 400)
        assert error["param"] == "n" and "each the best of up to 5; this server allows 4 in all" in error["message"]
    two = json.dumps({**body, "method_args": {"n": 2}, "n": 3})
    assert "3 answers each, each the best of up to 2" in check(post(server, two), 400)["message"]
    for more in ({"temperature": 0}, {"method_args": {"n": 4}}):
        assert post(server, json.dumps({**body, **more})).status_code == 200


def test_what_can_never_fit_into_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit of the whole process; requests that fit are still answered."""
    monkeypatch.setattr(memory_limit, "standing", lambda: 1 << 30)
    engine = tiny_engine()
    most = MemoryLimit("64GiB")
    room = 300 * sum(engine.runner.position_bytes)
    engine.limit = MemoryLimit(int((most.usable - most.for_seqs(engine, 256) + room) / (1 - SPARE)))
    with serving(engine, scheduling={"prefix_bytes": 0}) as running:
        error = check(post(running, json.dumps({**PLAIN, "prompt": "Some words " * 40, "max_tokens": 60})), 400)
        assert error["type"] == "invalid_request_error"
        assert "its KV can take" in error["message"] and "Use a smaller max_new_tokens" in error["message"]
        assert post(running, json.dumps(PLAIN)).status_code == 200


ODD: list[Any] = [True, 0, -1, 2**64, 10**30, 1e308, "", "inf", [], [[]], [0], [None], ["x"], {}, {"x": 1},
                  [{"type": 1}], {"type": "object"}, [{"role": 1}]]


@pytest.mark.parametrize("tools", [1, True, "x", {"type": "function"}, 2.5], ids=repr)
def test_tools_of_a_response_are_a_list(server: Running, tools: Any) -> None:
    error = check(post(server, json.dumps({"model": MODEL, "input": "Hi", "tools": tools}), "responses"), 400)
    assert error["param"] == "tools" and "list of functions" in error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages", "api/chat"])
def test_no_value_of_any_field_is_a_500(path: str) -> None:
    read = {"completions": CompletionBody, "chat/completions": ChatBody, "responses": ResponseBody,
            "messages": MessageBody, "api/chat": OllamaBody}[path].model_fields
    unread = {"completions": COMPLETION, "chat/completions": CHAT_UNREAD, "responses": RESPONSES,
              "messages": MESSAGES, "api/chat": OLLAMA}[path]
    asked = {"completions": PLAIN, "chat/completions": CHAT, "responses": {"model": MODEL, "input": "Hi"},
             "messages": CHAT, "api/chat": {**CHAT, "stream": False}}[path]
    limits = {"max_tokens": 4, "default_max_tokens": 2, "max_n": 2}
    with serving(tiny_engine(), **limits) as server, httpx.Client(timeout=60) as client:
        for field in sorted({*read, *Extras.model_fields, *unread} - {*OF_PEERS, "stream"}):
            for value in ODD:
                body = json.dumps({**asked, field: value})
                answer = client.post(f"{server.url}/{path if '/' in path[:4] else f'v1/{path}'}", content=body)
                assert answer.status_code < 500, (field, value, answer.text)
                assert answer.status_code == 200 or answer.json()["error"], (field, value)


def test_names_of_fields_make_no_header_that_breaks_the_answer() -> None:
    asked = {"completions": PLAIN, "responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 1}}
    given = {'0, ""': ["0", ""], '""': [""], "%20, a%0D%0Ab": [" ", "a\r\nb"], "%C3%A9%2C%20x": ["é, x"]}
    with serving(tiny_engine()) as server:
        for said, names in given.items():
            for path, body in asked.items():
                answer = post(server, json.dumps({**dict.fromkeys(names, 1), **body}), path)
                assert (answer.status_code, answer.headers["x-shoal-ignored"]) == (200, said)


CANVAS = {"model": MODEL, "prompt": "Hi", "canvas": True}


def test_words_that_come_in_order_are_no_canvas(server: Running) -> None:
    body = {**CANVAS, "stream": True, "steps": True, "max_tokens": 12}
    said = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text
    assert said.endswith("data: [DONE]\n\n") and '"steps"' in said and '"canvas"' not in said


def test_a_whole_answer_has_no_canvas(server: Running) -> None:
    refused = httpx.post(f"{server.url}/v1/completions", json=CANVAS, timeout=60)
    assert refused.status_code == 400 and "stream" in refused.json()["error"]["message"]


def test_who_iterates_cannot_ask_for_it() -> None:
    with Scheduler(tiny_engine(), start=False) as scheduler, pytest.raises(ValueError, match="deliver"):
        scheduler.submit("Hi", canvas=True)
