"""Encoder-decoders of text over HTTP and on the command line: prompts are sources, chats are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import shoal
from encoder_decoders import END, model_of, write
from serving import MODEL, Running, serving
from shoal.cli import main

TEXTS = ["Once upon a time", "Tea"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("t5") / "model", model_of("t5-gated"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(shoal.load(folder)) as running:
        yield running


def test_completions_answer_sources(server: Running) -> None:
    wanted = [server.engine.generate(text, max_new_tokens=8) for text in TEXTS]
    create = server.client().completions.create
    found = create(model=MODEL, prompt=TEXTS, max_tokens=8, temperature=0)
    assert [one.text for one in found.choices] == [one.text for one in wanted]
    assert found.usage.prompt_tokens == sum(len(text) + 2 for text in TEXTS)  # an end, and the answer's beginning
    assert create(model=MODEL, prompt=TEXTS, max_tokens=8).choices == found.choices  # as translators decode
    ids = create(model=MODEL, prompt=[*TEXTS[0].encode(), END], max_tokens=8, temperature=0)
    assert ids.choices[0].text != wanted[0].text  # bytes are no ids of this tokenizer, but ids are a source too
    parts = create(model=MODEL, prompt=TEXTS[0], max_tokens=8, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts if part.choices) == wanted[0].text
    drawn = create(model=MODEL, prompt=TEXTS[0], max_tokens=8, temperature=1, n=3, seed=1)
    assert len(drawn.choices) == 3


def test_everything_else_is_refused_in_a_line(server: Running) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/v1/embeddings", "/infill"):
        found = httpx.post(server.url + path, json=chat)
        assert found.status_code == 400 and "send the text to /v1/completions" in found.text
    echo = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "a", "echo": True})
    assert echo.status_code == 400 and "read by the model's encoder" in echo.json()["error"]["message"]
    empty = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": [999]})
    assert empty.status_code == 400 and "token id 999" in empty.json()["error"]["message"]


def test_the_command_line_answers_a_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", str(folder), "--max-new-tokens", "8", "--temperature", "0"]
    assert main(["generate", "--json", *asked, TEXTS[0]]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    wanted = shoal.load(folder).generate(TEXTS[0], max_new_tokens=8)
    assert found["tokens"] == list(wanted.tokens) and found["text"] == wanted.text
    assert found["stats"]["prompt_tokens"] == len(TEXTS[0]) + 2
    assert main(["chat", *asked]) == 2
    assert "its encoder reads one source" in capsys.readouterr().err
