"""Ollama's routes with its official client: chats, texts, tools, schemas, thoughts, models, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import MODEL, Running, serving, tiny_engine
from shoal import __version__
from shoal.serve.protocol.bodies import Extras
from shoal.serve.protocol.fields import IGNORED, OF_PEERS, OLLAMA, Refused
from shoal.serve.protocol.ollama import OllamaBody, as_chat
from tool_tokenizer import WEATHER, speaking, thinking

ollama = pytest.importorskip("ollama")

ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
COLD = {"temperature": 0, "num_predict": 12}
DAYS = {"type": "object", "properties": {"day": {"enum": ["today", "soon"]}}, "required": ["day"],
        "additionalProperties": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with ollama.Client(host=server.url, timeout=60) as found:
        yield found


def openais(server: Running, messages: list[dict[str, Any]], **options: Any) -> Any:
    given = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **options}
    return server.client().chat.completions.create(**given)


def post(server: Running, route: str = "chat", **given: Any) -> httpx.Response:
    asked = {"messages": ASK} if route == "chat" else {}
    body = {"model": MODEL, "stream": False, "options": COLD, **asked, **given}
    return httpx.post(f"{server.url}/api/{route}", json=body, timeout=60)


def test_a_chat_says_what_openais_says(server: Running, client: Any) -> None:
    found, expected = client.chat(MODEL, ASK, options=COLD), openais(server, ASK)
    assert (found.message.role, found.message.content) == ("assistant", expected.choices[0].message.content)
    assert (found.model, found.done, found.done_reason) == (MODEL, True, "length")
    assert (found.prompt_eval_count, found.eval_count) == (expected.usage.prompt_tokens, 12)
    assert found.total_duration >= found.eval_duration > 0 and found.created_at.endswith("Z")


def test_a_stream_joins_to_the_whole(server: Running, client: Any) -> None:
    parts = list(client.chat(MODEL, ASK, options=COLD, stream=True))
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True] and len(parts) > 5
    whole = client.chat(MODEL, ASK, options=COLD)
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert (parts[-1].eval_count, parts[-1].done_reason) == (12, "length")
    streams = httpx.post(f"{server.url}/api/chat", json={"model": MODEL, "messages": ASK, "options": COLD}, timeout=60)
    assert streams.headers["content-type"].startswith("application/x-ndjson")  # a request that does not say streams
    assert len(streams.text.splitlines()) == len(parts)


def test_options_are_those_of_sampling(server: Running, client: Any) -> None:
    options = {"temperature": 0.9, "top_k": 7, "top_p": 0.8, "min_p": 0.02, "seed": 11, "repeat_penalty": 1.4,
               "num_predict": 9, "num_ctx": 4096, "num_gpu": 0}
    found = client.chat(MODEL, ASK, options=options, keep_alive="5m")
    expected = openais(server, ASK, temperature=0.9, top_p=0.8, seed=11, max_tokens=9,
                       extra_body={"top_k": 7, "min_p": 0.02, "repetition_penalty": 1.4})
    assert found.message.content == expected.choices[0].message.content
    assert found.message.content != client.chat(MODEL, ASK, options={**options, "seed": 12}).message.content
    ignored = post(server, options=options, keep_alive=3).headers[IGNORED].split(", ")
    assert sorted(ignored) == ["keep_alive", "num_ctx", "num_gpu"]
    stop = found.message.content[4:6]
    cut = client.chat(MODEL, ASK, options={**options, "stop": [stop]})
    assert cut.message.content == found.message.content[: found.message.content.index(stop)]
    assert cut.done_reason == "stop"


def test_a_text_goes_through_the_template_or_as_it_is(server: Running, client: Any) -> None:
    told = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    found = client.generate(MODEL, "Hi", system="Be brief", options=COLD)
    assert found.response == openais(server, told).choices[0].message.content
    raw = client.generate(MODEL, "Some words", raw=True, options=COLD)
    assert raw.response == server.engine.generate("Some words", max_new_tokens=12).text
    parts = list(client.generate(MODEL, "Some words", raw=True, options=COLD, stream=True))
    assert "".join(part.response for part in parts) == raw.response and parts[-1].done_reason == "length"


def test_a_schema_binds_the_answer(client: Any) -> None:
    for shape, kind in ((DAYS, dict), ("json", dict)):
        options = {"temperature": 0, "num_predict": 200}
        assert isinstance(json.loads(client.chat(MODEL, ASK, format=shape, options=options).message.content), kind)
    assert json.loads(client.generate(MODEL, "Hi", format=DAYS, options=options).response)["day"] in ("today", "soon")


CALL = '<tool_call>\n{"name": "weather", "arguments": {"day": "soon", "warm": true}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_parsed(server: Running, stream: bool) -> None:
    answer = post(server, tools=[WEATHER], stream=stream, options={"temperature": 0, "num_predict": 200},
                  guided_choice=[CALL])
    said = [json.loads(line)["message"] for line in answer.text.splitlines()]
    calls = [call["function"] for message in said for call in message.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls))) and calls
    assert all(call["name"] == "weather" and set(call["arguments"]) == {"day", "warm"} for call in calls)


def test_a_conversation_with_calls_is_told_as_a_chat(server: Running, client: Any) -> None:
    calls = [{"function": {"name": "weather", "arguments": {"day": day, "warm": True}}} for day in ("soon", "today")]
    said = [*ASK, {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "11", "tool_name": "weather"}, {"role": "tool", "content": "12"}]
    found = client.chat(MODEL, said, tools=[WEATHER], options=COLD)
    named = [{"id": f"c{place}", "type": "function", "function": {
        "name": "weather", "arguments": json.dumps(call["function"]["arguments"])}} for place, call in enumerate(calls)]
    told = [*ASK, {"role": "assistant", "content": "", "tool_calls": named},
            {"role": "tool", "content": "11", "tool_call_id": "c0"},
            {"role": "tool", "content": "12", "tool_call_id": "c1"}]
    expected = openais(server, told, tools=[WEATHER])
    assert found.prompt_eval_count == expected.usage.prompt_tokens
    assert found.message.content == (expected.choices[0].message.content or "")


def test_a_translated_request_names_its_calls_and_efforts() -> None:
    call = {"function": {"name": "now", "arguments": {}}}
    said = as_chat({"messages": [{"role": "assistant", "tool_calls": [call, {**call, "id": "own"}]},
                                 *({"role": "tool", "content": text} for text in "abc")], "think": "high"})
    first, *results = said["messages"]
    assert [one["id"] for one in first["tool_calls"]] == ["call_0_0", "own"]
    assert [one["tool_call_id"] for one in results] == ["call_0_0", "own", "call_3"]
    assert (said["reasoning_effort"], said["enable_thinking"], said["stream"]) == ("high", True, True)


def test_thoughts_stand_beside_the_answer() -> None:
    with serving(thinking()) as server, ollama.Client(host=server.url, timeout=60) as client:
        longer = {"options": {"temperature": 0, "num_predict": 40}}
        more = {"thinking_token_budget": 6, "ignore_eos": True, **longer}
        found = post(server, **more).json()["message"]
        assert found["thinking"] and found["content"]
        assert post(server, "generate", prompt="Hi", **more).json()["thinking"]
        assert client.chat(MODEL, ASK, options=COLD, think=True).message.thinking
        off = client.chat(MODEL, ASK, options=COLD, think=False).message
        assert off.content and not off.thinking
        assert "thinking" in client.show(MODEL).capabilities
        asked = post(server, think="high").json()["prompt_eval_count"]
        assert asked == post(server, think=True).json()["prompt_eval_count"] + len("high")
        said = [*ASK, {"role": "assistant", "content": "Yes", "thinking": "hm"}, *ASK]
        assert post(server, messages=said).status_code == 200


def test_models_are_described(server: Running, client: Any) -> None:
    (model,) = client.list().models
    assert model.model == MODEL and model.size > 1000 and model.details.family == "llama"
    (running,) = client.ps().models
    assert (running.model, running.size_vram, running.context_length) == (MODEL, 0, server.engine.runner.max_positions)
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"] and "messages" in shown.template
    assert shown.modelinfo["llama.block_count"] == 2 and "temperature 0.7" in shown.parameters
    assert httpx.get(f"{server.url}/api/version").json() == {"version": __version__}


def test_a_name_may_have_the_tag_latest(client: Any) -> None:
    assert client.chat(f"{MODEL}:latest", ASK, options=COLD).model == MODEL
    assert client.show(f"{MODEL}:latest")
    for ask in (client.show, lambda name: client.chat(name, ASK), lambda name: client.generate(name, "Hi")):
        with pytest.raises(ollama.ResponseError, match="no model 'other'") as caught:
            ask("other")
        assert caught.value.status_code == 404


def test_a_request_without_a_text_only_loads(client: Any) -> None:
    assert client.generate(MODEL).done_reason == "load"
    found = client.chat(MODEL, [])
    assert (found.message.content, found.done, found.done_reason) == ("", True, "load")


@pytest.mark.parametrize(
    ("route", "given", "words"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}, "reads text alone"),
        ("generate", {"prompt": "x", "images": ["AA=="]}, "reads text alone"), ("chat", {"think": "a lot"}, "think is"),
        ("chat", {"messages": [{"role": "judge", "content": "x"}]}, "role"), ("chat", {"messages": [3]}, "messages.0"),
        ("chat", {"messages": 3}, "messages"), ("chat", {"options": {"mirostat": 1}}, "mirostat"),
        ("generate", {"prompt": "x", "template": "y"}, "template"), ("chat", {"format": "yaml"}, "format"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, "leave system and think out"),
        ("generate", {"prompt": 5, "raw": True}, "prompt"), ("chat", {"options": {"num_predict": 0}}, "num_predict"),
        ("chat", {"tools": [{"type": "function"}]}, "tools.0"), ("chat", {"n_cmpl": 2}, "one answer"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused(server: Running, route: str, given: dict[str, Any], words: str) -> None:
    answer = post(server, route, **given)
    assert answer.status_code == 400 and words in answer.json()["error"], answer.text


def test_an_error_in_a_stream_is_its_last_line() -> None:
    late = pytest.raises(ollama.ResponseError, match="longer than")
    with serving(tiny_engine(), timeout=0.3) as server, ollama.Client(host=server.url, timeout=60) as client, late:
        list(client.generate(MODEL, "Some words", raw=True, options={"num_predict": 490}, stream=True))


def test_keys(server: Running) -> None:
    with serving(tiny_engine(), api_keys=("right",)) as closed:
        with ollama.Client(host=closed.url) as client, pytest.raises(ollama.ResponseError, match="API key"):
            client.list()
        with ollama.Client(host=closed.url, headers={"authorization": "Bearer right"}) as client:
            assert client.list().models


def test_every_field_of_the_client_is_in_the_table_and_does_what_it_says(server: Running) -> None:
    from ollama import _types as types

    read = {*OLLAMA, *OllamaBody.model_fields, *Extras.model_fields, "options"}
    for kind in (types.ChatRequest, types.GenerateRequest):
        assert set(kind.model_fields) <= read
    assert not {*OllamaBody.model_fields, *Extras.model_fields} & set(OLLAMA)
    for name, field in OLLAMA.items():
        if OF_PEERS.get(name) != field:
            for value in ("something", 17):
                answer = post(server, **{name: value})
                assert answer.status_code == (400 if isinstance(field, Refused) else 200), name
                assert isinstance(field, Refused) or answer.headers[IGNORED] == name
            assert all(post(server, **{name: value}).status_code == 200 for value in field.neutral)
