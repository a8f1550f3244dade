"""Pictures on the page's chat, in a browser, with a tiny model that sees."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import seers
from chat_page import ChatPage, axe, conversation
from serving import Running, serving, wait

pytestmark = pytest.mark.browser
IMAGE = seers.picture(5, 60, 40)
SIZES = "return [...document.querySelectorAll(arguments[0])].map((one) => [one.width, one.height])"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(seers.engine(tmp_path_factory.mktemp("seer")), max_pictures=4 << 20) as running:
        yield running


@pytest.fixture
def page(driver: Any, server: Running) -> Iterator[ChatPage]:
    opened = ChatPage(driver, server, max_tokens=8)
    driver.get_log("browser")
    yield opened
    assert not driver.get_log("browser"), "the console has complaints"


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    path = tmp_path / "a [cat].png"
    path.write_bytes(seers.file_of(IMAGE))
    return path


def attach(page: ChatPage, path: Path) -> None:
    page.by("file").send_keys(str(path))
    wait(lambda: [one.text for one in page.all("#attached li")] == [f"{path.name}×"])


def shown(page: ChatPage, selector: str, *sizes: tuple[int, int]) -> None:
    """Wait until pictures of these sizes are drawn."""
    wait(lambda: page.ask(SIZES, selector) == [list(size) for size in sizes])


def decoded(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_a_picture_goes_with_a_message(page: ChatPage, cat: Path) -> None:
    attach(page, cat)
    shown(page, "#attached .thumbnail", (60, 40))
    page.say("What?")
    assert page.sent[-1]["messages"] == [seers.said(IMAGE, "What?")]
    assert not page.all("#attached li")
    shown(page, ".user .thumbnail", (60, 40))
    assert [one.get_attribute("aria-label") for one in page.all(".user .thumbnail")] == [cat.name]
    page.say("And now?")
    assert page.sent[-1]["messages"][0] == seers.said(IMAGE, "What?")
    page.click(".user .edit")
    page.all(".editing textarea")[-1].send_keys(" Then?\n")
    page.done()
    assert not axe(page.driver)


def test_an_edit_keeps_the_picture_and_the_browser_the_conversation(page: ChatPage, cat: Path) -> None:
    attach(page, cat)
    page.say("What?")
    page.click(".user .edit")
    page.all(".editing textarea")[-1].send_keys(" Where?\n")
    page.done()
    assert page.sent[-1]["messages"] == [seers.said(IMAGE, "What? Where?")]
    page.open()
    page.all(".pick")[0].click()
    shown(page, ".user .thumbnail", (60, 40))
    page.ask("document.getElementById('as-markdown').click()")
    wait(lambda: page.ask("return window.made.length"))
    assert r"![a \[cat\].png](data:image/png;base64," in page.ask("return window.made.at(-1)")


def test_a_picture_alone_is_a_message(page: ChatPage, cat: Path) -> None:
    attach(page, cat)
    page.say("")
    assert page.sent[-1]["messages"] == [seers.said(IMAGE, "")]
    assert page.by("title").text == cat.name


def test_a_large_picture_is_made_smaller(page: ChatPage, tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(seers.file_of(IMAGE.resize((3136, 100))))
    attach(page, path)
    page.say("What?")
    sent = decoded(page.sent[-1]["messages"][0]["content"][0]["image_url"]["url"])
    assert (sent.format, sent.size) == ("JPEG", (1568, 50))


def test_what_is_no_picture_is_not_attached(page: ChatPage, tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(b"\x89PNG")
    page.by("file").send_keys(str(tmp_path / "b.png"))
    wait(lambda: "b.png is no picture that the browser can show" in page.by("chat-error").text)
    assert not page.all("#attached li")


@pytest.mark.parametrize("picture", [
    {"name": "x", "url": "https://example.org/x.png"}, {"name": "x", "url": "data:text/html;base64,AA=="},
    {"name": 3, "url": "data:image/png;base64,AA=="}, None, "x",
])
def test_storage_that_was_tampered_with_loads_nothing(page: ChatPage, picture: Any) -> None:
    held = conversation("one", "two")
    held["messages"][0]["pictures"] = [picture]
    page.ask("localStorage.setItem(...arguments)", "shoal.chat.kept", json.dumps(held))
    page.open()
    assert not page.all(".pick")
