"""`/v1/responses` with the official client: whole and streamed, text, formats, tools, and refusals."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.responses import Response
from openai.types.responses import response_create_params as params
from pydantic import BaseModel

from serving import MODEL, Running, serving
from shoal.serve.protocol.fields import IGNORED, OF_PEERS, RESPONSES, Refused
from shoal.serve.protocol.responses import ResponseBody
from tool_tokenizer import NOW, WEATHER, speaking

FUNCTION = {"type": "function", "strict": True, **WEATHER["function"]}
OPTIONS: dict[str, Any] = {"model": MODEL, "input": "What is the weather?", "max_output_tokens": 300, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking()) as running:
        yield running


def chat(server: Running, messages: list[dict[str, Any]], **options: Any) -> Any:
    given = {"model": MODEL, "messages": messages, "max_tokens": 300, "temperature": 0, **options}
    return server.client().chat.completions.create(**given)


def test_a_response_says_what_a_chat_says(server: Running) -> None:
    found = server.client().responses.create(**{**OPTIONS, "max_output_tokens": 9}, instructions="Be brief")
    said = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "What is the weather?"}]
    expected = chat(server, said, max_tokens=9)
    assert found.output_text == expected.choices[0].message.content
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (expected.usage.prompt_tokens, 9)


def test_a_conversation_with_calls_is_told_as_a_chat(server: Running) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    ]
    calls = [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "noon"}]
    tools = [{"type": "function", "name": "now"}]
    found = server.client().responses.create(**{**OPTIONS, "input": items, "max_output_tokens": 4}, tools=tools)
    expected = chat(server, said, max_tokens=4, tools=[NOW])
    assert found.usage.input_tokens == expected.usage.prompt_tokens
    assert found.output_text == (expected.choices[0].message.content or "")


def test_formats_and_calls(server: Running) -> None:
    class Pair(BaseModel, extra="forbid"):
        left: bool

    client = server.client()
    assert isinstance(client.responses.parse(**OPTIONS, text_format=Pair).output_parsed, Pair)
    given: dict[str, Any] = {**OPTIONS, "tools": [FUNCTION], "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "name": "weather"}):
        (call,) = client.responses.create(**given, tool_choice=choice).output
        assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
        assert set(json.loads(call.arguments)) == {"day", "warm"} and call.call_id.startswith("call_")


@pytest.mark.parametrize("more", [{}, {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}],
                         ids=["text", "call"])
def test_events_build_what_a_whole_response_is(server: Running, more: dict[str, Any]) -> None:
    given = {**OPTIONS, "max_output_tokens": 12 if not more else 300, **more}
    whole, kinds, text, numbers = server.client().responses.create(**given), list[str](), "", list[int]()
    final: Any = None
    with server.client() as client, client.responses.stream(**given) as stream:
        for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            text += event.delta if event.type == "response.output_text.delta" else ""
            final = getattr(event, "response", None)
    assert numbers == list(range(len(numbers)))
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-2:] == ["response.output_item.done", "response.completed" if more else "response.incomplete"]
    assert text == final.output_text == whole.output_text
    assert [_plain(item) for item in final.output] == [_plain(item) for item in whole.output]
    assert final.usage.output_tokens == whole.usage.output_tokens


def _plain(item: Any) -> dict[str, Any]:
    gone = {"id", "call_id", "parsed_arguments", "parsed"}
    return {name: value for name, value in item.model_dump(exclude_none=True).items() if name not in gone | {"content"}}


def test_a_response_is_of_the_clients_type(server: Running) -> None:
    raw = httpx.post(f"{server.url}/v1/responses", json={**OPTIONS, "max_output_tokens": 3}, timeout=60).json()
    Response.model_validate(raw, strict=False)


def test_every_field_of_the_client_is_in_the_table_and_does_what_it_says(server: Running) -> None:
    read = {*RESPONSES, *ResponseBody.model_fields}
    assert set(typing.get_type_hints(params.ResponseCreateParamsBase)) | {"stream"} <= read
    for name, field in RESPONSES.items():
        if name not in OF_PEERS:
            for value in ("something", {"a": "b"}):
                body = {**OPTIONS, "max_output_tokens": 1, name: value}
                answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
                assert answer.status_code == (400 if isinstance(field, Refused) else 200), name
                assert isinstance(field, Refused) or answer.headers[IGNORED] == name
            for value in field.neutral:
                body = {**OPTIONS, "max_output_tokens": 1, name: value}
                assert httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input": None}, "input must be"), ({"input": []}, "input must be"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "without image_url"),
        ({"text": 3}, "text must be an object"), ({"tools": [{"type": "web_search"}]}, "tools.0 must be"),
        *(({"tools": value}, "must be a list of functions") for value in (3, 0.5, True, "a", {"type": "function"})),
        ({"max_output_tokens": 0}, "max_completion_tokens"), ({"model": "other"}, "no model"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused(server: Running, given: dict[str, Any], words: str) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={**OPTIONS, **given}, timeout=60)
    assert answer.status_code in (400, 404) and words in answer.json()["error"]["message"]


def test_an_error_in_a_stream_is_an_event() -> None:
    with serving(speaking(), timeout=0.3) as server, server.client() as client:
        given = {**OPTIONS, "max_output_tokens": 480, "temperature": 1}
        with client.responses.create(**given, stream=True, extra_body={"ignore_eos": True}) as stream:
            *_, last = stream
        assert last.type == "error" and "longer than" in last.message and last.code == "timeout"
