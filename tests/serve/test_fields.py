"""Every field of the installed client and of other servers is honoured, refused by name, or has no effect."""

from __future__ import annotations

import json
import typing
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import completion_create_params as chat

from peer_names import BINDING, NAMES
from serving import MODEL, Running, serving
from shoal.serve.protocol.bodies import Body, ChatBody, CompletionBody, Extras
from shoal.serve.protocol.fields import IGNORED, MESSAGES, OF_PEERS, OLLAMA, RESPONSES, Ignored, Refused, Unread
from shoal.serve.protocol.messages import MessageBody
from shoal.serve.protocol.ollama import OllamaBody
from shoal.serve.protocol.responses import ResponseBody
from tool_tokenizer import ASK, speaking

ROUTES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "chat/completions": (ChatBody, {"messages": ASK}), "completions": (CompletionBody, {"prompt": "Some words"}),
}
HONOURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: what is sent, and what says the same in fields of OpenAI's and Shoal's, or options of the engine
    "structured_outputs": ({"structured_outputs": {"regex": "[ab]{3}"}}, {"guided_regex": "[ab]{3}"}),
    "json_schema": ({"json_schema": {"const": [1]}}, {"guided_json": {"const": [1]}}),
    "grammar": ({"grammar": 'root ::= "a" "b"'}, {"guided_grammar": 'root ::= "a" "b"'}),
    "regex": ({"regex": "c[de]"}, {"guided_regex": "c[de]"}),
    "ebnf": ({"ebnf": 'root ::= "x"'}, {"guided_grammar": 'root ::= "x"'}),
    "format": ({"format": {"enum": ["p", "q"]}}, {"guided_json": {"enum": ["p", "q"]}}),
    "response_format": ({"response_format": {"type": "json_object", "schema": {"const": 3}}},
                        {"guided_json": {"const": 3}}),
    "typical_p": ({"typical_p": 0.4}, {"engine": {"typical_p": 0.4}}),
    "repeat_penalty": ({"repeat_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "repeat_last_n": ({"repeat_penalty": 1.9, "repeat_last_n": 3},
                      {"engine": {"repetition_penalty": 1.9, "repetition_window": 3}}),
    "min_tokens": ({"min_tokens": 19, "logit_bias": {"2": 6}},
                   {"engine": {"min_new_tokens": 19, "logit_bias": {2: 6.0}}}),
    "bad_words": ({"bad_words": ["m", "Q"]}, {"engine": {"bad_words": ["m", "Q"]}}),
    "allowed_token_ids": ({"allowed_token_ids": [30, 31, 32]}, {"engine": {"allowed_token_ids": [30, 31, 32]}}),
    "include_stop_str_in_output": ({"include_stop_str_in_output": True, "stop": ["Q", "B", "5"]},
                                   {"engine": {"keep_stop": True, "stop": ["Q", "B", "5"]}}),
    "no_stop_trim": ({"no_stop_trim": True, "stop": list("QB5")}, {"engine": {"keep_stop": True, "stop": list("QB5")}}),
    "n_predict": ({"max_tokens": None, "n_predict": 3}, {"max_tokens": 3}),
    "num_predict": ({"max_tokens": None, "num_predict": 3}, {"max_tokens": 3}),
    "max_new_tokens": ({"max_new_tokens": 3}, {"max_tokens": 3}),
    "max_completion_tokens": ({"max_completion_tokens": 4}, {"max_tokens": 4}),
    "n_cmpl": ({"n_cmpl": 2}, {"n": 2}),
    "options": ({"max_tokens": None, "options": {"num_predict": 5, "top_k": 3}}, {"max_tokens": 5, "top_k": 3}),
    "reasoning": ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
    "enable_thinking": ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
    "return_tokens_as_token_ids": ({}, {}),  # a test of its own
}
NEUTRAL: list[dict[str, Any]] = [
    {"top_k": -1}, {"top_k": 0}, {"min_p": 0}, {"top_p": 1}, {"seed": -1}, {"stop": ""}, {"stop": []}, {"stop": [""]},
    {"stream_options": {}}, {"stream_options": {"include_usage": False}}, {"stop": None}, {"echo": None},
    {"logit_bias": {}}, {"logit_bias": []}, {"n": 1}, {"stream_options": None}, {"repeat_penalty": 1},
    {"repeat_last_n": 64}, {"repeat_last_n": -1}, {"repeat_last_n": 0, "repeat_penalty": 1.5}, {"grammar": ""},
    {"structured_outputs": {}}, {"structured_outputs": {"json": None, "json_object": False}}, {"format": ""},
    {"guided_json": None}, {"tools": []}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"},
    {"response_format": {"type": "text"}}, {"options": {}}, {"options": {"seed": -1, "top_k": -1}}, {"top_logprobs": 0},
    {"logprobs": False}, {"echo": False}, {"user": None}, {"bad_words": []}, {"min_tokens": 0}, {"ignore_eos": False},
    {"typical_p": 1}, {"presence_penalty": 0}, {"method_args": {}}, {"chat_template_kwargs": {}},
    {"stop_token_ids": []},
]


