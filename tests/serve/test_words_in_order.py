"""A request for words as they are decided, where they are decided in order or the answer comes whole."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from serving import MODEL, Running, serving, tiny_engine
from shoal.engine.scheduling.scheduler import Scheduler

BODY = {"model": MODEL, "prompt": "Hi", "canvas": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine()) as running:
        yield running


def test_words_that_come_in_order_are_no_canvas(server: Running) -> None:
    body = {**BODY, "stream": True, "steps": True, "max_tokens": 12}
    said = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text
    assert said.endswith("data: [DONE]\n\n") and '"steps"' in said and '"canvas"' not in said


def test_a_whole_answer_has_no_canvas(server: Running) -> None:
    refused = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
    assert refused.status_code == 400 and "stream" in refused.json()["error"]["message"]


def test_who_iterates_cannot_ask_for_it() -> None:
    with Scheduler(tiny_engine(), start=False) as scheduler, pytest.raises(ValueError, match="deliver"):
        scheduler.submit("Hi", canvas=True)
