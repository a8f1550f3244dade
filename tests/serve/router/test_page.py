"""The page with several models, in a real browser: its choice lists them, and answers come from the chosen one."""

from __future__ import annotations

from typing import Any

import pytest

from chat_page import ChatPage
from chat_tokenizer import chat_tokenizer
from families import tiny
from serving import routing, wait
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for

pytestmark = pytest.mark.browser


def make(name: str) -> Engine:
    return engine_for(tiny("llama", seed=ord(name), layers=2), chat_tokenizer(), name=name)


def test_a_chosen_model_is_loaded_and_answers(driver: Any) -> None:
    with routing({name: lambda name=name: make(name) for name in "ab"}) as server:  # type: ignore[misc]
        page = ChatPage(driver, server)
        assert [one.get_attribute("value") for one in page.all("#chat-model option")] == ["a", "b"]
        assert "a ·" in page.by("model").text and server.shelf.get("b").state == "unloaded"
        page.click("#show-options")
        page.ask("document.getElementById('chat-model').value = 'b'; document.getElementById('options').close()")
        wait(lambda: "b ·" in page.by("model").text)
        page.say("Hello")
        assert page.ask("return window.sent.at(-1).model") == "b" and server.shelf.get("b").state == "loaded"
        page.open()  # which remembers the choice
        assert "b ·" in page.by("model").text
