"""Engines of one process take turns in the order in which they ask, and a stuck one holds up none."""

from __future__ import annotations

import threading
import time

import pytest

from serving import wait
from shoal.engine.scheduling.turns import FairTurns


def test_turns_exclude_each_other_and_none_is_passed_over() -> None:
    turns, inside, order = FairTurns(), list[str](), list[str]()

    def work(name: str) -> None:
        own = turns.of(threading.RLock())
        for _ in range(20):
            with own, own:  # entered again by its own thread
                inside.append(name)
                assert inside == [name]
                order.append(name)
                time.sleep(0.001)
                inside.remove(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(order) == 60
    together = order[10:40]  # while all three ask, none has two turns while another waits
    assert all(len({*together[at : at + 3]}) == 3 for at in range(0, 30, 3))


def test_a_wait_that_is_interrupted_leaves_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, lock = FairTurns(), threading.Lock()

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with turns.of(threading.RLock()):
        monkeypatch.setattr(turns._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), turns.of(lock):
            pytest.fail("two turns at once")
        assert not lock.locked() and len(turns._asked) == 1
    with turns.of(lock):
        assert lock.locked()


def test_a_turn_that_does_not_end_holds_up_no_other() -> None:
    turns, stuck, done = FairTurns(patience=0.1), threading.Event(), list[int]()

    def hang() -> None:
        with turns.of(threading.RLock()):
            assert stuck.wait(30)

    def work() -> None:
        own = turns.of(threading.RLock())
        for number in range(5):
            with own:
                done.append(number)

    first = threading.Thread(target=hang)
    first.start()
    wait(lambda: len(turns._asked) == 1)
    second = threading.Thread(target=work)
    second.start()
    second.join(20)
    assert done == [0, 1, 2, 3, 4] and first.is_alive()
    stuck.set()
    first.join(20)
    with turns.of(threading.RLock()):
        assert len(turns._asked) == 1
