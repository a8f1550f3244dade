"""Conversations as clients replay them: fields of earlier answers, prefill, and templates without a system role."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from chat_tokenizer import chat_tokenizer
from families import tiny
from serving import MODEL, Running, serving
from shoal.engine.loading.load import engine_for
from tool_tokenizer import WEATHER, speaking
from toy_tokenizers import tokenizer

ASK: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
_REASONS = "{% for m in messages %}{% if m.reasoning_content %}{{ '(' + m.reasoning_content + ')' }}{% endif %}" \
           "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}" \
           "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
_NO_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}REFUSE{% else %}" \
             "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}" \
             "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
_FIRST_ALONE = "{% if messages[0].role == 'system' %}{{ messages[0].content | upper }}{% endif %}" \
               + _NO_SYSTEM.replace("REFUSE", "")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking()) as running:
        yield running


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with serving(speaking(), strict=True) as running:
        yield running


def with_template(template: str) -> Any:
    words = chat_tokenizer()
    words.chat_template = template
    return serving(engine_for(tiny("llama", layers=2), words, name=MODEL))


def chat(server: Running, messages: list[dict[str, Any]], route: str = "v1/chat/completions", **more: Any) -> Any:
    sent = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, **more}
    answer = httpx.post(f"{server.url}/{route}", json=sent, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def tokens(server: Running, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    """The prompt of a conversation; a chat gets the same one."""
    answer = httpx.post(f"{server.url}/tokenize", json={"messages": messages, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["tokens"]
    told = chat(server, messages, **more).json()
    said = server.engine.generate(found, max_new_tokens=4).text
    assert (told["usage"]["prompt_tokens"], told["choices"][0]["message"]["content"]) == (len(found), said)
    return found


def ignored(answer: httpx.Response) -> list[str]:
    return [name for name in answer.headers.get("x-shoal-ignored", "").split(", ") if name]


SPOKEN: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}, []),
    ({"role": "assistant", "content": []}, {"role": "assistant", "content": ""}, []),
    ({"role": "assistant"}, {"role": "assistant", "content": ""}, []),
    ({"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None, "function_call": None,
      "tool_calls": []}, {"role": "assistant", "content": "a"}, []),
    ({"role": "assistant", "content": "a", "reasoning": "b", "reasoning_details": [{"text": "b"}],
      "thinking_blocks": [1], "provider_specific_fields": {"x": 1}}, {"role": "assistant", "content": "a"},
     ["provider_specific_fields", "reasoning", "reasoning_details", "thinking_blocks"]),
    ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}, []),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, {"role": "assistant", "content": "no"},
     []),
    ({"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "a"}]},
     {"role": "assistant", "content": "a"}, ["content.thinking"]),
    ({"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "b"}]}, "a"]},
     {"role": "assistant", "content": "a"}, ["content.thinking"]),
    ({"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}], "id": "m1"},
     {"role": "assistant", "content": "a"}, ["id"]),
    ({"role": "user", "content": {"type": "text", "text": "a"}}, {"role": "user", "content": "a"}, []),
    ({"role": "user", "content": {"text": "a"}}, {"role": "user", "content": "a"}, []),
    ({"role": "user", "content": ["a", "b"]}, {"role": "user", "content": "ab"}, []),
    ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "weight": 1},
     {"role": "user", "content": "a"}, ["content.cache_control", "weight"]),
    ({"role": "tool", "tool_call_id": "c", "content": None}, {"role": "tool", "content": ""}, []),
    ({"role": "tool", "tool_call_id": "c", "content": [], "is_error": True}, {"role": "tool", "content": ""},
     ["is_error"]),
    ({"role": "tool", "tool_call_id": "c"}, {"role": "tool", "content": ""}, []),
    ({"role": "function", "name": "weather", "content": "rain"}, {"role": "tool", "content": "rain"}, []),
    ({"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
     {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}, []),
]


@pytest.mark.parametrize(("given", "spoken", "names"), SPOKEN, ids=str)
def test_what_clients_replay(
    server: Running, strict: Running, given: dict[str, Any], spoken: dict[str, Any], names: list[str]
) -> None:
    words = server.engine.tokenizer
    expected = words.apply_chat_template([*ASK, spoken, *ASK], add_generation_prompt=True, tokenize=False)
    assert tokens(server, [*ASK, given, *ASK]) == words(expected, add_special_tokens=False)["input_ids"]
    answer = chat(server, [*ASK, given, *ASK])
    assert sorted(ignored(answer)) == [f"messages.{name}" for name in names]
    sent = {"model": MODEL, "messages": [*ASK, given, *ASK], "max_tokens": 1}
    assert httpx.post(f"{strict.url}/v1/chat/completions", json=sent).status_code == (400 if names else 200)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": []}, {"role": "system"},
        {"role": "user", "content": {"type": "image_url"}}, {"role": "user", "content": {"type": "input_audio"}},
        {"role": "user", "content": [5]},
        {"role": "user", "content": "a", "tool_calls": [1]}, {"role": "tool", "content": "x"},
        {"role": "assistant", "tool_calls": "x"}, {"role": "assistant", "function_call": "x"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]},
        {"role": "user", "content": {"type": []}},
        {"role": "judge", "content": "x"}, {"role": "user", "content": "x", "name": 4},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_message_is_named(server: Running, message: dict[str, Any]) -> None:
    for route in ("v1/chat/completions", "tokenize"):
        sent = {"model": MODEL, "messages": [*ASK, message]}
        answer = httpx.post(f"{server.url}/{route}", json=sent)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages.1", answer.text


def test_an_answer_of_responses_comes_back(server: Running) -> None:
    back = [{"role": "user", "content": "Hi", "weight": 1}, {"type": "reasoning", "id": "r", "summary": []},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed",
             "content": [{"type": "refusal", "refusal": "no"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}", "id": "f"},
            {"type": "function_call_output", "call_id": "c", "output": None}, {"role": "user", "content": "Hi"}]
    sent = {"model": MODEL, "input": back, "max_output_tokens": 2, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/responses", json=sent)
    assert answer.status_code == 200, answer.text
    assert ignored(answer) == ["messages.weight"]
    spoken = [*ASK, {"role": "assistant", "content": "no", "tool_calls": [
        {"function": {"name": "weather", "arguments": {}}}]}, {"role": "tool", "content": ""}, *ASK]
    words = server.engine.tokenizer
    text = words.apply_chat_template(spoken, add_generation_prompt=True, tokenize=False)
    assert answer.json()["usage"]["input_tokens"] == len(words(text, add_special_tokens=False)["input_ids"])


def test_a_template_with_a_place_for_reasoning_is_given_it() -> None:
    with with_template(_REASONS) as running:
        expected = running.engine.tokenizer("<|user|>Hi<|end|>(b)<|assistant|>a<|end|><|user|>Hi<|end|><|assistant|>",
                                            add_special_tokens=False)["input_ids"]
        for thought in ({"reasoning_content": "b"}, {"reasoning": "b"},
                        {"content": [{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "a"}]}):
            message = {"role": "assistant", "content": "a", **thought}
            assert tokens(running, [*ASK, message, *ASK]) == expected
            assert ignored(chat(running, [*ASK, message, *ASK])) == []


@pytest.mark.parametrize("refuse", ["{{ raise_exception('no system role') }}", ""], ids=["refused", "lost"])
def test_a_system_role_goes_before_the_users_next_words(refuse: str) -> None:
    rules = {"role": "system", "content": "Be brief"}
    with with_template(_NO_SYSTEM.replace("REFUSE", refuse)) as running:
        for messages, text in (
            ([rules, *ASK], "<|user|>Be brief\nHi<|end|><|assistant|>"),
            ([{**rules, "role": "developer"}, rules, *ASK], "<|user|>Be brief\nBe brief\nHi<|end|><|assistant|>"),
            ([*ASK, {"role": "assistant", "content": "a"}, rules, *ASK],
             "<|user|>Hi<|end|><|assistant|>a<|end|><|user|>Be brief\nHi<|end|><|assistant|>"),
            ([rules], "<|user|>Be brief<|end|><|assistant|>"),
            ([rules, {"role": "assistant", "content": "a"}, *ASK],
             "<|user|>Be brief<|end|><|assistant|>a<|end|><|user|>Hi<|end|><|assistant|>"),
            ([rules, *ASK, {"role": "assistant", "content": "a"}], "<|user|>Be brief\nHi<|end|><|assistant|>a"),
        ):
            assert tokens(running, messages) == running.engine.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_system_role_that_has_a_place_stays_there() -> None:
    """The template may change its text, and later messages may have none."""
    rules = {"role": "system", "content": "Be brief"}
    with with_template(_FIRST_ALONE) as running:
        words = running.engine.tokenizer
        for messages, text in (
            ([rules, *ASK], "BE BRIEF<|user|>Hi<|end|><|assistant|>"),
            ([rules, *ASK, rules, *ASK], "BE BRIEF<|user|>Hi<|end|><|user|>Be brief\nHi<|end|><|assistant|>"),
        ):
            assert tokens(running, messages) == words(text, add_special_tokens=False)["input_ids"]


def test_a_refusal_is_the_templates_own() -> None:
    with with_template("{{ raise_exception('never') }}") as running:
        sent = {"model": MODEL, "messages": [{"role": "system", "content": "a"}, *ASK]}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=sent)
        assert answer.status_code == 400 and "never" in answer.json()["error"]["message"]


BEGUN = [*ASK, {"role": "assistant", "content": "It is "}]
OPENINGS: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    (BEGUN, {}, "<|user|>Hi<|end|><|assistant|>It is "),
    (BEGUN, {"continue_final_message": True}, "<|user|>Hi<|end|><|assistant|>It is "),
    (BEGUN, {"continue_final_message": True, "add_generation_prompt": False}, "<|user|>Hi<|end|><|assistant|>It is "),
    (BEGUN, {"continue_final_message": False}, "<|user|>Hi<|end|><|assistant|>It is <|end|><|assistant|>"),
    (BEGUN, {"add_generation_prompt": True}, "<|user|>Hi<|end|><|assistant|>It is <|end|><|assistant|>"),
    (BEGUN, {"add_generation_prompt": False}, "<|user|>Hi<|end|><|assistant|>It is <|end|>"),
    (ASK, {"add_generation_prompt": False}, "<|user|>Hi<|end|>"),
    (ASK, {"continue_final_message": True}, "<|user|>Hi"),
    ([*ASK, {"role": "assistant", "content": None}], {}, "<|user|>Hi<|end|><|assistant|>"),
    ([*ASK, {"role": "assistant", "content": ""}], {"continue_final_message": True}, "<|user|>Hi<|end|><|assistant|>"),
    ([{"role": "assistant", "content": "It"}], {}, "<|assistant|>It"),
    ([*ASK, {"role": "assistant", "content": [{"type": "text", "text": "I"}]}], {}, "<|user|>Hi<|end|><|assistant|>I"),
    ([*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}], {},
     "<|user|>Hi<|end|><|assistant|><tool_call>a{}</tool_call><|end|><|assistant|>"),
]


@pytest.mark.parametrize(("messages", "options", "text"), OPENINGS, ids=str)
def test_where_an_answer_begins(
    server: Running, messages: list[dict[str, Any]], options: dict[str, Any], text: str
) -> None:
    assert tokens(server, messages, **options) == server.engine.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_an_answer_begins_in_one_place(server: Running) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"model": MODEL, "messages": BEGUN, **both})
    assert answer.status_code == 400 and "give one of them" in answer.json()["error"]["message"]


def test_tokenize_honours_its_options(server: Running) -> None:
    words, url = server.engine.tokenizer, server.url

    def ids(**body: Any) -> list[int]:
        found: list[int] = httpx.post(f"{url}/tokenize", json=body).json()["tokens"]
        return found

    text = "a<|end|>"
    mark = words.convert_tokens_to_ids("<|end|>")
    assert ids(content=text) == words(text)["input_ids"] and mark in ids(content=text)
    assert ids(content=text, parse_special=False) == words(text, split_special_tokens=True)["input_ids"]
    assert mark not in ids(content=text, parse_special=False)
    for name in ("add_special", "add_special_tokens"):
        for value in (True, False):
            assert ids(prompt=text, **{name: value}) == words(text, add_special_tokens=value)["input_ids"]
    named = httpx.post(f"{url}/tokenize", json={"prompt": "ab", "return_token_strs": True}).json()
    assert named["token_strs"] == words.convert_ids_to_tokens(named["tokens"])
    pieces = httpx.post(f"{url}/tokenize", json={"content": "ab", "with_pieces": True}).json()["tokens"]
    assert [(one["id"], one["piece"]) for one in pieces[-2:]] == [(words.convert_tokens_to_ids(x), x) for x in "ab"]
    offered = words.apply_chat_template(ASK, tools=[WEATHER], mood="glad", tokenize=True, return_dict=False,
                                        add_generation_prompt=True)
    assert ids(messages=ASK, tools=[WEATHER], chat_template_kwargs={"mood": "glad"}) == list(offered)


def test_pieces_of_a_character_are_bytes() -> None:
    words = tokenizer("byte_level")
    with serving(engine_for(tiny("llama", vocab_size=len(words), layers=1), words, name=MODEL)) as running:
        told = httpx.post(f"{running.url}/tokenize", json={"content": "a世", "with_pieces": True}).json()["tokens"]
    found = b"".join(one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in told)
    assert found.decode().endswith("a世") and any(isinstance(one["piece"], list) for one in told)


def test_tokenize_names_what_it_does_not_know(server: Running, strict: Running) -> None:
    for route, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [8]})):
        sent = {**body, "priority": 3, "other": None}
        assert ignored(httpx.post(f"{server.url}/{route}", json=sent)) == ["priority"]
        answer = httpx.post(f"{strict.url}/{route}", json=sent)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "priority"
        assert httpx.post(f"{server.url}/{route}", json={**body, "model": "other"}).status_code == 404
    for wrong in ({"messages": ASK, "parse_special": False}, {"prompt": "a", "add_special": 3}, {"messages": []},
                  {"prompt": "a", "add_special": True, "add_special_tokens": False},
                  {"messages": ASK, "chat_template_kwargs": {"messages": []}}):
        assert httpx.post(f"{server.url}/tokenize", content=json.dumps(wrong)).status_code == 400, wrong
