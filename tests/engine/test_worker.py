"""A worker that is killed begins anew: what it had under way is told so, what waited is served, nothing hangs."""

from __future__ import annotations

import functools
import random
import threading
import time
from typing import Any

import pytest

from drive import prompt
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.worker import WorkerThread
from shoal.errors import Interrupted

LENGTH = 40


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_for(tiny("llama", layers=4))


def patient(scheduler: Scheduler) -> Scheduler:
    scheduler.worker._pause = 60.0
    return scheduler


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def endanger(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let the scheduler's steps end in SystemExit now and then, before or after they have done their work."""
    rng, left = random.Random(0), [times]
    for name in ("_drop_cancelled", "_admit", "_forward", "_emit", "_finish", "_end", "_give"):

        def risky(step: Any, *args: Any) -> Any:
            fatal = left[0] > 0 and rng.random() < 0.03
            left[0] -= fatal
            if fatal and rng.random() < 0.5:
                raise SystemExit
            result = step(*args)
            if fatal:
                raise SystemExit
            return result

        monkeypatch.setattr(scheduler, name, functools.partial(risky, getattr(scheduler, name)))


def outcome(handle: Any) -> tuple[int, ...] | None:
    """Its tokens, or None where it was interrupted."""
    try:
        return tuple(step.token for step in handle)
    except Interrupted:
        return None


def test_what_waits_is_served_after_the_worker_has_died(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine.generate(prompt(5, 1), max_new_tokens=LENGTH).tokens
    with patient(Scheduler(engine, max_seqs=2)) as scheduler:
        step, calls, submitted = scheduler._batches.plain.step, iter(range(100)), threading.Event()

        def deadly(budget: int, seqs: Any = None) -> Any:
            assert submitted.wait(30)  # else the first answer might end before the second begins
            if next(calls) == 5:
                raise SystemExit
            return step(budget, seqs)

        monkeypatch.setattr(scheduler._batches.plain, "step", deadly)
        handles = [scheduler.submit(prompt(5, 1), max_new_tokens=LENGTH) for _ in range(5)]
        submitted.set()
        until(lambda: not scheduler.worker.well)
        scheduler.worker._hurry.set()
        until(lambda: scheduler.worker.well)
        assert [outcome(handle) for handle in handles] == [None, None, expected, expected, expected]
        assert {entry.seq.finish_reason for handle in handles[:2] for entry in handle.entries} == {"cancelled"}
        until(lambda: not scheduler._open)
        assert (scheduler.running, scheduler.waiting, scheduler.kv_use) == (0, 0, 0)
        assert scheduler._batches.plain.cache.seqs == 0
    assert not scheduler.worker.well


def test_whatever_moment_it_dies_at_nobody_waits_for_ever(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine.generate(prompt(5, 1), max_new_tokens=10).tokens
    scheduler = Scheduler(engine, max_seqs=2, start=False)
    scheduler.worker._pause = 0.0
    endanger(scheduler, monkeypatch, times=8)  # each takes six answers with it at most
    handles = [scheduler.submit(prompt(5, 1), max_new_tokens=10) for _ in range(6)]
    scheduler.worker.start()
    outcomes: list[Any] = []

    def ask(handle: Any) -> None:
        for _ in range(12):
            outcomes.append(outcome(handle))
            handle = scheduler.submit(prompt(5, 1), max_new_tokens=10)
        handle.cancel()

    threads = [threading.Thread(target=ask, args=(handle,), daemon=True) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "an answer never ended"
    assert len(outcomes) == 72 and set(outcomes) == {None, expected}
    until(lambda: not scheduler._open)
    assert outcome(scheduler.submit(prompt(5, 1), max_new_tokens=10)) == expected
    assert scheduler.close(timeout=30)


def test_a_fault_that_stays_fails_those_that_wait_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("broken for good")

    scheduler = Scheduler(engine, max_seqs=1)
    scheduler.worker._pause = 0.05
    monkeypatch.setattr(scheduler, "_admit", broken)
    handles = [scheduler.submit(prompt(5, 1), max_new_tokens=4) for _ in range(3)]
    assert [outcome(handle) for handle in handles] == [None] * 3
    assert scheduler.close(timeout=30)


def test_a_worker_that_is_done_stays_done() -> None:
    deaths: list[int] = []
    attempts = iter([ValueError(), KeyboardInterrupt(), None])

    def work() -> None:
        if error := next(attempts):
            raise error

    worker = WorkerThread("short", work, lambda: deaths.append(1), pause=0.01)
    assert not worker.well
    worker.start()
    worker.join(10)
    assert worker.ended and not worker.well
    assert len(deaths) == 2
