"""A request's limits are upper bounds, so one beyond the server's is capped; and scoring of a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import MODEL, Running, serving, tiny_engine

CONTEXT = 512
"""Of the tiny models."""
ROUTES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}]}, "completions": {"prompt": "Some words"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine(), max_tokens=40, default_max_tokens=12) as running:
        yield running


@pytest.fixture(scope="module")
def wide() -> Iterator[Running]:
    with serving(tiny_engine(), max_tokens=100_000) as running:
        yield running


def post(server: Running, route: str, **given: Any) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, **ROUTES[route], **given}
    return httpx.post(f"{server.url}/v1/{route}", content=json.dumps(body), timeout=60)


@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"max_tokens": 41}, 40), ({"max_tokens": 10**30}, 40), ({"max_tokens": -1}, 40), ({"max_tokens": -2}, 40),
        ({"n_predict": -1}, 40), ({"max_completion_tokens": 10**6}, 40), ({"max_tokens": 3, "num_predict": -1}, 3),
        ({"max_tokens": 9, "max_completion_tokens": 4}, 4), ({"max_tokens": 5, "max_completion_tokens": 99}, 5),
    ],
    ids=str,
)
def test_a_limit_beyond_the_servers_is_the_servers(
    server: Running, route: str, given: dict[str, Any], made: int
) -> None:
    answer = post(server, route, **given).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (made, "length")


def test_without_a_limit_answers_have_the_servers_default(server: Running) -> None:
    assert post(server, "chat/completions").json()["usage"]["completion_tokens"] == 12
    assert post(server, "completions").json()["usage"]["completion_tokens"] == 16
    with serving(tiny_engine(), max_tokens=5) as small:  # the default is a limit, too, and no demand
        assert post(small, "chat/completions").json()["usage"]["completion_tokens"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("route", list(ROUTES))
def test_a_limit_beyond_the_context_is_the_contexts(wide: Running, route: str) -> None:
    usages = []
    for limit in (100_000, -1):
        answer = post(wide, route, max_tokens=limit, ignore_eos=True).json()
        usages.append(answer["usage"])
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == CONTEXT
    for room in (1, 2):
        body = {"prompt": [20] * (CONTEXT - room)} if route == "completions" else {
            "messages": [{"role": "user", "content": "a" * (CONTEXT - 3 - room)}]}
        answer = post(wide, route, **body, max_tokens=7).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (room, "length")
    body = {"prompt": [20] * CONTEXT} if route == "completions" else {
        "messages": [{"role": "user", "content": "a" * CONTEXT}]}
    error = post(wide, route, **body, max_tokens=1)
    assert error.status_code == 400 and error.json()["error"]["code"] == "context_length_exceeded"


def test_many_stop_strings_each_stop(server: Running) -> None:
    plain = server.engine.generate("Some words", max_new_tokens=40).text
    for count in (5, 60, 256):
        stops = [plain[9:12], *(f"never {number}" for number in range(count - 1))]
        assert post(server, "completions", max_tokens=40, stop=stops).json()["choices"][0]["text"] == plain[
            : plain.index(plain[9:12])]
    assert "up to 256" in post(server, "completions", stop=["a"] * 257).json()["error"]["message"]


@pytest.mark.parametrize("prompt", ["Some words", [20, 21, 22], ["Some", "words and more"], [[20], [21, 22]]], ids=str)
def test_a_text_is_scored_without_an_answer(server: Running, prompt: Any) -> None:
    """As evaluation harnesses request it."""
    given = {"prompt": prompt, "echo": True, "logprobs": 2}
    scored, longer = (post(server, "completions", **given, max_tokens=limit).json() for limit in (0, 1))
    for one, more in zip(scored["choices"], longer["choices"], strict=True):
        read = len(one["logprobs"]["tokens"])
        assert more["text"].startswith(one["text"]) and len(more["logprobs"]["tokens"]) == read + 1
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert one["logprobs"][name] == more["logprobs"][name][:read]
        assert one["finish_reason"] == "length"
    usage = scored["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, longer["usage"]["prompt_tokens"])
    raw = post(server, "completions", **given, max_tokens=0, stream=True, stream_options={"include_usage": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n")[:-2]]
    assert raw.endswith("data: [DONE]\n\n") and [one["choices"][0] for one in events[:-1]] == scored["choices"]
    assert events[-1]["usage"] == usage


def test_nothing_is_made_where_nothing_is_asked_for(server: Running) -> None:
    plain = post(server, "completions", max_tokens=0).json()["choices"]
    assert plain == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
    assert post(server, "completions", max_tokens=0, n=2, echo=True).json()["choices"][1]["text"] == "Some words"
    whole = post(server, "completions", max_tokens=0, echo=True, logprobs=0, prompt=[20] * CONTEXT)
    assert len(whole.json()["choices"][0]["logprobs"]["tokens"]) == CONTEXT  # an answer needs no room
    for given in ({"metrics": True}, {"steps": True}, {"prompt": ""}, {"prompt": [97]},
                  {"echo": True, "logprobs": 0, "prompt": [20] * (CONTEXT + 1)}):
        assert post(server, "completions", max_tokens=0, **given).status_code == 400
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        error = post(server, "chat/completions", **{name: 0})
        assert error.status_code == 400 and error.json()["error"]["param"] == name


def test_the_first_of_the_likeliest_tokens_alone(server: Running) -> None:
    """A `top_p` of 0 is allowed, as by OpenAI."""
    drawn = post(server, "completions", temperature=1.5, top_p=0).json()["choices"][0]["text"]
    assert drawn == post(server, "completions").json()["choices"][0]["text"]


def test_usage_of_each_chunk(server: Running) -> None:
    for route in ROUTES:
        options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
        raw = post(server, route, max_tokens=6, stream=True, stream_options=options).text
        events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n")[:-2]]
        made = [one["usage"]["completion_tokens"] for one in events if one["usage"]]
        assert made == sorted(made) and made[-1] == 6 and len(made) > 3
        off = {"include_usage": False, "continuous_usage_stats": False, "x": None}
        assert '"usage"' not in post(server, route, max_tokens=2, stream=True, stream_options=off).text