CLIENT = httpx.Client(timeout=60)


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[None]:
    yield
    CLIENT.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking(), max_tokens=60) as running:
        yield running


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with serving(speaking(), strict=True) as running:
        yield running


def post(server: Running, route: str, **given: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 20, "temperature": 0, **ROUTES[route][1], **given}
    return CLIENT.post(f"{server.url}/v1/{route}", content=json.dumps(body))


def texts(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [(one.get("text", one.get("message", {}).get("content")), one["finish_reason"])
            for one in answer.json()["choices"]]


def test_no_field_of_the_others_is_unknown() -> None:
    for server, names in NAMES.items():
        for kind, _ in ROUTES.values():
            assert not set(names.split()) - {*read_by(kind), *kind.unread}, server


def test_what_binds_an_answer_is_never_ignored() -> None:
    for kind, _ in ROUTES.values():
        assert not [name for name in BINDING.split() if isinstance(kind.unread.get(name), Ignored)]


def read_by(kind: type[Body]) -> set[str]:
    return {*kind.model_fields, "options"}  # the entries of that one are fields themselves


def of_kind(route: str, kind: type[Unread]) -> dict[str, Any]:
    return {name: field for name, field in ROUTES[route][0].unread.items() if isinstance(field, kind)}


@pytest.mark.parametrize("route", list(ROUTES))
def test_what_would_change_an_answer_is_refused_by_name(server: Running, strict: Running, route: str) -> None:
    refused = of_kind(route, Refused)
    for name, field in refused.items():
        for value in ("something", 17, {"a": "b"}, ["x"]):
            error = post(server, route, **{name: value}).json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            assert error["message"] == f"{name} is not supported: {field.note}"
    for place in range(3):
        asked = {name: ([*field.neutral, None, None, None])[place] for name, field in refused.items()}
        answer = post(strict, route, max_tokens=1, **asked)
        assert answer.status_code == 200 and IGNORED not in answer.headers, answer.text


@pytest.mark.parametrize("route", list(ROUTES))
def test_what_changes_nothing_is_named_in_a_header(server: Running, strict: Running, route: str) -> None:
    ignored, plain = of_kind(route, Ignored), texts(post(server, route))
    for first in range(0, len(ignored), 30):
        names = list(ignored)[first : first + 30]
        answer = post(server, route, **dict.fromkeys(names, "something"))
        assert texts(answer) == plain and urllib.parse.unquote(answer.headers[IGNORED]).split(", ") == names
    for name in ignored:
        assert post(strict, route, **{name: "something"}).json()["error"]["param"] == name
    for place in range(4):
        asked = {name: ([*field.neutral, None, None, None, None])[place] for name, field in ignored.items()}
        assert IGNORED not in post(strict, route, max_tokens=1, **asked).headers


@pytest.mark.parametrize(("route", "name"), [(route, name) for route, (kind, _) in ROUTES.items() for name in HONOURED
                                             if name in read_by(kind)], ids=str)
def test_what_is_honoured_does_what_it_says(server: Running, strict: Running, route: str, name: str) -> None:
    sent, same = HONOURED[name]
    for drawn in ({}, {"temperature": 1.0, "seed": 5}):
        found = texts(post(server, route, **{**drawn, **sent}))
        plain = {"max_new_tokens": 20, "temperature": 0.0, **drawn, **same.get("engine", {})}
        if "engine" in same:
            prompt = ASK if route.startswith("chat") else "Some words"
            result = server.engine.generate(prompt, **plain)
            assert found == [(result.text, result.finish_reason)]
        else:
            assert found == texts(post(server, route, **{**drawn, **same}))
    changed = [texts(post(server, route, **{**drawn, **sent})) != texts(post(server, route, **drawn))
               for drawn in ({}, {"temperature": 1.0, "seed": 5})]
    assert any(changed) or name in ("return_tokens_as_token_ids", "enable_thinking")
    assert IGNORED not in post(strict, route, **sent).headers


@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize("given", NEUTRAL, ids=str)
def test_values_that_ask_for_nothing_change_nothing(strict: Running, route: str, given: dict[str, Any]) -> None:
    if "chat_template_kwargs" in given and route == "completions":
        assert post(strict, route, **given).status_code == 200
    assert texts(post(strict, route, **given)) == texts(post(strict, route))


@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "give one"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag is not supported"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "whitespace_pattern"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "structured_outputs.choice is []"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs", "structured_outputs.regex is 3"),
        ({"structured_outputs": "a"}, "structured_outputs", "dictionary"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar", "give one"),
        ({"regex": "a", "guided_regex": "b"}, "regex", "give one"),
        ({"json_schema": "{"}, "json_schema", "no JSON"), ({"format": "yaml"}, "format", "must be json"),
        ({"format": {"type": 3}}, None, ""), ({"grammar": 3}, "grammar", "string"),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.3}, "repeat_penalty", "give one"),
        ({"n": 1, "n_cmpl": 2}, "n_cmpl", "give one"), ({"repeat_penalty": 0}, "repeat_penalty", "greater than 0"),
        ({"repeat_last_n": -2}, "repeat_last_n", "-1"), ({"typical_p": 0}, "typical_p", "greater than 0"),
        ({"options": 3}, "options", "object"), ({"options": {"options": {}}}, "options", "object"),
        ({"options": {"temperature": 1}}, "options", "options.temperature"),
        ({"options": {"mirostat": 2}}, "mirostat", "not supported"),
        ({"allowed_token_ids": [97]}, None, "0..96"), ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
        ({"bad_words": [" "]}, None, "no word"), ({"n_predict": -3}, "n_predict", "-2"),
        ({"logit_bias": [[1]]}, "logit_bias", ""), ({"logit_bias": {"5": True}}, "logit_bias", ""),
        ({"logit_bias": [["a", 1]]}, "logit_bias", ""),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", ""),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(
    server: Running, route: str, given: dict[str, Any], param: str | None, said: str
) -> None:
    answer = post(server, route, **given)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert param is None or str(answer.json()["error"]["param"]).startswith(param)


