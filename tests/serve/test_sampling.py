"""Default sampling of requests over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import MODEL, Running, serving
from tool_tokenizer import speaking

PLAIN = {"model": MODEL, "prompt": "Some words", "max_tokens": 12}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}
MAKERS = {"temperature": 0.6, "top_p": 0.8, "top_k": 20}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking()) as running:
        yield running


@pytest.fixture(scope="module")
def makers() -> Iterator[Running]:
    """A server of a model whose makers recommend MAKERS."""
    engine = speaking()
    engine.sampling, engine.sampling_from = MAKERS, "files"
    with serving(engine) as running:
        yield running


def ask(server: Running, body: dict[str, Any], path: str = "completions", **more: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/{path}", json={**body, "metrics": True, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text(found: dict[str, Any]) -> str:
    return str(found["choices"][0]["text"])


def test_nobody_asked(server: Running) -> None:
    for more in ({}, {"temperature": None, "top_p": None}, {"presence_penalty": 0.0}):
        for body, path in ((PLAIN, "completions"), (CHAT, "chat/completions")):
            found = ask(server, body, path, **more)["metrics"]
            assert found["sampling"] == {"temperature": 0.7, "min_p": 0.05}
            assert 0 <= found["seed"] < 2**53
    assert len({ask(server, PLAIN)["metrics"]["seed"] for _ in range(3)}) == 3


def test_the_shown_seed_gives_the_same_answer_and_asks_for_nothing_else(server: Running) -> None:
    first = ask(server, PLAIN)
    again = ask(server, PLAIN, seed=first["metrics"]["seed"])
    assert text(again) == text(first) and again["metrics"]["sampling"] == first["metrics"]["sampling"]
    expected = server.engine.generate("Some words", max_new_tokens=12, temperature=0.7, min_p=0.05,
                                      seed=first["metrics"]["seed"])
    assert text(first) == expected.text


def test_a_seed_is_one_for_all_answers_of_a_request(server: Running) -> None:
    body = {**PLAIN, "prompt": ["Some words", "Other words"], "n": 2}
    first = ask(server, body)
    again = ask(server, body, seed=first["metrics"]["seed"])
    assert [choice["text"] for choice in again["choices"]] == [choice["text"] for choice in first["choices"]]


def test_the_models_makers_are_followed(makers: Running) -> None:
    assert ask(makers, PLAIN)["metrics"]["sampling"] == MAKERS
    assert ask(makers, PLAIN, seed=5)["metrics"]["sampling"] == MAKERS
    assert ask(makers, PLAIN, temperature=0.9)["metrics"]["sampling"] == {**MAKERS, "temperature": 0.9}
    assert ask(makers, PLAIN, top_p=1.0)["metrics"]["sampling"] == {"temperature": 0.6, "top_k": 20}
    props = httpx.get(f"{makers.url}/props").json()
    assert props["default_generation_settings"]["params"] == MAKERS
    assert props["default_generation_settings"]["params_from"] == "files"


def test_what_is_asked_for_without_recommendations(server: Running) -> None:
    assert ask(server, PLAIN, temperature=0.9)["metrics"]["sampling"] == {"temperature": 0.9}
    assert ask(server, PLAIN, top_p=0.5)["metrics"]["sampling"] == {"temperature": 1.0, "top_p": 0.5}
    props = httpx.get(f"{server.url}/props").json()
    assert props["default_generation_settings"]["params"] == {"temperature": 0.7, "min_p": 0.05}
    assert props["default_generation_settings"]["params_from"] == "default"


def test_temperature_0_is_greedy(makers: Running) -> None:
    expected = makers.engine.generate("Some words", max_new_tokens=12).text
    assert text(ask(makers, PLAIN, temperature=0)) == text(ask(makers, PLAIN, temperature=0, seed=5)) == expected


def test_responses_say_what_was_used(makers: Running) -> None:
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 4}
    found = httpx.post(f"{makers.url}/v1/responses", json=body, timeout=60).json()
    assert (found["temperature"], found["top_p"]) == (0.6, 0.8)


def test_a_stream_shows_it_on_the_chunk_of_usage(server: Running) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "metrics": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["metrics"]["sampling"] == {"temperature": 0.7, "min_p": 0.05} and events[-1]["metrics"]["seed"]
