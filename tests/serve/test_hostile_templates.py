"""A chat template that uses up time or memory: server, Python and command line report it and continue."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from transformers import AutoTokenizer

import shoal
from chat_tokenizer import chat_tokenizer
from families import tiny
from serving import MODEL, held_up, serving, tiny_engine
from shoal.cli import main
from shoal.sandbox import template
from shoal.sandbox.helper import Helpers

TALK = [{"role": "user", "content": "Hi"}]
HOSTILE = {
    "ranges": ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "computing time"),
    "lipsum": ("{{ lipsum(n=100000, min=500, max=1000) }}", "computing time"),
    "indent": ("{{ messages | tojson(indent=10**9) }}", "MiB of memory"),
    "long": ("{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}", "and may write"),
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
    "silent": ("{{ raise_exception('') }}", "TemplateError, without a reason"),
}


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    helpers = Helpers("shoal.sandbox.template", seconds=1, memory=template.MEMORY)
    monkeypatch.setattr(template, "_helpers", helpers)
    yield
    helpers.end()


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], str]:
    """Makes the folder of a model with a given chat template."""

    def made(chat_template: str) -> str:
        tiny("llama", layers=2).save_pretrained(tmp_path)
        words = chat_tokenizer()
        words.chat_template = chat_template
        words.save_pretrained(tmp_path)
        assert AutoTokenizer.from_pretrained(tmp_path).chat_template == chat_template
        return str(tmp_path)

    return made


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", HOSTILE)
def test_chats_are_400_with_the_reason_and_completions_go_on(folder: Callable[[str], str], case: str) -> None:
    text, why = HOSTILE[case]
    with serving(shoal.load(folder(text), dtype="float32")) as server:
        client = server.client()
        stream = client.completions.create(model=MODEL, prompt="Hi", max_tokens=40, temperature=0, stream=True)
        next(stream)
        for route in (lambda: client.chat.completions.create(model=MODEL, messages=TALK, max_tokens=3),
                      lambda: client.responses.create(model=MODEL, input="Hi")):
            with pytest.raises(openai.BadRequestError, match=f"refuses these messages: .*{why}"):
                route()
        assert len(list(stream)) > 30
        assert client.completions.create(model=MODEL, prompt="Hi", max_tokens=3).usage.completion_tokens == 3


@pytest.mark.slow
def test_chats_that_wait_for_a_template_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more of them than threads for all other work."""
    go, ask = threading.Event(), Helpers.ask
    monkeypatch.setattr(Helpers, "ask", lambda self, question: go.wait(60) and ask(self, question))
    body = {"model": MODEL, "messages": TALK, "max_tokens": 2}
    with serving(tiny_engine()) as server:
        client, url = server.client(), f"{server.url}/v1/chat/completions"
        with held_up(lambda _: httpx.post(url, json=body, timeout=60).status_code, 40, go) as found:
            for _ in range(3):
                assert client.completions.create(model=MODEL, prompt="Hi", max_tokens=3).usage.completion_tokens == 3
            assert not found
    assert found == [200] * 40


@pytest.mark.slow
@pytest.mark.parametrize("case", ["indent", "silent"])
def test_python_and_the_command_line_say_so(
    folder: Callable[[str], str], case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    text, why = HOSTILE[case]
    name = folder(text)
    engine = shoal.load(name, dtype="float32")
    for ask in (lambda: engine.generate(TALK, max_new_tokens=3), lambda: engine.session().send("Hi")):
        with pytest.raises(ValueError, match=f"refuses these messages: .*{why}"):
            ask()
    assert len(engine.generate("Hi", max_new_tokens=3).tokens) == 3
    common = ["--model", name, "--dtype", "float32", "--max-new-tokens", "3"]
    assert main(["generate", *common, "Hi"]) != 0
    assert f"{why}" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    main(["chat", *common])
    assert f"{why}" in "".join(capsys.readouterr())
    lines = tmp_path / "in.jsonl"
    lines.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"prompt": "Hi"}) + "\n")
    main(["batch", *common[:4], str(lines), str(tmp_path / "out.jsonl")])
    capsys.readouterr()
    assert why in (tmp_path / "out.jsonl").read_text()
