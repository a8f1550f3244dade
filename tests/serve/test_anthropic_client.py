"""`/v1/messages` with Anthropic's official client: whole and streamed, text, tools, schemas, counts, and refusals."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import MODEL, Running, serving
from shoal.serve.protocol.bodies import Extras
from shoal.serve.protocol.fields import IGNORED, MESSAGES, OF_PEERS, Refused
from shoal.serve.protocol.messages import MessageBody
from tool_tokenizer import NOW, WEATHER, speaking

anthropic = pytest.importorskip("anthropic")

ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
OPTIONS: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 300}
COLD = {"temperature": 0}
TOOL = {"name": "weather", "description": "tells it", "input_schema": WEATHER["function"]["parameters"]}
SHORT = {"max_tokens": 12}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking()) as running:
        yield running


def client(server: Running, **more: Any) -> Any:
    found = anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=60, **{"api_key": "none", **more})
    server.clients.append(found)
    return found


def create(server: Running, **given: Any) -> Any:
    return client(server).messages.create(**{**OPTIONS, "extra_body": COLD, **given})


def chat(server: Running, messages: list[dict[str, Any]], **options: Any) -> Any:
    return server.client().chat.completions.create(**{**OPTIONS, **COLD, "messages": messages, **options})


def post(server: Running, route: str = "", **given: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/messages{route}", json={**OPTIONS, **COLD, **given}, timeout=60)


@pytest.mark.parametrize("system", ["Be brief", [{"type": "text", "text": "Be brief"}]], ids=["text", "blocks"])
def test_a_message_says_what_a_chat_says(server: Running, system: Any) -> None:
    found = create(server, system=system, **SHORT)
    expected = chat(server, [{"role": "system", "content": "Be brief"}, *ASK], **SHORT)
    (block,) = found.content
    assert (found.type, found.role, block.type, block.text) == (
        "message", "assistant", "text", expected.choices[0].message.content)
    assert (found.stop_reason, found.stop_sequence, found.model) == ("max_tokens", None, MODEL)
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert usage.output_tokens == 12


def test_the_model_ends_its_turn(server: Running) -> None:
    bias = {"logit_bias": {str(server.engine.tokenizer.eos_token_id): 100}}
    raw = post(server, **bias)
    assert raw.headers[IGNORED] == "logit_bias"  # OpenAI's alone
    found = create(server, extra_body={**COLD, "allowed_token_ids": [server.engine.tokenizer.eos_token_id]})
    assert (found.stop_reason, found.content, found.usage.output_tokens) == ("end_turn", [], 1)


def test_a_stop_sequence_is_named(server: Running) -> None:
    text = create(server, max_tokens=20).content[0].text
    stop = text[6:8]
    given = {"max_tokens": 20, "stop_sequences": ["@@@", stop]}
    found = create(server, **given)
    assert (found.content[0].text, found.stop_reason, found.stop_sequence) == (
        text[: text.index(stop)], "stop_sequence", stop)
    with client(server).messages.stream(**{**OPTIONS, **given}, extra_body=COLD) as stream:
        streamed = stream.get_final_message()
    assert (streamed.content[0].text, streamed.stop_sequence) == (found.content[0].text, stop)


def test_a_conversation_with_calls_is_told_as_a_chat(server: Running) -> None:
    blocks: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Yes"},
            {"type": "tool_use", "id": "t1", "name": "now", "input": {"a": 1}},
            {"type": "tool_use", "id": "t2", "name": "now", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "noon"},
            {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "one"}]},
            {"type": "text", "text": "Well?"}]},
    ]
    call = [{"id": name, "type": "function", "function": {"name": "now", "arguments": given}}
            for name, given in (("t1", '{"a": 1}'), ("t2", "{}"))]
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "tool_calls": call},
            {"role": "tool", "tool_call_id": "t1", "content": "noon"},
            {"role": "tool", "tool_call_id": "t2", "content": "one"}, {"role": "user", "content": "Well?"}]
    tools = [{"name": "now", "input_schema": {"type": "object"}}]
    parameters = {"type": "function", "function": {**NOW["function"], "parameters": {"type": "object"}}}
    found = create(server, messages=blocks, tools=tools, max_tokens=4)
    expected = chat(server, said, max_tokens=4, tools=[parameters])
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert "".join(block.text for block in found.content) == (expected.choices[0].message.content or "")
    counted = client(server).messages.count_tokens(model=MODEL, messages=blocks, tools=tools)
    assert counted.input_tokens == expected.usage.prompt_tokens


CHOICES = [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]


@pytest.mark.parametrize("choice", CHOICES, ids=["any", "tool"])
def test_a_call_is_a_block(server: Running, choice: dict[str, Any]) -> None:
    found = create(server, tools=[TOOL], tool_choice=choice)
    (block,) = found.content
    assert (block.type, block.name, found.stop_reason) == ("tool_use", "weather", "tool_use")
    assert set(block.input) == {"day", "warm"} and block.id.startswith("toolu_")


def test_no_tool_is_called_where_none_may_be(server: Running) -> None:
    found = create(server, tools=[TOOL], tool_choice={"type": "none"}, **SHORT)
    assert found.content[0].text == create(server, **SHORT).content[0].text


@pytest.mark.parametrize("more", [SHORT, {"tools": [TOOL], "tool_choice": CHOICES[0]}], ids=["text", "call"])
def test_events_build_what_a_whole_message_is(server: Running, more: dict[str, Any]) -> None:
    whole, kinds, text, partial = create(server, **more), list[str](), "", ""
    for event in create(server, **more, stream=True):
        kinds.append(event.type)
        if event.type == "content_block_delta":
            text += getattr(event.delta, "text", "")
            partial += getattr(event.delta, "partial_json", "")
    named = [kind for place, kind in enumerate(kinds) if kinds[:place][-1:] != [kind]]
    assert named == ["message_start", "content_block_start", "content_block_delta", "content_block_stop",
                     "message_delta", "message_stop"]
    assert bool(text) != bool(partial)
    with client(server).messages.stream(**{**OPTIONS, **more}, extra_body=COLD) as stream:
        final = stream.get_final_message()
    gone = {"id": True, "usage": True, "content": {"__all__": {"id"}}}
    assert final.model_dump(exclude=gone) == whole.model_dump(exclude=gone)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.content[0].type == ("text" if more is SHORT else "tool_use")


def test_a_stream_names_its_events_and_pings(server: Running) -> None:
    said = post(server, stream=True, max_tokens=2).text
    lines = [line for line in said.splitlines() if line.startswith("event: ")]
    assert lines[:2] == ["event: message_start", "event: ping"] and lines[-1] == "event: message_stop"


def test_a_schema_binds_the_answer(server: Running) -> None:
    config = {"format": {"type": "json_schema", "schema": {"const": [1]}}}
    assert json.loads(create(server, output_config=config).content[0].text) == [1]


def test_thinking_and_effort_reach_the_template(server: Running) -> None:
    found = post(server, "/count_tokens", output_config={"effort": "high"}).json()["input_tokens"]
    assert found == post(server, "/count_tokens").json()["input_tokens"] + len("high")
    assert post(server, thinking={"type": "disabled"}, **SHORT).status_code == 200


def test_models_are_listed(server: Running) -> None:
    (found,) = client(server).models.list()
    assert (found.id, found.type, found.lifecycle) == (MODEL, "model", "active")
    assert client(server).models.retrieve(MODEL).id == MODEL


def test_keys() -> None:
    with serving(speaking(), api_keys=("right",)) as server:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            create(server)
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == "authentication_error"
        for given in ({"api_key": "right"}, {"api_key": None, "auth_token": "right"}):
            assert client(server, **given).messages.create(**{**OPTIONS, "max_tokens": 1})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"messages": []}, "messages"), ({"messages": "Hi"}, "messages"), ({"messages": [3]}, "messages.0"),
        ({"messages": [{"content": [{"type": "text", "text": "x"}] * 2}]}, "role is None"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "role"), ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "without a source"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [
            {"type": "image"}]}]}]}, "without a source"),
        ({"messages": [{"role": "user", "content": [7]}]}, "block of type None"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_call_id"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0 is of type 'bash_20250124'"),
        ({"tools": [{"input_schema": {}}]}, "a name"), ({"tools": {"name": "x"}}, "must be a list of tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "must be auto, any, tool or none"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "the tools are weather"),
        ({"tool_choice": "auto"}, "tool_choice.type"), ({"thinking": "yes"}, "thinking must be an object"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"), ({"system": 3}, "content"),
        ({"output_config": {"format": {"type": "text"}}}, "json_schema"), ({"output_config": {"x": 1}}, "x is not"),
        ({"n_cmpl": 2}, "one answer"), ({"stop_sequences": "a b"}, "must be a list of strings"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused(server: Running, given: dict[str, Any], words: str) -> None:
    answer = post(server, **given)
    said = answer.json()
    assert answer.status_code == 400 and words in said["error"]["message"], answer.text
    assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")


def test_errors_are_anthropics(server: Running) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        create(server, model="other")
    assert caught.value.body["error"]["type"] == "not_found_error"
    raw = httpx.post(f"{server.url}/v1/messages", content=b"{", timeout=60)
    assert (raw.status_code, raw.json()["type"]) == (400, "error")
    with pytest.raises(anthropic.NotFoundError):
        client(server).messages.count_tokens(model="other", messages=ASK)


def test_an_error_in_a_stream_is_an_event() -> None:
    with serving(speaking(), timeout=0.3) as server, pytest.raises(anthropic.APIStatusError, match="longer than"):
        list(create(server, stream=True, max_tokens=480, extra_body={"ignore_eos": True}))


def test_every_field_of_the_client_is_in_the_table_and_does_what_it_says(server: Running) -> None:
    from anthropic.types import message_create_params as plain
    from anthropic.types.beta import message_create_params as beta

    read = {*MESSAGES, *MessageBody.model_fields}
    for params in (plain, beta):
        assert set(typing.get_type_hints(params.MessageCreateParamsBase)) | {"stream"} <= read
    assert not {*MessageBody.model_fields, *Extras.model_fields} & set(MESSAGES)
    for name, field in MESSAGES.items():
        if name not in OF_PEERS:
            for value in ("something", {"a": "b"}):
                answer = post(server, max_tokens=1, **{name: value})
                assert answer.status_code == (400 if isinstance(field, Refused) else 200), name
                assert isinstance(field, Refused) or answer.headers[IGNORED] == name
            for value in field.neutral:
                assert post(server, max_tokens=1, **{name: value}).status_code == 200


def test_what_has_no_effect_in_a_message_is_named(server: Running) -> None:
    marked = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    answer = post(server, messages=[{"role": "user", "content": marked}], max_tokens=1)
    assert (answer.status_code, answer.headers[IGNORED]) == (200, "messages.content.cache_control")
    beta = client(server).beta.messages.create(**{**OPTIONS, **SHORT}, betas=["context-1m-2025-08-07"],
                                                 extra_body=COLD)
    assert beta.content[0].text == create(server, **SHORT).content[0].text
