"""The page's chat, in terms of what a user sees and does."""

from __future__ import annotations

import json
from typing import Any

from browser import resize
from serving import Running, wait

READY = "return /layers|Schichten/.test(document.getElementById('model').textContent)"
RECORD = """window.sent = []; window.made = []; const real = window.fetch; const url = URL.createObjectURL;
window.fetch = (path, given) => {
    if (given?.body) window.sent.push(JSON.parse(given.body)); return real(path, given); };
URL.createObjectURL = (blob) => { blob.text().then((text) => window.made.push(text)); return url.call(URL, blob); };"""


class ChatPage:
    """An opened page in a fresh profile; requests for answers are recorded."""

    def __init__(self, driver: Any, server: Running, *, max_tokens: int = 24, **kept: Any) -> None:
        self.driver, self.server = driver, server
        resize(driver, 1280, 800)
        driver.get("about:blank")
        driver.get(f"{server.url}/version")  # of the same origin, so that its storage can be set
        self.ask("localStorage.clear()")
        for key, value in {"shoal.settings": {"max_tokens": max_tokens}, **kept}.items():
            self.ask("localStorage.setItem(...arguments)", key, json.dumps(value))
        self.open()

    def open(self) -> None:
        self.driver.get(self.server.url)
        wait(lambda: self.ask(READY))
        self.ask(RECORD)

    def ask(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def by(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def click(self, selector: str) -> None:
        self.all(selector)[-1].click()

    def keys(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    @property
    def busy(self) -> bool:
        return bool(self.by("halt").is_displayed())

    def done(self) -> None:
        wait(lambda: not self.busy and self.all(".assistant .again"))

    def say(self, text: str) -> str:
        """Send a message; the answer's text."""
        from selenium.webdriver.common.keys import Keys

        self.by("ask").send_keys(text + Keys.ENTER)
        self.done()
        return self.answer

    @property
    def answer(self) -> str:
        """What the model said last, as it is kept."""
        return str(self.conversation["messages"][self.conversation["leaf"]]["content"])

    @property
    def conversation(self) -> dict[str, Any]:
        """The conversation that was kept last."""
        kept = self.ask("""return Object.keys(localStorage).filter((key) => key.startsWith('shoal.chat.'))
            .map((key) => JSON.parse(localStorage.getItem(key))).filter((one) => one?.leaf > 0)
            .sort((a, b) => b.when - a.when)[0]""")
        return dict(kept)

    @property
    def sent(self) -> list[dict[str, Any]]:
        """The bodies of the requests for answers."""
        return [body for body in self.ask("return window.sent") if body.get("stream")]


def conversation(*turns: str, **fields: Any) -> dict[str, Any]:
    """What the browser keeps of a conversation in which the two sides took turns."""
    messages = [{"id": place, "parent": place - 1 if place else None, "role": ("user", "assistant")[place % 2],
                 "content": text} for place, text in enumerate(turns)]
    return {"id": "kept", "title": "Kept", "system": "", "when": 1, "messages": messages, "leaf": len(turns) - 1,
            **fields}


def axe(driver: Any) -> list[Any]:
    """What axe-core finds wrong with the page as it is."""
    from pathlib import Path

    import axe_core_python

    driver.execute_script((Path(axe_core_python.__file__).parent / "axe.min.js").read_text("utf-8"))
    found = driver.execute_async_script("axe.run().then(arguments[0])")
    return [(one["id"], [node["target"] for node in one["nodes"]]) for one in found["violations"]]
