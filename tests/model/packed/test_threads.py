"""The number of threads follows what the machine gives."""

import pytest
import torch

from shoal.model.packed.native.threads import LOST, REST, WINDOW, ThreadCount


class Machine:
    """A number of processors that `busy` processes and the threads share evenly, and its clock."""

    def __init__(self, processors: int) -> None:
        self.processors, self.busy, self.now = processors, 0, 0.0
        self.threads = ThreadCount(lambda: self.now)

    def run(self, seconds: float, step: float = 0.005) -> list[int]:
        """Forwards for that long; how many threads each had."""
        counts = []
        for _ in range(round(seconds / step)):
            count = self.threads.choose(self.processors)
            share = min(1.0, self.processors / (count + self.busy))
            self.now += step
            self.threads.note(count * share, step)
            counts.append(count)
        return counts


def test_an_idle_machine_gives_all() -> None:
    assert set(Machine(8).run(5.0)) == {8}


def test_beside_a_busy_process_there_are_fewer_and_later_all_again() -> None:
    machine = Machine(2)
    machine.run(1.0)
    machine.busy = 1
    beside = machine.run(20.0)
    assert beside.index(1) <= WINDOW / 0.005
    tail = beside[len(beside) // 2 :]
    assert 1 <= tail.count(2) <= 0.02 * len(tail)  # trials, ever rarer
    machine.busy = 0
    after = machine.run(REST[1] + 1)
    assert after[-1] == 2
    machine.busy = 1
    again = machine.run(1.0)
    assert again.count(2) > tail.count(2)  # what was learned of the earlier neighbour is forgotten


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
    threads = ThreadCount(lambda: 0.0)
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
