"""The page's chat in a real browser: from the first question to branches, storage, files, keys and languages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import resize
from chat_page import ChatPage, axe, conversation
from serving import MODEL, Running, serving, tiny_engine, wait

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine()) as running:
        yield running


@pytest.fixture
def page(driver: Any, server: Running) -> Iterator[ChatPage]:
    opened = ChatPage(driver, server)
    driver.get_log("browser")
    yield opened
    assert not driver.get_log("browser"), "the console has complaints"


def key(name: str) -> str:
    from selenium.webdriver.common.keys import Keys

    return str(getattr(Keys, name))


def test_the_first_answer_is_two_actions_away(page: ChatPage) -> None:
    """Typing and Enter: nothing has to be clicked or chosen, and no method is named."""
    page.keys("Hi")
    page.keys(key("ENTER"))
    page.done()
    talk = page.server.engine.session(max_new_tokens=24)
    assert page.answer == talk.send("Hi").text
    (body,) = page.sent
    assert {name: body[name] for name in ("model", "messages", "max_tokens")} == {
        "model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24}
    assert not {"method", "temperature", "top_p", "seed"} & set(body)
    figures = page.all(".figures")[-1].text
    assert "tokens/s · 24 tokens" in figures and figures.endswith("cut off at the limit of tokens")
    assert page.say("More") == talk.send("More").text


def test_an_answer_streams_stops_and_goes_on(driver: Any, server: Running) -> None:
    page = ChatPage(driver, server, max_tokens=400)
    page.ask("""window.counts = []; new MutationObserver(() => window.counts.push(
        document.querySelector('.assistant .markdown:not(.thoughts *)')?.textContent.length ?? 0))
        .observe(document.getElementById('messages'), {childList: true, subtree: true})""")
    page.keys("Hi", key("ENTER"))
    wait(lambda: len(set(page.ask("return window.counts"))) > 3)
    page.keys(key("ESCAPE"))
    page.done()
    wait(lambda: server.scheduler.running == 0)
    before = page.answer
    assert 0 < len(before) < 400 and page.all(".figures")[-1].text == "stopped"
    page.click(".go_on")
    page.done()
    assert page.answer.startswith(before) and len(page.answer) > len(before)
    assert page.sent[-1]["messages"][-1] == {"role": "assistant", "content": before}


def test_what_was_deleted_during_its_answer_stays_so(driver: Any, server: Running) -> None:
    page = ChatPage(driver, server, max_tokens=400)
    with server.engine.turn():  # so that no answer ends before its conversation does
        page.keys("Hi", key("ENTER"))
        wait(lambda: page.busy and page.all("#list .remove"))
        page.click("#list .remove")
        driver.switch_to.alert.accept()
    wait(lambda: server.scheduler.running == 0 and not page.busy)
    page.open()
    assert not page.all(".pick")


def test_what_drafting_saved_is_told(driver: Any, server: Running) -> None:
    page = ChatPage(driver, server, **{"shoal.settings": {"max_tokens": 60, "method": "d3_spec"}})
    page.say("Hi")
    assert page.sent[-1]["method"] == "d3_spec"
    kept = page.conversation["messages"][-1]["figures"]["kept"]
    assert kept > 0 and f"guesses saved {kept} of 60 steps" in page.all(".figures")[-1].text


def test_answers_and_edits_are_branches(page: ChatPage) -> None:
    first = page.say("one")
    page.click(".again")
    page.done()
    assert page.all(".assistant .place")[-1].text == "2 of 2" and len(page.all("#messages > li")) == 2
    page.say("two")
    page.click(".assistant:nth-child(2) .earlier")
    assert len(page.all("#messages > li")) == 2, "what was said after the other branch is still on screen"
    page.click(".later")
    assert len(page.all("#messages > li")) == 4
    page.click(".user:first-child .edit")
    page.keys(key("END"), " more", key("ENTER"))
    page.done()
    assert page.sent[-1]["messages"] == [{"role": "user", "content": "one more"}]
    assert page.answer == page.server.engine.session(max_new_tokens=24).send("one more").text
    assert page.all(".user .place")[0].text == "2 of 2"
    page.click(".user:first-child .earlier")
    assert [one.text for one in page.all(".typed")] == ["one", "two"]
    page.say("three")
    said = [one["content"] for one in page.sent[-1]["messages"]]
    assert said[:3] == ["one", first, "two"] and said[-1] == "three"


def test_an_edit_can_be_given_up(page: ChatPage) -> None:
    page.say("one")
    page.keys(key("ARROW_UP"))
    assert page.ask("return document.activeElement.value") == "one"
    page.keys("x", key("ESCAPE"))
    assert [one.text for one in page.all(".typed")] == ["one"] and len(page.sent) == 1


def test_conversations_stay_in_the_browser(page: ChatPage) -> None:
    page.say("first talk")
    page.by("new").click()
    page.say("second talk")
    page.open()
    assert [one.text for one in page.all(".pick")] == ["second talk", "first talk"]
    page.all(".pick")[1].click()
    assert [one.text for one in page.all(".typed")] == ["first talk"]
    page.all("#list .remove")[1].click()
    page.driver.switch_to.alert.dismiss()
    assert len(page.all(".pick")) == 2
    page.all("#list .remove")[1].click()
    page.driver.switch_to.alert.accept()
    assert [one.text for one in page.all(".pick")] == ["second talk"] and not page.all(".typed")
    assert page.ask("return Object.keys(localStorage).filter((one) => one.startsWith('shoal.chat.')).length") == 1


def test_a_full_storage_is_said(page: ChatPage) -> None:
    page.ask("Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); }")
    page.keys("Hi", key("ENTER"))
    page.done()
    assert "no room" in page.by("chat-error").text and page.all(".assistant .markdown")[-1].text


def test_settings_reach_the_request(page: ChatPage) -> None:
    page.by("show-options").click()
    for name, text in (("system", "Be brief."), ("chat-temperature", "0.5"), ("top-p", "0.9"), ("chat-seed", "7")):
        page.by(name).send_keys(text)
    page.click("#chat-method option[value=full]")
    page.keys(key("ESCAPE"))
    page.say("Hi")
    body = page.sent[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_p"], body["seed"], body["method"]) == (0.5, 0.9, 7, "full")
    page.open()
    assert page.by("chat-temperature").get_attribute("value") == "0.5"
    page.by("show-options").click()
    page.by("chat-temperature").clear()
    page.by("chat-temperature").send_keys("9")
    page.click("#options [type=submit]")
    assert page.ask("return document.getElementById('options').open"), "a temperature of 9 was taken"
    page.keys(key("ESCAPE"))
    assert page.by("chat-temperature").get_attribute("value") == ""


def test_a_conversation_is_exported(page: ChatPage) -> None:
    import json

    answer = page.say("one")
    for name in ("as-markdown", "as-json"):
        page.click("#export summary")
        page.by(name).click()
    wait(lambda: len(page.ask("return window.made")) == 2)
    markdown, whole = page.ask("return window.made")
    assert markdown == f"# one\n\n## You\n\none\n\n## Answer\n\n{answer.strip()}\n"
    assert json.loads(whole) == page.conversation


def test_copying_gives_the_source(page: ChatPage) -> None:
    page.ask("""window.copied = [];
        navigator.clipboard.writeText = (text) => { window.copied.push(text); return Promise.resolve(); }""")
    answer = page.say("one")
    page.click(".assistant .copy")
    wait(lambda: page.all(".assistant .copy")[-1].text == "Copied")
    assert page.ask("return window.copied") == [answer]


def test_an_error_is_said_and_asked_again(page: ChatPage) -> None:
    page.ask("window.kept = window.fetch; window.fetch = () => Promise.reject(new TypeError('no'))")
    page.keys("Hi", key("ENTER"))
    wait(lambda: page.by("chat-retry").is_displayed())
    assert "does not answer" in page.by("chat-error").text
    page.ask("window.fetch = window.kept")
    page.by("chat-retry").click()
    wait(lambda: not page.by("chat-retry").is_displayed())
    page.done()
    assert page.answer and page.by("chat-error").text == ""


@pytest.mark.parametrize("kept", [
    "null", '{"id": 3}', '{"id": "x", "title": "<img>", "system": "", "when": 1, "leaf": 0, "messages": '
    '[{"id": 0, "parent": 0, "role": "user", "content": ""}]}',
])
def test_storage_that_was_tampered_with_does_no_harm(page: ChatPage, kept: str) -> None:
    for name in ("shoal.chat.x", "shoal.settings"):
        page.ask("localStorage.setItem(...arguments)", name, kept)
    page.open()
    assert not page.all(".pick")
    assert page.say("Hi")


def test_files_go_with_a_message(page: ChatPage, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('```')\n")
    (tmp_path / "b.png").write_bytes(b"\x89PNG")
    (tmp_path / "c.bin").write_bytes(b"\xff\x00")
    (tmp_path / "d.txt").write_text("x" * 300_000)
    told = {"b.png": "a picture", "c.bin": "no text file", "d.txt": "293 kB; a file may have up to 256 kB"}
    for name, why in told.items():
        page.by("file").send_keys(str(tmp_path / name))
        wait(lambda why=why: why in page.by("chat-error").text)
    page.by("file").send_keys(str(tmp_path / "a.py"))
    wait(lambda: [one.text for one in page.all("#attached li")] == ["a.py×"])
    page.say("What?")
    assert page.sent[-1]["messages"][0]["content"] == "a.py:\n````\nprint('```')\n````\n\nWhat?"
    assert not page.all("#attached li")


def test_files_are_dropped(page: ChatPage) -> None:
    page.ask("""const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File(['text'], 'dropped.txt', {type: 'text/plain'}));
        document.getElementById('thread').dispatchEvent(
            new DragEvent('drop', {bubbles: true, cancelable: true, dataTransfer}))""")
    wait(lambda: [one.text for one in page.all("#attached li")] == ["dropped.txt×"])


def test_thoughts_are_folded_and_not_sent(driver: Any, server: Running) -> None:
    held = conversation("one", "<think>hidden **step**</think>The answer", "two", "Plain")
    held["messages"][3]["thoughts"] = "told apart"
    page = ChatPage(driver, server, **{"shoal.chat.kept": held})
    page.all(".pick")[0].click()
    first, second = page.all(".assistant")
    assert [one.find_element("tag name", "summary").text for one in (first, second)] == ["Thoughts", "Thoughts"]
    assert "hidden" not in first.text and "The answer" in first.text and "told apart" not in second.text
    first.find_element("tag name", "summary").click()
    assert "hidden step" in first.text
    page.say("three")
    said = [one["content"] for one in page.sent[-1]["messages"]]
    assert said == ["one", "The answer", "two", "Plain", "three"]


def test_the_key_is_asked_for_and_not_kept(driver: Any) -> None:
    with serving(tiny_engine(), api_keys=("right",)) as server:
        driver.get("about:blank")
        driver.get(server.url)
        wait(lambda: driver.find_element("id", "key-form").is_displayed())
        driver.find_element("id", "key").send_keys("right\n")
        wait(lambda: driver.execute_script("return document.getElementById('model').textContent.includes('layers')"))
        driver.find_element("id", "ask").send_keys("Hi\n")
        wait(lambda: driver.find_elements("css selector", ".again"))
        assert "right" not in driver.execute_script("return JSON.stringify(localStorage) + document.cookie")
        driver.get_log("browser")


def test_everything_can_be_done_from_the_keyboard(page: ChatPage) -> None:
    """Tab reaches every button and field that is on screen; arrows change the view."""
    page.say("one")
    wanted = {"tab-chat", "new", "pick", "remove", "show-options", "thread", "copy", "edit", "again", "go_on",
              "attach", "ask", "send"}
    seen = set()
    for _ in range(30):
        page.keys(key("TAB"))
        seen.add(page.ask("return document.activeElement.id || document.activeElement.className"))
    assert wanted <= seen, wanted - seen
    page.by("tab-chat").send_keys(key("ARROW_RIGHT"))
    assert page.by("comparison").is_displayed() and not page.by("chat").is_displayed()
    page.driver.back()
    wait(lambda: page.by("chat").is_displayed())


def test_the_language_is_chosen_and_kept(page: ChatPage) -> None:
    page.say("one")
    page.by("show-options").click()
    page.click("#page-language option[value=de]")
    page.keys(key("ESCAPE"))
    assert page.by("new").text == "Neues Gespräch" and page.all(".again")[0].text == "Neu antworten"
    page.open()
    assert page.ask("return document.documentElement.lang") == "de" and page.by("send").text == "Senden"


def test_languages_have_the_same_texts(page: ChatPage) -> None:
    """Every text in every language, with the same values in it, and every text that the markup names."""
    texts = page.driver.execute_async_script(
        "const done = arguments[0]; import(new URL('page/strings.js', location)).then(({ STRINGS }) => done(STRINGS))")
    import re

    values = {name: {key: sorted(re.findall(r"\{(\w+)\}", text)) for key, text in own.items()}
              for name, own in texts.items()}
    assert len(values) >= 2 and all(one == values["en"] for one in values.values())
    named = page.ask("""return [...document.querySelectorAll('*')].flatMap((one) =>
        [one.dataset.t, one.dataset.tLabel, one.dataset.tHint].filter(Boolean))""")
    assert set(named) <= set(texts["en"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nobody_is_kept_out(driver: Any, server: Running, scheme: str, width: int) -> None:
    """axe-core finds no accessibility problem: empty, with every kind of block, in the settings, in the list."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    rich = ("# Head\n\n- a `b` **c**\n\n> q ~~s~~\n\n```python\n# c\nx = 'y' + 1\nreturn " + "z" * 200
            + "\n```\n\n| a | b |\n|---|---|\n| " + "1" * 80 + " | 2 |\n\n[there](http://example.com/) \u202e")
    page = ChatPage(driver, server, **{"shoal.chat.kept": conversation("one" * 50, f"<think>hm</think>{rich}")})
    resize(driver, width, 780)
    assert axe(driver) == []
    page.ask("document.querySelector('.pick').click(); document.querySelector('.thoughts').open = true")
    page.ask("document.getElementById('chat-error').textContent = 'Some trouble'")
    page.ask("document.body.classList.add('listing')")
    assert axe(driver) == []
    page.ask("document.body.classList.remove('listing'); document.getElementById('show-options').click()")
    assert axe(driver) == []
    assert page.ask("return document.documentElement.scrollWidth") <= width
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_on_a_phone_the_answer_fills_the_screen(driver: Any, server: Running) -> None:
    """The list is folded away, and the field stays at the foot."""
    page = ChatPage(driver, server, **{"shoal.chat.kept": conversation("one", "word " * 900)})
    resize(driver, 390, 780)
    assert not page.by("conversations").is_displayed()
    page.by("show-list").click()
    page.all(".pick")[0].click()
    assert not page.by("conversations").is_displayed()
    thread, field = (page.by(name).rect for name in ("thread", "field"))
    assert thread["height"] > 500 and field["y"] + field["height"] <= 780
    assert page.all(".again")[0].is_displayed()
