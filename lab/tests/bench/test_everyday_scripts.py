"""Scripts of `benchmarks/` on toy models: machines without kernels, and the clients of the mixed soak."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import mixed_soak
from documents import ROOT
from gguf_fixtures import FOLDER
from mixed_soak import KINDS, SCHEMA, Client
from serving import Running, serving
from tool_tokenizer import speaking


@pytest.mark.slow
def test_a_machine_without_kernels_is_measured() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "lab" / "benchmarks" / "plain.py"), "--model",
               str(FOLDER / "llama-Q4_1.gguf"), "--rounds", "2", "--no-compile"]
    environ = {**os.environ, "SHOAL_NATIVE": "off"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["stack"] == "PackedRunner" and found["machine"]["native_kernels"].startswith("none")
    assert {name: len(times) for name, times in found["seconds"].items()} == {"shoal": 2, "transformers": 2}
    assert found["shoal_over"]["shoal"] == 1


@pytest.mark.slow
def test_drafts_in_batches_are_measured() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "lab" / "benchmarks" / "draft_batches.py"), "--model",
               str(FOLDER / "llama-Q4_1.gguf"), "--methods", "prompt_lookup:length=3", "--texts", "problems",
               "--rows", "1,2", "--groups", "2", "--rounds", "2", "--new-tokens", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["together"], row["n"], row["equal"]) for row in rows] == [(1, 4, 4), (2, 8, 8)]
    assert all(row["tokens_per_forward"] >= 1 and row["faster"]["median"] > 0 for row in rows)


@pytest.mark.slow
def test_guesses_that_are_kept_are_counted_by_place(tmp_path: Path) -> None:
    chat = tmp_path / "mt_bench" / "question.jsonl"
    chat.parent.mkdir()
    asked = ({"turns": [f"Tell me about {name}."], "category": "writing"} for name in ("bees", "tides", "maps"))
    chat.write_text("".join(json.dumps(one) + "\n" for one in asked))
    (tmp_path / "vicuna").mkdir()
    (tmp_path / "vicuna" / "vicuna_bench.jsonl").write_text("")
    command = [sys.executable, "-W", "ignore", str(ROOT / "lab" / "benchmarks" / "acceptance.py"), "--model",
               str(FOLDER / "llama-Q4_1.gguf"), "--data", str(tmp_path), "--methods",
               "prompt_lookup:min_ngram=1:length=3,prompt_lookup:length=3", "--texts", "chat", "--items", "3",
               "--new-tokens", "40", "--together", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert first["n"] == first["equal"] == second["equal"] == 3 and first["beyond_first"] == [0, 0, 0]
    tokens = round(first["tokens_per_forward"] * first["forwards"])
    assert tokens == first["forwards"] + sum(first["kept_at"]) > first["forwards"]
    assert first["kept"] == round(sum(first["kept_at"]) / sum(first["guessed_at"]), 4) > 0
    assert first["guessed_at"] == sorted(first["guessed_at"], reverse=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking(), model_name="soak", max_tokens=2000) as running:
        yield running


def asked(server: Running, kinds: Sequence[str], **transport: Any) -> Client:
    """A client that has sent these requests, one after the other."""

    async def run() -> Client:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, **transport) as http:
            client = Client(http, random.Random(1), True)
            for kind in kinds:
                await client.ask(kind)
            return client

    return asyncio.run(run())


@pytest.mark.slow
def test_all_kinds_of_requests_are_asked_and_right(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_soak, "SYSTEMS", ["Be brief."])  # the toy model's context is short
    client = asked(server, [*KINDS, *KINDS])
    assert client.errors == []
    assert {kind: client.counts[kind] for kind in KINDS} == dict.fromkeys(KINDS, 2)
    assert client.counts["tokens"] > 100


@pytest.mark.parametrize(
    ("answer", "said"),
    [({"status_code": 500}, "500"), ({"json": {"usage": {"completion_tokens": 0}, "choices": []}}, "0 tokens"),
     ({"json": {"usage": {"completion_tokens": 1}, "choices": [{"finish_reason": "odd", "message": {}}]}}, "odd"),
     ({"text": "data: {\"choices\": [], \"usage\": null}\n\n"}, "without its end")],
)  # fmt: skip
def test_wrong_answers_are_told(server: Running, answer: dict[str, Any], said: str) -> None:
    made = {"status_code": 200, **answer}
    client = asked(server, ["prefix", "draws"], transport=httpx.MockTransport(lambda _: httpx.Response(**made)))
    assert any(said in error for error in client.errors) and len(client.errors) == 2


def test_what_is_not_under_the_schema_is_told() -> None:
    client = Client(httpx.AsyncClient(), random.Random(1), True)
    assert set(SCHEMA["required"]) == {"word", "sure"}
    client._holds('{"word": "x", "sure": true}')
    for text in ('{"word": "x"}', '{"word": "x", "sure": 1}', '{"word": "' + "x" * 13 + '", "sure": true}', "{"):
        with pytest.raises(ValueError if text == "{" else Exception):
            client._holds(text)
