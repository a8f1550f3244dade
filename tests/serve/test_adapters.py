"""Adapters as models of their own, over HTTP and on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from adapters import drawn, write_peft
from families import tiny
from real_models import real_model
from serving import MODEL, Running, serving, tiny_engine
from shoal.cli import main


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = tiny_engine()
    for seed, name in enumerate(("one", "two"), start=1):
        engine.add_adapter(write_peft(tmp_path_factory.mktemp(name), drawn(tiny("llama", layers=4), seed=seed)), name)
    with serving(engine, adapters=("one", "two")) as running:
        yield running


def test_each_is_a_model_of_its_own(server: Running) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [(MODEL, None), ("one", MODEL), ("two", MODEL)]
    assert httpx.get(f"{server.url}/v1/models/two").json()["parent"] == MODEL
    said = {}
    for name in (MODEL, "one", "two"):
        body = {"model": name, "prompt": "A secret", "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
        adapter = "" if name == MODEL else name
        own = server.engine.generate("A secret", max_new_tokens=12, adapter=adapter)
        assert answer["model"] == name and answer["choices"][0]["text"] == own.text
        said[name] = own.text
    assert len({*said.values()}) == 3
    body = {"model": "none", "prompt": "A secret"}
    missing = httpx.post(f"{server.url}/v1/completions", json=body)
    assert missing.status_code == 404 and "'one', 'two'" in missing.json()["error"]["message"]


def test_prompts_are_scored_with_it(server: Running) -> None:
    found = {}
    for name in (MODEL, "one"):
        body = {"model": name, "prompt": "A secret", "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
        found[name] = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert found[MODEL] != found["one"]


def test_ollamas_routes_and_chats_know_them(server: Running) -> None:
    assert [one["name"] for one in httpx.get(f"{server.url}/api/tags").json()["models"]] == [MODEL, "one", "two"]
    body = {"model": "two:latest", "messages": [{"role": "user", "content": "abc"}], "stream": False,
            "options": {"num_predict": 8, "temperature": 0}}
    answer = httpx.post(f"{server.url}/api/chat", json=body).json()
    chat = {"model": "two", "messages": body["messages"], "max_tokens": 8, "temperature": 0}
    other = httpx.post(f"{server.url}/v1/chat/completions", json=chat).json()
    assert answer["model"] == "two" and answer["message"]["content"] == other["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_a_real_model_with_two_adapters_in_one_batch(tmp_path: Path) -> None:
    """Random adapters of a published model in GGUF, through real loading: a stream's text is what it gives alone."""
    from shoal import load

    engine = load(real_model("smollm2"))
    layer = engine.runner.shape
    generator = torch.Generator().manual_seed(0)
    for name in ("one", "two"):
        rows = {"q_proj": layer.heads * layer.head_dim, "v_proj": layer.kv_heads * layer.head_dim}
        pairs = {f"model.layers.{number}.self_attn.{part}": (
            torch.randn(8, layer.hidden, generator=generator), torch.randn(count, 8, generator=generator) * 0.02)
            for number in range(layer.num_layers) for part, count in rows.items()}
        engine.add_adapter(write_peft(tmp_path / name, pairs, r=8), name)
    prompts = ["The capital of France is", "Once upon a time", "def add(a, b):"]
    alone = {(name, text): engine.generate(text, max_new_tokens=24, adapter=name).text
             for name in ("one", "two", "") for text in prompts}
    assert len({alone[name, prompts[0]] for name in ("one", "two", "")}) == 3

    def ask(asked: tuple[str, str]) -> str:
        body = {"model": asked[0] or MODEL, "prompt": asked[1], "max_tokens": 24, "temperature": 0}
        text: str = httpx.post(f"{running.url}/v1/completions", json=body, timeout=300).json()["choices"][0]["text"]
        return text

    with serving(engine, adapters=("one", "two")) as running, ThreadPoolExecutor(len(alone)) as pool:
        for _ in range(2):  # the second time prompts are known
            assert dict(zip(alone, pool.map(ask, alone), strict=True)) == alone


def reported(capsys: pytest.CaptureFixture[str], *options: str) -> list[int]:
    assert main(["generate", "--json", "abc", "--max-new-tokens", "8", "--temperature", "0", *options]) == 0
    tokens: list[int] = json.loads(capsys.readouterr().out)["tokens"]
    return tokens


def test_generate_runs_one(capsys: pytest.CaptureFixture[str], tiny_folder: str, tmp_path: Path) -> None:
    from shoal import load

    engine = load(tiny_folder, dtype="float32")
    from transformers import AutoModelForCausalLM

    path = write_peft(tmp_path / "own", drawn(AutoModelForCausalLM.from_pretrained(tiny_folder)))
    engine.add_adapter(path, "x", 0.5)
    own = engine.generate("abc", max_new_tokens=8, adapter="x")
    model = ("--model", tiny_folder, "--dtype", "float32")
    assert tuple(reported(capsys, *model, "--lora", f"{path}:0.5")) == own.tokens
    assert reported(capsys, *model) != list(own.tokens)


def test_bad_adapters_are_one_line(capsys: pytest.CaptureFixture[str], tiny_folder: str, tmp_path: Path) -> None:
    path = write_peft(tmp_path / "own", drawn(tiny("llama", intermediate_size=80), ("up_proj",)))
    model = ("--model", tiny_folder, "--dtype", "float32")
    for command, options, message in (
        ("generate", ("abc", "--lora", path), "is for another model"),
        ("generate", ("abc", "--lora", f"a={path}", "--lora", f"b={path}"), "this command runs one"),
        ("generate", ("abc", "--lora", str(tmp_path / "none")), "there is no adapter at"),
        ("serve", ("--port", "0", "--lora", f"x={path}"), "is for another model"),
        ("serve", ("--port", "0", "--lora", f"=x{path}"), "empty name"),
    ):
        assert main([command, *model, *options]) != 0
        error = capsys.readouterr().err.strip()
        assert message in error and "Traceback" not in error and "\n" not in error
