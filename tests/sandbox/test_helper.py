"""Helper processes: limits of time, memory and stack, and the next question after each."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.sandbox import helper
from shoal.sandbox.helper import Helpers, NoAnswer, OverLimit

kept: list[bytes] = []


def answer(question: Any) -> Any:
    """The work of the helper process."""
    what = question[0]
    if what == "say":
        print("not for the asker")
        return [question[1], os.getpid()]
    if what == "limits":
        return [resource.getrlimit(one)[0] for one in (resource.RLIMIT_CPU, resource.RLIMIT_AS)]
    if what == "spin":
        while True:
            pass
    if what == "fill":
        return len("a" * (4 << 30))
    if what == "keep":
        kept.append(b"a" * question[1])
        return os.getpid()
    if what == "recurse":
        return answer(["recurse"])
    if what == "die":
        os.kill(os.getpid(), question[1])
    if what == "refuse":
        raise NoAnswer("so it is")
    raise ValueError("\ud800 odd")


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helpers]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
    made = Helpers("test_helper", seconds=1, memory=256 << 20)
    yield made
    made.end()


def test_a_process_is_used_again(helpers: Helpers) -> None:
    first, second = (helpers.ask(["say", {"a": word}]) for word in ("one\ntwo", "\ud83d\u20ac"))
    assert first[0] == {"a": "one\ntwo"} and second[0] == {"a": "\ud83d\u20ac"}
    assert first[1] == second[1] != os.getpid()


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (["spin"], "more than 1 s of computing time"),
        (["fill"], "more than 256 MiB of memory"),
        (["recurse"], "calls itself without an end"),
        (["die", 11], "nested too deeply, or its parts"),
        (["die", 9], "more than 256 MiB of memory"),
        (["die", 15], "ended with SIGTERM"),
    ],
    ids=str,
)
def test_a_limit_is_told_and_the_next_question_answered(helpers: Helpers, question: Any, why: str) -> None:
    for _ in range(2):
        with pytest.raises(OverLimit, match=why):
            helpers.ask(question)
        assert helpers.ask(["say", 1])[0] == 1


@pytest.mark.parametrize(("question", "why"), [(["refuse"], "^so it is$"), (["other"], "ValueError: . odd")], ids=str)
def test_an_error_of_the_work_is_no_limit(helpers: Helpers, question: Any, why: str) -> None:
    with pytest.raises(NoAnswer, match=why) as caught:
        helpers.ask(question)
    assert not isinstance(caught.value, OverLimit)


def test_many_threads_share_few_processes(helpers: Helpers) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda n=n: found.append(helpers.ask(["say", n]))) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number, _ in found) == list(range(20)) and len({process for _, process in found}) <= 2


def test_where_a_question_has_a_time_of_its_own_waiting_counts(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        helpers._room.acquire()
    with pytest.raises(OverLimit, match="no answer within 0.1 s: other questions"):
        helpers.ask(["say", 1], within=0.1)
    for _ in range(2):
        helpers._room.release()
    given, timed = list[float](), helper.timed
    monkeypatch.setattr(helper, "timed", lambda *args: given.append(args[2]) or timed(*args))
    monkeypatch.setattr(helper, "time", SimpleNamespace(monotonic=iter([10.0, 110.0, 10.0, 10.0]).__next__))
    monkeypatch.setattr(helper, "_PATIENCE", 450)
    assert helpers.ask(["say", 1], within=500.0)[0] == helpers.ask(["say", 1], within=500.0)[0] == 1
    assert given == [helper._START_SECONDS, 400.0, 450]


def test_a_question_that_takes_longer_than_its_time_is_ended(helpers: Helpers) -> None:
    with pytest.raises(OverLimit, match=r"^it takes more than 0.2 s$"):
        helpers.ask(["spin"], within=0.2)
    assert helpers.ask(["say", 1], within=60)[0] == 1


def test_without_limits_of_the_work_there_are_none(helpers: Helpers) -> None:
    free = Helpers("test_helper", seconds=None, memory=None)
    mine = [resource.getrlimit(one)[0] for one in (resource.RLIMIT_CPU, resource.RLIMIT_AS)]
    assert free.ask(["limits"]) == mine and not set(helpers.ask(["limits"])) & set(mine)
    assert len({free.ask(["keep", 100 << 20]) for _ in range(3)}) == 1
    free.end()


def test_a_process_that_has_not_given_back_its_memory_is_replaced(helpers: Helpers) -> None:
    assert len({helpers.ask(["keep", 100 << 20]) for _ in range(4)}) == 4
    assert len({helpers.ask(["keep", 1 << 20]) for _ in range(4)}) == 1


def test_one_that_has_begun_takes_the_first_question(helpers: Helpers) -> None:
    helpers.begin()
    (process,) = helpers._idle
    helpers.begin()
    assert helpers.ask(["say", 1]) == [1, process.pid]


def test_a_slow_start_counts_for_nothing(helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine imports take longer than an answer may; each new process would be killed too soon."""
    helpers._words[2] = f"import time; time.sleep(1); {helpers._words[2]}"
    monkeypatch.setattr("shoal.sandbox.helper._PATIENCE", 0.5)
    assert helpers.ask(["say", 1])[0] == 1
    monkeypatch.setattr("shoal.sandbox.helper._START_SECONDS", 0.3)
    helpers.end()
    with pytest.raises(NoAnswer, match="did not start"):
        helpers.ask(["say", 1])


def test_without_a_process_there_is_no_answer(helpers: Helpers) -> None:
    helpers._words[0] = "/nowhere/python"
    helpers.begin()
    with pytest.raises(NoAnswer, match="no process can be started"):
        helpers.ask(["say", 1])


def test_processes_end_with_who_asks(helpers: Helpers) -> None:
    process = helpers.ask(["say", 1])[1]
    helpers.end()
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert helpers.ask(["say", 2])[0] == 2
