"""How many guesses pay: against brute force, and in a simulated machine whose clock goes by a formula."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.speculative.cost.model import ForwardTimes
from shoal.speculative.cost.policy import MARGIN, CostModel, DrafterRecord, paying_lengths


def measured(slope: float, jump: float = 0.0, rows: int = 1) -> ForwardTimes:
    """Times of a machine where guesses add jump + slope * guesses to a step."""
    times = ForwardTimes()
    for _ in range(5):
        times.observe(rows, 0, 2.0)
        for guesses in (1, 2, 3, 4, 6, 8, 12, 16):
            times.observe(rows, guesses, 2.0 * (1 + jump + slope * guesses))
    return times


def test_what_was_measured_is_found_between_and_beyond() -> None:
    times = measured(0.1, 0.2)
    for guesses in (1, 3, 5, 7, 16):
        assert times.added(1, guesses) == pytest.approx(0.2 + 0.1 * guesses)
    assert times.added(1, 32) == pytest.approx(2 * times.added(1, 16))
    assert times.step(1) == 2.0 and times.step(2) == 0.0


def test_before_anything_was_measured_a_slope_is_assumed() -> None:
    times = ForwardTimes()
    assert 0 < times.added(1, 1) < 0.2 and times.added(1, 8) == pytest.approx(8 * times.added(1, 1))
    assert not times.known(1)
    times.observe(1, 4, 1.0)  # without a plain step to compare with
    assert times.added(1, 8) == pytest.approx(8 * times.added(1, 1))


def test_a_stall_is_outvoted() -> None:
    times = measured(0.05)
    times.observe(1, 4, 500.0)
    times.observe(1, 0, 500.0)
    assert times.added(1, 4) == pytest.approx(0.2) and times.step(1) == 2.0


def test_noise_in_one_size_does_not_raise_the_others() -> None:
    times = ForwardTimes()
    for _ in range(3):
        times.observe(1, 0, 1.0)
    times.observe(1, 1, 4.0)
    times.observe(1, 8, 1.4)
    assert times.added(1, 1) <= times.added(1, 8) == pytest.approx(0.4)


def test_what_shares_no_call_is_slower_than_what_does() -> None:
    times = ForwardTimes()
    assert times.slower(1) == times.slower(1, 1) == 1.0, "nothing was timed"
    for _ in range(3):
        times.observe(1, 0, 1.2)
        times.observe(1, 0, 1.0, steps=8)
    assert times.slower(1, 1) == pytest.approx(1.2, rel=0.01) and times.slower(1, 8) == 1.0
    assert times.slower(1, 4) == pytest.approx(1.0286, rel=0.01), "a call takes 0.2286 beside its steps"
    assert times.slower(1) == pytest.approx(times.step(1), rel=0.01) and times.slower(2, 1) == 1.0
    times.observe(1, 0, 50.0)
    assert times.slower(1, 1) <= 1.5, "a stall"


@pytest.mark.parametrize("slower", [1.0, 1.2])
def test_a_trial_that_wakes_a_drafter_costs_the_calls_that_are_not_shared(slower: float) -> None:
    def pause(times: ForwardTimes) -> int:
        record = DrafterRecord(0.5, 0.2, most=1, awake=8)
        for _ in range(8):
            record.judged(0, 1)
        assert record.length(times, 1, 8) == 0
        return record._pause.left

    times = measured(0.05)
    for _ in range(9):
        times.observe(1, 0, 2.0 * slower)
        times.observe(1, 0, 2.0, steps=8)
    assert pause(times) in ((75, 76) if slower == 1.0 else range(180, 241))


def brute_force(chances: list[list[float]], times: ForwardTimes, room: int, rows: int) -> float:
    """The best gain over all combinations of lengths."""
    best = 1.0
    for lengths in itertools.product(*(range(len(some) + 1) for some in chances)):
        if sum(lengths) <= room:
            tokens = rows + sum(sum(some[:length]) for some, length in zip(chances, lengths, strict=True))
            best = max(best, tokens / rows / (1 + (times.added(rows, sum(lengths)) if any(lengths) else 0)))
    return best


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0.02, 0.99), st.integers(0, 4)), min_size=1, max_size=3),
    st.floats(0, 0.8),
    st.floats(0, 1.5),
    st.integers(0, 9),
    st.integers(0, 2),
)
def test_lengths_are_those_of_brute_force(
    rows: list[tuple[float, int]], slope: float, jump: float, room: int, extra: int
) -> None:
    chances = [[rate**place for place in range(1, most + 1)] for rate, most in rows]
    total = len(rows) + extra
    times = measured(slope, jump, total)
    lengths = paying_lengths(chances, times, room, total)
    assert all(length <= len(some) for length, some in zip(lengths, chances, strict=True)) and sum(lengths) <= room
    best = brute_force(chances, times, room, total)
    if any(lengths):
        tokens = total + sum(sum(some[:length]) for some, length in zip(chances, lengths, strict=True))
        assert tokens / total / (1 + times.added(total, sum(lengths))) == pytest.approx(best) and best > MARGIN
    else:
        assert best <= MARGIN + 1e-9


def test_where_positions_are_dear_nothing_is_guessed() -> None:
    certain = [[1.0] * 15]
    assert paying_lengths(certain, measured(1.0), 63, 1) == [0]
    assert paying_lengths(certain, measured(0.1), 63, 1) == [15]
    assert paying_lengths([[0.3, 0.09]], measured(0.02, 0.5), 63, 1) == [0]


class Machine:
    """Plays steps of a cost model whose machine adds `slope` of a step per guess."""

    def __init__(self, slope: float, **record: Any) -> None:
        self.model, self.slope = CostModel(DrafterRecord(**record) if record else None), slope
        self.guesses: list[int] = []

    def step(self, chances: list[float]) -> int:
        lengths = self.model.lengths([chances], 1, 63)
        self.model.times.observe(1, lengths[0], 1 + self.slope * lengths[0])
        self.guesses.append(lengths[0])
        return lengths[0]


def test_the_first_steps_are_plain() -> None:
    machine = Machine(0.01)
    for _ in range(4):
        machine.step([0.9, 0.8, 0.7])
    assert machine.guesses[:2] == [0, 0] and machine.guesses[2] > 0


def test_trials_grow_step_by_step() -> None:
    machine = Machine(0.01)
    for _ in range(8):
        machine.step([0.99**place for place in range(1, 16)])
    tried = [guesses for guesses in machine.guesses if guesses]
    assert tried[0] <= 3 and tried[-1] == 15
    assert all(later <= 2 * max(tried[:place]) for place, later in enumerate(tried) if place)


def test_dear_guesses_are_tried_seldom_and_more_and_more_so() -> None:
    machine = Machine(1.2)
    for _ in range(4000):
        machine.step([0.9, 0.8, 0.7])
    tries = [place for place, guesses in enumerate(machine.guesses) if guesses]
    assert 1 < len(tries) < 12
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries) if later - earlier > 8]
    assert gaps == sorted(gaps) and gaps[0] > 100


def test_what_became_cheap_is_found_again() -> None:
    machine = Machine(1.2)
    for number in range(2000):
        machine.slope = 1.2 if number < 300 else 0.02
        machine.step([0.9, 0.8, 0.7])
    assert all(machine.guesses[-200:])


def helped(rate: float, cost: float, steps: int, believed: float = 0.7) -> tuple[float, list[int]]:
    """Seconds per token against plain decoding with a drafter, and what it was asked for."""
    model, dice = CostModel(DrafterRecord(believed, 0.4)), random.Random(1)
    asked, seconds, tokens = [], 0.0, 0
    for _ in range(steps):
        length = model.helped(1, 63)
        kept = next((place for place in range(length) if dice.random() >= rate), length)
        spent = 1 + 0.02 * length
        model.times.observe(1, length, spent)
        if length:
            model.drafter.judged(kept, min(kept + 1, length))
            model.drafter.took(1, length, cost * length)
        asked.append(length)
        seconds, tokens = seconds + spent + cost * length, tokens + kept + 1
    return seconds / tokens, asked


def test_a_good_drafter_is_used_and_a_bad_one_put_off() -> None:
    good, _ = helped(0.9, 0.1, 400)
    bad, asked = helped(0.1, 0.4, 1000)
    assert good < 0.45
    assert bad < 1.02 and sum(map(bool, asked)) < 20 and max(asked[:3]) <= 1


def texts(rates: list[float], steps: int) -> list[float]:
    """Seconds per token against plain decoding, for one text after the other with the same drafter."""
    model, dice, found = CostModel(DrafterRecord(0.45, 0.12)), random.Random(2), []
    for _ in range(3):
        model.times.observe(1, 0, 1.0)
    for rate in rates:
        model.drafter.begin()
        seconds, tokens = 0.0, 0
        for _ in range(steps):
            length = model.helped(1, 63)
            kept = next((place for place in range(length) if dice.random() >= rate), length)
            model.times.observe(1, length, 1 + 0.05 * length)
            if length:
                model.drafter.judged(kept, min(kept + 1, length))
                model.drafter.took(1, length, 0.15 * length)
                model.drafter.brought(kept - 0.2 * length)
            seconds, tokens = seconds + 1 + 0.2 * length, tokens + kept + 1
        found.append(seconds / tokens)
    return found


def test_a_drafter_that_was_put_off_in_one_text_is_tried_in_the_next() -> None:
    found = texts([0.05, 0.05, 0.05, 0.75] * 8, 60)
    good, bad = found[3::4], [seconds for place, seconds in enumerate(found) if place % 4 < 3]
    assert sum(good) / len(good) < 0.75, good
    assert sum(bad) / len(bad) < 1.03 and max(bad) < 1.08, bad


def test_a_drafter_that_pays_in_no_text_is_tried_in_few() -> None:
    found = texts([0.05] * 60, 60)
    assert sum(found[20:]) / 40 < 1.004
    again = texts([*[0.05] * 20, *[0.75] * 40], 60)
    assert sum(again[40:]) / 20 < 0.75


def test_a_drafter_nobody_believes_in_may_prove_itself() -> None:
    seconds, _ = helped(0.95, 0.1, 3000, believed=0.1)
    assert seconds < 0.7


def asked(model: CostModel, rows: int, slope: float, rate: float, steps: int) -> list[int]:
    """Guesses per sequence that a drafter is asked for, on a machine where a guess adds `slope` of a step."""
    found = []
    for _ in range(steps):
        length = model.helped(rows, 63)
        model.times.observe(rows, rows * length, 1 + slope * rows * length)
        if length:
            kept = int(rate * length)
            model.drafter.judged(kept, min(kept + 1, length))
            model.drafter.took(rows, length, 0.1 * length)
        found.append(length)
    return found


def test_where_positions_are_dear_a_new_text_brings_no_trial() -> None:
    model = CostModel(DrafterRecord(0.7, 0.1))
    assert any(asked(model, 8, 0.2, 1.0, 50))  # what they cost has to be found out
    for _ in range(3):
        model.drafter.begin()
        assert not any(asked(model, 8, 0.2, 1.0, 20))
    assert 1 <= sum(map(bool, asked(model, 8, 0.2, 1.0, 400))) <= 3  # and once in a while, whether it still is so


def test_where_positions_are_dear_short_texts_together_bring_a_trial() -> None:
    model = CostModel(DrafterRecord(0.7, 0.1))
    asked(model, 8, 0.2, 1.0, 50)
    trials = 0
    for _ in range(10):
        model.drafter.begin()
        trials += sum(map(bool, asked(model, 8, 0.2, 1.0, 40)))
    assert 1 <= trials <= 2


def test_a_stall_in_a_trial_does_not_end_all_trials() -> None:
    model = CostModel(DrafterRecord(0.7, 0.1))
    asked(model, 8, 2.0, 1.0, 4)
    assert sum(map(bool, asked(model, 8, 0.01, 1.0, 2000))) > 1000


def test_a_drafter_is_put_off_for_as_many_rows_as_it_did_not_pay_for() -> None:
    model = CostModel(DrafterRecord(0.7, 0.1))
    for rows in (1, 8):
        asked(model, rows, 0.2 if rows == 8 else 0.02, 1.0, 50)
    assert not any(asked(model, 8, 0.2, 1.0, 20))
    assert all(asked(model, 1, 0.02, 1.0, 20)[1:])


def test_a_drafter_that_begins_badly_is_tried_again_soon() -> None:
    """Bad luck with the first guesses of a text may not cost the rest of it."""
    model, found = CostModel(DrafterRecord(0.45, 0.1)), []
    for _ in range(3):
        model.times.observe(1, 0, 1.0)
    model.drafter.begin()
    for step in range(64):
        length = model.helped(1, 63)
        model.times.observe(1, length, 1 + 0.05 * length)
        if length:
            kept = 0 if step < 6 else length
            model.drafter.judged(kept, min(kept + 1, length))
            model.drafter.took(1, length, 0.05 * length)
        found.append(length)
    assert not all(found[:16]) and sum(found[32:]) > 64, found


@pytest.mark.parametrize(
    ("cost", "slope", "rest"), [(0.02, 0.01, 16), (0.2, 0.095, 30), (0.5, 0.245, 75), (3.0, 0.5, 128)]
)
def test_a_drafter_rests_the_longer_the_dearer_a_trial_is(cost: float, slope: float, rest: int) -> None:
    """A hundred times what a trial takes, so that trials take one step of a hundred; within bounds."""
    times, record = measured(slope), DrafterRecord(0.5, cost, most=1)
    for _ in range(8):
        record.judged(0, 1)
    assert record.length(times, 1, 8) == 0  # it begins to rest
    found = [record.length(times, 1, 8) for _ in range(2 * rest + 1)]
    assert found[rest - 1] == 1 and not any(found[: rest - 1]), found
    assert not any(found[rest:]), "twice as long then"


def drafting(fixed: float, each: float, rate: float, steps: int = 300) -> list[int]:
    """Guesses that a drafter is asked for, which takes so much for each turn and for each guess."""
    model, dice, found = CostModel(DrafterRecord(0.45, 0.2)), random.Random(3), []
    for _ in range(steps):
        length = model.helped(1, 63)
        model.times.observe(1, length, 1 + 0.07 * length)
        if length:
            kept = next((place for place in range(length) if dice.random() >= rate), length)
            model.drafter.judged(kept, min(kept + 1, length))
            model.drafter.took(1, length, fixed + each * length)
        found.append(length)
    return found


@pytest.mark.parametrize(("fixed", "each", "rate"), [(0.17, 0.05, 0.65), (0.0, 0.25, 0.65), (0.4, 0.0, 0.8)])
def test_so_many_are_asked_for_as_bring_most_by_what_a_turn_and_a_guess_take(
    fixed: float, each: float, rate: float
) -> None:
    def gain(length: int) -> float:
        return float(sum(rate**place for place in range(length + 1)) / (1 + fixed + (each + 0.07) * length))

    best = max(map(gain, range(1, 9)))
    late = drafting(fixed, each, rate)[100:]
    assert sum(map(gain, late)) / len(late) > 0.97 * best, late


def test_guesses_that_had_to_read_much_first_say_nothing_of_the_others() -> None:
    record, times = DrafterRecord(0.9, 0.1), measured(0.05)
    for _ in range(9):
        record.took(1, 2, 0.2)
    for _ in range(9):
        record.begin()
        record.took(1, 2, 0.4)
    for _ in range(12):
        record.judged(0, 1)
    tried = 0
    for _ in range(2000):
        if record.length(times, 1, 8):
            record.took(1, 2, 0.4)
            record.judged(0, 1)
            tried += 1
    assert tried > 2 and record._costs[1].of(2) == pytest.approx(0.2)


def test_of_a_stall_not_all_counts() -> None:
    record = DrafterRecord(0.9, 0.1)
    for _ in range(9):
        record.took(1, 2, 0.2)
    record.took(1, 2, 40.0)
    assert 0.2 < record._costs[1].of(2) < 0.25


def test_what_a_drafter_reads_before_its_first_guess_is_learned_apart() -> None:
    record, times = DrafterRecord(0.5, 0.2, awake=8), measured(0.05)
    for _ in range(6):
        record.begin()
        record.took(8, 1, 3.4)
        record.took(8, 1, 0.2)
    assert record._costs[4].of(1) == pytest.approx(0.2, abs=0.02)
    assert 8 * record._reading[4] == pytest.approx(3.2, rel=0.05)
    record.begin()
    assert not record.length(times, 8, 8, spare=2.0)
