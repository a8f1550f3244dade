"""A server of two processes that share a model says what one process says, and ends where one of them does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

import shoal
from families import tiny
from ray_processes import save_tiny
from serving import serve_process, wait
from shoal.cli.entry import main

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or sys.platform == "win32",
                                reason="torch is built without gloo here")
PROMPTS = ["Some words of a text", "Other words, and more of them", "Some words of another text", "abcabcabcabcabc"]
D3 = {"method": "d3", "method_args": {"alpha": 0.8, "core": 2}}
ASKED: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "d3": D3,
    "guesses": {"method": "prompt_lookup"},
    "self": {"method": "d3_spec", "method_args": {"mean": 0.6, "core": 1}},
    "drafted": {"method": "draft_model", "method_args": {"draft": "BESIDE"}},
    "sampled": {"method": "full", "temperature": 1.0, "seed": 11},
    "best": {"method": "best_of", "method_args": {"n": 3}, "temperature": 1.0, "seed": 11},
    "kv": {"method": "kv_int8"},
}


class Server:
    """A running server of two processes."""

    def __init__(self, process: subprocess.Popen[str], url: str, said: list[str], folder: Path) -> None:
        self.process, self.url, self.said, self.folder = process, url, said, folder

    def ask(self, prompt: str, /, **more: Any) -> httpx.Response:
        body = {"model": "t", "prompt": prompt, "temperature": 0, "max_tokens": 24, "steps": True, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def tokens(self, prompt: str, /, **more: Any) -> list[list[float]]:
        """Tokens and layers of an answer."""
        answer = self.ask(prompt, **more)
        assert answer.status_code == 200, answer.text
        return [[step["token"], step["layers"]] for step in answer.json()["choices"][0]["steps"]]

    @property
    def others(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [one for one in children if one.environ().get("RANK") == "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("shared")
    save_tiny(home / "beside")
    return save_tiny(home / "model")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return shoal.load(folder, dtype="float32", device="cpu", backend="hf")


def serve(folder: Path, *words: str) -> Iterator[Server]:
    options = ["--tensor-parallel", "2", "--model", str(folder), "--dtype", "float32", "--device", "cpu", "--methods",
               "full,d3,d3_spec,prompt_lookup,draft_model,best_of,kv_int8", *words]
    with serve_process(*options, within=400) as (process, url, said):
        yield Server(process, url, said, folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    yield from serve(folder)


@pytest.fixture
def doomed(folder: Path) -> Iterator[Server]:
    yield from serve(folder, "--grace", "5")


def asked(server: Server, name: str) -> dict[str, Any]:
    """A request's options, with the folder of a second model."""
    return dict(json.loads(json.dumps(ASKED[name]).replace("BESIDE", str(server.folder.with_name("beside")))))


def said_by_one(oracle: Any, prompt: str, /, **options: Any) -> list[list[float]]:
    method = {name: options.pop(name) for name in ("method", "method_args") if name in options}
    if "method_args" not in method:
        method = method.get("method", "full")
    result = oracle.generate(prompt, **{"temperature": 0.0, "max_new_tokens": 24, "method": method, **options})
    return [[token, depth] for token, depth in zip(result.tokens, result.depths, strict=True)]


@pytest.mark.slow
def test_eight_at_once_get_what_one_process_says(server: Server, oracle: Any) -> None:
    """Of every kind, beside each other: full depth, less of it, guesses, draws, a search, and a form of KV."""
    wanted = [(PROMPTS[place % len(PROMPTS)], asked(server, name)) for place, name in enumerate(ASKED)]
    with ThreadPoolExecutor(len(wanted)) as pool:
        found = list(pool.map(lambda pair: server.tokens(pair[0], **pair[1]), wanted))
    for (prompt, options), tokens in zip(wanted, found, strict=True):
        assert tokens == said_by_one(oracle, prompt, **options), options
    assert {layers for _, layers in found[0]} == {4} and min(layers for _, layers in found[1]) < 4


@pytest.mark.slow
def test_a_prompt_that_begins_alike_is_read_once_and_says_the_same(server: Server, oracle: Any) -> None:
    prompt = "A long beginning that two requests have in common, and then "
    for end in ("one", "two"):
        answer = server.ask(prompt + end)
        assert answer.json()["choices"][0]["steps"][-1]["token"] == said_by_one(oracle, prompt + end)[-1][0]
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 20


@pytest.mark.slow
def test_a_prompt_long_enough_for_two_waves_says_the_same(server: Server, oracle: Any) -> None:
    prompt = " ".join(f"{word} {number}" for number in range(12) for word in PROMPTS[0].split())
    assert len(prompt) > 256
    assert server.tokens(prompt) == said_by_one(oracle, prompt)


