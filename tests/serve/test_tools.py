"""Tools: templates, messages, choices that bind the answer, and calls parsed from a text in any pieces."""

from __future__ import annotations

import inspect
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from transformers import PreTrainedTokenizerBase

from serving import MODEL, Running, serving, tiny_engine
from shoal.serve.errors import ApiError
from shoal.serve.protocol.bodies import TEMPLATE_OPTIONS, ChatBody
from shoal.serve.protocol.logprobs import TokenNames
from shoal.serve.protocol.thoughts import Reading
from shoal.serve.protocol.tools import CallReader, tools_of
from shoal.serve.protocol.wire import ChatWire
from shoal.types import Step
from tool_tokenizer import ASK, NOW, WEATHER, speaking

TAGGED, PLAIN = "tools <tool_call>", "tools"


@pytest.fixture(scope="module", params=[True, False], ids=["tagged", "plain"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving(speaking(request.param)) as running:
        yield running


def ask(server: Running, **options: Any) -> Any:
    given = {"model": MODEL, "messages": ASK, "max_tokens": 300, "temperature": 0.7, "seed": 1, **options}
    return server.client().chat.completions.create(**given)


def pieces(text: str, template: str, size: int, **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    tools = tools_of([WEATHER, NOW], None, None, template)
    assert tools is not None
    reader, content, calls = CallReader(tools), "", []
    for at in range(0, len(text), size):
        delta = reader.read(text[at : at + size], at + size >= len(text))
        content += delta.get("content", "")
        calls += delta.get("tool_calls", [])
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len({call["id"] for call in calls}) == len(calls)
    return content, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


MADE = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": None, "tool_calls": [
    {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"day":  "soon"}'}}]},
    {"role": "tool", "tool_call_id": "c", "content": "rain"}]
"""A conversation in which a call has been made and answered."""


@pytest.mark.parametrize(("messages", "text", "calls"), [
    (MADE, "{call}", 0), (MADE, "So {call}\n{call}", 0), (MADE, "{call} {other}", 1), (MADE, "[{call}, {other}]", 2),
    (MADE, "<tool_call>{call}</tool_call>", 1), (MADE, "```json\n{call}\n```", 1), (MADE, "{other}", 1),
    (MADE[:1], "{call}", 1), ([*MADE, {"role": "user", "content": "And now?"}], "{call}", 1),
])
def test_a_call_that_was_made_before_needs_its_tags(messages: list[Any], text: str, calls: int) -> None:
    """Small models copy it as text, and an agent would loop for ever."""
    tools = tools_of([WEATHER, NOW], None, None, TAGGED, None, messages)
    assert tools is not None
    written = text.replace("{call}", CALL).replace("{other}", OTHER)
    for size in (1, 7, 1000):
        reader, found = CallReader(tools), []
        for at in range(0, len(written), size):
            found += reader.read(written[at : at + size], at + size >= len(written)).get("tool_calls", [])
        assert len(found) == calls


def pointing(pointer: str) -> dict[str, Any]:
    """A tool whose argument is a list of a type given by a reference within its own schema."""
    schema = {
        "$defs": {"Day~": {"$anchor": "day", "enum": ["today", "soon"]}, "Place": {
            "type": "object", "properties": {"day": {"$ref": "#/$defs/Day~0"}}, "required": ["day"],
            "additionalProperties": False}},
        "definitions": {"Old": {"$ref": "#/$defs/Place"}},
        "type": "object", "properties": {"place": {"type": "array", "items": {"$ref": pointer}, "maxItems": 1}},
        "required": ["place"], "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": "place", "parameters": schema}}


CALL, OTHER = '{"name": "weather", "arguments": {"day": "soon"}}', '{"name": "now", "arguments": {}}'
SOON, NONE = ("weather", {"day": "soon"}), ("now", {})
TEXTS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (TAGGED, f"<tool_call>\n{CALL}\n</tool_call>", "", [SOON]),
    (TAGGED, f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}</tool_call>\n", "Let me see.",
     [SOON, NONE]),
    (TAGGED, f"<tool_call>{OTHER}</tool_call> and more", " and more", [NONE]),
    (TAGGED, "a < b, <tool", "a < b, <tool", []),
    (TAGGED, "text with an end\n", "text with an end\n", []),
    (TAGGED, '<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
    (TAGGED, "<tool_call>{broken</tool_call> x", "<tool_call>{broken</tool_call> x", []),
    (TAGGED, f"<tool_call>{CALL}", "", [SOON]),
    (TAGGED, f"<tool_call>{CALL}\n<tool_call>{OTHER}", "", [SOON, NONE]),
    (TAGGED, f"<tool_call>{CALL[:-1]}", "", [SOON]),
    (TAGGED, CALL[:-2], "", [SOON]),
    (TAGGED, CALL[:-3], CALL[:-3], []),
    (TAGGED, f"<tool_call>{CALL[:-1]}</tool_call>\n<tool_call>{OTHER}</tool_call>", "", [SOON, NONE]),
    (TAGGED, f"```json\n{CALL[:-1]}\n```", "", [SOON]),
    (TAGGED, f"<tool_call>{CALL[:-1]}, x</tool_call> y", f"<tool_call>{CALL[:-1]}, x</tool_call> y", []),
    (TAGGED, '{"name": "weather", "arguments": {"day": "<`soon`>"}', "", [("weather", {"day": "<`soon`>"})]),
    (TAGGED, f"<tool_call>\n{CALL}}}\n</tool_call>", "", [SOON]),
    (TAGGED, f"{{{CALL}}}", "", [SOON]),
    (TAGGED, f"<tool_call>{{ {CALL}}}</tool_call> {{{OTHER}", "", [SOON, NONE]),
    (TAGGED, f"<tool_call>\n{CALL}\n{OTHER}\n</tool_call>", "", [SOON, NONE]),
    (TAGGED, f"<tools>\n{CALL}\n</tools>", "", [SOON]),
    (TAGGED, f"<tools>[{CALL}, {OTHER}]</tools>", "", [SOON, NONE]),
    (TAGGED, f"I ask.\n<tools>\n{CALL}", "I ask.", [SOON]),
    (TAGGED, f"```\n{CALL}\n```", "", [SOON]),
    (TAGGED, f"```tool_call\n{CALL}\n```\n```json\n{OTHER}\n```", "", [SOON, NONE]),
    (TAGGED, f"I ask:\n```json\n{CALL}\n```\nThen I tell, with `x`.", "I ask:\nThen I tell, with `x`.", [SOON]),
    (TAGGED, f"```json\n<tool_call>\n{CALL}\n</tool_call>\n```", "", [SOON]),
    (TAGGED, f"I ask {CALL}, and wait.", "I ask, and wait.", [SOON]),
    (TAGGED, f"{CALL}\n```python\n", "\n```python", [SOON]),
    (TAGGED, f"[{CALL}, 1] [{OTHER}]", f"[{CALL}, 1]", [NONE]),
    (TAGGED, '{"tool_calls": [' + OTHER + "]}", "", [NONE]),
    (TAGGED, '{"type": "function", "function": ' + CALL + "}", "", [SOON]),
    (TAGGED, '{"function": "weather", "parameters": {"day": "soon"}}', "", [SOON]),
    (TAGGED, '{"name": "other", "arguments": ' + OTHER + "}", '{"name": "other", "arguments": ' + OTHER + "}", []),
    (TAGGED, '{"name": "weather", "age": 3}', '{"name": "weather", "age": 3}', []),
    (TAGGED, '{"name": "now", "arguments": null}', "", [NONE]),
    (TAGGED, '{"name": "now", "arguments": ' + "[" * 9000, '{"name": "now", "arguments": ' + "[" * 9000, []),
    (TAGGED, '{"name": "now", "arguments": ' + "[" * 9000 + "]" * 9000 + "}",
     '{"name": "now", "arguments": ' + "[" * 9000 + "]" * 9000 + "}", []),
    (TAGGED, "say `{` and [ and ```\nx\n```", "say `{` and [ and ```\nx\n```", []),
    (TAGGED, f"```json\n{CALL}\n```", "", [SOON]),
    (TAGGED, f" [{CALL}]", "", [SOON]),
    (TAGGED, "```json\n[1, 2]\n```", "```json\n[1, 2]\n```", []),
    (TAGGED, "```python", "```python", []),
    (TAGGED, "[1] As", "[1] As", []),
    (PLAIN, CALL.replace("arguments", "parameters"), "", [SOON]),
    (PLAIN, f"{CALL}; {OTHER}", "", [SOON, NONE]),
    (PLAIN, f"{CALL}\n{OTHER}", "", [SOON, NONE]),
    (PLAIN, f"[{CALL}, {OTHER}]", "", [SOON, NONE]),
    (PLAIN, '{"a": 1}', '{"a": 1}', []),
    (PLAIN, f"Hello {CALL}", "Hello", [SOON]),
    (PLAIN, f"{CALL}; and so on;", "; and so on;", [SOON]),
    (PLAIN, "{unfinished", "{unfinished", []),
]


