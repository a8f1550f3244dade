"""Admission `auto`: what it remembers, when it changes, and what it does to a scheduler that works."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from drive import prompt
from families import tiny
from shoal.engine.admission import Auto, Join, Policy, Waves, policy
from shoal.engine.engine import Engine
from shoal.engine.forecast import Answer, Forecast, Pace
from shoal.engine.load import engine_for
from shoal.engine.scheduler import Scheduler
from shoal.methods.d3 import D3
from shoal.model.cost import CostCard

LAYERS = 4
STEEP = D3(alpha=0.9, core=1, horizon=16)
CLIENTS, ASKED = 4, 80


def pace(rows: int = 4) -> Pace:
    """A tick costs what its layers cost."""
    return Pace(0.1, 1.0, 0.0, 0.0, CostCard(1.0, 0.1, 0.0, 0.0, (None,) * LAYERS, ((1, 0.0),), rows))


@functools.cache
def engine() -> Engine:
    return engine_for(tiny("llama", layers=LAYERS))


class Forecasts:
    """Stands in for `Forecast`: says what it is told to, and keeps what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gain, self.asked = 1.0, list[tuple[int, int]]()
        monkeypatch.setattr("shoal.engine.admission.Forecast", self)

    def of(self, answers: Sequence[Answer], rows: int, pace: Pace) -> Forecast:
        self.asked.append((len(answers), rows))
        return Forecast(join=self.gain, waves=1.0)


def ended(auto: Auto, gain: float, forecasts: Forecasts, together: int = 4) -> str:
    forecasts.gain = gain
    auto.ended(FOUR, together)
    return type(auto.choice).__name__


def row() -> Any:
    """One that has not begun."""
    from shoal.engine.request import Request

    (made,) = engine().rows([prompt(5)], Request.from_options({"max_new_tokens": 4}), engine().recipe(STEEP, 4))
    return made


FOUR = [row()] * 4


def test_a_small_gain_changes_nothing_and_a_loss_ends_the_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, forecasts = Auto(pace()), Forecasts(monkeypatch)
    gains = [1.0, 1.04, 1.06, 1.04, 1.001, 1.0, 1.04, 1.06, 0.9]
    chosen = [ended(auto, gain, forecasts) for gain in gains]
    assert chosen == ["Join", "Join", "Waves", "Waves", "Waves", "Join", "Join", "Waves", "Join"]


