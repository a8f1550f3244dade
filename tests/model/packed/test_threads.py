"""The number of threads follows what the machine gives."""

import threading

import pytest
import torch

from shoal.model.packed.native.threads import LOST, REST, WINDOW, ThreadCount, idle_seconds


class Machine:
    """A number of processors that `busy` processes and the threads share evenly, and its clock."""

    def __init__(self, processors: int, tells_idle: bool = True) -> None:
        self.processors, self.busy, self.now, self.idle = processors, 0, 0.0, 0.0
        self.threads = ThreadCount(lambda: self.now, lambda: self.idle if tells_idle else None)

    def run(self, seconds: float, step: float = 0.005) -> list[int]:
        """Forwards for that long; how many threads each had."""
        counts = []
        for _ in range(round(seconds / step)):
            count = self.threads.choose(self.processors)
            share = min(1.0, self.processors / (count + self.busy))
            self.now += step
            self.idle += step * max(0, self.processors - count - self.busy)
            self.threads.note(count * share, step)
            counts.append(count)
        return counts


def test_an_idle_machine_gives_all() -> None:
    assert set(Machine(8).run(5.0)) == {8}


@pytest.mark.parametrize("tells_idle", [True, False])
def test_beside_a_busy_process_there_are_fewer_and_later_all_again(tells_idle: bool) -> None:
    machine = Machine(2, tells_idle)
    machine.run(1.0)
    machine.busy = 1
    seen = machine.run(20.0)
    assert seen.index(1) <= WINDOW / 0.005
    tail = seen[len(seen) // 2 :]
    assert tail.count(2) <= (0 if tells_idle else 0.02 * len(tail))  # trials: none where no processor is idle
    machine.busy = 0
    after = machine.run(2 * REST[0] if tells_idle else REST[1] + 1)
    assert after[-1] == 2
    machine.busy = 1
    assert machine.run(1.0)[-1] == 1


def test_a_quota_that_idle_processors_do_not_show_makes_trials_rare() -> None:
    now = [0.0]
    threads = ThreadCount(lambda: now[0], lambda: 10 * now[0])  # ten idle ones that this process must not use
    counts = []
    for _ in range(6000):
        counts.append(threads.choose(4))
        now[0] += 0.005
        threads.note(min(1.0, counts[-1]), 0.005)
    assert counts[:4] == [4, 4, 4, 4]
    assert 0 < counts[3000:].count(4) <= 0.02 * 3000


def test_the_machine_says_how_long_it_was_idle() -> None:
    idle = idle_seconds()
    assert idle is not None
    assert idle > 0


def test_the_number_is_what_is_left() -> None:
    machine = Machine(16)
    machine.busy = 1
    assert machine.run(1.0)[-1] == 15
    machine.busy = 16  # more than half of each thread's time is lost, and all wait for the slowest
    assert machine.run(1.0)[-1] < 8


def test_never_below_one() -> None:
    machine = Machine(2)
    machine.busy = 40
    assert set(machine.run(2.0)) <= {1, 2}
    assert machine.run(0.05)[-1] == 1


def test_what_is_short_or_small_changes_nothing() -> None:
    threads = ThreadCount(lambda: 0.0, lambda: 0.0)
    for _ in range(50):
        assert threads.choose(4) == 4
        threads.note(4 - 0.9 * LOST, WINDOW)
    threads.choose(4)
    threads.note(1.0, WINDOW / 8)  # a hiccup
    threads.note(4.0, WINDOW)
    assert threads.choose(4) == 4


def test_another_number_of_torch_threads_counts_at_once() -> None:
    threads = ThreadCount()
    assert threads.choose() == torch.get_num_threads()
    assert threads.choose(3) == 3
    assert threads.choose(1) == 1
    assert threads.choose(1000) == 64


@pytest.mark.parametrize("fixed", [1, 5])
def test_a_fixed_number_stays(fixed: int) -> None:
    machine = Machine(4)
    machine.busy, machine.threads.fixed = 4, fixed
    assert set(machine.run(1.0)) == {fixed}


def test_a_thread_alone_says_nothing_about_the_machine() -> None:
    threads, found = ThreadCount(lambda: 0.0, lambda: 0.0), list[int]()
    assert threads.choose(4) == 4
    with threads.alone():
        other = threading.Thread(target=lambda: found.append(threads.choose(4)))
        other.start()
        other.join()
        found.append(threads.choose(4))
        threads.note(1.0, 10 * WINDOW)
    assert found == [4, 1] and threads.choose(4) == 4
    threads.note(1.0, 10 * WINDOW)
    assert threads.choose(4) == 1