@pytest.mark.parametrize(("template", "text", "content", "calls"), TEXTS)
def test_calls_are_read_whatever_the_pieces(template: str, text: str, content: str, calls: list[Any]) -> None:
    for size in (1, 2, 3, 7, 12, 1000):
        assert pieces(text, template, size) == (content, calls)


def test_a_call_that_a_limit_cut_is_none() -> None:
    tools = tools_of([WEATHER, NOW], None, None, TAGGED)
    assert tools is not None
    for text in (CALL[:-1], f"<tool_call>{CALL[:-2]}"):
        assert CallReader(tools).read(text, True, cut=True) == {"content": text}
    assert CallReader(tools).read(f"<tool_call>{CALL}", True, cut=True).get("tool_calls")


def test_random_texts_lose_nothing_but_white_space_before_calls() -> None:
    dice = random.Random(1)
    words = ["<", "tool", "<tool_call>", "</tool_call>", "<tools>", " ", "\n", "x", CALL, "{", "}", "[", "]", ";", ",",
             "```", "```json", '{"name": ', '{"tool_calls": [', '"', OTHER]
    for _ in range(1000):
        parts = [dice.choice(words) for _ in range(9)]
        text = "".join(parts)
        whole = pieces(text, TAGGED, len(text))
        assert whole == pieces(text, TAGGED, dice.choice((1, 2, 5)))
        if not whole[1]:
            assert whole[0] == text