def test_it_joins_with_too_few_rows_or_too_little_history(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, forecasts = Auto(pace()), Forecasts(monkeypatch)
    assert ended(auto, 9.0, forecasts, together=1) == "Join"
    assert ended(auto, 9.0, forecasts, together=9) == "Join"
    assert forecasts.asked == []
    assert ended(auto, 9.0, forecasts, together=9) == "Waves"
    assert ended(auto, 9.0, forecasts, together=1) == "Join"
    assert forecasts.asked == [(12, 9)]


@pytest.mark.parametrize(("rows", "kept"), [(4, 64), (50, 200)])
def test_old_answers_are_forgotten(rows: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    auto, forecasts = Auto(pace(rows)), Forecasts(monkeypatch)
    for _ in range(60):
        ended(auto, 1.0, forecasts)
    assert max(count for count, _ in forecasts.asked) == kept


def test_the_policy_in_force_decides() -> None:
    auto = Auto(pace(), patience=5.0)
    under_way = row()
    under_way.tokens += [1, 2]
    assert auto.admits([under_way], 0.0) and not auto.holds([row()])
    auto.choice = auto._waves
    assert not auto.admits([under_way], 4.9) and auto.holds([row()])
    assert auto.admits([under_way], 5.0)


def test_by_name() -> None:
    assert isinstance(policy("auto", 1.0, pace()), Auto)
    assert isinstance(policy("join", 1.0, pace()), Join) and isinstance(policy("waves"), Waves)
    with pytest.raises(ValueError, match="measured pace"):
        policy("auto")
    with pytest.raises(ValueError, match="patience"):
        policy("auto", -1.0, pace())


class Noted(Waves):
    """Keeps what it is told."""

    def __init__(self, patience: float) -> None:
        super().__init__(patience)
        self.told: list[tuple[list[str], int]] = []

    def ended(self, rows: Sequence[Any], together: int) -> None:
        self.told.append(([row.finish_reason for row in rows], together))


def test_the_scheduler_tells_who_ended_by_itself_and_how_many_there_were() -> None:
    def broken(ids: Any, scores: Any) -> Any:
        if ids.shape[1] >= 7:
            raise ZeroDivisionError
        return scores

    noted = Noted(patience=0.0)
    scheduler = Scheduler(engine(), max_rows=3, policy=noted, start=False)
    for new in (2, 2, 6, 4):
        scheduler.submit(prompt(5), max_new_tokens=new)
    scheduler.submit(prompt(5), max_new_tokens=9).cancel()
    scheduler.submit(prompt(5), max_new_tokens=9, logits_processor=[broken])
    gone = scheduler.submit(prompt(5), max_new_tokens=9)
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
        if gone.entries[0].row.emitted == 2:
            gone.cancel()
    # In turns 1, 4 and 5; the row that breaks has gone by then, and before turn 5 the cancelled one as well.
    assert noted.told == [(["length"] * 2, 3), (["length"], 3), (["length"], 1)]


def test_rows_that_wait_count_as_far_as_they_fit() -> None:
    noted = Noted(patience=math.inf)
    scheduler = Scheduler(engine(), max_rows=3, policy=noted, start=False)
    for new in (4, 3):
        scheduler.submit(prompt(5), max_new_tokens=new)
    scheduler.turn()
    scheduler.submit(prompt(5), max_new_tokens=3)
    scheduler.turn()
    scheduler.submit(prompt(5), max_new_tokens=3, n=4)
    scheduler.turn()
    assert [together for _, together in noted.told] == [3, 3]
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
    assert [together for _, together in noted.told] == [3, 3, 3, 2]


def play(how: Policy, seed: int, tokens: Sequence[int], method: Any = STEEP) -> tuple[float, list[Any]]:
    """Layers that the ticks of a closed loop of clients went through, each counted once per tick, and the answers."""
    one, draw, layers = engine(), random.Random(seed), 0.0
    scheduler, tickets = Scheduler(one, max_rows=CLIENTS, policy=how, start=False), list[Any]()
    forward = one.stack.forward

    def counted(feeds: Any, cache: Any, *tap: Any) -> Any:
        nonlocal layers
        if feeds[0].steps[0]:
            layers += len({layer for feed in feeds for layer in feed.plan.layers(feed.steps[0])})
        return forward(feeds, cache, *tap)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.stack, "forward", counted)
        while len(tickets) < ASKED or scheduler.running or scheduler.waiting:
            while len(tickets) < ASKED and scheduler.running + scheduler.waiting < CLIENTS:
                options = {"max_new_tokens": draw.choice(tokens), "method": method, "ignore_eos": True}
                tickets.append(scheduler.submit(prompt(5, len(tickets) % 9), **options))
            scheduler.turn()
    return layers, [ticket.results[0].tokens for ticket in tickets]


@pytest.mark.parametrize(
    ("tokens", "method", "better"),
    [((10, 13, 16), STEEP, "Waves"), ((2, 3, 30), STEEP, "Join"), ((6, 12, 18), "full", "Join")],
    ids=["similar", "unequal", "full"],
)
def test_it_comes_to_do_what_is_better_and_changes_no_token(tokens: Sequence[int], method: Any, better: str) -> None:
    auto = Auto(pace())
    join, expected = play(Join(), 1, tokens, method)
    waves, also = play(Waves(), 1, tokens, method)
    taken, answers = play(auto, 1, tokens, method)
    assert answers == also == expected
    assert better == ("Waves" if waves < join else "Join")
    assert abs(join - waves) > 0.1 * taken
    assert taken <= min(join, waves) * 1.1  # it begins by joining, and finds out
    assert len({len(answer) for answer in answers}) == len(tokens)
