"""Constraints that explode, nest too deeply or are large are bounded and answered, and delay no other request."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from serving import MODEL, Running, held_up, serving
from shoal.engine.constraints import constraint
from shoal.sandbox.helper import Helpers
from tool_tokenizer import ASK, speaking

DEEP = 5000


def nested(deep: int) -> Any:
    return json.loads('{"type": "array", "items": ' * deep + "{}" + "}" * deep)


def properties(count: int) -> dict[str, Any]:
    return {f"p{number}": {"type": "integer", "title": f"P {number}"} for number in range(count)}


def chained(deep: int) -> dict[str, Any]:
    """A shallow schema with deep references."""
    named: dict[str, Any] = {f"a{n}": {"type": "array", "items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(deep)}
    return {"$ref": "#/$defs/a0", "$defs": {**named, f"a{deep}": {"type": "integer"}}}


RULES = "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1}' for n in range(DEEP)) + f'\nr{DEEP}: "b"'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": nested(200)}}}}
TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"guided_regex": "(x{1000}){1000}"}, "too many expressions"),
    "pattern": ({"guided_json": {"type": "string", "pattern": "(.*a){30}.{2000}"}, "max_tokens": 300},
                "too many expressions"),
    "repetition": ({"guided_grammar": 'root ::= "a"{1000000000}'}, "Too many items"),
    "parentheses": ({"guided_grammar": "root ::= " + "(" * 900 + '"a"' + ")" * 900}, "nested too deeply"),
    "rules": ({"guided_grammar": RULES}, "nested too deeply, or its parts"),
    "references": ({"guided_json": chained(DEEP)}, "nested too deeply, or its parts"),
    "arrays": ({"guided_json": nested(400)}, "nested more than 127 deep"),
    "format": ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(400)}}},
               "nested more than 127 deep"),
    "text": ({"guided_json": json.dumps(nested(400))}, "nested more than 127 deep"),
    "tool": ({"tools": [TOOL], "tool_choice": "required"}, "nested more than 127 deep"),
    "break after break": ({"guided_grammar": "\n" * 400_000 + "x"}, "more than 1 s of computing time"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking(), max_body=1 << 22) as running:
        yield running


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    helpers = Helpers("shoal.engine.constraints.grammar_trial", seconds=1, memory=512 << 20)
    monkeypatch.setattr(constraint, "_trials", helpers)
    yield
    helpers.end()


def body(given: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "messages": ASK, "max_tokens": 3, "temperature": 0, **given}


def chat(server: Running, given: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body(given), timeout=120)


@pytest.mark.quick(11)
@pytest.mark.parametrize("case", TOO_MUCH)
def test_what_takes_too_much_is_400_with_the_reason_on_a_connection_that_stays(
    server: Running, little_time: None, request: pytest.FixtureRequest, case: str
) -> None:
    given, why = TOO_MUCH[case]
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    request.addfinalizer(connection.close)
    for _ in range(2):
        connection.request("POST", "/v1/chat/completions", json.dumps(body(given)),
                           {"content-type": "application/json"})
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
        assert (answer.status, answer.will_close) == (400, False), error
        assert why in error["message"] and len(error["message"]) < 1500
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200


@pytest.mark.slow
def test_a_grammar_of_very_many_alternatives_is_answered(server: Running) -> None:
    fits, not_quite = ("start: " + " | ".join(f'"w{n}"' for n in range(count)) for count in (30_000, 70_000))
    assert chat(server, {"guided_grammar": fits}).json()["choices"][0]["message"]["content"].startswith("w")
    refused = chat(server, {"guided_grammar": not_quite})
    assert refused.status_code == 400
    said = refused.json()["error"]["message"]
    assert "too many parts" in said or "of computing time" in said  # a slow machine runs out of the latter first


@pytest.mark.slow
@pytest.mark.parametrize("required", [True, False])
def test_an_object_of_thousands_of_properties_binds_its_answer(server: Running, required: bool) -> None:
    schema = {"type": "object", "properties": properties(3000), "additionalProperties": False}
    schema |= {"required": list(properties(3000))} if required else {}
    given = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    choice = chat(server, {**given, "max_tokens": 8}).json()["choices"][0]
    said = "".join(choice["message"]["content"].split())
    assert said.startswith('{"p' if required else "{") and choice["finish_reason"] in ("length", "stop")


def test_references_that_are_resolved_elsewhere_and_a_name_of_ones_own_stay(server: Running) -> None:
    """Compiled integers share one definition; a schema's own definitions are unchanged."""
    schema = {"$defs": {"small": {"const": 7}}, "type": "object", "additionalProperties": False,
              "properties": {"a": {"$ref": "#/$defs/small"}, "b": {"type": "integer", "description": "any"}},
              "required": ["a", "b"]}
    for more in ({}, {"$id": "https://example.com/schema"}):
        said = json.loads(chat(server, {"guided_json": {**more, **schema}, "max_tokens": 60}).json()["choices"][0]
                          ["message"]["content"])
        assert said["a"] == 7 and isinstance(said["b"], int)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Semaphore, threading.Event]]:
    """Make compiling release the semaphore and then wait for the event."""
    begun, go, ask = threading.Semaphore(0), threading.Event(), constraint._trials.ask

    def slow(question: Any) -> Any:
        begun.release()
        assert go.wait(60)
        return ask(question)

    monkeypatch.setattr(constraint._trials, "ask", slow)
    yield begun, go
    go.set()


@pytest.mark.slow
def test_others_are_answered_while_constraints_are_compiled(
    server: Running, held: tuple[threading.Semaphore, threading.Event]
) -> None:
    """There are more of them than threads for all other work."""
    begun, go = held
    with held_up(lambda number: chat(server, {"guided_regex": f"b{number}"}).status_code, 40, go) as found:
        assert begun.acquire(timeout=60)
        assert chat(server, {}).status_code == 200
        assert httpx.post(f"{server.url}/tokenize", json={"messages": ASK}, timeout=60).status_code == 200
        assert not found
    assert found == [200] * 40


def test_too_many_that_wait_are_429(
    server: Running, monkeypatch: pytest.MonkeyPatch, held: tuple[threading.Semaphore, threading.Event]
) -> None:
    begun, go = held
    monkeypatch.setattr("shoal.serve.answer._WAITING", 1)
    with held_up(lambda _: chat(server, {"guided_regex": "c"}).status_code, 1, go):
        assert begun.acquire(timeout=60)
        assert chat(server, {"guided_regex": "d"}).status_code == 429


@pytest.mark.parametrize("name", ["messages", "conversations", "conversation", "self", "tools", "add_special_tokens"])
def test_names_that_a_template_is_given_otherwise_are_400(server: Running, name: str) -> None:
    answer = chat(server, {"chat_template_kwargs": {name: []}})
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


@pytest.mark.parametrize("deep", [900, 3000])
def test_arguments_of_a_replayed_call_that_are_nested_too_deeply_are_400(server: Running, deep: int) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * deep + "]" * deep}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "x"}]
    answer = chat(server, {"messages": messages})
    assert answer.status_code == 400 and answer.json()["error"]["message"]
