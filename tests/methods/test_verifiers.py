"""Verifiers that run programs, and those behind a URL; what goes wrong with one is its own request's affair."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from chat_tokenizer import chat_tokenizer
from drive import SHORT
from families import tiny
from method_matrix import SEARCHES
from serving import MODEL, serving, tiny_engine
from shoal.cli.options import common
from shoal.decode.branches import examples
from shoal.decode.branches.examples import Example, Execution, program
from shoal.decode.branches.verifier import Attempt, Endpoint, NoVerdictInTime, ask, verdict
from shoal.engine.loading import ranks
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.types import ModelInfo
from test_matrix import engine_of

WORDS = chat_tokenizer()
execution = Execution()
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 11}
PROMPT = '''\
Complete this.
```python
def double(number):
    """Twice a number.

    >>> double(2)
    4
    >>> double("ab")
    "abab"
    double([1]) => [1, 1]
    assert double(5) == 11
    """
'''
RIGHT = "    return 2 * number\n```\nThat is all."


def finished(text: str, question: str = PROMPT) -> Attempt:
    return Attempt((), (1,), text, True, 0.25, question)


@contextmanager
def endpoint(answer: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    """A server that answers JSON with what a function makes of it: bytes as they are, an int as a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(said if isinstance(said, int) else 200)
            self.end_headers()
            if not isinstance(said, int):
                self.wfile.write(said if isinstance(said, bytes) else json.dumps(said).encode())

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()
        server.server_close()


def test_examples_are_those_of_the_prompt_and_no_assert_is_one() -> None:
    assert examples.examples(PROMPT + PROMPT) == (
        Example("double(2)", "4"), Example('double("ab")', '"abab"'), Example("double([1])", "[1, 1]"))
    assert examples.examples("Write f.\nassert f(1) == 2\n") == ()
    found = examples.examples(">>> x = 3\n>>> f(x,\n...   y=[1])\n[1,\n 2]\n\n>>> g(1)\nTraceback (most recent):\n"
                              ">>> h(2)\n'a' '''\nmore\n>>> broken(\n1\n>>> 1 + 1\n2\n")
    assert found == (Example("f(x,\n  y=[1])", "[1,\n2]", "x = 3"), Example("h(2)", "'a'", "x = 3"))


@pytest.mark.parametrize(("begins", "part"), [
    ("", " "), ("", "- "), ("f(1)", " "), ("f(", ")"), ("f(", ") "), ("", ">>> f(1)\n"), (">>> f(1)\n[\n", "1,\n"),
])
def test_long_prompts_are_looked_at_quickly(begins: str, part: str) -> None:
    began = time.monotonic()
    examples.examples(f"{begins}{part * (60_000 // len(part))}!")
    assert time.monotonic() - began < 20, "what looks at every pair of places takes minutes"


def test_a_value_may_be_long_and_words_may_follow_a_short_one() -> None:
    lines = "\n".join(["[", *["1,"] * 60, "]"])
    for text, wanted in ((f"{lines}\n", lines), ("[\n1]\nand so on\n", "[\n1]")):
        assert examples.examples(f">>> f(1)\n{text}") == (Example("f(1)", wanted),)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (RIGHT, 1.0), ("    return number + number\n", 1.0), ("    return number + 2\n", 1 / 3),
        ("    return 4\n", 1 / 3),
        ("    return (((\n", 0.0), ("    raise SystemExit\n", 0.0), ("    import os\n    os._exit(0)\n", 0.0),
        ("    return 2 * number\n\nassert double(1) == 3\nprint(1 / 0)\n", 1.0),
        ("    return 2 * number\n\nx = (", 1.0),
    ],
)
def test_the_score_is_the_share_of_examples_that_pass(text: str, share: float) -> None:
    assert execution(finished(text)) == pytest.approx(share)


def test_an_endless_program_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "SECONDS", 0.3)
    began = time.monotonic()
    assert execution(finished("    while True: pass\n")) == 0.0 and time.monotonic() - began < 20


