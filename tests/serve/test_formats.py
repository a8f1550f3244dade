"""Formats, defaults, token routes and origins, with the official client, browsers and other servers' clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from pydantic import BaseModel

from serving import MODEL, Running, serving
from tool_tokenizer import ASK, speaking


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking()) as running:
        yield running


class Answer(BaseModel, extra="forbid"):
    warm: bool
    day: int | None


def ask(server: Running, **options: Any) -> Any:
    given = {"model": MODEL, "messages": ASK, "max_tokens": 400, "temperature": 0.7, "seed": 1, **options}
    return server.client().chat.completions.create(**given)


def test_an_answer_is_parsed_by_the_client(server: Running) -> None:
    parsed = server.client().chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Answer, max_tokens=400, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    assert parsed.choices[0].finish_reason == "stop"


FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": [1, True]}}}},
     r"\[\s*1\s*,\s*true\s*\]"),
    ({"response_format": {"type": "json_object", "schema": {"const": "x"}}}, '"x"'),
    ({"extra_body": {"guided_json": {"enum": ["p", "q"]}}}, '"[pq]"'),
    ({"extra_body": {"guided_json": '{"const": 7}'}}, "7"),
    ({"extra_body": {"guided_regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"extra_body": {"guided_grammar": 'root ::= "a" "b"'}}, "ab"),
    ({"extra_body": {"guided_choice": ["yes", 'n"o']}}, 'yes|n"o'),
    ({"response_format": {"type": "text"}, "extra_body": {"guided_regex": "c"}}, "c"),
]


@pytest.mark.parametrize(("given", "pattern"), FORMATS, ids=str)
def test_a_format_binds_whole_answers_and_streams(server: Running, given: dict[str, Any], pattern: str) -> None:
    whole = ask(server, **given).choices[0]
    assert re.fullmatch(pattern, whole.message.content) and whole.finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(server, **given, stream=True)]
    assert "".join(pieces) == whole.message.content


def test_a_json_object_is_one_and_a_cut_one_says_so(server: Running) -> None:
    cut = ask(server, response_format={"type": "json_object"}, max_tokens=1).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("{", "length")


def test_completions_are_bound_too_each_choice_for_itself(server: Running) -> None:
    answer = server.client().completions.create(
        model=MODEL, prompt=["a", "b"], n=2, seed=3, extra_body={"guided_choice": ["no", "yes"]}
    )
    assert {choice.text for choice in answer.choices} <= {"no", "yes"} and len(answer.choices) == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"response_format": {"type": "xml"}}, "must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "must be an object with a schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 3}}}, "an object, true"),
        ({"extra_body": {"guided_json": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"extra_body": {"guided_regex": "(a"}}, "unclosed group"),
        ({"extra_body": {"guided_regex": "a", "ignore_eos": True}}, "ignore_eos"),
        ({"extra_body": {"guided_regex": "a", "guided_grammar": "b"}}, "give one"),
    ],
    ids=str,
)
def test_what_cannot_be_met_is_400(server: Running, given: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        ask(server, **given)


def test_the_likeliest_of_several_answers_are_given(server: Running) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "Some words", "max_tokens": 6, "seed": 5, "logprobs": 0}
    made = server.client().completions.create(**options, n=4)
    scores = [sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs) for choice in made.choices]
    order = sorted(range(4), key=lambda place: -scores[place])
    best = server.client().completions.create(**options, n=2, best_of=4)
    assert [choice.text for choice in best.choices] == [made.choices[place].text for place in order[:2]]
    assert best.usage.completion_tokens == made.usage.completion_tokens
    del options["logprobs"]
    plain = server.client().completions.create(**options, n=2, best_of=4, extra_body={"steps": True})
    assert [choice.text for choice in plain.choices] == [choice.text for choice in best.choices]
    assert all(choice.logprobs is None and choice.steps for choice in plain.choices)


def test_an_echoed_prompt_has_log_probabilities_of_its_own(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = server.engine.tokenizer("Some words")["input_ids"]
    logs = server.engine.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(logs[place, token]) for place, token in enumerate(ids[1:])]
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "temperature": 0, "logprobs": 2}
    for chunk in (1000, 4):
        monkeypatch.setattr(server.engine.runner, "prefill_chunk", chunk)
        for prompt in ("Some words", ids):
            choice = server.client().completions.create(**options, prompt=prompt, echo=True).choices[0]
            plain = server.client().completions.create(**options, prompt=prompt).choices[0]
            found = choice.logprobs
            assert choice.text == "Some words" + plain.text
            assert "".join(found.tokens[: len(ids)]) == "Some words" and found.text_offset[1] == 1
            assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
            assert found.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-6)
            assert found.token_logprobs[len(ids) :] == pytest.approx(plain.logprobs.token_logprobs)
            for token, own, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[1:]:
                assert top[token] == own and 2 <= len(top) <= 3
    stream = server.client().completions.create(**options, prompt="Some words", echo=True, stream=True)
    scored = [piece.choices[0].logprobs for piece in stream if piece.choices[0].logprobs]
    told = [value for one in scored for value in one.token_logprobs]
    assert told[1:] == pytest.approx(found.token_logprobs[1:])


def test_guesses_are_counted_in_the_usage(server: Running) -> None:
    extra = {"method": "prompt_lookup", "method_args": {"min_ngram": 1}}
    usage = ask(server, messages=[{"role": "user", "content": "ab" * 9}], temperature=0, extra_body=extra).usage
    kept, lost = (getattr(usage.completion_tokens_details, f"{kind}_prediction_tokens")
                  for kind in ("accepted", "rejected"))
    assert usage.draft_n == kept + lost > 0 and usage.draft_n_accepted == kept
    assert ask(server, max_tokens=3, extra_body={"method": "full"}).usage.completion_tokens_details is None


def test_the_models_own_sampling_is_the_default() -> None:
    engine = speaking()
    engine.sampling = {"temperature": 0.0, "repetition_penalty": 1.8}
    with serving(engine) as server:
        client, options = server.client(), {"model": MODEL, "prompt": "Some words", "max_tokens": 12}
        expected = engine.generate("Some words", max_new_tokens=12, repetition_penalty=1.8).text
        assert client.completions.create(**options).choices[0].text == expected
        plain = engine.generate("Some words", max_new_tokens=12).text
        given = client.completions.create(**options, extra_body={"repetition_penalty": 1.0})
        assert given.choices[0].text == plain != expected
        assert httpx.get(f"{server.url}/props").json()["default_generation_settings"]["params"] == engine.sampling


def test_words_in_the_forms_of_vllm_and_llama_cpp(server: Running) -> None:
    words, url = server.engine.tokenizer, server.url
    ids = words("Some words")["input_ids"]
    for name in ("prompt", "content"):
        found = httpx.post(f"{url}/tokenize", json={name: "Some words", "model": MODEL, "add_special": True}).json()
        assert found == {"tokens": ids, "count": len(ids), "max_model_len": server.engine.runner.max_positions}
    chat = httpx.post(f"{url}/tokenize", json={"messages": ASK}).json()["tokens"]
    assert chat == words.apply_chat_template(ASK, add_generation_prompt=True, tokenize=True, return_dict=False)
    back = httpx.post(f"{url}/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": "Some words", "content": "Some words"}
    assert httpx.post(f"{url}/tokenize", json={"content": ""}).json()["tokens"] == []
    for route, body in (("tokenize", {}), ("tokenize", {"prompt": "a", "content": "b"}), ("tokenize", {"prompt": 3}),
                        ("detokenize", {}), ("detokenize", {"tokens": [97]}), ("detokenize", {"tokens": "a"}),
                        ("tokenize", {"messages": [{"role": "judge", "content": "x"}]})):
        assert httpx.post(f"{url}/{route}", json=body).status_code == 400


def test_props_tell_of_the_model_and_its_card(server: Running) -> None:
    found = httpx.get(f"{server.url}/props").json()
    assert (found["model_alias"], found["num_layers"], found["total_slots"]) == (MODEL, 2, 16)
    assert found["chat_template"] == server.engine.tokenizer.chat_template
    assert found["card"] == {"layer_scores": {}, "order": None, "bears": None, "skips": None, "origin": ""}


@pytest.mark.parametrize(
    ("origins", "origin", "may"),
    [
        ((), "http://localhost:3000", True), ((), "http://127.0.0.1", True), ((), "https://example.org", False),
        ((), "http://localhost.example.org", False), (("https://example.org",), "https://example.org", True),
        (("https://example.org",), "https://example.com", False), (("*",), "https://example.com", True),
    ],
)
def test_pages_that_may_ask(origins: tuple[str, ...], origin: str, may: bool) -> None:
    with serving(speaking(), cors_origins=origins, api_keys=("key",)) as server:
        asked = {"origin": origin, "access-control-request-method": "POST",
                 "access-control-request-headers": "authorization, content-type"}
        leave = httpx.options(f"{server.url}/v1/chat/completions", headers=asked)
        assert (leave.status_code == 200) == may
        answer = httpx.get(f"{server.url}/v1/models", headers={"origin": origin, "authorization": "Bearer key"})
        assert (answer.headers.get("access-control-allow-origin") in (origin, "*")) == may
        assert httpx.get(f"{server.url}/props", headers={"origin": origin}).status_code == 401
        assert json.loads(answer.text)["data"][0]["id"] == MODEL
