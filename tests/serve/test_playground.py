"""The routes of the page at `/`; test_browser.py drives the page itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import httpx
import pytest

from serving import MODEL, Running, serving, tiny_engine
from shoal.methods.d3 import D3

ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0, "steps": True}
SPEC = {"method": "d3_spec", "method_args": {"alpha": 0.8, "core": 2}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine()) as running:
        yield running


def get(server: Running, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}/{path}", timeout=60)


def plan(server: Running, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/playground/plan", json=body, timeout=60)


def choices(server: Running, route: str, **body: Any) -> list[dict[str, Any]]:
    """Every choice of every chunk of a stream."""
    with httpx.stream("POST", f"{server.url}/v1/{route}", json={**ASK, **body, "stream": True}, timeout=60) as answer:
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line and "[DONE]" not in line]
    return [choice for one in data for choice in json.loads(one)["choices"]]


class Page(HTMLParser):
    """Collects what a strict policy would refuse, and the files that the page requests."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.files: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        self.inline += [tag for _ in range(1) if tag == "style" or (tag == "script" and "src" not in given)]
        self.files += [given[name] or "" for name in ("src", "href") if name in given]


def test_the_page_needs_nothing_but_its_own_files(server: Running) -> None:
    answer, page = get(server, ""), Page()
    assert answer.headers["content-type"].startswith("text/html")
    page.feed(answer.text)
    assert not page.inline
    seen, left = set(), page.files
    while left:
        name = left.pop()
        assert re.fullmatch(r"page/\w+\.(js|css|svg)", name), name
        part = get(server, name)
        assert part.status_code == 200
        seen.add(name)
        left += {f"page/{found}" for found in re.findall(r'from "\./(.+?)"', part.text)} - seen
    assert "page/main.js" in seen and len(seen) >= 6


def test_the_policy_of_the_page_is_strict(server: Running) -> None:
    for path in ("", "page/main.js", "page/page.css", "page/icon.svg"):
        policy = get(server, path).headers["content-security-policy"]
        rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
        assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
        assert {rules[kind] for kind in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
        assert rules["require-trusted-types-for"] == "'script'"
        assert get(server, path).headers["x-dns-prefetch-control"] == "off"
    for kind in ("js", "css"):
        for name in sorted(path.name for path in (files("shoal.serve") / "page").iterdir() if path.name.endswith(kind)):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|https?://(?!www\.w3\.org)",
                                 get(server, f"page/{name}").text), name  # fmt: skip


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "__init__.py", "%2e%2e/app.py"])
def test_other_files_are_not_given(server: Running, name: str) -> None:
    assert get(server, f"page/{name}").status_code == 404


def test_a_request_may_name_several_methods(server: Running) -> None:
    depth, drafter = {"method": "d3", "method_args": {"alpha": 0.9, "core": 2}}, {"method": "prompt_lookup"}
    asked: list[Any] = [depth, [depth, {**drafter, "method_args": {"min_ngram": 1}}]]
    told = [plan(server, **depth, max_tokens=20).json(), plan(server, method=asked[1], max_tokens=20).json()]
    assert told[1] == {**told[0], "method": "d3+prompt_lookup", "guesses": True}
    body = {**ASK, "prompt": "ABCABC", "max_tokens": 20}
    alone, both = (
        httpx.post(f"{server.url}/v1/completions", json={**body, **method}, timeout=60).json()["choices"][0]
        for method in (depth, {"method": asked[1]})
    )
    layers = [[step["layers"] for step in choice["steps"]] for choice in (alone, both)]
    assert both["text"] == alone["text"] and layers[0] == layers[1]
    twice = [depth, {"method": "early_exit", "method_args": {"exit_layer": 2}}]
    answer = httpx.post(f"{server.url}/v1/completions", json={**body, "method": twice}, timeout=60)
    assert answer.status_code == 400 and "both fill the part 'plan'" in answer.json()["error"]["message"]


def test_the_model_and_its_methods_are_told(server: Running) -> None:
    told = get(server, "playground/model").json()
    assert (told["model"], told["num_layers"], told["chat"], told["default_method"]) == (MODEL, 4, True, "auto")
    assert told["masked"] is False
    methods = {method["name"]: method for method in told["methods"]}
    assert {"full", "d3", "prompt_lookup"} <= set(methods) and "draft_model" not in methods
    knobs = {knob["name"]: knob for knob in methods["d3"]["knobs"]}
    assert set(knobs) == set(D3.option_names())
    assert knobs["rounding"]["choices"] == ["floor", "ceil", "round"] and knobs["rounding"]["default"] == "floor"
    assert "decay base" in knobs["alpha"]["about"]
    assert "corpus" not in {knob["name"] for knob in methods["aded"]["knobs"]}