def test_a_bound_answer_is_a_call_of_a_tool_that_fits_its_schema(server: Running) -> None:
    for seed in range(3):
        answer = ask(server, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False, seed=seed)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (set(arguments), arguments.get("day", "soon") in ("today", "soon")) in (
            ({"day", "warm"}, True), (set(), True))
        assert (call.function.name == "now") == (not arguments)


@pytest.mark.parametrize("pointer", ["#/$defs/Place", "#/definitions/Old", "#day", "#/$defs/Day~0", "#"])
def test_pointers_within_a_tools_schema_stay_in_it(server: Running, pointer: str) -> None:
    tools = [WEATHER, pointing(pointer)]
    for choice in ("required", {"type": "function", "function": {"name": "place"}}):
        message = ask(server, tools=tools, tool_choice=choice, parallel_tool_calls=False).choices[0].message
        (call,) = message.tool_calls
        tool = next(tool for tool in tools if tool["function"]["name"] == call.function.name)
        jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])


FINALS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "$defs": {"B": {"const": "now"}}, "type": "array", "prefixItems": [{
            "type": "object", "properties": {"name": {"$ref": "#/$defs/B"}, "arguments": {"const": {}}},
            "required": ["name", "arguments"], "additionalProperties": False}], "items": False, "minItems": 1}}}},
    {"extra_body": {"guided_json": {"enum": [[{"list": [{"name": "now", "arguments": {}}]}]]}}},
    {"extra_body": {"guided_regex": r"\[x{3}[}]"}},
    {"extra_body": {"guided_choice": ["[yes}", '["no": 1}']}},
    {"extra_body": {"guided_grammar": 'root ::= "[" [a-c] "}"'}},
]