def test_programs_have_their_time_from_when_they_are_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: examples take 4.5 s, and a worker is free after 100 s."""
    clock, given = [0.0], list[float]()

    class Pool(ThreadPoolExecutor):
        def submit(self, *words: Any) -> Any:  # type: ignore[override]
            clock[0] += 100
            return super().submit(*words)

    def run(program: object, seconds: float) -> str:
        given.append(seconds)
        clock[0] += min(seconds, 4.5)
        return "passed" if seconds >= 4.5 else "timeout"

    pool = Pool(1)
    monkeypatch.setattr(examples, "_workers", lambda: pool)
    monkeypatch.setattr(examples, "find", lambda: "none")
    monkeypatch.setattr(examples, "Sandbox", lambda kind: SimpleNamespace(run=run))
    monkeypatch.setattr(examples, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    shown = "".join(f"f({number}) => 1\n" for number in range(8))
    assert Execution(30.0)(finished(RIGHT, shown)) == 6 / 8 and given == [5.0] * 6 + [3.0]
    assert Execution(27.0)(finished(RIGHT, shown)) == 6 / 8 and len(given) == 13
    assert execution(finished(RIGHT, shown)) == 1.0
    pool.shutdown()


def test_nobody_is_impatient_with_what_keeps_its_own_time() -> None:
    assert ask(BestOf(2, verifier="execution", patience=60.0).judge(), finished(RIGHT), 0.0).result(60) == 1.0
    with pytest.raises(TimeoutError):
        ask(lambda attempt: float(threading.Event().wait(20)), finished(RIGHT), 0.0).result(60)


@pytest.mark.parametrize("patience", [1e7, 1e10, 1e300, math.inf])
def test_any_patience_may_be_had(patience: float) -> None:
    assert ask(lambda attempt: 0.5, finished("x"), patience).result(60) == 0.5
    with endpoint(lambda _: {"score": 0.5}) as url:
        assert ask(Endpoint(url, patience), finished("x"), patience).result(60) == 0.5


def test_where_nothing_can_be_run_likelihood_judges() -> None:
    assert execution(Attempt((), (1,), RIGHT, False, 0.25, PROMPT)) == 0.25
    assert execution(finished(RIGHT, "Write f.\nassert f(1) == 2\n")) == 0.25


def test_the_program_is_the_block_wherever_it_begins() -> None:
    body = "def f():\n    return 1\n"
    for prompt, answer in (
        ("Write f.", f"Here:\n```python\n{body}```\nand\n```\nf()\n```\n"), ("", body + "print(f())\n"),
        ("Write f:\n```\n", body + "```\nbla bla"), ("```\nx\n```\nWrite f.", body), (body, "f()\n"),
    ):
        assert program(prompt, answer) == body
    assert program("", "no (program") == "no (program"


@pytest.mark.parametrize("method", [BestOf(3), *SEARCHES], ids=repr)
def test_a_verifier_behind_a_url_steers_and_is_told_all(method: Method) -> None:
    engine, seen = engine_for(tiny("llama"), WORDS), list[dict[str, Any]]()

    def even(tokens: Any) -> float:
        return (1 + sum(token % 2 == 0 for token in tokens)) / (1 + len(tokens))

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(body)
        return {"score": even(body["answer_tokens"])}

    asked = {**method.to_dict()["method_args"]}
    with endpoint(answer) as url:
        remote = make({"method": method.name, "method_args": {**asked, "verifier": url}})
        found = engine.generate(SHORT[0], method=remote, max_new_tokens=10, **WARM)
    local = type(method)(**{**asked, "verifier": lambda attempt: even(attempt.tokens)})
    expected = engine.generate(SHORT[0], method=local, max_new_tokens=10, **WARM)
    assert found.tokens == expected.tokens
    both = [[engine.generate(SHORT[0], method=one, max_new_tokens=10, temperature=1.0, seed=seed).tokens
             for seed in range(5)] for one in (local, method)]
    assert both[0] != both[1], "likelihood would have chosen alike"
    last = seen[-1]
    assert last["prompt_tokens"] == SHORT[0] and last["prompt"] == WORDS.decode(SHORT[0], skip_special_tokens=True)
    assert last["answer"] == WORDS.decode(last["answer_tokens"], skip_special_tokens=True) and last["finished"]
    assert 0 < last["likelihood"] <= 1


BAD: list[tuple[Any, str]] = [
    (500, "answered with status 500"), (b"<html>", "answered b'<html>'"), ([1], r"must answer \{.score.: r\}"),
    ({"score": 1.5}, "said 1.5"), ({"score": "0.5"}, "said '0.5'"), (b'{"score": NaN}', "said nan"), ({}, "answer"),
    ("hang", "gave no answer within 0.3 s|timed out"),
]


@pytest.mark.parametrize("kind", [BestOf(2), *SEARCHES], ids=lambda one: one.name)
@pytest.mark.parametrize(("said", "words"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_bad_endpoint_fails_its_own_request_alone(kind: Method, said: Any, words: str) -> None:
    let_go = threading.Event()
    plain = engine_of("llama").generate(SHORT[1], max_new_tokens=9).tokens
    with endpoint(lambda _: let_go.wait(30) if said == "hang" else said) as url:
        method = make({**kind.to_dict(), "method_args": {**kind.to_dict()["method_args"], "verifier": url,
                                                         "patience": 0.3 if said == "hang" else 20.0}})
        scheduler = Scheduler(engine_of("llama"), start=False)
        bad = scheduler.submit(SHORT[0], method=method, max_new_tokens=9, **WARM)
        good = scheduler.submit(SHORT[1], max_new_tokens=9)
        while scheduler.running or scheduler.waiting:
            scheduler.turn()
        let_go.set()
    with pytest.raises((ValueError, TimeoutError), match=words):
        list(bad)
    assert good.results[0].tokens == plain
    assert scheduler._batches.plain.cache.seqs == 0, "nothing is left of it"


def test_nobody_there() -> None:
    with pytest.raises(ValueError, match="the verifier failed: URLError"):
        method = BestOf(2, verifier="http://127.0.0.1:1/")
        engine_of("llama").generate(SHORT[0], method=method, max_new_tokens=3, **WARM)


@pytest.mark.parametrize("kind", [BestOf, *map(type, SEARCHES)])
def test_other_rows_go_on_while_a_verdict_is_waited_for(kind: Callable[..., Method]) -> None:
    """The verifier answers only when another sequence has come to its end: it would never, if that one had to wait."""
    over = threading.Event()

    def verifier(attempt: Attempt) -> float:
        assert over.wait(60)
        return 0.5

    scheduler = Scheduler(engine_of("llama"), start=False)
    slow = scheduler.submit(SHORT[0], method=kind(verifier=verifier, patience=60.0), max_new_tokens=4, **WARM)
    other = scheduler.submit(SHORT[1], max_new_tokens=30)
    for _ in range(2000):
        scheduler.turn()
        if other.done:
            over.set()
        if not scheduler.running:
            break
    assert other.results[0].finish_reason == slow.results[0].finish_reason == "length"


def test_a_request_whose_verifier_hangs_can_be_cancelled() -> None:
    let_go = threading.Event()
    method = BestOf(2, verifier=lambda attempt: float(let_go.wait(60)), patience=60.0)
    scheduler = Scheduler(engine_of("llama"), start=False)
    handle = scheduler.submit(SHORT[0], method=method, max_new_tokens=2, **WARM)
    for _ in range(8):
        scheduler.turn()
    assert scheduler.running == 1
    handle.cancel()
    scheduler.turn()
    let_go.set()
    assert not scheduler.running and scheduler._batches.plain.cache.seqs == 0


def test_a_verdict_is_there_in_its_time() -> None:
    said = ask(lambda attempt: 0.5, finished("x"), 5.0)
    assert said.result(10) == 0.5
    with pytest.raises(TimeoutError, match="gave no answer within 0.1 s"):
        ask(lambda attempt: float(threading.Event().wait(20)), finished("x"), 0.1).result(10)


def test_a_verifier_whose_own_limit_is_over_has_not_answered_in_time() -> None:
    """As an endpoint's connection, whose limit is that of the search, may be first."""
    def slow(_: Attempt) -> float:
        raise TimeoutError("timed out")

    with pytest.raises(NoVerdictInTime, match="gave no answer within 3 s"):
        verdict(slow, finished("x"), 3.0)


