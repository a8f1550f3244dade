"""The playground in a real browser: types, watches tokens come, switches methods, and finds nothing to break out of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from browser import browser, resize
from chat_tokenizer import SPECIALS
from families import tiny
from serving import MODEL, Running, serving, tiny_engine, wait
from shoal.engine.load import engine_for

pytestmark = pytest.mark.browser
MARKUP = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(2)>", "</textarea><b>", "<iframe srcdoc='<b>'>", "&lt;",
)  # fmt: skip
MADE = "return document.querySelectorAll('img, b, iframe, script:not([src]), [onload], [onerror]').length"
PANES = """return [...document.querySelectorAll('.pane')].map((pane) => ({
    title: pane.querySelector('h2').textContent,
    text: pane.querySelector('.text').textContent,
    tints: [...pane.querySelectorAll('.text span')].map((span) => getComputedStyle(span).backgroundColor),
    guesses: pane.querySelectorAll('.text .guess').length,
    bars: pane.querySelectorAll('.depths rect').length,
    left: pane.getBoundingClientRect().left,
    numbers: [...pane.querySelectorAll('dd')].map((one) => one.textContent),
}))"""


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine()) as running:
        yield running


@pytest.fixture
def page(driver: Any, server: Running) -> Iterator[Page]:
    resize(driver, 1280, 900)
    yield Page(driver, server)
    assert not driver.get_log("browser"), "the console has complaints"


class Page:
    """The page, as somebody who looks at it would speak of it."""

    def __init__(self, driver: Any, server: Running) -> None:
        self.driver, self.server = driver, server
        driver.get(server.url)
        self.wait_for("return document.getElementById('model').textContent.includes('layers')")

    def ask(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def wait_for(self, script: str) -> None:
        wait(lambda: self.ask(script))

    def by(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def type(self, name: str, text: str) -> None:
        self.by(name).clear()
        self.by(name).send_keys(text)

    def choose(self, name: str, value: str) -> None:
        from selenium.webdriver.support.select import Select

        Select(self.by(name)).select_by_value(value)

    @property
    def busy(self) -> bool:
        return not self.by("run").is_enabled()

    def run(self) -> list[int]:
        """Click, and count the tokens that are to be seen until all is done."""
        self.by("run").click()
        return self.watch()

    def watch(self) -> list[int]:
        counts: list[int] = []

        def done() -> bool:
            going = self.busy
            counts.append(self.ask("return document.querySelectorAll('.text span').length"))
            return not going

        wait(done)
        return counts

    def panes(self) -> list[dict[str, Any]]:
        return list(self.ask(PANES))


def keys(page: Page, *pressed: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    chain = ActionChains(page.driver)
    for key in pressed:
        if key == "CONTROL-ENTER":
            chain.key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL)
        else:
            chain.send_keys(getattr(Keys, key, key))
    chain.perform()


def test_a_prompt_streams_tinted_tokens_beside_full_depth(page: Page) -> None:
    page.choose("kind", "plain")
    page.type("prompt", "Some words")
    page.type("tokens", "200")
    for knob, value in (("alpha", "0.99"), ("core", "2")):
        page.driver.find_element("css selector", f"[data-knob={knob}]").send_keys(value)
    page.wait_for("return document.getElementById('caption').textContent.includes('200 tokens')")
    seen = page.run()
    assert len(set(seen)) > 3, f"tokens did not come one after another: {seen}"
    ours, full = page.panes()
    spec = {"method": "d3", "method_args": {"alpha": 0.99, "core": 2}}
    expected = page.server.engine.generate("Some words", max_new_tokens=200, method=spec)
    assert (ours["title"], full["title"]) == ("d3", "full depth")
    assert ours["text"] == expected.text
    assert full["text"] == page.server.engine.generate("Some words", max_new_tokens=200).text
    assert len(set(ours["tints"])) == len(set(expected.depths)) > 1 and len(set(full["tints"])) == 1
    assert ours["tints"][0] == full["tints"][0] and ours["bars"] == full["bars"] == 200
    assert ours["numbers"][1] == f"{expected.stats.mean_layers:.2f}" and float(ours["numbers"][0]) > 0
    assert full["left"] > ours["left"] + 100
    assert page.by("picture").find_elements("css selector", "svg rect")
    assert "first different token" in page.by("verdict").text


def test_pointing_at_a_token_tells_its_layers(page: Page) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    page.type("tokens", "30")
    page.run()
    span = page.driver.find_elements("css selector", ".text span")[0]
    ActionChains(page.driver).move_to_element(span).perform()
    page.wait_for("return document.querySelector('.said').textContent.startsWith('token 1: 4 of 4 layers')")


def test_another_method_has_other_knobs_and_guesses(page: Page) -> None:
    before = page.ask("return [...document.querySelectorAll('[data-knob]')].map((one) => one.dataset.knob)")
    page.choose("method", "d3_spec")
    after = page.ask("return [...document.querySelectorAll('[data-knob]')].map((one) => one.dataset.knob)")
    assert "rounding" in before and "length" not in before and "length" in after
    page.wait_for("return document.getElementById('caption').textContent.includes('Same output')")
    page.type("tokens", "60")
    page.run()
    ours, full = page.panes()
    assert ours["guesses"] > 0 == full["guesses"] and ours["text"] == full["text"]
    assert "The same tokens as full depth" in page.by("verdict").text
    page.choose("method", "full")
    page.run()
    assert len(page.panes()) == 1


def test_a_knob_that_is_wrong_is_said_at_once(page: Page) -> None:
    alpha = page.driver.find_element("css selector", "[data-knob=alpha]")
    alpha.send_keys("7")
    page.wait_for("return document.getElementById('caption').textContent.includes('alpha')")
    page.by("run").click()
    page.wait_for("return document.getElementById('error').textContent.includes('alpha')")
    assert not page.busy
    assert [entry for entry in page.driver.get_log("browser") if "400" in entry["message"]]


def test_on_a_phone_nothing_runs_over_the_edge(page: Page) -> None:
    resize(page.driver, 360, 740)
    page.type("prompt", "Wide" * 60)
    page.ask("document.getElementById('more').open = true")
    page.type("tokens", "120")
    page.run()
    assert page.ask("return document.documentElement.scrollWidth") <= 360
    ours, full = page.panes()
    assert ours["left"] == full["left"]


def test_everything_can_be_done_from_the_keyboard(page: Page) -> None:
    assert page.ask("return document.activeElement.id") == "prompt"
    keys(page, "Hi", "CONTROL-ENTER")
    assert len(set(page.watch())) > 1
    for _ in range(40):
        if page.ask("return document.activeElement.className") == "text":
            break
        keys(page, "TAB")
    keys(page, "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT")
    assert page.ask("return document.querySelector('.said').textContent").startswith("token 1:")
    page.type("tokens", "450")
    keys(page, "CONTROL-ENTER")
    wait(lambda: page.server.scheduler.running == 1)
    keys(page, "ESCAPE")
    wait(lambda: page.server.scheduler.running == 0)
    assert not page.busy and page.by("error").text == ""
    assert len(page.panes()[0]["tints"]) < 450


def test_markup_stays_text(driver: Any) -> None:
    from selenium.common.exceptions import JavascriptException

    with serving(_speaker_of_markup(), model_name="<b>tiny</b>") as server:
        page = Page(driver, server)
        resize(driver, 1280, 900)
        page.type("prompt", "".join(MARKUP) + '"><svg onload=alert(3)>')
        page.type("tokens", "40")
        page.run()
        ours = page.panes()[0]
        assert any(mark in ours["text"] for mark in MARKUP), ours["text"]
        page.driver.find_element("css selector", "[data-knob=order]").send_keys(MARKUP[1])
        page.by("run").click()
        page.wait_for("return document.getElementById('error').textContent.includes('<img')")
        assert page.ask(MADE) == 0
        log = [entry["message"] for entry in driver.get_log("browser")]
        assert not [line for line in log if "status of 400" not in line], log
        with pytest.raises(JavascriptException, match="TrustedHTML"):  # the policy holds even where a script slips
            page.ask("document.body.innerHTML = arguments[0]", MARKUP[1])
        assert "TrustedHTML" in driver.get_log("browser")[0]["message"]


def test_the_key_is_asked_for_and_not_kept(driver: Any) -> None:
    with serving(tiny_engine(), api_keys=("right",)) as server:
        driver.get(server.url)
        wait(lambda: driver.execute_script("return !document.getElementById('key-form').hidden"))
        for key in ("wrong", "right"):
            field = driver.find_element("id", "key")
            field.clear()
            field.send_keys(key + "\n")
        page = Page.__new__(Page)
        page.driver, page.server = driver, server
        page.wait_for("return document.getElementById('model').textContent.includes('layers')")
        assert page.run()[-1] > 0 and len(page.panes()) == 2
        kept = page.ask("return [localStorage.length, sessionStorage.length, document.cookie]")
        assert kept == [0, 0, ""]
        log = [entry["message"] for entry in driver.get_log("browser")]
        assert not [line for line in log if "status of 401" not in line], log


def _speaker_of_markup() -> Any:
    """A model whose every word is a piece of markup."""
    words = [f"{MARKUP[number % len(MARKUP)]}{number}" for number in range(97 - len(SPECIALS))]
    vocab = {word: place for place, word in enumerate([*SPECIALS, *words])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return engine_for(tiny("llama", layers=4), tokenizer, name=MODEL)