@pytest.mark.slow
def test_a_constraint_holds_and_a_stop_ends(server: Server, oracle: Any) -> None:
    pytest.importorskip("llguidance")
    bound = server.ask(PROMPTS[0], guided_regex="[a-c]{5}", method="full").json()["choices"][0]["text"]
    expected = oracle.generate(PROMPTS[0], constraint=shoal.Regex("[a-c]{5}"), temperature=0.0, max_new_tokens=24)
    assert bound == expected.text and len(bound) == 5
    whole = oracle.generate(PROMPTS[1], temperature=0.0, max_new_tokens=24).text
    assert server.ask(PROMPTS[1], stop=whole[6:8]).json()["choices"][0]["text"] == whole[: whole.index(whole[6:8])]


@pytest.mark.slow
def test_a_stream_says_it_piece_by_piece_and_a_client_may_leave(server: Server, oracle: Any) -> None:
    body = {"model": "t", "prompt": PROMPTS[1], "temperature": 0, "max_tokens": 24, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]" and len(lines) > 20
    text = "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])
    assert text == oracle.generate(PROMPTS[1], temperature=0.0, max_new_tokens=24).text
    body |= {"max_tokens": 15000, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as stream:
        next(stream.iter_lines())
    wait(lambda: 'num_requests_running{model_name="t"} 0' in httpx.get(f"{server.url}/metrics", timeout=60).text, 60)
    assert server.tokens(PROMPTS[0]) == said_by_one(oracle, PROMPTS[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "more", "said"),
    [("completions", {"method": "prompt_lookup", "method_args": {"control": "goodput"}}, "measures time"),
     ("completions", {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}, "log-probabilities of prompts"),
     ("completions", {"logit_bias": {"5000": 1}}, "logit_bias"),
     ("embeddings", {"input": "abc"}, "vectors")],
)
def test_what_would_part_the_processes_is_answered_400(
    server: Server, oracle: Any, path: str, more: dict[str, Any], said: str
) -> None:
    prompt = {} if path == "embeddings" else {"prompt": "Some words"}
    answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "t", **prompt, **more}, timeout=60)
    assert answer.status_code == 400 and said in answer.text
    assert server.tokens(PROMPTS[0]) == said_by_one(oracle, PROMPTS[0])


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_server_with_one_line(doomed: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(doomed.ask, PROMPTS[0], max_tokens=15000, ignore_eos=True)
        wait(lambda: 'num_requests_running{model_name="t"} 1' in httpx.get(f"{doomed.url}/metrics").text, 60)
        others = doomed.others
        assert len(others) == 1
        others[0].send_signal(signal.SIGKILL)
        assert long.result(60).status_code in (502, 503)
    assert doomed.process.wait(60) == 1
    wait(lambda: any("error" in line for line in doomed.said))
    (line,) = [line for line in doomed.said if "error" in line and "event" not in line]
    assert "process 1 of the 2 that share the model has ended, killed by SIGKILL" in line
    assert not any("Traceback" in line for line in doomed.said)


@pytest.mark.slow
def test_an_interrupt_ends_all(doomed: Server) -> None:
    assert doomed.tokens(PROMPTS[0])
    others = doomed.others
    doomed.process.send_signal(signal.SIGINT)
    assert doomed.process.wait(60) == 130
    psutil.wait_procs(others, 20)
    assert others and not any(one.is_running() for one in others)


@pytest.mark.slow
def test_process_zero_that_is_killed_leaves_none(doomed: Server) -> None:
    others = doomed.others
    doomed.process.send_signal(signal.SIGKILL)
    gone, left = psutil.wait_procs(others, 30)
    assert gone and not left


@pytest.mark.slow
def test_torchrun_starts_it_too(folder: Path) -> None:
    """And both end on one signal to the process that serves."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shoal",
             "serve", "--tensor-parallel", "2", "--model", str(folder), "--device", "cpu", "--dtype", "float32",
             "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if line.startswith("serving"))
        assert "in 2 processes" in line
        url = line.split(" at ")[1].split()[0]
        body = {"model": "model", "prompt": "Some words", "max_tokens": 4}
        assert httpx.post(f"{url}/completions", json=body, timeout=60).status_code == 200
        first = next(one for one in psutil.Process(process.pid).children() if one.environ().get("RANK") == "0")
        first.send_signal(signal.SIGINT)
        process.communicate(timeout=90)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["1"], "must be at least 2"), (["3"], "4 heads"), (["2", "--replicas", "2"], "--replicas"),
     (["2", "--memory", "2GiB"], "--memory"), (["2", "--models", "."], "several models"),
     (["2", "--quant", "int8"], "quant='int8'"), (["2", "--backend", "packed"], "'packed'"),
     (["2", "--admission", "waves", "--patience", "2"], "--patience"), (["2", "--lora", "x"], "--lora")],
)
def test_what_cannot_be_is_refused_in_a_line_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["serve", "--model", str(folder), "--device", "cpu", "--tensor-parallel", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_model_without_a_plan_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny("gpt2").save_pretrained(tmp_path)
    assert main(["serve", "--model", str(tmp_path), "--tensor-parallel", "2", "--device", "cpu"]) == 2
    assert "no plan for it" in capsys.readouterr().err


def test_another_number_than_torchruns_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--model", str(folder), "--tensor-parallel", "2", "--device", "cpu", "--port", "0"]) == 2
    assert "torchrun has started 4 processes" in capsys.readouterr().err