def test_the_plan_is_the_engines(server: Running) -> None:
    method = D3(alpha=0.9, core=2)
    told = plan(server, method="d3", method_args={"alpha": 0.9, "core": 2}, max_tokens=20).json()
    expected = server.engine.plan(method, max_new_tokens=20)
    for step in range(20):
        runs = [layer for layer, last in enumerate(told["attention"]) if last is None or step < last]
        assert tuple(runs) == expected[step]
    assert told["attention"] == told["mlp"]
    assert told["mean_layers"] == pytest.approx(sum(map(len, expected)) / 20)
    assert (told["exact_to"], told["guesses"]) == ("plan", False)
    assert plan(server, **SPEC).json()["guesses"] is True


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"method": "d3", "max_tokens": 1 << 20}, 400),
        ({"method": "nonsense"}, 400),
        ({"method": "d3", "method_args": {"alpha": 7}}, 400),
        ({"method": "d3", "method_args": {"core": 9}}, 400),
        ({"method": "draft_model"}, 403),
        ({"method": "aded", "method_args": {"corpus": "/etc/passwd"}}, 403),
        ({"max_tokens": 0}, 400),
        ({"max_tokens": 1 << 60}, 400),
        ({"other": 1}, 400),
    ],
)
def test_a_plan_is_refused_as_a_request_would_be(server: Running, body: dict[str, Any], status: int) -> None:
    answer = plan(server, **body)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_a_request_may_not_name_a_file(server: Running) -> None:
    body = {**ASK, "prompt": "A", "method": "prompt_lookup", "method_args": {"inner": {
        "method": "aded", "method_args": {"corpus": "/etc/passwd"}}}}  # fmt: skip
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 403


def test_the_operator_decides() -> None:
    with serving(tiny_engine(), methods=frozenset({"full"}), method="d3", api_keys=("k",)) as server:
        assert get(server, "").status_code == get(server, "page/main.js").status_code == 200
        assert get(server, "playground/model").status_code == plan(server).status_code == 401
        bearer = {"authorization": "Bearer k"}
        told = httpx.get(f"{server.url}/playground/model", headers=bearer, timeout=60).json()
        assert ([method["name"] for method in told["methods"]], told["default_method"]) == (["full"], "d3")
        answer = httpx.post(f"{server.url}/playground/plan", json={"method": "d3"}, headers=bearer, timeout=60)
        assert answer.status_code == 403
        assert httpx.post(f"{server.url}/playground/plan", json={}, headers=bearer, timeout=60).json()["method"] == "d3"
    with serving(tiny_engine(), playground=False) as server:
        for path in ("", "page/main.js", "playground/model"):
            assert get(server, path).status_code == 404


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_every_token_tells_its_layers(server: Running, route: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    asked: dict[str, Any] = {"completions": {"prompt": "Some words"}, "chat/completions": {"messages": messages}}
    method = {"method": "d3", "method_args": {"alpha": 0.8, "core": 2}}
    whole = httpx.post(f"{server.url}/v1/{route}", json={**ASK, **asked[route], **method}, timeout=60).json()
    steps = whole["choices"][0]["steps"]
    depths = [len(layers) for layers in server.engine.plan(D3(alpha=0.8, core=2), max_new_tokens=12)]
    assert [step["layers"] for step in steps] == depths and depths[-1] < depths[0] == 4
    assert [step["index"] for step in steps] == list(range(12))
    streamed = choices(server, route, **asked[route], **method)
    assert [step for choice in streamed for step in choice.get("steps", [])] == steps
    said = whole["choices"][0]["text"] if route == "completions" else whole["choices"][0]["message"]["content"]
    assert "".join(step["text"] for step in steps) == said


def test_guessed_tokens_are_told_apart(server: Running) -> None:
    streamed = choices(server, "completions", prompt="Some words", n=2, **SPEC)
    for index in (0, 1):
        steps = [step for choice in streamed if choice["index"] == index for step in choice["steps"]]
        assert len(steps) == 12 and {step["from_draft"] for step in steps} == {False, True}
    assert all("steps" not in choice for choice in choices(server, "completions", prompt="Some words", steps=False))


def test_a_token_held_back_is_told_at_once(server: Running) -> None:
    expected = server.engine.generate("Some words", max_new_tokens=12)
    stop = expected.text[3:6]
    streamed = choices(server, "completions", prompt="Some words", stop=[stop])
    steps = [step for choice in streamed for step in choice["steps"]]
    assert tuple(step["token"] for step in steps) == expected.tokens[: len(steps)]
    assert any(not step["text"] for step in steps)