@pytest.mark.parametrize("route", list(ROUTES))
def test_a_bias_comes_in_pairs_too_and_false_bans(server: Running, route: str) -> None:
    plain = server.engine.generate(ASK if route.startswith("chat") else "Some words", max_new_tokens=20)
    first = plain.tokens[0]
    banned = texts(post(server, route, logit_bias=[[first, False]]))
    assert banned == texts(post(server, route, logit_bias={str(first): False})) == texts(
        post(server, route, logit_bias={str(first): -100})) != texts(post(server, route))
    assert texts(post(server, route, logit_bias=[[40, 100.0]])) == texts(post(server, route, logit_bias={"40": 100}))


def test_responses_take_them_too(server: Running) -> None:
    def respond(**given: Any) -> httpx.Response:
        body = {"model": MODEL, "input": "Hi", "max_output_tokens": 30, "temperature": 0, **given}
        return CLIENT.post(f"{server.url}/v1/responses", json=body)

    for given in ({"structured_outputs": {"choice": ["yes"]}}, {"grammar": 'root ::= "yes"'}, {"regex": "yes"},
                  {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"const": "yes"}}}}):
        said = respond(**given).json()["output"][0]["content"][0]["text"]
        assert said in ("yes", '"yes"')
    assert respond(max_output_tokens=10**6).json()["usage"]["output_tokens"] <= 60
    for name, value in (("mirostat", 2), ("lora", [{"id": 0}]), ("prompt_embeds", "x")):
        assert respond(**{name: value}).json()["error"]["param"] == name
    assert "priority" in respond(priority=3).headers[IGNORED]