@pytest.mark.parametrize("given", FINALS, ids=str)
def test_beside_tools_the_final_text_alone_is_bound(server: Running, given: dict[str, Any]) -> None:
    words = server.engine.tokenizer
    for seed, (against, called) in enumerate((("[", True), ("<{", False), ("[<", True))):
        bias = {str(token): -100 for token in words.encode(against, add_special_tokens=False)}
        options = {**given, "tools": [WEATHER, NOW], "seed": seed, "temperature": 1.5, "logit_bias": bias}
        message = ask(server, **options).choices[0].message
        assert bool(message.tool_calls) == called
        assert message.content is None if called else fits(message.content, given)
        assert all(call.function.name in ("weather", "now") for call in message.tool_calls or ())
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(server, **options, stream=True))
        assert streamed == (message.content or "")
    assert ask(server, **given, tools=[NOW], tool_choice="required").choices[0].message.tool_calls
    plain = ask(server, **given, tools=[NOW], tool_choice="none").choices[0].message
    assert plain.tool_calls is None and fits(plain.content, given)


def test_after_a_result_a_call_beside_a_format_has_its_tags(server: Running) -> None:
    """Otherwise a small model, which forgets them, calls again and again."""
    answered = [*ASK, {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "now"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "noon"}]
    words = server.engine.tokenizer
    bias = {str(words.convert_tokens_to_ids(letter)): value for letter, value in (("{", 100), ("<", -100))}
    tagged = "<tool_call>" in words.chat_template
    for messages, called in ((ASK, True), (answered, not tagged)):
        found = ask(server, messages=messages, tools=[NOW], parallel_tool_calls=False, logit_bias=bias,
                    extra_body={"guided_regex": "yes"}).choices[0].message
        assert found.content == "yes" if not called else found.tool_calls


def fits(text: str, given: dict[str, Any]) -> bool:
    """Whether a text matches one of `FINALS`."""
    if "response_format" in given:
        return json.loads(text) == [{"name": "now", "arguments": {}}]
    ((kind, wanted),) = given["extra_body"].items()
    if kind == "guided_json":
        return json.loads(text) in wanted["enum"]
    pattern = {"guided_choice": r'\[yes}|\["no": 1}', "guided_grammar": r"\[[abc]}"}.get(kind, wanted)
    return re.fullmatch(pattern, text) is not None


def test_a_named_tool_is_the_one_that_is_called(server: Running) -> None:
    choice = ask(server, tools=[WEATHER, NOW], tool_choice={"type": "function", "function": {"name": "now"}}).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    assert choice.finish_reason == "stop"


def test_a_stream_brings_the_same_calls(server: Running) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    whole, calls, reasons = ask(server, **options).choices[0].message.tool_calls[0], [], []
    for chunk in ask(server, **options, stream=True):
        assert not chunk.choices[0].delta.content
        calls += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
    assert [(call.index, call.function) for call in calls] == [(0, calls[0].function)]
    assert calls[0].function.model_dump() == whole.function.model_dump()
    assert reasons[-1] == "tool_calls"


def test_a_cut_call_is_text_that_ends_by_its_length(server: Running) -> None:
    choice = ask(server, tools=[WEATHER], tool_choice="required", max_tokens=20).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert "name" in choice.message.content


