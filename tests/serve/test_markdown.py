# ruff: noqa: E501 (texts and their HTML stay in one piece)
"""The page's markdown: what it makes of well-meant texts, and that hostile answers of a model stay harmless."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chat_page import ChatPage, conversation
from serving import Running, serving, tiny_engine

pytestmark = pytest.mark.browser
LONG = 20_000
CASES = {
    "a *b* **c** ***d*** ~~e~~": '<p dir="auto">a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <del>e</del></p>',
    "**a *b* c**": '<p dir="auto"><strong>a <em>b</em> c</strong></p>',
    "***a* b**": '<p dir="auto"><strong><em>a</em> b</strong></p>',
    "**a *b***": '<p dir="auto"><strong>a <em>b</em></strong></p>',
    "2 * 3 * 4, snake_case_name, *open": '<p dir="auto">2 * 3 * 4, snake_case_name, *open</p>',
    "`a*b*` ``c`d``": '<p dir="auto"><code dir="ltr">a*b*</code> <code dir="ltr">c`d</code></p>',
    r"\*a\*": '<p dir="auto">*a*</p>',
    "## Head ##\ntext": '<h4 dir="auto">Head</h4><p dir="auto">text</p>',
    "#hash": '<p dir="auto">#hash</p>',
    "a\n\n---\nb": '<p dir="auto">a</p><hr><p dir="auto">b</p>',
    "- a\n- b\n  - c\n- d": '<ul><li dir="auto">a</li><li dir="auto">b<ul><li dir="auto">c</li></ul></li>'
                            '<li dir="auto">d</li></ul>',
    "3. a\n4. b": '<ol start="3"><li dir="auto">a</li><li dir="auto">b</li></ol>',
    "1. a\n\n   more\n2. b": '<ol start="1"><li dir="auto">a<p dir="auto">more</p></li><li dir="auto">b</li></ol>',
    "a\n- b\n\nc": '<p dir="auto">a</p><ul><li dir="auto">b</li></ul><p dir="auto">c</p>',
    "> a\n> > b": '<blockquote><p dir="auto">a</p><blockquote><p dir="auto">b</p></blockquote></blockquote>',
    "| a | b |\n|:-:|--:|\n| 1 | *2* |": '<div class="table" tabindex="0" role="group" aria-label="Table"><table><thead><tr>'
    '<th class="center">a</th><th class="right">b</th></tr></thead><tbody><tr><td class="center">1</td>'
    '<td class="right"><em>2</em></td></tr></tbody></table></div>',
    "a | b": '<p dir="auto">a | b</p>',
    "see https://example.com/a_b_c.": '<p dir="auto">see <a href="https://example.com/a_b_c" rel="noopener noreferrer nofollow" '
    'target="_blank" title="https://example.com/a_b_c">https://example.com/a_b_c</a>.</p>',
    "[a](https://example.com/x_(y))": '<p dir="auto"><a href="https://example.com/x_(y)" rel="noopener noreferrer nofollow" '
    'target="_blank" title="https://example.com/x_(y)">a</a><span class="host"> (example.com)</span></p>',
    "```python\nif x: # no\n    'y'\n```": '<div class="code"><div class="code-head"><span>python</span>'
    '<button type="button" class="copy">Copy</button></div><pre tabindex="0" role="group" aria-label="code"><code dir="ltr">'
    '<span class="keyword">if</span> x: <span class="comment"># no</span>\n    <span class="string">\'y\'</span></code></pre></div>',
}
"""Texts and their HTML, written by hand."""

_URL = "https://evil.example"
HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", f"<img src={_URL}/beacon.png>", f"<iframe src={_URL}></iframe>",
    "<svg onload=alert(1)>", "<svg><script>alert(1)</script></svg>", "<body onload=alert(1)>", "<style>body{display:none}</style>",
    f"<link rel=stylesheet href={_URL}/a.css>", f'<meta http-equiv="refresh" content="0;url={_URL}">', f"<base href={_URL}/>",
    f"<form action={_URL}><input name=key></form>", "<details open ontoggle=alert(1)>", "<math><mtext><script>alert(1)</script>",
    f"<object data={_URL}></object><embed src={_URL}>", f"<video src={_URL} autoplay></video>", "<!-- --!><img src=x onerror=alert(1)>",
    "[a](javascript:alert(1))", "[a](JaVaScRiPt:alert(1))", "[a](java\tscript:alert(1))", "[a](&#106;avascript:alert(1))",
    "[a](\x01javascript:alert(1))", "[a](vbscript:msgbox(1))", "[a](data:text/html,<script>alert(1)</script>)",
    "[a](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)", "[a](file:///etc/passwd)", "[a](blob:https://evil.example/1)",
    "[a](//evil.example/x)", "[a](/playground/model)", "[a](#prompt=x)", "<javascript:alert(1)>", "[https://bank.example](https://evil.example)",
    "[a](https://bank.example@evil.example/)", f"![x]({_URL}/beacon.png)", f"![x]({_URL}/a.png \"t\" onerror=alert(1))",
    "![x](data:image/svg+xml,<svg/onload=alert(1)>)", f"[![x]({_URL}/a.png)]({_URL})", '[a](https://e.example/" onmouseover="alert(1))',
    '[a](https://e.example "x\\" onmouseover=\\"alert(1)")', "```<script>alert(1)</script>\nx\n```", '```"><img src=x onerror=alert(1)>\n</code></pre><script>alert(1)</script>\n```',
    "`</code><script>alert(1)</script>`", "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| [a](javascript:alert(1)) | <b> |",
    "# <img src=x onerror=alert(1)>", "> " * 5000 + "deep", "".join(" " * 2 * n + "- x\n" for n in range(300)), "[" * LONG, "*a " * LONG,
    "`" * 3 + "a" + "`a" * LONG, "![" * LONG, "**" * LONG + "a", "_a*" * LONG, "|" * 3000 + "\n" + "|-" * 2999 + "|\n", "a\u202ecod.exe\u2066 user = 'x'",
    "[a](https://e.example/\u202egnp.exe)", "<think><img src=x onerror=alert(1)></think><think>", "\x00<script\x00>alert(1)</script>", "{{constructor.constructor('alert(1)')()}}",
    "&lt;script&gt;alert(1)&lt;/script&gt;", "```html\n" + "<" * LONG + "\n```", "```js\n" + '"\\' * LONG + "\n```", "(" + "http://e.example/" + ")" * LONG, "x" * 200_000,
]  # fmt: skip
"""Answers that try to run, load, send, deceive or stall."""
KNOWN = ["A", "BLOCKQUOTE", "BUTTON", "CODE", "DEL", "DETAILS", "DIV", "EM", "H3", "H4", "H5", "H6", "HR", "LI", "OL", "P", "PRE",
         "SPAN", "STRONG", "SUMMARY", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"]
SEEN = """const [root, known] = arguments; const all = [...document.querySelectorAll(root + ' *')];
return {
    names: all.map((one) => one.tagName).filter((name) => !known.includes(name)),
    attributes: all.flatMap((one) => [...one.attributes].map((a) => a.name)),
    links: all.filter((one) => one.tagName === 'A').map((one) => [one.href, one.rel, one.target]),
    loaded: performance.getEntriesByType('resource').map((one) => one.name),
    turned: document.querySelector(root).innerText.match(/[\\u202a-\\u202e\\u2066-\\u2069]/g) ?? [],
}"""
ATTRIBUTES = {"class", "dir", "href", "rel", "target", "title", "tabindex", "role", "aria-label", "start", "type", "hidden", "open"}
SHOW = """const [text, done] = arguments; import(new URL('page/markdown.js', location)).then(({ show }) => {
    const made = document.createElement('div');
    show(made, text); done(made.outerHTML.slice(5, -6)); })"""
GROW = """const [text, done] = arguments; import(new URL('page/markdown.js', location)).then(({ show }) => {
    const wrong = []; const grown = document.createElement('div');
    const step = Math.max(1, Math.ceil(text.length / 60));
    for (let end = 0; end <= text.length + step; end += step) {
        const fresh = document.createElement('div');
        show(grown, text.slice(0, end)); show(fresh, text.slice(0, end));
        if (grown.outerHTML !== fresh.outerHTML) wrong.push(end);
    }
    done(wrong); })"""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def page(driver: Any, server: Running) -> ChatPage:
    return ChatPage(driver, server)


def test_texts_become_the_elements_that_they_mean(page: ChatPage) -> None:
    found = {text: page.driver.execute_async_script(SHOW, text) for text in CASES}
    assert found == CASES


def test_a_text_that_grows_looks_as_if_it_came_at_once(page: ChatPage) -> None:
    """Only changed blocks are made again while an answer streams; the result is that of a fresh element."""
    for text in ["\n\n".join(CASES), *(text for text in HOSTILE if len(text) < 1000)]:
        assert page.driver.execute_async_script(GROW, text) == [], text


def test_hostile_answers_stay_text(driver: Any, server: Running) -> None:
    """Nothing runs, loads or leads to another scheme, as an answer, a thought, a title, or what the user said."""
    assert len(HOSTILE) >= 50
    turns = [turn for text in HOSTILE for turn in (text[:200], text)]
    held = conversation(*turns, title=HOSTILE[1])
    page = ChatPage(driver, server, **{"shoal.chat.kept": held})
    page.all(".pick")[0].click()
    assert len(page.all("#messages > li")) == len(turns)
    seen = page.ask(SEEN, "#messages", KNOWN)
    assert seen["names"] == [] and set(seen["attributes"]) <= ATTRIBUTES
    assert seen["links"] and all(href.startswith(("http://", "https://")) for href, _, _ in seen["links"])
    assert {(rel, target) for _, rel, target in seen["links"]} == {("noopener noreferrer nofollow", "_blank")}
    assert all(name.startswith(server.url) for name in seen["loaded"])
    assert not [entry for entry in driver.get_log("browser") if "favicon" not in entry["message"]]
    shown = page.ask("return document.getElementById('messages').textContent")
    for text in HOSTILE[:17]:
        assert text in shown, "it is not shown as it is"


@pytest.mark.parametrize("text, host", [("[https://bank.example](https://evil.example)", "evil.example"),
                                        ("[a](https://bank.example@evil.example/)", "evil.example"),
                                        ("![x](https://evil.example/beacon.png)", "evil.example")])
def test_a_link_says_where_it_leads(page: ChatPage, text: str, host: str) -> None:
    assert f'<span class="host"> ({host})</span>' in page.driver.execute_async_script(SHOW, text)


def test_signs_that_turn_a_text_are_named(page: ChatPage) -> None:
    for text in ("a\u202eb", "`a\u202eb`", "```\na\u202eb\n```"):
        found = page.driver.execute_async_script(SHOW, text)
        assert '<span class="turned">U+202E</span>' in found and "\u202e" not in found


def test_no_answer_stalls_the_page(page: ChatPage) -> None:
    """What takes time that grows with the square of the length runs into the driver's limit for scripts."""
    for text in HOSTILE:
        if len(text) >= 3000:
            assert page.driver.execute_async_script(SHOW, text)