@pytest.mark.parametrize("route", list(ROUTES))
def test_a_seed_of_minus_one_is_drawn(server: Running, route: str) -> None:
    drawn = {str(texts(post(server, route, temperature=1.5, seed=-1))) for _ in range(4)}
    assert len(drawn) > 1


def test_the_table_has_every_field_of_the_client() -> None:
    for kind, params in ((ChatBody, chat.CompletionCreateParamsBase),
                         (CompletionBody, completion.CompletionCreateParamsBase)):
        assert set(typing.get_type_hints(params)) | {"stream"} <= {*read_by(kind), *kind.unread}


def test_a_field_is_read_or_not() -> None:
    for kind, _ in ROUTES.values():
        assert not read_by(kind) & set(kind.unread)
    assert not {*ResponseBody.model_fields, *Extras.model_fields} & set(RESPONSES)


@pytest.mark.parametrize("name", ["unheard_of", "ä\n"])
def test_an_unknown_field_has_no_effect(server: Running, strict: Running, name: str) -> None:
    answer = post(server, "completions", **{name: {"a": "b"}})
    assert texts(answer) == texts(post(server, "completions")) and urllib.parse.unquote(answer.headers[IGNORED]) == name
    refused = post(strict, "completions", **{name: "something"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_field_without_effect_is_logged_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="shoal.serve"):
        for _ in range(3):
            post(server, "completions", nobody_knows=1)
    assert sum('"event": "ignored", "field": "nobody_knows"' in line for line in caplog.messages) == 1


def test_the_document_holds_the_fields() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference_server.md").read_text(encoding="utf-8")
    both, rest = page.split("## Responses")
    of_responses, of_messages = rest.split("## Messages")
    told = {(name, route): (answer, why) for name, where, answer, why in rows(both)
            for route in ("chat", "completions") if where.partition(",")[0] in (route, "both")}
    expected = {(name, route): said for route, kind in (("chat", ChatBody), ("completions", CompletionBody))
                for name, said in in_words(read_by(kind), kind.unread).items()}
    assert told.keys() == expected.keys()
    wrong = {place: said for place, said in expected.items() if said not in (told[place], (told[place][0], None))}
    assert not wrong, f"docs/reference_server.md says otherwise: {wrong}"
    alone = {name: field for name, field in RESPONSES.items() if ChatBody.unread.get(name) != field}
    listed = {name: (answer, why) for name, answer, why in rows(of_responses)}
    for name, said in in_words(set(ResponseBody.model_fields), RESPONSES).items():
        assert name in listed or name not in {*ResponseBody.model_fields, *alone}
        assert said in (listed.get(name, said), (listed.get(name, said)[0], None)), name
    for unread, read, part in ((MESSAGES, MessageBody, of_messages.partition("\n## ")[0]),
                               (OLLAMA, OllamaBody, page.split("\n## Ollama\n")[1].partition("\n## ")[0])):
        told_of = {name: (answer, why) for name, answer, why in rows(part)}
        own = {name: field for name, field in unread.items() if OF_PEERS.get(name) != field}
        expected_of = in_words(set(read.model_fields), own)
        assert told_of.keys() == expected_of.keys()
        assert all(said in (told_of[name], (told_of[name][0], None)) for name, said in expected_of.items())


def rows(page: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return [[name.strip("`"), *rest] for name, *rest in lines]


def in_words(read: set[str], unread: Mapping[str, Unread]) -> dict[str, tuple[str, str | None]]:
    """What the page says of each field: the answer, and why, which is free for those that are read."""
    said: dict[str, tuple[str, str | None]] = dict.fromkeys(read, ("honoured", None))
    for name, field in unread.items():
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
        refusal = f"400, unless {neutral}" if neutral else "400"
        said[name] = ("no effect" if isinstance(field, Ignored) else refusal, field.note)
    return said