def test_the_template_sees_tools_calls_their_results_and_its_variables(server: Running) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"day": "soon"}'}}]
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    words = server.engine.tokenizer
    spoken = [*ASK, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"day": "soon"}}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    expected = words.apply_chat_template(spoken, tools=[WEATHER], mood="glad", reasoning_effort="low",
                                         add_generation_prompt=True, tokenize=True, return_dict=False)
    answer = ask(server, messages=messages, tools=[WEATHER], max_tokens=3, temperature=0, reasoning_effort="low",
                 extra_body={"chat_template_kwargs": {"mood": "glad"}})
    assert answer.usage.prompt_tokens == len(expected)
    said = server.engine.generate(list(expected), max_new_tokens=3).text
    assert (answer.choices[0].message.content or "") == said


def test_none_leaves_tools_out_and_auto_is_the_models_choice(server: Running) -> None:
    plain = ask(server, max_tokens=8, temperature=0)
    assert ask(server, max_tokens=8, temperature=0, tools=[NOW], tool_choice="none").choices == plain.choices
    auto = ask(server, max_tokens=8, temperature=0, tools=[NOW], tool_choice="auto")
    assert auto.choices == ask(server, max_tokens=8, temperature=0, tools=[NOW]).choices
    assert auto.usage.prompt_tokens > plain.usage.prompt_tokens


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0 must be"),
        ({"tools": [{"type": "code", "function": {"name": "a"}}]}, "tools.0 must be"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "must be none, auto, required"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "the tools are now"),
        ({"tool_choice": "required"}, "without tools"),
        ({"tools": [pointing("#/$defs/Other")], "tool_choice": "required"}, "Other"),
        ({"tools": [pointing("http://a.b/c")], "tool_choice": "required"}, "http://a.b/c"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "must have a function with a name"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "tool_calls is not supported"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "no variable of a template"),
    ],
    ids=str,
)
def test_what_is_wrong_is_400(server: Running, given: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        ask(server, **given)


def test_a_template_without_a_place_for_tools_says_so() -> None:
    with pytest.raises(ApiError, match="no place for tools"):
        tools_of([NOW], None, None, tiny_engine().tokenizer.chat_template)


def test_options_of_the_tokenizer_are_no_variables() -> None:
    known = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert known - {"self", "documents", "kwargs"} <= TEMPLATE_OPTIONS


@pytest.mark.parametrize("method", [["full"], ["prompt_lookup"], ["auto"], ["prompt_lookup", "d3"]], ids=repr)
def test_turns_with_calls_are_read_once(server: Running, method: list[str]) -> None:
    """All of an earlier request's prompt but the turn's beginning is cached, by the metrics too."""
    talk: list[Any] = [*ASK]
    talk[0] = {"role": "user", "content": f"{talk[0]['content']} {method}"}
    read, seen, before = 0, 0, hits(server)
    for turn in range(3):
        answer = ask(server, messages=talk, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False,
                     extra_body={"method": method})
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached >= read - len("<|assistant|>")
        read, seen = answer.usage.prompt_tokens, seen + cached
        message = answer.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": f"rain {turn}"} for call in message.tool_calls]
        talk += [message, *results]
    assert seen > 0 and hits(server) - before == seen


def hits(server: Running) -> float:
    """Cached prompt tokens, by the server's count."""
    text = httpx.get(f"{server.url}/metrics").text
    return sum(map(float, re.findall(r"^shoal:prefix_cache_hits_total\{.*\} (\S+)", text, re.M)))


def test_text_that_is_held_back_makes_no_chunk() -> None:
    body = ChatBody(model="m", messages=[{"role": "user"}])
    wire = ChatWire(body, TokenNames(None), Reading(tools_of([WEATHER], None, None, TAGGED)))
    held, shown = (Step(seq=0, index=index, token=5, text=text, depth=4) for index, text in enumerate(["<tool", "x"]))
    assert wire.chunk(0, held) is None
    body.steps = True
    chunk = wire.chunk(0, shown)
    assert chunk is not None and chunk["delta"] == {"content": "<toolx"} and chunk["steps"][0]["token"] == 5
