"""What Open WebUI 0.12.4 asks of a server, as recorded between the two while it was used in a browser.

Its fields, the names and parameters of its tools and the order of its requests are those recorded; the texts are not.
It sends its own tools with every message, whatever the model, and has the model write titles meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from chat_tokenizer import chat_tokenizer
from families import tiny
from serving import MODEL, Running, serving, tiny_engine, wait
from shoal.engine.loading.load import engine_for
from shoal.serve.protocol.fields import IGNORED
from tool_scripts import scripted, written

ASK = {"role": "user", "content": "What time is it?"}
TIME = '{"current_timestamp":1796047291,"user_timezone":"UTC"}'
TEXTS = ("Let me see.", "It is that time.")
ROUTES = ("v1/chat/completions", "api/chat")


def tool(name: str, *required: str, **properties: Any) -> dict[str, Any]:
    parameters = {"properties": properties, "type": "object", **({"required": required} if required else {})}
    return {"type": "function", "function": {"name": name, "description": "does it", "parameters": parameters}}


ANY = {"additionalProperties": True, "type": "object"}
TASK = {"properties": {"content": {"type": "string"}, "status": {"default": "pending", "enum": ["pending", "completed"],
                                                                 "type": "string"}},
        "required": ["content"], "type": "object"}
TOOLS = [
    tool("get_current_timestamp"),
    tool("calculate_timestamp", days_ago={"default": 0, "description": "how many", "type": "integer"}),
    tool("ask_user", "questions", questions={"items": ANY, "type": "array"},
         allow_other={"default": True, "type": "boolean"}),
    tool("create_tasks", "tasks", tasks={"items": TASK, "type": "array"}),
]


def send(server: Running, route: str, messages: list[Any], **more: Any) -> httpx.Response:
    headers = {"authorization": "Bearer none", "accept": "*/*", "user-agent": "Python/3.11 aiohttp/3.14.5"}
    body = {"stream": True, "model": MODEL, "messages": messages, "tools": TOOLS, **more}
    return httpx.post(f"{server.url}/{route}", json=body, headers=headers, timeout=60)


def heard(answer: httpx.Response) -> tuple[str, list[Any]]:
    """The text of a stream, and its calls."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("application/x-ndjson"):
        parts = [json.loads(line)["message"] for line in answer.text.splitlines()]
    else:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        parts = [json.loads(line)["choices"][0]["delta"] for line in lines]
    return "".join(one.get("content") or "" for one in parts), [call for one in parts
                                                                for call in one.get("tool_calls", ())]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A model whose template has no place for tools, as most small ones."""
    with serving(tiny_engine(), default_max_tokens=24) as running:
        yield running


def test_it_finds_the_models(server: Running) -> None:
    get = {path: httpx.get(f"{server.url}/{path}", timeout=60).json() for path in (
        "v1/models", "api/tags", "api/ps", "api/version")}
    assert [one["id"] for one in get["v1/models"]["data"]] == [MODEL]
    for path in ("api/tags", "api/ps"):
        assert [(one["name"], one["model"]) for one in get[path]["models"]] == [(MODEL, MODEL)]
    assert get["api/version"]["version"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_model_that_calls_no_tools_answers_without_them(server: Running, route: str) -> None:
    answer = send(server, route, [ASK])
    assert heard(answer) == (server.engine.generate([ASK], max_new_tokens=24).text, [])
    assert answer.headers[IGNORED] == "tools"
    assert IGNORED not in send(server, route, [ASK], tools=[]).headers


@pytest.mark.parametrize(("strict", "choice"), [(False, "required"), (True, "auto"), (
    False, {"type": "function", "function": {"name": "create_tasks"}})])
def test_tools_that_must_be_called_are_not_left_out(strict: bool, choice: Any) -> None:
    with serving(tiny_engine(), strict=strict) as running:
        answer = send(running, ROUTES[0], [ASK], tool_choice=choice)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "this model's chat template has no place for tools"
        without = send(running, ROUTES[0], [ASK], tool_choice="none", max_tokens=1)
        assert without.status_code == 200 and IGNORED not in without.headers


@pytest.mark.parametrize("route", ROUTES)
def test_a_call_and_what_it_returned(route: str) -> None:
    said = [f"{TEXTS[0]}\n{written('get_current_timestamp')}", TEXTS[1], '{"title": "Time"}', "It was."]
    with serving(scripted(said)) as running:
        text, (call,) = heard(send(running, route, [ASK]))
        assert text.strip() == TEXTS[0] and call["function"]["name"] == "get_current_timestamp" and call["id"]
        if route == "api/chat":
            assert call["function"]["arguments"] == {}
            kept = {"index": 0, "id": call["id"], "function": {"name": call["function"]["name"], "arguments": {}}}
            made = [{"role": "assistant", "content": "", "tool_calls": [kept]},
                    {"role": "tool", "content": TIME, "tool_call_id": call["id"]}]
        else:
            kept = {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"],
                                                                       "arguments": call["function"]["arguments"]}}
            made = [{"role": "assistant", "content": TEXTS[0], "tool_calls": [kept]},
                    {"role": "tool", "tool_call_id": call["id"], "content": TIME}]
        assert heard(send(running, route, [ASK, *made])) == (TEXTS[1], [])
        most = {"options": {"num_predict": 1000}} if route == "api/chat" else {"max_tokens": 1000}
        task = {"role": "user", "content": "Write a title as JSON."}
        title = send(running, route, [task], stream=False, tools=None, **most).json()
        message = title["message"] if route == "api/chat" else title["choices"][0]["message"]
        assert message["content"] == '{"title": "Time"}'
        more = [{"role": "assistant", "content": TEXTS[1]}, {"role": "user", "content": "Thanks"}]
        assert heard(send(running, route, [ASK, *made, *more])) == ("It was.", [])


@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_that_is_stopped_ends_here(route: str, caplog: pytest.LogCaptureFixture) -> None:
    """The client closes the connection; the answer would have gone on for thousands of tokens."""
    caplog.set_level("INFO")
    engine = engine_for(tiny("llama", layers=2, max_position_embeddings=1 << 14), chat_tokenizer(), name=MODEL)
    engine.eos_token_ids = frozenset()
    most = {"options": {"num_predict": 15_000}} if route == "api/chat" else {"max_tokens": 15_000}
    body = {"stream": True, "model": MODEL, "messages": [ASK], "tools": TOOLS, **most}
    with serving(engine) as running:
        with httpx.stream("POST", f"{running.url}/{route}", json=body, timeout=60) as stream:
            assert next(stream.iter_lines())
        wait(lambda: any('"finish": ["cancelled"]' in record.getMessage() for record in caplog.records))
        wait(lambda: running.scheduler.running == 0)
