"""Every command on a real model, a few tokens each: what works on toy sizes must work where embeddings are large."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import shoal
from real_models import real_model
from shoal.cli import main
from shoal.cli.options import common
from shoal.speculative import draft_head_file
from word_problems import write

pytestmark = pytest.mark.slow
TOKENS = ["--max-new-tokens", "6"]
GREEDY = [*TOKENS, "--temperature", "0"]
QUESTION, ANSWER = "What is the largest planet of the solar system?", "Jupiter"
"""One that the model is sure of, in any precision: on the capital of France two answers are a tie."""


@pytest.fixture(scope="module")
def model() -> str:
    return real_model("smollm2")


@pytest.fixture(scope="module")
def loaded(model: str) -> Any:
    return shoal.load(model)


@pytest.fixture
def once(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands take the model that is loaded already; how it is loaded has a test of its own."""
    monkeypatch.setattr(common, "load_engine", lambda *_, **__: loaded)
    yield


def said(*words: str) -> tuple[str, str]:
    """What a command writes to stdout and stderr; it has to succeed, and to draw no bar into a pipe."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    assert code == 0, err.getvalue()
    assert "\r" not in err.getvalue() and "it/s" not in err.getvalue()
    return out.getvalue(), err.getvalue()


def report(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*words)[0].splitlines()[-1])
    return found


def test_generate_loads_and_answers(model: str) -> None:
    found = report("generate", "--model", model, QUESTION, "--max-new-tokens", "12", "--temperature", "0", "--json")
    assert ANSWER in found["text"]


def test_chats_by_depth_and_by_drafts(once: None, model: str) -> None:
    plain = report("generate", "--model", model, "Why is the sky blue?", "--json", *GREEDY)
    for method in ("prompt_lookup", "d3_spec"):
        drafted = report("generate", "--model", model, "--method", method, "Why is the sky blue?", "--json", *GREEDY)
        assert drafted["tokens"] == plain["tokens"]
    shallow = report("generate", "--model", model, "--method", "d3", "--mean", "0.9", "Why?", "--json", *GREEDY)
    assert shallow["stats"]["mean_layers"] < 30


def test_methods(once: None, model: str) -> None:
    rows = {row["name"]: row for row in report("methods", "--model", model, "--json")["methods"]}
    assert rows["d3"]["runs"] and rows["d3_spec"]["runs"]


def test_its_card_ships(loaded: Any) -> None:
    """By fingerprint where the file is the one that was calibrated, else by its norm vectors."""
    card = loaded.card
    assert "ships with Shoal" in card.origin and sorted(card.order) == list(range(30))
    assert card.bears is not None and 25 < card.bears <= 30
    last = loaded.plan("d3", max_new_tokens=64)[-1]
    assert set(range(30)) - set(last) <= set(card.order[:5])


def test_correctness(once: None, model: str) -> None:
    said("correctness", "--model", model, "--method", "d3", "--mean", "0.9", "--max-new-tokens", "4")


def test_batch(once: None, model: str, tmp_path: Path) -> None:
    lines = [{"id": "a", "prompt": "Hello"}, {"id": "b", "messages": [{"role": "user", "content": "Hi"}]}]
    asked = tmp_path / "in.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    said("batch", str(asked), str(tmp_path / "out.jsonl"), "--model", model, *TOKENS)
    assert len((tmp_path / "out.jsonl").read_text("utf-8").splitlines()) == 2


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("problems")))


def test_eval(once: None, model: str, problems: str) -> None:
    words = ["--suite", problems, "--n", "2", "--loss-n", "2", "--method", "d3", "--mean", "0.9", *TOKENS]
    found = report("eval", "--model", model, *words, "--json")
    assert len(found["suites"]) == 1 and re.fullmatch("[0-9a-f]{16}", found["fingerprint"])


def test_calibrate_ends_in_time(once: None, model: str, problems: str, tmp_path: Path) -> None:
    words = ["--suite", problems, "--loss-n", "2", "--answer-n", "2", "--metric", "perplexity", "--no-timing"]
    words += ["--minutes", "0.02", "--out", str(tmp_path / "card.json"), "--json"]
    made = report("calibrate", "--model", model, *words)
    assert made["trials"]["cut_short"] and len(made["layer_scores"]["leave_one_out"]) == 30


def test_bench(model: str) -> None:
    words = ["--rounds", "1", "--new-tokens", "4", "--context", "8", "--peer", "none", "--methods", "d3:mean=0.9"]
    assert report("bench", "--model", model, *words)["results"]


def test_bench_drafts(model: str) -> None:
    words = ["--texts", "problems", "--items", "1", "--rounds", "1", "--new-tokens", "4"]
    assert report("bench-drafts", "--model", model, *words, "--methods", "prompt_lookup", "--peer", "none")["results"]


def test_env() -> None:
    assert report("env", "--json")["shoal"] == shoal.__version__


def test_serve_answers(model: str) -> None:
    words = [sys.executable, "-m", "shoal", "serve", "--model", model, "--port", "0", "--max-rows", "2"]
    words += ["--served-model-name", "smollm2"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(found[1] for line in process.stderr if (found := re.search(r"at (http[^\s,]+)", line)))
        asked = [{"role": "user", "content": QUESTION}]
        body = {"model": "smollm2", "messages": asked, "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert ANSWER in json.load(answer)["choices"][0]["message"]["content"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def test_bench_serve(model: str) -> None:
    words = ["--concurrency", "1", "--requests", "1", "--rounds", "1", "--new-tokens", "4", "--context", "8"]
    assert report("bench-serve", "--model", model, *words, "--peer", "none")["results"]


def test_the_part_that_ships_is_for_this_model_and_changes_no_token(loaded: Any) -> None:
    card = json.loads((draft_head_file.SHIPPED / "smollm2-135m-instruct" / draft_head_file.CARD).read_text("utf-8"))
    assert loaded.fingerprint in card["fingerprints"] and card["licence"] and card["command"].startswith("shoal train")
    ask = [{"role": "user", "content": "Write a Python function that adds up the even numbers of a list."}]
    plain, eagle, auto = (loaded.generate(ask, method=name, max_new_tokens=64) for name in ("full", "eagle", "auto"))
    assert eagle.tokens == plain.tokens == auto.tokens
    assert eagle.stats.accepted > 0 and eagle.stats.tokens_per_forward > 1.4
    assert loaded.recipe("auto", 64).proposer.drafter.part.name.endswith("smollm2-135m-instruct")
