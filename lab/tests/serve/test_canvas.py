"""Tokens decided in any order, as a client and the page receive them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import shoal
from browser import browser, resize
from chat_tokenizer import chat_tokenizer
from masked import masked_model
from serving import MODEL, Running, serving, wait
from shoal.engine.loading.load import engine_for

HUB = Path(__file__).resolve().parents[3] / "hub" / "shoal-canvas"
PROMPT = "shuffle : ann bob cid dee ="


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(engine_for(masked_model(), chat_tokenizer(), name=MODEL), method="diffusion") as running:
        yield running


def choices(server: Running, **fields: Any) -> list[dict[str, Any]]:
    """The choices of all chunks of a stream, in order."""
    chat = "messages" in fields
    path = "chat/completions" if chat else "completions"
    body = {"model": MODEL, "temperature": 0, "stream": True, "steps": True, "max_tokens": 12,
            **({} if chat else {"prompt": "Some words"}), **fields}
    with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("fields", [{}, {"messages": [{"role": "user", "content": "Hi"}]}, {"n": 3, "temperature": 1}],
                         ids=["completion", "chat", "three"])
def test_every_word_comes_once_and_is_the_answer(server: Running, fields: dict[str, Any]) -> None:
    said = choices(server, canvas=True, method="diffusion", method_args={"steps": 6}, ignore_eos=True, **fields)
    vocabulary = server.engine.tokenizer
    for index in range(fields.get("n", 1)):
        own = [choice for choice in said if choice["index"] == index]
        decided = [word for choice in own for word in choice.get("canvas", ())]
        tokens = {step["index"]: step["token"] for choice in own for step in choice.get("steps", ())}
        assert sorted(place for place, _, _ in decided) == sorted(tokens) == list(range(12))
        assert {place: text for place, text, _ in decided} == {
            place: vocabulary.decode([token], skip_special_tokens=False) for place, token in tokens.items()}
        assert [step for _, _, step in decided] == [step for step in range(6) for _ in range(2)]
        assert [place for place, _, _ in decided] != list(range(12)), "they came from left to right"
        before = set()
        for choice in own:  # a token is announced before it is text
            before |= {place for place, _, _ in choice.get("canvas", ())}
            assert {step["index"] for step in choice.get("steps", ())} <= before


def test_who_does_not_ask_is_told_of_words_in_order_alone(server: Running) -> None:
    said = choices(server, method="diffusion", method_args={"steps": 6})
    assert not [choice for choice in said if "canvas" in choice]


@pytest.mark.browser
def test_the_page_shows_words_where_they_stand() -> None:
    """The shipped model shuffles names: the boxes fill in another order than the text's."""
    engine = shoal.load(HUB, dtype="float32")
    with browser() as driver, serving(engine, method="diffusion") as running:
        resize(driver, 1280, 900)
        driver.get(f"{running.url}/#view=compare")
        wait(lambda: driver.execute_script("return document.getElementById('model').textContent.includes('layers')"))
        driver.execute_script("document.getElementById('settings').open = true")
        for name, text in (("prompt", PROMPT), ("tokens", "8")):
            driver.find_element("id", name).clear()
            driver.find_element("id", name).send_keys(text)
        driver.execute_script("""window.seen = [];
            new MutationObserver(() => window.seen.push([...document.querySelectorAll('.boxes span')].map(
                (box) => box.textContent))).observe(document.body, {childList: true, subtree: true})""")
        driver.find_element("id", "run").click()
        wait(lambda: driver.find_element("id", "run").is_enabled())
        boxes = driver.execute_script("""return [...document.querySelectorAll('.boxes span')].map(
            (box) => [box.textContent, box.step, box.classList.contains('beyond'),
                getComputedStyle(box).backgroundColor])""")
        assert not driver.find_element("id", "picture").is_displayed(), "depth means nothing here"
        seen = driver.execute_script("return window.seen")
        answer = engine.generate(PROMPT, max_new_tokens=8, method="diffusion")
        text = driver.find_element("css selector", ".text").text
        assert not driver.get_log("browser"), "the console has complaints"
    words = [word for word, _, beyond, _ in boxes if not beyond]
    assert len(boxes) == 8 and len(words) == len(answer.tokens)
    assert text.split() == answer.text.split() == words[: len(answer.text.split())]
    order = [step for _, step, _, _ in boxes]
    assert sorted(order) == list(range(8)) != order
    assert len({colour for *_, colour in boxes}) == 8
    gaps = [row for row in seen if any(not one and then for one, then in zip(row, row[1:], strict=False))]
    assert gaps, "no word was ever seen before one on its left"