def test_over_http_a_server_s_own_verifier_that_hangs_holds_up_nobody_else() -> None:
    let_go = threading.Event()
    body = {"model": MODEL, "prompt": "Some words", "max_tokens": 5, "temperature": 1.0, "seed": 5}
    with endpoint(lambda _: let_go.wait(60)) as url:
        method = BestOf(2, verifier=url, patience=3.0)
        with serving(tiny_engine(), method=method) as server:
            found: list[httpx.Response] = []
            slow = threading.Thread(
                target=lambda: found.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)))
            slow.start()
            plain = httpx.post(f"{server.url}/v1/completions", json={**body, "method": "full"}, timeout=60)
            early = slow.is_alive()
            refused = httpx.post(f"{server.url}/v1/completions", timeout=60,
                                 json={**body, "method": "best_of", "method_args": {"verifier": url}})
            slow.join()
            let_go.set()
    assert plain.status_code == 200 and plain.json()["choices"][0]["text"]
    assert refused.status_code == 403 and "verifier of best_of" in refused.json()["error"]["message"]
    assert found[0].status_code == 504 and "the verifier of answers gave none in time" in found[0].text
    assert early, "the other request was answered while this one waited"


@pytest.mark.parametrize("kind", [BestOf, *map(type, SEARCHES)])
def test_processes_that_share_a_model_wait_for_no_verdict(kind: Callable[..., Method]) -> None:
    ranks.Ranks(size=2).check(kind(2).recipe(ModelInfo(6)))
    with pytest.raises(Unsupported, match="waiting for what others say in 2 processes"):
        ranks.Ranks(size=2).check(kind(2, verifier="execution").recipe(ModelInfo(6)))


def test_words_of_the_command_line_may_hold_a_url() -> None:
    found = common.method_from("best_of:n=2:verifier=http://127.0.0.1:8000/score:patience=2")
    assert found == BestOf(2, verifier="http://127.0.0.1:8000/score", patience=2)
