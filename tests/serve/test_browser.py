"""The page's comparison of methods in a real browser: streaming, switching methods, and attempts at injection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from browser import resize
from chat_tokenizer import SPECIALS
from families import tiny
from serving import MODEL, Running, serving, tiny_engine, wait
from shoal.engine.loading.load import engine_for

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

COUNTING = """window.counts = [];
new MutationObserver(() => window.counts.push(document.querySelectorAll('.text span').length))
    .observe(document.body, {childList: true, subtree: true})"""


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
    """The page, in terms of what a user sees and does."""

    def __init__(self, driver: Any, server: Running) -> None:
        self.driver, self.server = driver, server
        driver.get("about:blank")
        driver.get(f"{server.url}/#view=compare")
        self.wait_for("return document.getElementById('model').textContent.includes('layers')")
        self.ask("document.getElementById('settings').open = true")

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
        """Click, and count the visible tokens until the answer is done."""
        return self.watch(self.by("run").click)

    def watch(self, start: Callable[[], object] = lambda: None) -> list[int]:
        """The counts as observed inside the page: polling from outside may be too slow to see any."""
        self.ask(COUNTING)
        start()
        wait(lambda: not self.busy)
        return list(self.ask("return [...window.counts, document.querySelectorAll('.text span').length]"))

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
    page.by("prompt").click()
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
        driver.get(f"{server.url}/#view=compare")
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
    """A model whose tokens are all markup."""
    words = [f"{MARKUP[number % len(MARKUP)]}{number}" for number in range(97 - len(SPECIALS))]
    vocab = {word: place for place, word in enumerate([*SPECIALS, *words])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return engine_for(tiny("llama", layers=4), tokenizer, name=MODEL)


def test_a_number_that_is_none_is_not_sent(page: Page) -> None:
    for field, text in (("tokens", "abc"), ("tokens", "0"), ("temperature", "-1"), ("seed", "1.5")):
        before = page.by(field).get_attribute("value")
        page.type(field, text)
        page.by("run").click()
        page.wait_for(f"return document.getElementById('error').textContent.includes('“{text}”')")
        assert page.ask("return document.activeElement.id") == field and not page.panes() and not page.busy
        page.type(field, before or " ")
    page.type("tokens", "5")
    page.run()
    assert page.by("error").text == "" and page.panes()[0]["numbers"][2] == "5"


def test_a_conversation_goes_on_from_an_answer(page: Page) -> None:
    page.choose("method", "full")
    page.type("tokens", "12")
    page.type("prompt", "one")
    page.run()
    talk = page.server.engine.session(max_new_tokens=12)
    assert page.panes()[0]["text"] == talk.send("one").text
    page.driver.find_element("xpath", "//button[text()='Go on from this answer']").click()
    assert page.by("prompt").get_attribute("value") == "" and page.ask("return document.activeElement.id") == "prompt"
    assert [one.text.split()[0] for one in page.by("turns").find_elements("tag name", "li")] == ["You", "Answer"]
    page.by("prompt").send_keys("two")
    page.run()
    assert page.panes()[0]["text"] == talk.send("two").text
    page.by("anew").click()
    assert not page.by("talk").is_displayed()
    page.type("prompt", "one")
    page.run()
    assert page.panes()[0]["text"] == talk.messages[1]["content"]


def test_where_answers_part_and_meet_again_is_marked(page: Page) -> None:
    page.choose("kind", "plain")
    page.type("prompt", "Some words")
    page.type("tokens", "120")
    page.choose("method", "early_exit")
    page.driver.find_element("css selector", "[data-knob=exit_layer]").send_keys("3")
    page.run()
    spec = {"method": "early_exit", "method_args": {"exit_layer": 3}}
    ours, full = (page.server.engine.generate("Some words", max_new_tokens=120, method=method).tokens
                  for method in (spec, "full"))
    first = next(place for place, pair in enumerate(zip(ours, full, strict=True)) if pair[0] != pair[1])
    assert f"The first different token is number {first + 1}" in page.by("verdict").text
    marks = page.ask("""return [...document.querySelectorAll('.text .parts')].map(
        (one) => one.steps.map((step) => step.index))""")
    assert [first in found for found in marks] == [True, True]
    apart = page.ask("return document.querySelectorAll('.text .apart').length")
    assert apart > 0


def test_the_meeting_is_the_nearest(page: Page) -> None:
    found = page.driver.execute_async_script("""const done = arguments[0];
        import(new URL('page/compare.js', location)).then(({ parting, meeting }) => done([
            parting([1, 2, 3], [1, 2, 3]), parting([1, 2], [1, 2, 3]), parting([1, 9], [1, 2]),
            meeting([1, 8, 9, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7], 1),
            meeting([1, 2, 3, 4, 5, 6, 7], [1, 8, 2, 3, 4, 5, 6, 7], 1),
            meeting([1, 2, 3], [1, 4, 5], 1)]))""")
    assert found == [None, 2, 1, [3, 1], [1, 2], None]


def test_what_is_asked_for_survives_a_reload_and_goes_by_link(page: Page) -> None:
    page.type("prompt", 'Words & <b>more</b> "words"')
    page.choose("method", "d3_spec")
    page.ask("document.getElementById('more').open = true")
    page.driver.find_element("css selector", "[data-knob=length]").send_keys("3")
    page.type("tokens", "17")
    page.by("compare").click()
    wait(lambda: "compare=0" in page.driver.current_url)
    address = page.driver.current_url
    for go in (page.driver.refresh, lambda: (page.driver.get("about:blank"), page.driver.get(address))):
        go()
        page.wait_for("return document.getElementById('model').textContent.includes('layers')")
        assert page.by("prompt").get_attribute("value") == 'Words & <b>more</b> "words"'
        assert page.by("method").get_attribute("value") == "d3_spec"
        assert page.driver.find_element("css selector", "[data-knob=length]").get_attribute("value") == "3"
        assert page.by("tokens").get_attribute("value") == "17" and not page.by("compare").is_selected()
    page.by("link").click()
    page.wait_for("return document.getElementById('link').textContent === 'Copied'")
    page.run()
    assert len(page.panes()) == 1 and page.ask(MADE) == 0


def test_an_address_that_was_tampered_with_does_no_harm(driver: Any, server: Running) -> None:
    driver.get("about:blank")
    driver.get(f"{server.url}/#method=nothing&tokens=x&talk=%7B%22a%22&knob.alpha=%3Cimg%3E&kind=no")
    page = Page.__new__(Page)
    page.driver, page.server = driver, server
    page.wait_for("return document.getElementById('model').textContent.includes('layers')")
    assert page.by("method").get_attribute("value") == "d3" and page.by("kind").get_attribute("value") == "chat"
    assert page.ask(MADE) == 0 and not page.by("talk").is_displayed()
    driver.get_log("browser")


def test_methods_that_cannot_run_say_why(page: Page) -> None:
    page.by("refused").click()
    assert "shortgpt: " in page.by("reasons").text
    option = page.driver.find_element("css selector", "option[value=shortgpt]")
    assert not option.is_enabled() and option.text == "shortgpt (not on this model)"


def test_what_people_turn_first_stands_first(page: Page) -> None:
    names = page.ask("return [...document.querySelectorAll('[data-knob]')].map((one) => one.dataset.knob)")
    assert names[:2] == ["mean", "alpha"]


def test_guesses_that_were_kept_stand_out_as_runs(page: Page) -> None:
    page.choose("method", "d3_spec")
    page.ask("document.getElementById('more').open = true")
    page.driver.find_element("css selector", "[data-knob=length]").send_keys("3")
    page.type("tokens", "60")
    page.run()
    runs = page.ask("""return [...document.querySelector('.text').children].map((one) =>
        [one.classList.contains('guess'), one.classList.contains('begins')])""")
    before = False
    for guess, begins in runs:
        assert begins == (guess and not before)
        before = guess
    assert any(begins for _, begins in runs)


def test_a_server_that_died_is_explained_and_asked_again(driver: Any) -> None:
    with serving(tiny_engine()) as server:
        page = Page(driver, server)
        resize(driver, 1280, 900)
        page.type("tokens", "5")
    page.by("run").click()
    page.wait_for("return !document.getElementById('retry').hidden")
    assert "does not answer; it may have been stopped" in page.by("error").text
    page.wait_for("return !document.getElementById('run').disabled")
    page.by("retry").click()
    page.wait_for("return !document.getElementById('retry').hidden")
    driver.get_log("browser")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nobody_is_kept_out(page: Page, scheme: str, width: int) -> None:
    """axe-core finds no accessibility problem, before and after an answer."""
    import axe_core_python

    source = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text("utf-8")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [
        {"name": "prefers-color-scheme", "value": scheme}]})
    resize(page.driver, width, 800)
    for run in (False, True):
        if run:
            page.type("tokens", "40")
            page.run()
            page.driver.find_element("xpath", "//button[text()='Go on from this answer']").click()
        page.ask(source)
        found = page.driver.execute_async_script("axe.run().then(arguments[0])")
        assert not [(one["id"], [node["target"] for node in one["nodes"]]) for one in found["violations"]]
        assert page.ask("return document.documentElement.scrollWidth") <= width
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
